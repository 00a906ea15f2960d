"""Codes of gathered rows, read from x itself: those of the gathered matrix, bit for bit."""

import pytest
import torch

from qtrain.kernels.numerics.philox import NEAREST, Rounding
from qtrain.kernels.quantize.absmax import launch_absmax
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS, BlockGroups
from qtrain.kernels.quantize.delayed_scale import delayed_scale, launch_delayed_scale
from qtrain.kernels.quantize.dual_bf16x2 import launch_dual_bf16x2, supports_dual_bf16x2
from qtrain.kernels.quantize.gather_rows import (
    EVERY_ROW,
    GatheredRows,
    RowIndex,
    gather_dual,
    gather_rows_ref,
    in_memory,
    launch_gather_dual,
    launch_gather_rows,
    with_index,
)
from qtrain.kernels.quantize.operators import quantize_dual, quantize_dual_delayed
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref, scale_ref
from tests.cases import without_e5m2
from tests.kernels.quantize.test_kernels import KEY, ROLE, same, stress_matrix

CASES = [
    ("int8", "rowwise", "rowwise"),
    ("e4m3", "rowwise", "rowwise"),
    ("e4m3", "tensorwise", "tensorwise"),
    ("e4m3", "given", "given"),
    ("e4m3", "1x128", "1x128"),
    ("e4m3", "1x128", "128x128"),
    ("e5m2", "128x128", "128x128"),
]
GROUPS = 3


