"""The experts of a mixture in every scheme: each expert computes what a dense MLP of its own rows computes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.kernels.grouped.permute import weights_of_rows
from qtrain.kernels.grouped.token_permutation import group_rows
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS
from qtrain.kernels.quantize.gather_rows import GatheredRows, RowIndex, in_memory
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.execute import quantize_operands
from qtrain.quant.experts import experts_mlp
from qtrain.quant.gemm_table import multiply
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.tensor_roles import BOTH, NeedsOperand
from qtrain.tensors.quantized_tensor import QuantizedTensor, flatten_operands
from tests.cases import without_norms
from tests.quant.emulation import TABLE

C, INNER, EXPERTS, PER_TOKEN = 128, 64, 4, 2


class Experts(nn.Module):
    """Stacked experts, as a mixture holds them."""

    def __init__(self, experts: int = EXPERTS, width: int = C, inner: int = INNER):
        super().__init__()
        self.gate_up = GroupedLinear(experts, width, 2 * inner)
        self.down_proj = GroupedLinear(experts, inner, width)

    def forward(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        return experts_mlp(self.gate_up, self.down_proj, x, experts, weights)


def module(seed: int = 0, dtype: torch.dtype = torch.float32, **sizes) -> Experts:
    torch.manual_seed(seed)
    return Experts(**sizes).to(dtype)


def routing(tokens: int, kind: str = "random", seed: int = 1) -> tuple[Tensor, Tensor]:
    """experts [T, k] and weights fp32 [T, k]."""
    g = torch.Generator().manual_seed(seed)
    scores = torch.rand(tokens, EXPERTS, generator=g)
    if kind == "empty":
        scores[:, 1] = -1  # no token chooses it
        scores[:, 3] = -1
    elif kind == "one":
        scores[:, :2] += 2
    weights, experts = scores.softmax(-1).topk(PER_TOKEN)
    return experts, weights / weights.sum(-1, keepdim=True)


def loop_over_experts(m: Experts, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """The definition, in x's dtype."""
    w_up = m.gate_up.weight.view(m.gate_up.groups, -1, x.shape[1]).to(x.dtype)
    w_down = m.down_proj.weight.view(len(w_up), x.shape[1], -1).to(x.dtype)
    out = torch.zeros_like(x)
    for e in range(len(w_up)):
        token, k = (experts == e).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], w_up[e]).chunk(2, dim=-1)
        y = F.linear(F.silu(gate) * up, w_down[e])
        out = out.index_add(0, token, y * weights[token, k, None].to(x.dtype))
    return out


def gradients(m: Experts, run, x: Tensor, experts: Tensor, weights: Tensor, dout: Tensor) -> list[Tensor]:
    x, weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
    m.zero_grad()
    out = run(x, experts, weights)
    out.backward(dout.to(out.dtype))
    return [out.detach(), x.grad, weights.grad, m.gate_up.weight.grad, m.down_proj.weight.grad]


@pytest.mark.parametrize("kind", ["random", "empty", "one"])
@pytest.mark.parametrize("tokens", [1, 37, 300])
def test_high_precision_is_the_loop_over_experts(tokens, kind):
    m = module()
    x, dout = torch.randn(2, tokens, C)
    experts, weights = routing(tokens, kind)
    found = gradients(m, m, x, experts, weights, dout)
    truth = gradients(m, lambda *a: loop_over_experts(m, *a), x.double(), experts, weights.double(), dout)
    for one, other in zip(found, truth, strict=True):
        assert (one - other).abs().max() <= 1e-5 * other.abs().max() + 1e-9


ERROR = {"mxfp8": 0.15, "int4": 0.5, "nvfp4": 0.5, "bitnet": 1.5, "binary": 1.5, "int4_weight": 0.5, "qat": 0.5}
"""Relative errors that a scheme's formats allow; 0.1 of the others."""
NAMES = [name for name in SCHEMES.names() if name not in ("auto", "bf16")]


KWARGS = [
    *((name, without_norms(name)) for name in NAMES),
    ("fp8_blockwise", {"grad_weight_x": "128x128"}),
]


