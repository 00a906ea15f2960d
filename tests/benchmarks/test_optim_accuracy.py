"""The distance of optimizers with low-bit states from fp32 AdamW: small, and 0 for fp32 itself."""

import torch

from benchmarks import optim_accuracy
from tests.bench.test_optim_step import figures, no_peers  # noqa: F401


def test_accuracy_is_zero_for_fp32_itself_and_small_for_low_bits(tmp_path, capsys):
    recording = optim_accuracy.record(20, 0.95, torch.device("cpu"))
    assert max(optim_accuracy.distances("adamw", recording)) < 1e-4
    assert 1e-4 < max(optim_accuracy.distances("adamw_8bit", recording)) < 0.05
    argv = ["--steps", "2", "--beta2", "0.9", "--device", "cpu", "--json", str(tmp_path / "a.json")]
    optim_accuracy.main([*argv, "--names", "adamw_4bit", "torchao.AdamW4bit"])
    (found,) = figures(tmp_path / "a.json")
    assert found["adamw_4bit"]["embedding"] > 0 and "pip install torchao" in found["torchao.AdamW4bit"]["embedding"]
    assert "| adamw_4bit " in capsys.readouterr().out
