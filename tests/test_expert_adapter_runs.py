"""llm_finetune.py with --ep and adapters of routed experts: losses, checkpoints and exports of one process.

Ranks add the gradients of a micro-batch's tokens in another order than one process: in fp32 a relative 1e-6 or so.
"""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from qtrain.models import add_lora, as_lora, build_model, load_adapter, read_model_source
from tests.data.corpora import write_questions
from tests.system import flags, losses, only_run, serving, write_model
from tests.test_context_parallel_runs import saved
from tests.test_many_processes import FINETUNE
from tests.test_mixture_runs import QWEN

WIDE = {**QWEN, "num_hidden_layers": 2, "hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64}
"""Linears of a size that low-bit bases take."""
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
SETTINGS = {**FINETUNE, "model": "mixture.json", "deterministic": False, "optim": "adamw", "export": True}
CASES: dict[str, dict[str, Any]] = {
    "all linears": {"lora": {"r": 3, "targets": ["all-linear", *EXPERTS]}},
    "gate_up, on NF4": {"lora": {"r": 2, "base": "nf4", "targets": EXPERTS[:1]}},
    "experts, muon": {"lora": {"r": 4, "targets": EXPERTS}, "optim": "muon"},
    # Weights that differ by 1e-7 flip codes of activations, and one code is 1e-2 of a value: SGD hardly moves adapters
    # in four steps, and its momentum is the sum of their gradients.
    "experts on INT8": {"lora": {"r": 4, "base": "int8", "targets": EXPERTS}, "optim": "sgd"},
    "fully sharded": {"lora": {"r": 3, "targets": ["o_proj", *EXPERTS]}, "reshard_after_forward": "always"},
}
LOSSES, TENSORS = 1e-5, 1e-4
"""Relative differences."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("experts")
    write_model(folder / "mixture.json", max_position_embeddings=512, **WIDE)
    write_questions(folder / "questions.jsonl")
    with serving(folder) as server:
        server.folder = folder
        yield server


def run(server, world: int, runs: Path, **settings: Any) -> Path:
    """The folder of a run that ends on `world` processes."""
    done = server.run_ranks(world, "llm_finetune", flags(**settings, runs_dir=runs))
    assert [outcome.code for outcome in done] == [0] * world, "\n".join(outcome.err for outcome in done)
    return only_run(runs, "llm_finetune")


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()} and len(expected) > 2
    for name, tensor in expected.items():
        a, b = found[name].double(), tensor.double()
        assert (a - b).norm() <= TENSORS * b.norm(), name


@pytest.mark.sweep
@pytest.mark.parametrize("case", CASES)
def test_runs_that_divide_adapted_experts_go_on_with_any_ep(server, case, tmp_path):
    """Two processes with --ep 2 up to step 2, then four or one up to the end, and one undisturbed."""
    settings = {**SETTINGS, **CASES[case]}
    alone = {**settings, "reshard_after_forward": "auto"}
    one = run(server, 1, tmp_path / "one", **alone)
    many = run(server, 2, tmp_path / "many", **settings, ep=2)
    assert_close(saved(many), saved(one))
    shutil.rmtree(many / "checkpoints/00000004")
    shutil.copytree(many, tmp_path / "back" / "llm_finetune" / many.name)
    run(server, 4, tmp_path / "many", **settings, ep=2 if "linears" in case else 4, resume=many)
    back = run(server, 1, tmp_path / "back", **alone, resume=tmp_path / "back" / "llm_finetune" / many.name)
    for other in (many, back):
        for a, b in zip(losses(one), losses(other), strict=True):
            assert a[0] == b[0] and b[1] == pytest.approx(a[1], rel=LOSSES)
        assert_close(saved(other), saved(one))
        for file in ("adapter/adapter_model.safetensors", "hf/model.safetensors"):
            assert_close(load_file(other / file), load_file(one / file))
    source, ids, logits = read_model_source(str(server.folder / "mixture.json")), torch.arange(20)[None], []
    for folder in (one, many):
        lora = as_lora({"adapter": str(folder / "adapter")})
        model = build_model(source, seed=1)
        add_lora(model, lora, seed=0)
        load_adapter(model, lora.adapter)
        with torch.no_grad():
            logits.append(model.eval()(ids))
    assert (logits[0] - logits[1]).norm() <= TENSORS * logits[0].norm()


@pytest.mark.sweep
def test_an_adapter_is_continued_where_experts_are_divided(server, tmp_path):
    """And without an export the adapter is all that is written."""
    settings = {**SETTINGS, "lora": {"r": 2, "targets": EXPERTS}, "export": False}
    first = run(server, 2, tmp_path / "first", **settings, ep=2)
    assert not (first / "hf").exists()
    settings |= {"lora": {"adapter": str(first / "adapter")}, "n_steps": 1}
    one, many = (run(server, n, tmp_path / str(n), **settings, ep=n) for n in (1, 2))
    assert losses(many)[0][1] == pytest.approx(losses(one)[0][1], rel=LOSSES)
    assert losses(many)[0][1] != pytest.approx(losses(first)[0][1], rel=1e-3)
    name = "adapter/adapter_model.safetensors"
    assert_close(load_file(many / name), load_file(one / name))


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["fp8_tensorwise", "fp8_blockwise", "int8"])
def test_frozen_experts_compute_in_order_too(server, scheme, tmp_path):
    """Adapters of attention alone, with --deterministic: the losses of one process, bit for bit."""
    settings = {**SETTINGS, "deterministic": True, "lora": {"r": 3, "targets": ["q_proj", "o_proj"]}, "n_steps": 2}
    settings |= {"quantize": scheme, "export": False}
    one, many, sharded = (
        losses(run(server, n, tmp_path / name, **settings, **options))
        for n, name, options in (
            (1, "one", {}),
            (2, "many", {"ep": 2}),
            (4, "sharded", {"ep": 2, "reshard_after_forward": "always"}),
        )
    )
    assert one == many == sharded