@pytest.mark.parametrize("scheme, kwargs", KWARGS)
def test_every_scheme_trains_experts(scheme, kwargs):
    """Both linears are swapped, and outputs and gradients are those of the loop but for the scheme's error."""
    m, plain = module(), module()
    quantized = quantize_linears(m, SCHEMES.make(scheme, kwargs, "--quantize"), seed=0)
    assert [c.reason for c in quantized.choices] == [None, None], quantized.choices
    assert [c.groups for c in quantized.choices] == [EXPERTS, EXPERTS]
    x, dout = torch.randn(2, 300, C)
    experts, weights = routing(300, "empty")
    found = gradients(m, m, x, experts, weights, dout)
    truth = gradients(plain, lambda *a: loop_over_experts(plain, *a), x, experts, weights, dout)
    for one, other in zip(found, truth, strict=True):
        assert (one - other).norm() / other.norm() < ERROR.get(scheme, 0.1)
    empty = found[3].view(EXPERTS, -1)[[1, 3]], found[4].view(EXPERTS, -1)[[1, 3]]
    assert not any(g.any() for g in empty)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme, kwargs", [("bf16", {}), *KWARGS])
@pytest.mark.parametrize("kind", ["random", "empty", "one"])
def test_on_a_gpu_without_the_host(scheme, kwargs, kind):
    """bf16 experts against the loop over experts in fp64; after a first call nothing waits for the device."""
    sizes = {"width": 256, "inner": 128}
    m, plain = module(dtype=torch.bfloat16, **sizes).cuda(), module(dtype=torch.bfloat16, **sizes).cuda()
    quantize_linears(m, SCHEMES.make(scheme, kwargs, "--quantize"), seed=0)
    x, dout = torch.randn(2, 1000, 256, device="cuda", dtype=torch.bfloat16)
    experts, weights = (t.cuda() for t in routing(1000, kind))
    found = gradients(m, m, x, experts, weights, dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = gradients(m, m, x, experts, weights, dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(found, again, strict=True))
    truth = gradients(plain, lambda *a: loop_over_experts(plain, *a), x.double(), experts, weights.double(), dout)
    for one, other in zip(found, truth, strict=True):
        assert (one.double() - other.double()).norm() / other.double().norm() < ERROR.get(scheme, 0.1)


def scales_cover_tokens(scheme: str) -> bool:
    """Whether a scale of its activations covers several tokens; of nvfp4 the one of the tensor does."""
    (fmt, granularity), _ = TABLE.get(scheme, {}).get("output") or (("", ""), None)
    return fmt == "nvfp4" or granularity in ("tensorwise", "32x32", "128x128")


@pytest.mark.parametrize("scheme, kwargs", [case for case in KWARGS if not scales_cover_tokens(case[0])])
def test_nan_in_one_token_stays_with_it_and_its_experts(scheme, kwargs):
    m = module()
    quantize_linears(m, SCHEMES.make(scheme, kwargs, "--quantize"), seed=0)
    x, dout = torch.randn(2, 40, C)
    experts, weights = routing(40)
    x[7, 3] = float("nan")
    out, _, _, dup, ddown = gradients(m, m, x, experts, weights, dout)
    others = torch.arange(40) != 7
    assert out[7].isnan().all() and out[others].isfinite().all()
    own = torch.zeros(EXPERTS, dtype=torch.bool)
    own[experts[7]] = True
    for gradient in (dup, ddown):
        of_expert = gradient.view(EXPERTS, -1)
        assert of_expert[~own].isfinite().all() and not of_expert[own].isfinite().all()


@pytest.mark.parametrize(
    "scheme, kwargs",
    [case for case in KWARGS if case[0] in ("int8", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise")],
)
def test_each_expert_is_a_dense_linear_of_its_own_rows(scheme, kwargs):
    """Bit for bit: the codes of an expert's rows, multiplied by the dense product."""
    m = module()
    kwargs = {**kwargs, "stochastic_rounding": False}
    quantized = quantize_linears(m, SCHEMES.make(scheme, kwargs, "--quantize"), seed=0)
    linear = quantized.linears[0]
    experts, _ = routing(200)
    groups = group_rows(experts, EXPERTS)
    x = torch.randn(groups.rows, C)
    dy = torch.randn(groups.rows, 2 * INNER)
    x[groups.token_of_row < 0] = 0
    dy[groups.token_of_row < 0] = 0
    arguments = linear.arguments()._replace(groups=groups)
    w = arguments.weight
    xs, dys = (quantize_operands(t, arguments.request(name, BOTH)) for name, t in (("x", x), ("dy", dy)))
    y = arguments.multiply("output", xs.rows, w.rows, torch.float32)
    dx = arguments.multiply("grad_input", dys.rows, w.columns, torch.float32)
    dw = arguments.multiply("grad_weight", dys.columns, xs.columns, torch.float32)
    for e in range(EXPERTS):
        rows = slice(int(groups.starts[e]), int(groups.starts[e + 1]))
        own = slice(e * 2 * INNER, (e + 1) * 2 * INNER)
        assert torch.equal(y[rows], multiply("output", _rows(xs.rows, rows), _rows(w.rows, own), torch.float32))
        assert torch.equal(
            dx[rows], multiply("grad_input", _rows(dys.rows, rows), _columns(w.columns, own, e), torch.float32)
        )
        assert torch.equal(
            dw[own],
            multiply("grad_weight", _columns(dys.columns, rows, e), _columns(xs.columns, rows, e), torch.float32),
        )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scheme, kwargs", [*KWARGS, ("fp8_tensorwise", {"scaling": "delayed"})])
def test_operands_of_gathered_rows(scheme, kwargs, device):
    """Those of the gathered matrix, bit for bit, and the absmax that delayed scaling records."""
    m = module(dtype=torch.bfloat16).to(device)
    linear = quantize_linears(m, SCHEMES.make(scheme, kwargs, "--quantize"), seed=0).linears[0]
    experts, weights = routing(200)
    groups = group_rows(experts.to(device), EXPERTS)
    arguments, delayed = linear.arguments()._replace(groups=groups), "scaling" in kwargs
    x, dy = (torch.randn(200, columns, device=device).bfloat16() for columns in (C, 2 * INNER))
    weight = weights_of_rows(weights.to(device), groups)
    held = torch.ones(groups.rows, dtype=torch.bool, device=device)
    if delayed:  # codes of blocks of no group need not be written
        held = (groups.group_of_block >= 0).repeat_interleave(BLOCK_ROWS)
    for needs in (BOTH, NeedsOperand(True, False), NeedsOperand(False, True)):
        for name, t in (
            ("x", GatheredRows(x, RowIndex(groups.token_of_row))),
            ("dy", GatheredRows(dy, RowIndex(groups.token_of_row, weight))),
        ):
            found, amax = [], []
            for rows in (t, in_memory(t)):
                for buffer in (linear.x_amax, linear.dy_amax) if delayed else ():
                    buffer.zero_()
                operands = quantize_operands(rows, arguments.request(name, needs))
                found.append([_held(q.float(), held) for q in flatten_operands(operands)[0] if q is not None])
                amax.append(torch.cat([linear.x_amax, linear.dy_amax]) if delayed else None)
            for one, other in zip(*found, strict=True):
                assert torch.equal(one, other)
            assert not delayed or (amax[0].any() and torch.equal(*amax))


def _held(t: torch.Tensor, held: torch.Tensor) -> torch.Tensor:
    """What t, along rows or along columns, has of these rows."""
    return t[held] if len(t) == len(held) else t[:, held] if t.shape[-1] == len(held) else t


def _rows(q: QuantizedTensor, rows: slice) -> QuantizedTensor:
    """Rows of an operand with their scales."""
    height = {"rowwise": 1, "1x128": 1, "128x128": 128}.get(q.format.granularity)
    scale = q.scale if height is None else q.scale[rows.start // height : -(-rows.stop // height)]
    return q._replace(codes=q.codes[rows], scale=scale)


def _columns(q: QuantizedTensor, columns: slice, group: int) -> QuantizedTensor:
    """The columns of a group in transposed codes, with the group's scales."""
    codes, granularity = q.codes[:, columns].contiguous(), q.format.granularity
    if granularity == "rowwise":
        scale = q.scale.view(-1, len(codes))[group]
    elif granularity == "tensorwise":
        scale = q.scale
    else:
        scale = q.scale[:, columns.start // 128 : columns.stop // 128]
    return q._replace(codes=codes, scale=scale)
