"""Processes that divide the experts of a mixture train as one does, bit for bit with --deterministic."""

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch

from benchmarks.mesh_equality import (
    CLOSE,
    CONFIG,
    MIXTURE,
    SCHEMES_COMPARED,
    TWO_HEADS,
    differences,
    random_micro_batch,
    train,
)
from llm_finetune import FinetuneSettings
from qtrain.core.errors import UserError
from qtrain.models import (
    RECOMPUTE_SETS,
    ModelConfig,
    ModelSource,
    apply_recompute,
    build_model,
    compile_layers,
)
from qtrain.parallel.layers.local_config import check_experts_divisible
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import expert_mesh_shape, make_mesh, planned_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.plan.sharding import reshards
from qtrain.train.settings.exclusions import check_exclusions
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import LanguageSettings, VisionSettings
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import compute_gradients
from tests.cases import FULL_SWEEP, sampled
from tests.worlds import run_ranks

STEPS, MICRO_BATCHES = 2, 8
CASES = [
    ("bf16", "adamw", "1x2", 2),
    ("int8", "adamw_4bit", "2x2", 2),
    ("fp8_tensorwise", "muon", "1x4", 2),
    ("fp8_tensorwise delayed", "adamw_8bit", "2x2", 4),
    ("int8 tensorwise", "adamw_8bit", "4x1", 2),
    ("fp8_rowwise", "muon", "2x2", 2),
    ("fp8_blockwise", "adamw_8bit", "1x2", 2),
    ("int8_blockwise", "adamw", "1x4", 4),
]


def _of_rank(
    scheme: str, optimizer: str, mesh: str, ep: int, deterministic: bool, full_shard: bool = False
) -> dict[str, Any]:
    replicate, shard, *tp = map(int, mesh.split("x"))
    made, config = make_mesh(replicate, shard, "cpu", *tp, ep=ep), MIXTURE | TWO_HEADS if tp else MIXTURE
    device = torch.device("cpu")
    return train(scheme, optimizer, made, device, STEPS, deterministic, MICRO_BATCHES, full_shard, config)


def _results(
    scheme: str, optimizer: str, mesh: str, ep: int, deterministic: bool, full_shard: bool = False
) -> list[dict[str, Any]]:
    world = math.prod(map(int, mesh.split("x")))
    return run_ranks(world, _of_rank, scheme, optimizer, mesh, ep, deterministic, full_shard)


@functools.cache
def _of_one(scheme: str, optimizer: str, deterministic: bool) -> dict[str, Any]:
    return _results(scheme, optimizer, "1x1", 1, deterministic)[0]


@pytest.mark.parametrize(
    ("scheme", "optimizer", "mesh", "ep"),
    sampled(CASES, lambda scheme, *_: scheme != "int8"),
)
def test_in_order_groups_of_processes_train_as_one(scheme, optimizer, mesh, ep):
    """Losses, gradient norms, weights, codes and states, of each expert."""
    one = _of_one(scheme, optimizer, True)
    for of_rank in _results(scheme, optimizer, mesh, ep, True):
        assert differences(one, of_rank) == ""


FULLY = [
    ("fp8_tensorwise delayed", "adamw_8bit", "1x4", 2),
    ("int8", "muon", "1x4", 2),
    ("fp8_tensorwise", "adamw_8bit", "2x2", 4),
    ("fp8_rowwise", "adamw", "1x4", 4),
    ("bf16", "muon", "2x2", 2),
    ("int8_blockwise", "adamw_4bit", "1x4", 2),
]
"""Experts that two ranks hold, which are sharded fully over these, and experts that one holds, which stay."""


@pytest.mark.parametrize(
    ("scheme", "optimizer", "mesh", "ep"),
    sampled(FULLY, lambda scheme, _, mesh, ep: (scheme, ep) not in {("int8", 2), ("fp8_tensorwise", 4)}),
)
def test_fully_sharded_layers_with_divided_experts_train_as_one_process(scheme, optimizer, mesh, ep):
    one = _of_one(scheme, optimizer, True)
    for of_rank in _results(scheme, optimizer, mesh, ep, True, True):
        assert differences(one, of_rank) == ""


