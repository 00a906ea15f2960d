"""Adapters of experts that several ranks hold: what one process computes with all of them, of loss and gradients."""

import functools

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.mesh_equality import MIXTURE, random_micro_batch
from qtrain.comm.ranks import all_gather
from qtrain.kernels.grouped.token_permutation import group_rows_of
from qtrain.models import Decoder, Lora, ModelSource, add_lora, build_model, compile_layers
from qtrain.parallel.layers.experts import EPExperts
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.parallel.sharding.shards import Sharded, is_placeholder
from qtrain.quant import SCHEMES, adapted_experts, quantize_linears
from qtrain.quant.adapted_experts import AdaptedExperts
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import compute_gradients
from tests.cases import sampled
from tests.parallel.layers.test_experts import _part, _tokens
from tests.quant.test_adapted_experts import SCALE, adapters, doubled, loop, run
from tests.quant.test_experts import EXPERTS, module
from tests.worlds import run_ranks

UP, DOWN, MICRO_BATCHES = "experts.gate_up_proj", "experts.down_proj", 4
TARGETS = {"gate_up": (UP,), "down": (DOWN,), "both": (UP, DOWN), "attention": ("all-linear", UP, DOWN)}
MESHES = {"1": (1, 1, 1), "2": (1, 2, 2), "4": (1, 4, 4), "4, two with each expert": (1, 4, 2)}
"""replicate, shard, ep."""


def _gradient(sharded: Sharded, model: Decoder) -> tuple[int, np.ndarray] | None:
    """Of the whole parameter, or of this rank's experts: its first row, and it."""
    if is_placeholder(sharded.master):
        return None
    gradient = sharded.master.grad
    whole = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
    part = model.partition(sharded.name)
    return 0 if part is None else part.ranges[0][0], whole.numpy()


def _of_rank(
    mesh: str,
    base: str,
    which: str,
    full_shard: bool = False,
    every_routing: bool = True,
    compiled: bool = False,
) -> tuple[float, dict[str, np.ndarray]]:
    """The loss of a step of four micro-batches, and the gradient of each adapter, as all experts have it."""
    replicate, shard, ep = MESHES[mesh]
    made, source = make_mesh(replicate, shard, "cpu", ep=ep), ModelSource("small", MIXTURE, "--model")
    config, place = source.model_config(), None
    if ep > 1:
        group = made.expert_mesh.tp_group
        place = ModelParallel(config, None, group, every_routing=every_routing).place
    model = build_model(source, dtype=torch.float32, seed=1, place=place, lazy=full_shard)
    scheme = SCHEMES.make("bf16", {}, "-") if base == "dense" else base_scheme(base, "bf16")
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head, realize=not full_shard)
    add_lora(model, Lora(r=3, targets=TARGETS[which]), seed=5)
    for name, p in model.named_parameters():
        if ".lora_b." in name:  # else those of A are 0
            part, generator = model.partition(name), torch.Generator().manual_seed(len(name))
            drawn = torch.randn(p.shape if part is None else part.full_shape(p.shape), generator=generator) / 10
            p.data.copy_(drawn if part is None else part.take(drawn))
    if compiled:
        compile_layers(model)
    parallel = DataParallel(model, quantized, made, units=decoder_units(model) if full_shard else ())
    batches = [random_micro_batch(0, number) for number in range(made.reader, MICRO_BATCHES, made.readers)]
    found = compute_gradients(model, language_forward(model, None), quantized, batches, 0, parallel=parallel)
    whole: dict[str, dict[int, np.ndarray]] = {}
    for of_rank in all_gather({s.name: _gradient(s, model) for s in parallel.parameters}):
        for name, part in of_rank.items():
            if part is not None:
                whole.setdefault(name, {})[part[0]] = part[1]
    return found.loss, {name: np.concatenate([parts[row] for row in sorted(parts)]) for name, parts in whole.items()}


@functools.cache
def _of_one(base: str, which: str) -> tuple[float, dict[str, np.ndarray]]:
    return run_ranks(1, _of_rank, "1", base, which)[0]


def _compare(found: tuple[float, dict[str, np.ndarray]], base: str, which: str) -> None:
    (loss, gradients), (expected, of_one) = found, _of_one(base, which)
    # INT8 codes of rows on the border between two may differ.
    error = {"dense": 1e-5, "int8": 2e-3}[base]
    assert loss == pytest.approx(expected, rel=error)
    assert gradients.keys() == of_one.keys() and len(of_one) >= 2
    assert any(".experts." in name for name in of_one) and (which != "attention" or any("qkv" in n for n in of_one))
    for name, gradient in of_one.items():
        assert gradients[name].shape == gradient.shape
        assert np.linalg.norm(gradients[name] - gradient) <= error * np.linalg.norm(gradient) > 0, name


