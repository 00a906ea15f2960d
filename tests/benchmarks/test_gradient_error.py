"""Gradients under schemes against high precision: what is exact, what is chance, what stays."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch

from benchmarks.gradient_error import gradient_error, main
from qtrain.core.errors import UserError

ONE_GEMM = 'int8:{"output":"bf16","grad_input":"bf16"}'


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.json"
    shape = {"model_type": "llama", "vocab_size": 64, "hidden_size": 64, "intermediate_size": 96}
    path.write_text(json.dumps(shape | {"num_hidden_layers": 2, "num_attention_heads": 2}))
    return str(path)


def table(capsys, tiny, *flags) -> dict[str, list[float]]:
    small = ["--model", tiny, "--sequences", "4", "--seq_len", "32", "--device", "cpu"]
    main([*small, *flags])
    rows = [line.split("|")[1:-1] for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    return {name.strip(): [float(cell) for cell in cells] for name, *cells in rows[1:]}


def test_errors_are_taken_apart():
    """Draws around a shifted mean: the shift is the bias, the spread the noise, and one draw has both."""
    generator = torch.Generator().manual_seed(0)
    true = [torch.randn(200, 100, generator=generator).double(), torch.randn(50, generator=generator).double()]
    size = sum(float(t.square().sum()) for t in true) ** 0.5
    shift = [0.03 * size * torch.ones_like(t) / 20_050**0.5 for t in true]

    def draws(count):
        for _ in range(count):
            yield [t + s + 0.1 * torch.randn(t.shape, generator=generator) for t, s in zip(true, shift, strict=True)]

    found = gradient_error(draws(20), true)
    noise = 0.1 * 20_050**0.5 / size
    assert found.noise == pytest.approx(noise, rel=0.02) and found.bias == pytest.approx(0.03, rel=0.1)
    assert found.error == pytest.approx((noise**2 + 0.03**2) ** 0.5, rel=0.02)
    alone = gradient_error(iter([[t + s for t, s in zip(true, shift, strict=True)]]), true)
    assert alone.noise == 0 and alone.error == alone.bias == pytest.approx(0.03)


def test_schemes_on_random_tokens(tiny, capsys):
    nearest = 'int8:{"stochastic_rounding":false,"output":"bf16","grad_input":"bf16"}'
    found = table(capsys, tiny, "--schemes", f"bf16,{ONE_GEMM},{nearest},int8,fp8_rowwise,int8_weight", "--draws", "12")
    assert found["bf16"] == [0, 0, 0]
    error, noise, bias = found[ONE_GEMM]
    assert error == pytest.approx(noise, rel=0.1) and bias < 0.2 * noise  # unbiased, but for what 12 draws leave
    assert found[nearest][1] == 0 and 0 < found[nearest][0] < error
    assert found["int8"][0] > error and found["fp8_rowwise"][0] > found[nearest][0] and found["int8_weight"][0] > 0


def test_real_data(tiny, capsys, tmp_path):
    np.random.default_rng(0).integers(0, 64, 1000).astype(np.uint16).tofile(tmp_path / "tokens.bin")
    data = json.dumps({"type": "token", "dataset_dir": str(tmp_path)})
    assert table(capsys, tiny, "--schemes", "int8", "--draws", "2", "--data", data)["int8"][0] > 0
    with pytest.raises(UserError, match="--sequences 7"):
        table(capsys, tiny, "--data", data, "--seq_len", "128", "--sequences", "9")


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--schemes", "int9"], "Did you mean 'int8'?"),
        (["--schemes", "auto"], "name the ones to compare"),
        (["--schemes", ","], "nothing to compare"),
        (["--draws", "0"], "--draws"),
        (["--model", "llama-100n"], "llama-100m"),
    ],
)
def test_bad_input(tiny, capsys, flags, message):
    with pytest.raises(UserError, match=message):
        table(capsys, tiny, *flags)


@pytest.mark.sweep  # its message is tested above; a process imports torch for seconds
def test_command_line():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.gradient_error", "--model", "llama-100n"], capture_output=True, text=True
    )
    assert done.returncode == 2 and "llama-100m" in done.stderr and "Traceback" not in done.stderr