@pytest.mark.parametrize("scheme", sampled(list(SCHEMES_COMPARED)[:-4], lambda scheme: scheme != "fp8_rowwise"))
def test_otherwise_losses_are_close(scheme):
    one = _of_one(scheme, "adamw_8bit", False)
    first, *others = _results(scheme, "adamw_8bit", "2x2" if FULL_SWEEP else "1x2", 2, False)
    assert differences(one, first, CLOSE) == ""
    assert all(differences(first, other) == "" for other in others)


GROUPS = ["fp8_tensorwise delayed", "int8 tensorwise", "fp8_blockwise", "bf16", "int8", "fp8_rowwise", "int8_weight"]


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", GROUPS)
def test_tensor_groups_that_share_experts_train_the_same_on_any_mesh(scheme):
    """Two groups of two ranks that shard or have replicas, or four of two, with layers fully sharded: bit for bit. As
    groups that each have all experts: nearly."""
    alone = _results(scheme, "adamw_8bit", "1x2x2", 1, True)[0]
    first, *others = _results(scheme, "adamw_8bit", "1x2x2", 2, True)
    assert differences(alone, first, CLOSE) == ""
    for mesh, full_shard in (("2x1x2", False), ("1x2x2", True), ("2x2x2", True)):
        others += _results(scheme, "adamw_8bit", mesh, 2, True, full_shard)
    assert all(differences(first, other) == "" for other in others)


@pytest.mark.parametrize(
    ("mesh", "ep", "found"),
    [((1, 8), 2, (1, 4)), ((2, 4), 2, (2, 2)), ((2, 4), 8, (1, 1)), ((8, 1), 2, (4, 1)), ((4, 2), 4, (2, 1))],
)
def test_the_mesh_of_the_ranks_that_hold_the_same_experts(mesh, ep, found):
    assert expert_mesh_shape(*mesh, ep) == found


@pytest.mark.parametrize(
    ("mesh", "ep", "words"),
    [
        ((1, 4), 3, "--ep: 3 does not divide the 4 processes that read data of their own; allowed: 1, 2, 4."),
        ((1, 1), 2, "--ep: 2 does not divide the 1 process that reads data; allowed: 1."),
        ((2, 6), 4, "--ep: 4 neither divides the 6 processes of --dp_shard nor is a multiple of them"),
    ],
)
def test_groups_that_do_not_fit_are_refused(mesh, ep, words):
    with pytest.raises(UserError) as refused:
        expert_mesh_shape(*mesh, ep)
    assert words in str(refused.value)


REFUSED = [
    (VisionSettings(ep=2), "models of timm have no experts"),
    (LanguageSettings(ep=2, model_impl="hf"), "only qtrain's own decoder has expert parallelism"),
    (
        LanguageSettings(ep=2, optimizer_in_backward=True),
        "--optimizer_in_backward does not know experts",
    ),
    (LanguageSettings(ep=2, deterministic=True, quantize="nvfp4"), "nvfp4 needs a scale of the tokens of all experts"),
    (LanguageSettings(ep=2, optim="q_galore_adamw"), "--optim q_galore_adamw works on .*allowed: adamw, .*muon"),
]


@pytest.mark.parametrize(("settings", "words"), REFUSED)
def test_settings_that_divided_experts_do_not_know_are_refused(settings, words):
    with pytest.raises(UserError, match=rf"^--ep: 2, but .*{words}"):
        check_exclusions(Options(settings, "llm_pretrain"), option="--ep")
    check_exclusions(Options(dataclasses.replace(settings, ep=1), "llm_pretrain"), option="--ep")


def test_auto_shards_layers_fully_where_the_memory_does_not_suffice():
    checked, model = check_settings(LanguageSettings(), "test"), torch.nn.Linear(2, 2)
    for ep in (1, 2):
        on_mesh = dataclasses.replace(checked, mesh=planned_mesh(1, 4, ep))
        assert reshards(on_mesh, 2, 1, model, [model]) and not reshards(on_mesh, 1, 2, model, [model])


