"""Adapters of experts: each expert computes what its matrices plus its own scale · B · A compute; those alone train."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.kernels.grouped import grouped_plain_mm
from qtrain.kernels.grouped.token_permutation import TokenPermutation, group_rows
from qtrain.quant import adapted_experts, quantize_linears
from qtrain.quant.adapted_experts import AdaptedExperts, adapted_experts_mlp
from qtrain.quant.export import exported_weight
from qtrain.quant.schemes.frozen_base import base_scheme
from tests.quant.test_experts import EXPERTS, INNER, C, Experts, module, routing

SCALE = 1.5


def pair(rank: int, columns: int, rows: int, seed: int) -> tuple[Tensor, Tensor]:
    """A [E * r, columns], B [E * rows, r]."""
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(EXPERTS * rank, columns, generator=g), torch.randn(EXPERTS * rows, rank, generator=g)
    return a / columns**0.5, b / rank**0.5


def adapters(rank: int, which: str) -> dict[str, Tensor]:
    found = dict(zip(("a_up", "b_up"), pair(rank, C, 2 * INNER, 2), strict=True)) if "up" in which else {}
    return found | (dict(zip(("a_down", "b_down"), pair(rank, INNER, C, 3), strict=True)) if "down" in which else {})


def grouped(m: Experts, x: Tensor, experts: Tensor, weights: Tensor, dropout: float = 0.0, **of: Tensor) -> Tensor:
    up = AdaptedExperts(m.gate_up, of.get("a_up"), of.get("b_up"), SCALE, dropout)
    down = AdaptedExperts(m.down_proj, of.get("a_down"), of.get("b_down"), SCALE, dropout)
    return adapted_experts_mlp(up, down, x, experts, weights)


def loop(
    m: Experts, x: Tensor, experts: Tensor, weights: Tensor, factors: tuple[Tensor, Tensor] | None = None, **of: Tensor
) -> Tensor:
    """The definition, in x's dtype. factors: of the elements that each A reads, [T, k, K]."""
    w_up, w_down = (exported_weight(w).to(x.dtype).unflatten(0, (EXPERTS, -1)) for w in (m.gate_up, m.down_proj))

    def linear(rows: Tensor, w: Tensor, which: str, e: int, factor: Tensor | float) -> Tensor:
        y = F.linear(rows, w[e])
        if f"a_{which}" not in of:
            return y
        a, b = (of[f"{p}_{which}"].unflatten(0, (EXPERTS, -1))[e] for p in "ab")
        return y + SCALE * F.linear(F.linear(rows * factor, a), b)

    out = torch.zeros_like(x)
    for e in range(EXPERTS):
        token, k = (experts == e).nonzero(as_tuple=True)
        of_up, of_down = (1.0, 1.0) if factors is None else (f[token, k] for f in factors)
        gate, up = linear(x[token], w_up, "up", e, of_up).chunk(2, dim=-1)
        y = linear(F.silu(gate) * up, w_down, "down", e, of_down)
        out = out.index_add(0, token, y * weights[token, k, None].to(x.dtype))
    return out


def run(compute, m: Experts, x: Tensor, experts: Tensor, weights: Tensor, dout: Tensor, **of: Tensor) -> list[Tensor]:
    """The output and the gradients of x, weights, A and B."""
    m.requires_grad_(False)
    leaves = [t.clone().requires_grad_() for t in (x, weights, *of.values())]
    out = compute(m, leaves[0], experts, leaves[1], **dict(zip(of, leaves[2:], strict=True)))
    out.backward(dout.to(out.dtype))
    assert all(p.grad is None for p in m.parameters())
    return [out.detach(), *(leaf.grad for leaf in leaves)]


def doubled(of: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.double() for name, t in of.items()}


