"""Grouped products with blockwise scales: each group's dense product, kernels close to the definition."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm.blockwise_mm import BLOCKS, BlockwiseTiling, blockwise_mm
from qtrain.kernels.grouped.grouped_blockwise_mm import (
    k_grouped_blockwise_mm,
    k_grouped_blockwise_mm_ref,
    launch_grouped_rows_blockwise,
    launch_grouped_sums_blockwise,
    m_grouped_blockwise_mm,
    m_grouped_blockwise_mm_ref,
    rows_tilings,
    sums_tilings,
)
from qtrain.kernels.grouped.per_group import matrices, unstack
from qtrain.kernels.numerics.formats import empty_scale
from tests.kernels.gemm.test_scaled_mm import E4M3, codes
from tests.kernels.grouped.cases import ROUTINGS, expected_and_size, matrix_of, routed, scales, spans

ROLES = ("output", "grad_input")
FORMATS = [(torch.int8, ("1x128", "128x128")), (E4M3, ("1x128", "128x128")), (torch.int8, ("32x32", "32x32"))]


def block_scale(block: str, shape: tuple[int, int], seed: int, device: str) -> Tensor:
    """Scales of a matrix of this shape, laid out as the quantizers lay them out."""
    empty = empty_scale(block, *shape, torch.empty(0, device=device))
    return empty.copy_(scales(seed, device, empty.numel())[0].view(empty.shape))


def operands(shape_a, shape_b, dtype, blocks, seed, device, groups=1):
    """groups: matrices in b along its rows, or, below 0, along its columns, each with blocks of its own."""
    a, b = codes(*shape_a, dtype, seed, device), codes(*shape_b, dtype, seed + 1, device)
    rows, columns = shape_b
    own = (rows // groups, columns) if groups > 0 else (rows, columns // -groups)
    parts = [block_scale(blocks[1], own, seed + i, device) for i in range(abs(groups))]
    scale_b = torch.cat(parts, 0 if groups > 0 else 1) if len(parts) > 1 else parts[0]
    return a, b, block_scale(blocks[0], shape_a, seed + 50, device), scale_b


def rows_operands(g, n, k, dtype, blocks, role, seed=0):
    device = g.starts.device.type
    shape, groups = ((g.count * n, k), g.count) if role == "output" else ((n, g.count * k), -g.count)
    return operands((g.rows, k), shape, dtype, blocks, seed, device, groups)


def sums_operands(g, n, k, dtype, blocks, seed=0):
    return operands((n, g.rows), (k, g.rows), dtype, blocks, seed, g.starts.device.type)


def sums_blocks(blocks):
    """The blocks of sums in a scheme whose products of rows have `blocks`."""
    return list(dict.fromkeys([(blocks[0], blocks[0]), blocks]))


@pytest.mark.parametrize("dtype, blocks", FORMATS)
@pytest.mark.parametrize("routing", ROUTINGS)
def test_each_group_is_the_dense_product(dtype, blocks, routing):
    """N is a multiple of the block's rows and not."""
    g, last = routed(routing), int(routed(routing).starts[-1])
    (rows_a, along), rows_b = BLOCKS[blocks[0]], BLOCKS[blocks[1]][0]
    for role, n, k in (("output", 128, 64), ("output", 40, 128), ("grad_input", 40, 160), ("grad_input", 256, 32)):
        a, b, scale_a, scale_b = rows_operands(g, n, k, dtype, blocks, role, n)
        groups = g.group_of_block, g.starts
        y = m_grouped_blockwise_mm(a, b, scale_a, scale_b, *blocks, *groups, torch.bfloat16)
        assert (y[last:] == 0).all()
        scales_b = unstack(scale_b, g.count, role == "output")
        for e, s, t in spans(g):
            own = scale_a[s // rows_a : t // rows_a]
            assert scales_b[e].shape == (-(-n // rows_b), -(-k // along))
            w = matrix_of(b, e, k, g.count)
            assert torch.equal(y[s:t], blockwise_mm(a[s:t], w, own, scales_b[e], *blocks, torch.bfloat16))
    n, k = 40, 160
    for pair in sums_blocks(blocks):
        a, b, scale_a, scale_b = sums_operands(g, n, k, dtype, pair)
        dw = k_grouped_blockwise_mm(a, b, scale_a, scale_b, *pair, g.starts, torch.float32).view(g.count, n, k)
        for e, s, t in spans(g):
            own = [scale[:, s // along : t // along] for scale in (scale_a, scale_b)]
            operands_of_group = a[:, s:t].contiguous(), b[:, s:t].contiguous()
            assert torch.equal(dw[e], blockwise_mm(*operands_of_group, *own, *pair, torch.float32))
            assert t > s or (dw[e] == 0).all()


def test_different_cuts_of_k_are_refused():
    g = routed("random")
    a, b, *s = sums_operands(g, 32, 32, torch.int8, ("32x32", "32x32"))
    with pytest.raises(ValueError, match="cut K differently"):
        k_grouped_blockwise_mm(a, b, *s, "32x32", "1x128", g.starts, torch.bfloat16)


@pytest.mark.filterwarnings("ignore")
def test_operators():
    g, blocks = routed("random"), ("1x128", "128x128")
    rows = rows_operands(g, 40, 64, torch.int8, blocks, "output")
    sums = sums_operands(g, 40, 64, torch.int8, ("1x128", "1x128"))
    torch.library.opcheck(m_grouped_blockwise_mm, (*rows, *blocks, g.group_of_block, g.starts, torch.bfloat16))
    torch.library.opcheck(k_grouped_blockwise_mm, (*sums, "1x128", "1x128", g.starts, torch.bfloat16))


def close(out, expected, size, dtype):
    """Sums of a block are exact (INT8) or within the tensor cores' accumulator (FP8), which aligns 32 products to the
    largest of them and keeps about 13 bits. size: sums of magnitudes."""
    rounding = 2**-8 if out.dtype == torch.bfloat16 else 2**-20
    bits = 2**-20 if dtype == torch.int8 else 2**-11
    error = (out.double() - expected.double()).abs()
    assert (error <= rounding * expected.double().abs() + bits * size.double() + 1e-12).all()


def check(g, n, k, dtype, blocks, role, out_dtype, tilings=None):
    """tilings: of the interpreter; None: all that the dispatch has."""
    a, b, *s = rows_operands(g, n, k, dtype, blocks, role, n)
    a.view(torch.uint8)[int(g.starts[-1]) :] = 0x7F  # of FP8 a NaN: the kernel must not read it
    expected, size = expected_and_size(m_grouped_blockwise_mm_ref, a, b, *s, *blocks, g.starts)
    w, scale_w = matrices(b, k, g.count), unstack(s[1], g.count, role == "output")
    taken = tilings or rows_tilings(a, w, scale_w, *blocks, out_dtype).values()
    assert taken
    for tiling in taken:
        out = torch.full((g.rows, n), 7.0, dtype=out_dtype, device=a.device)
        launch_grouped_rows_blockwise(a, w, s[0], scale_w, *blocks, out, tiling, g.group_of_block, g.starts)
        close(out, expected, size, dtype)

    for pair in sums_blocks(blocks):
        a, b, *s = sums_operands(g, n, k, dtype, pair, n)
        for t in (a, b):
            t.view(torch.uint8)[:, int(g.starts[-1]) :] = 0x7F
        expected, size = expected_and_size(k_grouped_blockwise_mm_ref, a, b, *s, *pair, g.starts)
        taken = tilings or sums_tilings(a, b, s[1], *pair, out_dtype).values()
        assert taken
        for tiling in taken:
            out = torch.full((g.count, n, k), 7.0, dtype=out_dtype, device=a.device)
            launch_grouped_sums_blockwise(a, b, *s, *pair, out, tiling, g.starts)
            close(out.view(-1, k), expected, size, dtype)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype, blocks", FORMATS)
def test_kernels_in_the_interpreter(dtype, blocks):
    for number, routing in enumerate(("some_empty", "random")):
        tilings = [BlockwiseTiling(128, 64, 4, 2)]
        check(routed(routing), 80, 144, dtype, blocks, ROLES[number], torch.float32, tilings)


@pytest.mark.gpu
@pytest.mark.parametrize("n,k,groups,tokens", [(80, 144, 4, 150), (1152, 896, 8, 900), (2048, 768, 16, 4000)])
@pytest.mark.parametrize("dtype, blocks", [*FORMATS, (E4M3, ("1x128", "1x128"))])
def test_kernels_on_gpu(dtype, blocks, n, k, groups, tokens):
    for number, routing in enumerate(ROUTINGS):
        g = routed(routing, groups, tokens, "cuda")
        for out_dtype in (torch.bfloat16, torch.float32)[: 1 + number // 2]:
            check(g, n, k, dtype, blocks, ROLES[number % 2], out_dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("role", [*ROLES, "grad_weight"])
def test_same_result_every_time(role):
    """Warps that load and warps that multiply walk through uneven groups on their own: a step that is read before it is
    loaded, or after it is overwritten, would change the result."""
    g, n, k, blocks = routed("random", 8, 6000, "cuda"), 2048, 1152, ("1x128", "128x128")
    if role == "grad_weight":
        a, b, *s = sums_operands(g, n, k, E4M3, blocks)
        tilings = sums_tilings(a, b, s[1], *blocks, torch.bfloat16)
        shape, launch, groups = (g.count, n, k), launch_grouped_sums_blockwise, (g.starts,)
    else:
        a, b, *s = rows_operands(g, n, k, E4M3, blocks, role)
        b, s[1] = matrices(b, k, g.count), unstack(s[1], g.count, role == "output")
        tilings = rows_tilings(a, b, s[1], *blocks, torch.bfloat16)
        shape, launch, groups = (g.rows, n), launch_grouped_rows_blockwise, (g.group_of_block, g.starts)

    def run(tiling):
        out = torch.full(shape, 7.0, dtype=torch.bfloat16, device="cuda")
        return launch(a, b, *s, *blocks, out, tiling, *groups)

    for tiling in list(tilings.values())[:3]:
        first = run(tiling)
        assert all(torch.equal(run(tiling), first) for _ in range(20)), tiling.name


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["triton", "ref"])
def test_operators_on_gpu(family, monkeypatch):
    """Also shapes that no kernel takes."""
    monkeypatch.setenv("QTRAIN_IMPL", family)
    for n, k in ((40, 144), (7, 5)):
        for number, routing in enumerate(ROUTINGS):
            g, blocks = routed(routing, device="cuda"), ("1x128", "128x128")
            of_sums = sums_blocks(blocks)[number % 2]
            rows, sums = rows_operands(g, n, k, E4M3, blocks, ROLES[number % 2]), sums_operands(g, n, k, E4M3, of_sums)
            y = m_grouped_blockwise_mm(*rows, *blocks, g.group_of_block, g.starts, torch.float32)
            dw = k_grouped_blockwise_mm(*sums, *of_sums, g.starts, torch.float32)
            for found, product, operands_of, blocks_of in (
                (y, m_grouped_blockwise_mm_ref, rows, blocks),
                (dw, k_grouped_blockwise_mm_ref, sums, of_sums),
            ):
                close(found, *expected_and_size(product, *operands_of, *blocks_of, g.starts), E4M3)