def test_micro_batches_of_several_lengths_and_what_is_no_mixture_are_refused():
    with pytest.raises(UserError, match=r"^--ep: 2, but ranks that compute experts together need micro-batches of"):
        check_exclusions(Options(FinetuneSettings(ep=2, seq_len_multiple=8), "llm_finetune"), option="--ep")
    with pytest.raises(UserError, match=r"^--ep: 2, but llama is not a mixture of experts"):
        check_experts_divisible(ModelConfig.from_hf(CONFIG), 2, "llama")
    with pytest.raises(UserError, match=r"^--ep: 3 does not divide the 4 experts of qwen; allowed: 1, 2, 4\."):
        check_experts_divisible(ModelConfig.from_hf(MIXTURE), 3, "qwen")
    with pytest.raises(
        UserError, match=r"^--ep: 4 does not .* the 2 experts of qwen on each rank of --tp 2; allowed: 1, 2\."
    ):
        check_experts_divisible(ModelConfig.from_hf(MIXTURE), 4, "qwen", tp=2)


def _of_compiled(
    scheme: str, mode: str, compiled: bool, deterministic: bool, every_routing: bool = True, ranks: int = 2, tp: int = 1
) -> tuple[float, float]:
    """Of `ranks`, which have two experts each; or so many groups of `tp`."""
    mesh = make_mesh(1, ranks, "cpu", tp, ep=ranks)
    source = ModelSource("small", {**MIXTURE, **TWO_HEADS, "num_experts": 2 * ranks * tp}, "--model")
    parts = ModelParallel.on(source.model_config(), mesh, every_routing=every_routing)
    model = build_model(source, dtype=torch.bfloat16, seed=1, place=parts.place)
    name, options = SCHEMES_COMPARED[scheme]
    made = SCHEMES.make(name, options, "-")
    quantized = quantize_linears(model, made, seed=0, head=model.lm_head, shared=parts.shared_linear)
    apply_recompute(model, RECOMPUTE_SETS[mode])
    if compiled:
        compile_layers(model)
    parallel = DataParallel(model, quantized, mesh, deterministic=deterministic)
    batches = [random_micro_batch(0, 2 * i + mesh.dp_rank) for i in range(2)]
    forward = language_forward(model, None)
    gradients = compute_gradients(model, forward, quantized, batches, 0, parallel=parallel)
    return gradients.loss, gradients.norm


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "tp", "deterministic"),
    [(how, 1, ordered) for how in ("eager full", "compiled none", "compiled full") for ordered in (False, True)]
    + [("eager full", 2, False), ("compiled full", 2, False)],
)
def test_recomputed_and_compiled_layers(how, tp, deterministic):
    """Recomputation changes nothing; compiled layers round otherwise."""
    compiled, mode = how.split()
    plain = run_ranks(2 * tp, _of_compiled, "int8", "none", False, deterministic, True, 2, tp)
    found = run_ranks(2 * tp, _of_compiled, "int8", mode, compiled == "compiled", deterministic, True, 2, tp)
    if compiled == "eager":
        assert found == plain
    for (loss, norm), (other_loss, other_norm) in zip(found, plain, strict=True):
        assert loss == pytest.approx(other_loss, rel=1e-3) and norm == pytest.approx(other_norm, rel=1e-2)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("how", "tp"),
    [("eager none", 1), ("eager selective", 1), ("compiled none", 1), ("compiled full", 1), ("eager selective", 2)],
)
def test_rows_as_a_routing_needs_them_change_nothing(how, tp):
    """Four ranks: rows for every routing are four times an even load."""
    compiled, mode = how.split()
    arguments = "int8", mode, compiled == "compiled", False
    every, needed = (
        run_ranks(4, _of_compiled, *arguments, every_routing, 4 // tp, tp) for every_routing in (True, False)
    )
    if compiled == "eager":
        assert needed == every
    for (loss, norm), (other_loss, other_norm) in zip(needed, every, strict=True):  # compiled in other parts
        assert loss == pytest.approx(other_loss, rel=1e-3) and norm == pytest.approx(other_norm, rel=1e-2)
