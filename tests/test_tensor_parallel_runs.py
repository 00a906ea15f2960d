"""The scripts with --tp: losses of one process, the same export, checkpoints that any --tp resumes, and refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cases import sampled
from tests.data.corpora import functions, write_raw
from tests.system import contents, flags, losses, only_run, serving, write_model

TOKENS = {"type": "token", "dataset_dir": "tokens", "tokenizer": "byte"}
SETTINGS = {
    "device": "cpu",
    "lr": 0.01,
    "ckpt_interval": 2,
    "keep_ckpts": 9,
    "model": "tiny.json",
    "train_ds": TOKENS,
    "eval_ds": TOKENS,
    "eval_sequences": 4,
    "seq_len": 32,
    "batch_size": 4,
    "micro_batch_size": 2,
    "n_steps": 4,
}
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts scripts in a folder with two models and text."""
    folder = tmp_path_factory.mktemp("tensor")
    write_model(folder / "tiny.json", max_position_embeddings=512, **SIZES)
    write_model(folder / "mixture.json", max_position_embeddings=512, **{**SIZES, **MIXTURE})
    write_model(folder / "odd.json", max_position_embeddings=512, **{**SIZES, "intermediate_size": 168})
    text = "\n".join(functions()[:36]).encode()
    write_raw(folder / "tokens" / "0.bin", torch.frombuffer(bytearray(text[:6000]), dtype=torch.uint8).numpy())
    with serving(folder) as server:
        yield server


def run(server, world: int, runs: Path, **settings: Any) -> Path:
    """The run folder of a whole run on `world` processes. Only rank 0 may say anything."""
    done = server.run_ranks(world, "llm_pretrain", flags(**{**SETTINGS, **settings}, runs_dir=runs))
    assert [outcome.code for outcome in done] == [0] * world, "\n".join(outcome.err for outcome in done)
    assert all("error" not in outcome.err for outcome in done) and all(outcome.out == "" for outcome in done[1:])
    return only_run(runs, "llm_pretrain")


def saved(folder: Path, step: int) -> dict[str, torch.Tensor]:
    found = contents(folder / "checkpoints" / f"{step:08d}")
    return {name: tensor for name, tensor in found.items() if not name.startswith("rng.")}


def assert_close(one: Path, other: Path, relative: float) -> None:
    """Losses and evaluation losses within `relative`, and all tensors of the checkpoint of the same shapes."""
    for a, b in zip(losses(one), losses(other), strict=True):
        pairs = [(x, y) for x, y in zip(a, b, strict=True) if isinstance(x, float)]
        assert a[0] == b[0] and a[4:6] == b[4:6] and all(y == pytest.approx(x, rel=relative) for x, y in pairs)
    a, b = saved(one, 4), saved(other, 4)
    if not any(name.endswith(".codes") for name in a):  # a rank's row of a stored weight has a scale of its own
        assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()} and len(a) > 10
    a, b = (load_file(folder / "hf" / "model.safetensors") for folder in (one, other))
    assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()}
    for name, tensor in a.items():
        assert (tensor - b[name]).norm() <= max(relative, 1e-5) * 100 * tensor.norm(), name


MIXTURE = {
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "router_aux_loss_coef": 0.01,
}
FULL = {"reshard_after_forward": "always"}
CASES = [
    ("bf16", 2, 1e-5, {}),
    ("fp8_tensorwise", 4, 5e-2, {}),
    ("bitnet", 4, 5e-2, {}),
    ("int8_weight", 4, 5e-2, {}),
    ("bf16", 4, 1e-5, FULL),
    ("fp8_tensorwise", 4, 5e-2, FULL),
    ("int8_weight", 4, 5e-2, FULL),
]


@pytest.mark.parametrize(("scheme", "world", "relative", "sharding"), sampled(CASES, lambda _, world, *__: world == 4))
def test_several_ranks_train_save_and_export_as_one(server, scheme, world, relative, sharding, tmp_path):
    """In fp32 only the order of sums differs; in low bits this learning rate lets gradient norms differ by 5%."""
    settings = {"quantize": scheme, "sample_prompts": ["def "], "sample_tokens": 4}
    one = run(server, 1, tmp_path / "one", **settings)
    two = run(server, world, tmp_path / "two", tp=2, **settings, **sharding)
    assert_close(one, two, relative)
    log = (two / "train.log").read_text()
    assert f"1 x {world // 2} x 2 (replicate x shard x tensor, " in log and "of activations" in log
    assert "tensor  inputs of qkv and gate_up are gathered" in log
    assert "sample: def  [>]" in log


@pytest.mark.parametrize(
    ("optim", "ep", "sharding"),
    [
        ("adamw_8bit", 1, {}),
        ("adamw", 1, {}),
        ("adamw", 2, {}),
        ("adamw", 2, FULL),
        ("adamw", 2, {"dp_replicate": 2, "deterministic": True}),
        ("adamw_8bit", 2, FULL),
    ],
)
def test_ranks_that_divide_experts_train_and_export_a_mixture_as_one(server, optim, ep, sharding, tmp_path):
    """Two have half of the experts each; two groups of two a quarter."""
    settings = {
        "model": "mixture.json",
        "optim": optim,
        "quantize": "bf16",
        "sample_prompts": ["def "],
        "sample_tokens": 4,
    }
    one = run(server, 1, tmp_path / "one", **settings)
    many = run(server, 2 * ep, tmp_path / "many", tp=2, ep=ep, **settings, **sharding)
    assert_close(one, many, 1e-5 if optim == "adamw" else 1e-3)
    assert "expert_load" in (many / "metrics.jsonl").read_text()
    log = (many / "train.log").read_text()
    assert f"experts over groups of {2 * ep}" in log and "experts 1 of 4 on each process" in log if ep > 1 else True