def gathered_case(rows, columns, seed, kind, weighted, device="cpu", dtype=torch.bfloat16, tokens=45):
    """x [tokens, columns] and the index of `rows` rows: tokens more than once (or of zeros), and rows of none, whose
    weights are negative."""
    x, generator = stress_matrix(tokens, columns, seed, kind, dtype, device), torch.Generator().manual_seed(seed)
    token = torch.randint(-4, tokens, (rows,), generator=generator).clamp(min=-1)
    token[1], token[rows // 2 :: 3] = tokens // 2, -1  # with its NaN
    weight = torch.where(token < 0, -1.0, torch.rand(rows, generator=generator) + 0.01)
    weight[:3] = torch.tensor([-0.3, 1e3, 0.0])
    for row in set(range(tokens)) - set(token.tolist()):  # each is gathered, as in a mixture
        x[row] = 0
    return x, RowIndex(token.int().to(device), weight.to(device) if weighted else None)


def groups_of(rows, granularity, device):
    """Of whole blocks of rows: group 0 is empty, the last block belongs to none."""
    if granularity != "rowwise" or rows % BLOCK_ROWS:
        return None
    group_of_block = [2 - block % 2 for block in range(rows // BLOCK_ROWS - 1)] + [-1]
    return BlockGroups(torch.tensor(group_of_block, dtype=torch.int32, device=device), GROUPS)


def without_group(index, groups):
    """Rows of no group hold no token."""
    if groups is None:
        return index
    return index._replace(
        token_of_row=torch.where(groups.group_of_block.repeat_interleave(BLOCK_ROWS) < 0, -1, index.token_of_row)
    )


def check_dual(rows, columns, seed, kind, fmt, granularity, granularity_t, weighted, rounding=NEAREST, device="cpu"):
    x, index = gathered_case(rows, columns, seed, kind, weighted, device)
    groups = groups_of(rows, granularity, device)
    index = without_group(index, groups)
    whole = gather_rows_ref(x, *index)
    scale, amax = None, None
    if granularity == "given":
        granularity = granularity_t = "tensorwise"
        scale = torch.tensor([1e-2], device=device)
        amax = torch.zeros(1, dtype=torch.int32, device=device)
    assert supports_dual_bf16x2(x, fmt, granularity, scale is not None, index, granularity_t)
    found = launch_dual_bf16x2(
        x, fmt, granularity, rounding, False, scale, amax, granularity_t=granularity_t, groups=groups, index=index
    )
    row_bits, column_bits = rounding.bits(whole.shape)
    expected = quantize_ref(whole, fmt, granularity, row_bits, scale=scale)
    expected += quantize_transposed_ref(whole, fmt, granularity_t, column_bits, scale=scale, groups=groups)
    same(found, expected, (rows, columns, kind, weighted))
    if amax is not None:
        same([amax.view(torch.float32)], [whole.float().abs().amax().view(1)], kind)


def check_held(rows, columns, seed, weighted, device="cpu"):
    """Under a given scale blocks of no group are left out: their codes are those of another call, the rest the same."""
    x, index = gathered_case(rows, columns, seed, "outlier", weighted, device)
    blocks = rows // BLOCK_ROWS
    for held in ([0, 1, -1, -1], [0, 0, 1, -1], [-1] * 4):
        held = torch.tensor(held[:blocks], dtype=torch.int32, device=device)
        of_row = (held >= 0).repeat_interleave(BLOCK_ROWS)
        zeros = index._replace(token_of_row=torch.where(of_row, index.token_of_row, -1))
        scale = torch.tensor([1e-2], device=device)
        every = launch_dual_bf16x2(x, "e4m3", "tensorwise", scale=scale, index=zeros)
        out = [torch.full_like(t.view(torch.uint8), 3).view(t.dtype) for t in every]
        amax = torch.zeros(1, dtype=torch.int32, device=device)
        launch_dual_bf16x2(x, "e4m3", "tensorwise", scale=scale, amax=amax, out=out, index=zeros, held=held)
        of_row[:BLOCK_ROWS] = True  # the first block stores the scale
        for found, expected in ((out[0], every[0]), (out[2].t(), every[2].t())):
            found, expected = found.view(torch.uint8), expected.view(torch.uint8)
            assert torch.equal(found[of_row], expected[of_row]) and (found[~of_row] == 3).all()
        assert torch.equal(out[1], scale) and torch.equal(out[3], scale)
        assert amax.view(torch.float32) == gather_rows_ref(x, *zeros).float().abs().amax()


def check_gather_dual(rows, columns, seed, dtype, device="cpu"):
    index = gathered_case(rows, 16, seed, "normal", False, device)[1].token_of_row
    x = torch.randint(256, (45, columns), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)
    x = x.to(device).view(dtype)
    expected = gather_rows_ref(x.view(torch.uint8), index)
    held = torch.tensor([1, 0, -1, -1][: rows // 128], dtype=torch.int32, device=device)
    of_row = (held >= 0).repeat_interleave(128)
    for group_of_block, written in ((None, torch.ones_like(of_row)), (held, of_row)):
        for function in (launch_gather_dual, gather_dual)[device == "cpu" and group_of_block is None :]:
            codes, codes_t = function(x, index, group_of_block)
            assert codes.dtype == codes_t.dtype == dtype and codes_t.is_contiguous()
            for found in (codes.view(torch.uint8), codes_t.view(torch.uint8).t()):
                assert torch.equal(found[written], expected[written]), (rows, columns, function)


def check_absmax(columns, seed, weighted, dtype, device="cpu"):
    x, index = gathered_case(144, columns, seed, "nonfinite", weighted, device, dtype)
    whole = gather_rows_ref(x, *index).float().abs()
    expected = whole.amax().view(1), whole.amax(1), whole.amax(0)
    for tensor in (True, False):
        found = launch_absmax(x, tensor=tensor, rows=True, columns=True, index=index)
        same([t.view(torch.float32) for t in found[not tensor :]], expected[not tensor :], (columns, tensor))


def check_delayed_scale(function, dtype, weighted, device="cpu"):
    for kind in ("outlier", "nonfinite"):
        x, index = gathered_case(37, 40, 3, kind, weighted, device, dtype)
        whole, known = gather_rows_ref(x, *index), torch.tensor([0.37], device=device)
        assert torch.equal(function(x, known, "e4m3", False, index), known)
        own = function(x, torch.zeros_like(known), "e4m3", False, index)
        same([own], [scale_ref(whole, "e4m3", "tensorwise")], kind)


def check_operators(device, dtype):
    """Formats and shapes that a kernel gathers for, and those that it does not."""
    for weighted, key in ((False, None), (True, KEY.to(device))):
        for rows, columns in ((256, 48), (37, 40), (0, 16)):
            x, index = gathered_case(max(rows, 8), columns, 5, "outlier", weighted, device, dtype)
            index = RowIndex(*(None if t is None else t[:rows] for t in index))
            if not rows:
                x.zero_()  # as `gathered_case` does with rows that are not gathered
            whole = gather_rows_ref(x, *index)
            for fmt, granularity, granularity_t, fmt_t in (
                ("int8", "rowwise", "rowwise", "int8"), ("int4", "rowwise", "rowwise", "int4"),
                ("e4m3", "1x128", "1x128", "e5m2"), ("e4m3", "1x128", "128x128", "e4m3"),
                ("e4m3", "tensorwise", "tensorwise", "e4m3"), ("ternary", "tensorwise", "tensorwise", "ternary"),
            ):  # fmt: skip
                groups = groups_of(rows, granularity, device) if rows and fmt != "ternary" else None
                own = without_group(index, groups)
                t, of = gather_rows_ref(x, *own), groups or (None, 1)
                asked = fmt, granularity, granularity_t, key, ROLE, True, True, False, None, fmt_t, *of
                found = quantize_dual(x, *asked, *own)
                same(found, quantize_dual(t, *asked), (fmt, granularity, granularity_t, rows, weighted))
            for value in (1e-2, 0.0):
                known = torch.tensor([value], device=device)
                found = quantize_dual_delayed(x, "e4m3", known, key, ROLE, True, True, False, *index)
                same(found, quantize_dual_delayed(whole, "e4m3", known, key, ROLE), (rows, weighted))
            assert torch.equal(in_memory(GatheredRows(x, index)), whole)
            assert GatheredRows(x, index).shape == whole.shape
    assert in_memory(x) is x and with_index(x) == (x, EVERY_ROW)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_on_the_cpu(dtype):
    check_operators("cpu", dtype)
    for weighted in (False, True):
        check_delayed_scale(lambda *a: delayed_scale(*a[:-1], *a[-1]), dtype, weighted)


def test_fakes():
    x, index = gathered_case(128, 16, 0, "normal", True)
    torch.library.opcheck(
        quantize_dual, (x, "int8", "rowwise", "rowwise"), {"token_of_row": index[0], "weight_of_row": index[1]}
    )
    torch.library.opcheck(
        quantize_dual_delayed, (x, "e4m3", torch.ones(1), None, 0, True, True, False, index[0], index[1])
    )
    torch.library.opcheck(delayed_scale, (x, torch.ones(1), "e4m3", False, *index))
    torch.library.opcheck(gather_dual, (x.view(torch.int8), index.token_of_row))


def test_rows_not_tokens_decide_what_a_kernel_takes():
    x, index = gathered_case(128, 48, 0, "normal", True)
    assert x.shape[0] % 16 and supports_dual_bf16x2(x, "int8", "rowwise", index=index)
    assert not supports_dual_bf16x2(x, "int8", "rowwise")
    assert not supports_dual_bf16x2(x, "int8", "rowwise", index=RowIndex(index.token_of_row[:120]))


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity,granularity_t", without_e5m2(CASES))
def test_dual_in_the_interpreter(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    check_dual(256, 48, 0, "nonfinite", fmt, *pair, weighted=True)
    check_dual(144, 272, 1, "outlier", fmt, *pair, weighted=False, rounding=Rounding(KEY, ROLE))


@pytest.mark.interpreter
def test_rows_of_no_group_in_the_interpreter():
    check_held(384, 48, 0, weighted=False)
    check_gather_dual(256, 40, 0, torch.int8)


@pytest.mark.interpreter
def test_absmax_in_the_interpreter():
    for weighted in (False, True):
        check_absmax(48, 0, weighted, torch.bfloat16)
        check_absmax(40, 1, weighted, torch.float32)
        for dtype in (torch.float32, torch.bfloat16):
            check_delayed_scale(lambda *a: launch_delayed_scale(*a)[0], dtype, weighted)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt,granularity,granularity_t", CASES)
def test_dual_on_gpu(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    generator, key = torch.Generator().manual_seed(9), KEY.cuda()
    for number in range(48):
        m, k = (16 * torch.randint(1, 40, (2,), generator=generator)).tolist()
        m, k = (-(-m // 128) * 128, -(-k // 128) * 128) if number % 3 == 0 else (m, k)
        rounding = (NEAREST, Rounding(key, ROLE), Rounding(key, ROLE, rows=False))[number // 2 % 3]
        kind = ("outlier", "nonfinite", "zero_row")[number % 3]
        check_dual(m, k, number, kind, fmt, *pair, number % 2 == 1, rounding, "cuda")
    check_dual(16384, 2048, 0, "outlier", fmt, *pair, True, device="cuda")


@pytest.mark.gpu
def test_rows_of_no_group_on_gpu():
    for columns in (48, 272, 2048):
        for weighted in (False, True):
            check_held(512, columns, columns, weighted, "cuda")
    for dtype in (torch.int8, torch.float8_e4m3fn):
        for rows, columns in ((128, 16), (512, 40), (384, 2048), (512, 13)):
            check_gather_dual(rows, columns, columns, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_operators_on_gpu(dtype):
    check_operators("cuda", dtype)
    for weighted in (False, True):
        check_delayed_scale(lambda *a: delayed_scale(*a[:-1], *a[-1]), dtype, weighted, "cuda")
        for columns in (40, 48, 1040):
            check_absmax(columns, columns, weighted, dtype, "cuda")
            x, index = gathered_case(1000, columns, columns, "outlier", weighted, "cuda", dtype)
            assert torch.equal(launch_gather_rows(x, *index), gather_rows_ref(x, *index))