CASES = [(mesh, base, which) for mesh in list(MESHES)[1:] for base in ("dense", "int8") for which in TARGETS]


@pytest.mark.parametrize(
    ("mesh", "base", "which"),
    sampled(CASES, lambda mesh, base, which: which != "attention" and (mesh != "2" or base == "int8")),
)
def test_loss_and_gradients_are_those_of_one_process(mesh, base, which):
    for found in run_ranks(MESHES[mesh][1], _of_rank, mesh, base, which):
        _compare(found, base, which)


@pytest.mark.parametrize("mesh", list(MESHES)[2:])
def test_in_fully_sharded_layers_they_are_too(mesh):
    """Frozen experts of a rank are sharded over the ranks that hold the same ones, if there are any."""
    for found in run_ranks(4, _of_rank, mesh, "int8", "attention", True):
        _compare(found, "int8", "attention")


@pytest.mark.parametrize(
    ("every_routing", "compiled"),
    sampled([(False, False), (True, True), (False, True)], lambda every, compiled: compiled),
)
def test_rows_as_a_routing_needs_them_and_compiled_layers_change_nothing(every_routing, compiled):
    """Of two ranks an even load is half of the rows of any routing, of four a quarter."""
    mesh = "2" if compiled else "4"
    for found in run_ranks(MESHES[mesh][1], _of_rank, mesh, "dense", "both", False, every_routing, compiled):
        _compare(found, "dense", "both")


def _dropped(dropout: float) -> tuple[float, list[float]]:
    """Of the elements that adapters of this rank's experts read, how many dropout left; relative errors of output and
    gradients against the loop over all experts, with the elements that the ranks left."""
    group, plain = make_mesh(0, 0, "cpu", ep=2).expert_mesh.tp_group, adapted_experts._dropped
    masks: list[Tensor] = []

    def recorded(rows: Tensor, mask: Tensor, dropout: float) -> Tensor:
        masks.append(mask)
        return plain(rows, mask, dropout)

    adapted_experts._dropped = recorded  # in a process of its own
    torch.manual_seed(group.rank)

    def ranks(m: EPExperts, x: Tensor, experts: Tensor, weights: Tensor, **of: Tensor) -> Tensor:
        up = AdaptedExperts(m.gate_up, of["a_up"], of["b_up"], SCALE, dropout)
        down = AdaptedExperts(m.down_proj, of["a_down"], of["b_down"], SCALE, dropout)
        return m.compute_adapted(up, down, x, experts, weights)

    of, tokens = adapters(4, "up and down"), [_tokens("random", rank) for rank in range(2)]
    own = {name: t.chunk(2)[group.rank] for name, t in of.items()}
    x, experts, weights, dout = tokens[group.rank]
    found = run(ranks, _part(module(), group), x, experts, weights, dout, **own)
    x, experts, weights, dout = (torch.cat(list(of_ranks)) for of_ranks in zip(*tokens, strict=True))
    count = EXPERTS // 2
    rows = group_rows_of(experts, EXPERTS, group.rank * count, count).row_of_topk.long()  # [2 * T, k]
    held = (experts // count == group.rank).unsqueeze(-1)
    left = [(mask[rows] & held).numpy() for mask in masks[:2]]  # of gate_up and down_proj: [2 * T, k, K]
    share = left[0].sum() / (held.sum().item() * x.shape[1])
    factors = [torch.from_numpy(sum(of_ranks)) / (1 - dropout) for of_ranks in zip(*all_gather(left), strict=True)]
    arguments = x.double(), experts, weights.double(), dout
    truth = run(lambda *a, **k: loop(*a, tuple(factors), **k), module(), *arguments, **doubled(of))
    own_truth = [t.chunk(2)[group.rank] for t in truth]
    return share, [float((a - b).norm() / b.norm()) for a, b in zip(found, own_truth, strict=True)]


def test_dropout_hides_elements_of_each_ranks_rows_from_its_adapters():
    for share, errors in run_ranks(2, _dropped, 0.3):
        assert share == pytest.approx(0.7, abs=0.02) and len(errors) == 7 and max(errors) < 1e-5