@pytest.mark.parametrize("which", ["up and down", "up", "down"])
@pytest.mark.parametrize("kind", ["random", "empty", "one"])
@pytest.mark.parametrize(("tokens", "rank"), [(1, 8), (37, 3), (300, 16)])
def test_high_precision_is_the_loop_over_experts(tokens, rank, kind, which):
    m, of = module(), adapters(rank, which)
    x, dout = torch.randn(2, tokens, C)
    experts, weights = routing(tokens, kind)
    found = run(grouped, m, x, experts, weights, dout, **of)
    truth = run(loop, m, x.double(), experts, weights.double(), dout, **doubled(of))
    for one, other in zip(found, truth, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max() + 1e-9
    if kind == "empty":  # experts 1 and 3
        assert not any(g.unflatten(0, (EXPERTS, -1))[[1, 3]].any() for g in found[3:])


def test_one_expert_may_have_all_tokens():
    m, of, experts = module(), adapters(4, "up and down"), torch.full((200, 1), 2)
    x, dout = torch.randn(2, 200, C)
    weights = torch.rand(200, 1)
    found = run(grouped, m, x, experts, weights, dout, **of)
    truth = run(loop, m, x.double(), experts, weights.double(), dout, **doubled(of))
    for one, other in zip(found, truth, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.parametrize(("base", "least", "error"), [("nf4", 0, 1e-5), ("int8", 1e-3, 0.05), ("fp8", 1e-3, 0.1)])
def test_a_base_in_low_bits_is_the_loop_over_its_dequantized_weights(base, least, error):
    """Up to the rounding of activations and their gradients in 8-bit products, which does run."""
    m, of = module(), adapters(4, "up and down")
    quantized = quantize_linears(m, base_scheme(base, "bf16"), seed=0)
    assert [c.reason for c in quantized.choices] == [None, None]
    x, dout = torch.randn(2, 150, C)
    experts, weights = routing(150, "empty")
    found = run(grouped, m, x, experts, weights, dout, **of)
    truth = run(loop, m, x, experts, weights, dout, **of)
    for one, other in zip(found, truth, strict=True):
        assert least * other.norm() <= (one - other).norm() <= error * other.norm()


def test_bf16_rows_multiply_fp32_adapters_whose_gradients_are_fp32(monkeypatch):
    """Operands have rows of 16 bytes, as the kernels need, of any rank."""
    operands, multiply = [], adapted_experts._multiply

    def recorded(rows: Tensor, matrices: Tensor, groups: TokenPermutation) -> Tensor:
        operands.extend((rows, matrices))
        return multiply(rows, matrices, groups)

    monkeypatch.setattr(adapted_experts, "_multiply", recorded)
    m, of = module(dtype=torch.bfloat16), adapters(3, "up and down")
    x, dout = torch.randn(2, 300, C, dtype=torch.bfloat16)
    experts, weights = routing(300)
    found = run(grouped, m, x, experts, weights, dout, **of)
    truth = run(loop, m, x.double(), experts, weights.double(), dout, **doubled(of))
    assert [t.dtype for t in found] == [torch.bfloat16] * 2 + [torch.float32] * 5
    for one, other in zip(found, truth, strict=True):
        assert (one - other).norm() < 0.02 * other.norm()
    assert len(operands) == 16
    assert all(t.dtype == torch.bfloat16 and not any(size % 8 for size in t.shape) for t in operands)


def test_dropout_hides_elements_from_a_alone(monkeypatch):
    """Output and gradients are those of the loop with the same elements left out, the others scaled."""
    masks, dropped = [], adapted_experts._dropped

    def recorded(rows: Tensor, mask: Tensor, dropout: float) -> Tensor:
        masks.append(mask)
        return dropped(rows, mask, dropout)

    monkeypatch.setattr(adapted_experts, "_dropped", recorded)
    m, of = module(), adapters(4, "up and down")
    x, dout = torch.randn(2, 100, C)
    experts, weights = routing(100)
    torch.manual_seed(0)
    found = run(lambda *a, **k: grouped(*a, dropout=0.3, **k), m, x, experts, weights, dout, **of)
    rows = group_rows(experts, EXPERTS).row_of_topk.long()
    factors = masks[0][rows] / 0.7, masks[1][rows] / 0.7
    assert [f.bool().float().mean().item() for f in factors] == pytest.approx([0.7, 0.7], abs=0.02)
    truth = run(lambda *a, **k: loop(*a, factors, **k), m, x.double(), experts, weights.double(), dout, **doubled(of))
    for one, other in zip(found, truth, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max()


@pytest.mark.gpu
@pytest.mark.parametrize("rank", [3, 8, 16])
@pytest.mark.parametrize("base", ["none", "nf4", "fp8"])
def test_on_a_gpu_without_the_host(base, rank, monkeypatch):
    """bf16 against the loop in fp64; no product falls back to its definition, and nothing waits for the device."""
    m, of = module(dtype=torch.bfloat16), {name: t.cuda() for name, t in adapters(rank, "up and down").items()}
    m.cuda()
    for name in ("m_grouped_plain_mm_ref", "k_grouped_plain_mm_ref"):
        monkeypatch.setattr(grouped_plain_mm, name, None)
    if base != "none":
        quantize_linears(m, base_scheme(base, "bf16"), seed=0)
    x, dout = torch.randn(2, 1000, C, device="cuda", dtype=torch.bfloat16)
    experts, weights = (t.cuda() for t in routing(1000, "empty"))
    found = run(grouped, m, x, experts, weights, dout, **of)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = run(grouped, m, x, experts, weights, dout, **of)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    truth = run(loop, m, x.double(), experts, weights.double(), dout, **doubled(of))
    for one, two, other in zip(found, again, truth, strict=True):
        assert torch.equal(one, two)
        assert (one - other).norm() < 0.1 * other.norm()
