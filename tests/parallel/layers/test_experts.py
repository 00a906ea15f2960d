"""Experts on two ranks: together they compute what one process does with all of them, in order bit for bit."""

import functools
from typing import Any

import pytest
import torch
from torch import Tensor

from qtrain.comm.rank_group import RankGroup
from qtrain.comm.wire import sent
from qtrain.parallel.layers.experts import EPExperts
from qtrain.parallel.layers.place import shared_over
from qtrain.parallel.mesh import make_mesh
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.grouped_linear import GroupedLinear
from tests.cases import sampled, without_norms
from tests.quant.test_experts import EXPERTS, INNER, PER_TOKEN, C, Experts, module, routing
from tests.worlds import run_ranks

RANKS, TOKENS, STEP = 2, 100, 6
ERROR = {
    "bf16": 1e-6,
    "int4": 0.5,
    "nvfp4": 0.5,
    "int8_blockwise": 0.2,
    "int4_weight": 1e-6,
    "int8_weight": 1e-6,
    "qat": 1e-6,
}
"""Relative errors of scales that cover other tokens, and of codes rounded with other bits; 0.1 of the others."""
KINDS = ("random", "one")
"""The second routes all tokens to two experts, of one rank."""
CASES = {name: {} for name in SCHEMES.names() if name != "auto" and not without_norms(name)}
SAMPLE = ("int8", "fp8_tensorwise")
IN_ORDER = {**{name: {} for name in CASES if name != "nvfp4"}, "int8 tensorwise": {"granularity": "tensorwise"}}


def _part(whole: Experts, group: RankGroup) -> EPExperts:
    """The experts of this rank."""
    count = EXPERTS // RANKS
    part = Experts.__new__(Experts)
    torch.nn.Module.__init__(part)
    part.gate_up = GroupedLinear(count, C, 2 * INNER)
    part.down_proj = GroupedLinear(count, INNER, C)
    for own, of in ((part.gate_up, whole.gate_up), (part.down_proj, whole.down_proj)):
        own.weight.data = of.weight.data.chunk(RANKS)[group.rank].clone()
    return EPExperts(part, group)


def _quantized(m: torch.nn.Module, name: str, options: dict[str, Any], rank: int, group: RankGroup | None = None):
    """With the keys of a rank's micro-batch. group: the ranks that have the other experts."""
    shared = None if group is None else shared_over(group)
    quantized = quantize_linears(m, SCHEMES.make(name, options, "--quantize"), seed=0, shared=lambda name: shared)
    quantized.set_step(STEP + rank)
    return m


def _tokens(kind: str, rank: int) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(10 + rank)
    x, dout = torch.randn(2, TOKENS, C, generator=g) * (1 + 3 * rank)
    return x, *routing(TOKENS, kind, seed=rank), dout


def _run(run, tokens: tuple[Tensor, ...]) -> list[Tensor]:
    """Output, and the gradients of x and of the routes' weights."""
    x, experts, weights, dout = tokens
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    out = run(x, experts, weights)
    out.backward(dout)
    return [out.detach(), x.grad, weights.grad]


def _gradients(m: Experts) -> list[Tensor]:
    found = [m.gate_up.weight.grad, m.down_proj.weight.grad]
    m.zero_grad()
    return found


def _of_rank(name: str, options: dict[str, Any], in_order: bool) -> dict[str, Any]:
    """For each routing: largest relative error against one process, or whether all is equal; and the bytes sent."""
    group = make_mesh(0, 0, "cpu", ep=RANKS).expert_mesh.tp_group
    part, found = _quantized(_part(module(), group), name, options, group.rank, group), {}
    terms = tuple(part.keep_in_order().values()) if in_order else None
    for kind in KINDS:
        sent.clear()
        own = _run(part, _tokens(kind, group.rank))
        kinds = dict(sent)
        of_weights = [t.grad for t in terms] if in_order else _gradients(part)
        one, dw = [], []
        for rank in range(RANKS):
            whole = _quantized(module(), name, options, rank)
            one.append(_run(whole, _tokens(kind, rank)))
            dw.append([g.chunk(RANKS)[group.rank] for g in _gradients(whole)])
        expected = one[group.rank]
        if in_order:
            expected = [*expected, *(torch.stack(of) for of in zip(*dw, strict=True))]
            for t in terms:
                t.grad = None
        else:
            expected = [*expected, *(sum(of) for of in zip(*dw, strict=True))]
        pairs = list(zip([*own, *of_weights], expected, strict=True))
        found[kind] = {
            "equal": [torch.equal(a, b) for a, b in pairs],
            "error": max(float((a - b).norm() / b.norm().clamp(min=1e-9)) for a, b in pairs),
            "sent": kinds,
        }
    return found


def _of_both_ranks(names: tuple[str, ...], in_order: bool) -> dict[str, dict[str, Any]]:
    cases = {name: (name.split()[0], (IN_ORDER if in_order else CASES)[name]) for name in names}
    return {name: _of_rank(*case, in_order) for name, case in cases.items()}


@functools.cache
def _results(names: tuple[str, ...], in_order: bool) -> list[dict[str, dict[str, Any]]]:
    return run_ranks(RANKS, _of_both_ranks, names, in_order)


def results(name: str, in_order: bool) -> list[dict[str, Any]]:
    """Of each rank. The schemes that are always tested share the processes."""
    return [found[name] for found in _results(SAMPLE if name in SAMPLE else (name,), in_order)]


@pytest.mark.parametrize("name", sampled(list(CASES), lambda name: name not in SAMPLE))
def test_ranks_add_what_their_experts_computed(name):
    for found in results(name, False):
        for kind in KINDS:
            assert found[kind]["error"] <= ERROR.get(name, 0.1), kind


@pytest.mark.parametrize("name", sampled(list(IN_ORDER), lambda name: name not in SAMPLE))
def test_in_order_they_compute_what_one_process_does(name):
    for found in results(name, True):
        assert {kind: found[kind]["equal"] for kind in KINDS} == dict.fromkeys(KINDS, [True] * 5)


def test_what_travels():
    """Tokens, as codes where one scale covers all, and sums, in fp32; experts, weights, and the weights' gradients."""
    tokens, routes = TOKENS * C, TOKENS * PER_TOKEN * 4
    plain, low_bit = (results(name, False)[0]["random"]["sent"] for name in ("int8", "fp8_tensorwise"))
    assert plain == {"activations": 4 * tokens * 4, "routes": 3 * routes}
    assert low_bit == {"activations": 3 * tokens * 4, "activation codes": tokens, "scales": 4, "routes": 3 * routes}
