"""Grouped products of 8-bit codes: each group's dense product, zeros elsewhere, kernels equal to the definition."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from qtrain.kernels.gemm.blockwise_wgmma import WGMMA_TILINGS
from qtrain.kernels.gemm.persistent import Tiling
from qtrain.kernels.gemm.scaled_mm import scaled_mm
from qtrain.kernels.grouped import grouped_mm as module
from qtrain.kernels.grouped.grouped_mm import (
    ROWS_TILINGS,
    SUMS_TILINGS,
    for_all_blocks,
    k_grouped_mm,
    k_grouped_mm_ref,
    launch_sums_wgmma,
    m_grouped_mm,
    m_grouped_mm_ref,
    sums_mm_names,
)
from qtrain.kernels.grouped.per_group import matrices
from qtrain.kernels.grouped.persistent import (
    launch_k_grouped,
    launch_long_sums,
    launch_longest_first,
    launch_m_grouped,
)
from qtrain.kernels.grouped.token_permutation import ALIGNMENT
from tests.kernels.gemm.test_blockwise_wgmma import on_hopper
from tests.kernels.gemm.test_scaled_mm import DTYPES, truth
from tests.kernels.grouped.cases import (
    ROUTINGS,
    expected_and_size,
    matrix_of,
    routed,
    rows_operands,
    spans,
    sums_operands,
)

ROLES = ("output", "grad_input")


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("tensorwise", [False, True])
def test_each_group_is_the_dense_product(dtypes, routing, tensorwise):
    """Bit for bit; rows after the last group are zero whatever they hold, and so are groups without rows."""
    g, n, k = routed(routing), 24, 48
    last = int(g.starts[-1])
    for role in ROLES:
        a, b, scale_a, scale_b = rows_operands(g, n, k, dtypes, role, 1, tensorwise)
        y = m_grouped_mm(a, b, scale_a, scale_b, g.group_of_block, g.starts, torch.bfloat16)
        assert y.shape == (g.rows, n) and (y[last:] == 0).all()
        for e, s, t in spans(g):
            scales = (scale_a, scale_b) if tensorwise else (scale_a[s:t], scale_b[e * n : (e + 1) * n])
            own = scaled_mm(a[s:t], matrix_of(b, e, k, g.count), *scales, torch.bfloat16)
            assert torch.equal(y[s:t], own)
    a, b, scale_a, scale_b = sums_operands(g, n, k, dtypes, 2, tensorwise)
    dw = k_grouped_mm(a, b, scale_a, scale_b, g.starts, torch.float32)
    assert dw.shape == (g.count * n, k)
    for e, s, t in spans(g):
        scales = (scale_a, scale_b) if tensorwise else (scale_a[e * n : (e + 1) * n], scale_b[e * k : (e + 1) * k])
        own = scaled_mm(a[:, s:t].contiguous(), b[:, s:t].contiguous(), *scales, torch.float32)
        assert torch.equal(dw[e * n : (e + 1) * n], own)
        assert t > s or (dw[e * n : (e + 1) * n] == 0).all()


@pytest.mark.parametrize("dtypes", DTYPES[:2])
def test_against_fp64(dtypes):
    g, n, k = routed("some_empty"), 40, 96
    a, b, scale_a, scale_b = rows_operands(g, n, k, dtypes, "output")
    scale_a[3] *= 1000  # an outlier
    y = m_grouped_mm(a, b, scale_a, scale_b, g.group_of_block, g.starts, torch.float32)
    for e, s, t in spans(g):
        expected, size = truth(a[s:t], matrix_of(b, e, k, g.count), scale_a[s:t], scale_b[e * n : (e + 1) * n])
        assert ((y[s:t].double() - expected).abs() <= 2**-22 * size).all()


def test_a_nan_stays_in_its_row_and_in_its_group():
    g = routed("random")
    a, b, scale_a, scale_b = rows_operands(g, 16, 32, DTYPES[0], "output")
    scale_a[5] = float("nan")
    y = m_grouped_mm(a, b, scale_a, scale_b, g.group_of_block, g.starts, torch.bfloat16)
    assert y[5].isnan().all() and y.isnan().any(1).sum() == 1
    a, b, scale_a, scale_b = sums_operands(g, 16, 32, DTYPES[0])
    scale_b.view(g.count, 32)[2, 7] = float("nan")
    dw = k_grouped_mm(a, b, scale_a, scale_b, g.starts, torch.bfloat16).view(g.count, 16, 32)
    assert dw[2, :, 7].isnan().all() and dw.isnan().sum() == 16


def test_no_rows():
    g = routed("random", tokens=0)
    a, b, scale_a, scale_b = rows_operands(g, 16, 32, DTYPES[0], "grad_input")
    y = m_grouped_mm(a, b, scale_a, scale_b, g.group_of_block, g.starts, torch.bfloat16)
    assert y.shape == (0, 16)
    dw = k_grouped_mm(*sums_operands(g, 16, 32, DTYPES[0]), g.starts, torch.bfloat16)
    assert dw.shape == (64, 32) and (dw == 0).all()


def test_other_operands_are_refused():
    g = routed("random")
    a, b, *scales = rows_operands(g, 16, 32, DTYPES[0], "output")
    with pytest.raises(AssertionError, match="K = 16"):
        m_grouped_mm(a[:, :16].contiguous(), b, *scales, g.group_of_block, g.starts, torch.bfloat16)
    with pytest.raises(AssertionError, match="rows are not"):
        m_grouped_mm(a[:130], b, *scales, g.group_of_block, g.starts, torch.bfloat16)
    with pytest.raises(AssertionError, match="both int8 or both FP8"):
        k_grouped_mm(a, b.float(), *scales, g.starts, torch.bfloat16)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("role", ROLES)
def test_operators(role):
    g = routed("random")
    a, b, *scales = rows_operands(g, 16, 32, DTYPES[0], role)
    torch.library.opcheck(m_grouped_mm, (a, b, *scales, g.group_of_block, g.starts, torch.bfloat16))
    torch.library.opcheck(k_grouped_mm, (*sums_operands(g, 16, 32, DTYPES[0]), g.starts, torch.bfloat16, False))


# ---- kernels ---------------------------------------------------------------------------------------------------------


def close(out, expected, dtypes, size, fast_accum=True):
    """expected, size: fp32."""
    if dtypes[0] == torch.int8:
        assert torch.equal(out, expected.to(out.dtype))
    else:  # as in tests/kernels/gemm/test_scaled_mm.py
        error, bits = (out.double() - expected.double()).abs(), 9 if fast_accum else 12
        assert (error <= 2**-8 * expected.double().abs() + 2**-bits * size).all()


def check_rows(g, n, k, dtypes, launches, role, tensorwise=False, fast_accum=True):
    """launches: tilings and dtypes of the output."""
    a, b, *scales = rows_operands(g, n, k, dtypes, role, n, tensorwise)
    last = int(g.starts[-1])
    if not tensorwise:
        scales[0][last:] = float("nan")
    a.view(torch.uint8)[last:] = 0x7F  # of FP8 a NaN: the kernel must not read it
    expected, size = expected_and_size(m_grouped_mm_ref, a, b, *scales, g.starts)
    for tiling, out_dtype in launches:
        out = torch.full((g.rows, n), 7.0, dtype=out_dtype, device=a.device)
        launch_m_grouped(
            a, matrices(b, k, g.count), out, tiling, g.group_of_block, g.starts, tuple(scales), fast_accum=fast_accum
        )
        close(out, expected, dtypes, size, fast_accum)


def check_sums(g, n, k, dtypes, launches, tensorwise=False, fast_accum=True, longest=None):
    a, b, *scales = sums_operands(g, n, k, dtypes, n, tensorwise)
    for t in (a, b):
        t.view(torch.uint8)[:, int(g.starts[-1]) :] = 0x7F  # as above
    expected, size = expected_and_size(k_grouped_mm_ref, a, b, *scales, g.starts)
    for tiling, out_dtype in launches:
        out = torch.full((g.count, n, k), 7.0, dtype=out_dtype, device=a.device)
        launch_k_grouped(a, b, out, tiling, g.starts, tuple(scales), fast_accum=fast_accum)
        close(out.view(-1, k), expected, dtypes, size, fast_accum)
    for out_dtype in {out_dtype for _, out_dtype in launches} if longest else ():
        out = torch.full((g.count, n, k), 7.0, dtype=out_dtype, device=a.device)
        launch_long_sums(a, b, out, g.starts, tuple(scales), longest)
        for e, s, t in spans(g):
            wanted = expected.view(out.shape)[e].to(out_dtype)
            assert torch.equal(out[e], wanted if t - s > longest else torch.full_like(out[e], 7.0))


SMALL = [Tiling(128, 64, 64, 4, 2), Tiling(64, 32, 128, 4, 2, group_m=2, subtiles=1)]


@pytest.mark.interpreter
@pytest.mark.parametrize("dtypes", DTYPES[:2])
@pytest.mark.parametrize("routing", ["some_empty", "one_row"])
def test_rows_in_the_interpreter(dtypes, routing):
    """N and K are no multiples of the tile: nothing of the next group is read or overwritten."""
    for number, role in enumerate(ROLES):
        check_rows(routed(routing), 80, 144, dtypes, [(SMALL[number], torch.float32)], role, number == 1)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtypes", DTYPES[:2])
@pytest.mark.parametrize("routing", ["random", "some_empty"])
def test_sums_in_the_interpreter(dtypes, routing):
    for number, tiling in enumerate(SMALL):
        check_sums(routed(routing), 80, 48, dtypes, [(tiling, torch.float32)], number == 1)


@pytest.mark.interpreter
def test_long_sums_in_the_interpreter():
    """Sums of groups that are too long for int32 are added span by span; others are left."""
    check_sums(routed("some_empty", tokens=300), 80, 48, DTYPES[0], [(SMALL[0], torch.float32)], longest=ALIGNMENT)


@pytest.mark.interpreter
def test_longest_first_in_the_interpreter():
    starts = torch.tensor([0, 128, 128, 512, 640, 640, 1280], dtype=torch.int32)
    assert launch_longest_first(starts).tolist() == [5, 2, 0, 3, 1, 4]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "n,k,groups,tokens", [(80, 144, 4, 150), (1152, 896, 8, 900), (272, 528, 8, 33), (2048, 768, 16, 4000)]
)
@pytest.mark.parametrize("dtypes,fast_accum", [(DTYPES[0], True), (DTYPES[1], True), (DTYPES[1], False)])
def test_kernels_on_gpu(dtypes, fast_accum, n, k, groups, tokens):
    for number, routing in enumerate(ROUTINGS):
        g = routed(routing, groups, tokens, "cuda")
        rows, sums = (
            [
                (t, out_dtype)
                for out_dtype, largest in ((torch.bfloat16, 2**18), (torch.float32, 2**14))
                for t in tilings.values()
                if t.block_m * t.block_n <= largest
            ]
            for tilings in (ROWS_TILINGS, SUMS_TILINGS)
        )
        check_rows(g, n, k, dtypes, rows, ROLES[number % 2], n == 272, fast_accum)
        longest = 2 * ALIGNMENT if dtypes[0] == torch.int8 and number == 0 else None
        check_sums(g, n, k, dtypes, sums, n == 272, fast_accum, longest)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("tensorwise", [False, True])
@pytest.mark.parametrize("fast_accum", [False, True])
def test_each_candidate_of_sums_is_launched(dtype, tensorwise, fast_accum, monkeypatch):
    """On tensors that are said to be a GPU's: the autotuner leaves out a candidate that raises."""
    launched = []

    def every_name(op, key, names, run):
        assert all(run(name).shape == (4 * 192, 256) for name in names)
        assert len(launched) == len(names)
        return names[0]

    monkeypatch.setattr("qtrain.kernels.gemm.blockwise_wgmma.has_wgmma", lambda device: True)
    monkeypatch.setattr(module, "has_fp8", lambda device: True)
    monkeypatch.setattr(module, "choose", every_name)
    monkeypatch.setattr(module, "_library", lambda *args: [])
    for name in ("launch_sums_wgmma", "launch_k_grouped"):
        monkeypatch.setattr(module, name, lambda *args, name=name, **kwargs: launched.append(name))
    with FakeTensorMode():
        a, b = (torch.empty(rows, 1024, dtype=dtype, device="cuda") for rows in (192, 256))
        scales = (torch.empty(1 if tensorwise else 4 * rows, device="cuda") for rows in (192, 256))
        starts = torch.empty(5, dtype=torch.int32, device="cuda")
        k_grouped_mm._init_fn(a, b, *scales, starts, torch.bfloat16, fast_accum)
    assert ("launch_sums_wgmma" in launched) == (tensorwise and not fast_accum and dtype != torch.int8)


@on_hopper
@pytest.mark.gpu
@pytest.mark.parametrize("n,k,groups,tokens", [(192, 144, 4, 150), (1536, 2048, 16, 4000), (64, 768, 8, 33)])
@pytest.mark.parametrize("dtypes", DTYPES[1:])
def test_sums_in_fp32_on_gpu(dtypes, n, k, groups, tokens):
    """Of one scale a tensor, by the kernel of blockwise products: its partial sums go to fp32 totals."""
    for routing in ROUTINGS:
        g = routed(routing, groups, tokens, "cuda")
        a, b, *scales = sums_operands(g, n, k, dtypes, n, True)
        for t in (a, b):
            t.view(torch.uint8)[:, int(g.starts[-1]) :] = 0x7F  # as above
        names = sums_mm_names(a, b, tuple(scales), torch.bfloat16, fast_accum=False)
        assert [name for name in names if name in WGMMA_TILINGS], names
        assert not {*sums_mm_names(a, b, tuple(scales), torch.bfloat16, fast_accum=True)} & {*WGMMA_TILINGS}
        expected, size = expected_and_size(k_grouped_mm_ref, a, b, *scales, g.starts)
        for tiling in WGMMA_TILINGS.values():
            out = torch.full((g.count, n, k), 7.0, dtype=torch.bfloat16, device="cuda")
            launch_sums_wgmma(a, b, *(for_all_blocks(s) for s in scales), out, tiling, g.starts)
            close(out.view(-1, k), expected, dtypes, size, fast_accum=False)


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["triton", "cublas", "ref"])
@pytest.mark.parametrize("dtypes", DTYPES)
def test_operators_take_every_shape_without_the_host(family, dtypes, monkeypatch):
    """No synchronization, also where the definition computes it: shapes that no kernel takes."""
    monkeypatch.setenv("QTRAIN_IMPL", family)
    for n, k in ((16, 32), (7, 5), (272, 144)):
        for number, routing in enumerate(ROUTINGS):
            g = routed(routing, device="cuda")
            rows, sums = rows_operands(g, n, k, dtypes, ROLES[number % 2]), sums_operands(g, n, k, dtypes)
            groups = g.group_of_block, g.starts
            for _ in range(2):  # the first call compiles and times
                y = m_grouped_mm(*rows, *groups, torch.bfloat16)
                dw = k_grouped_mm(*sums, g.starts, torch.bfloat16)
                torch.cuda.set_sync_debug_mode("error")
            torch.cuda.set_sync_debug_mode("default")
            expected = m_grouped_mm_ref(*(t.cpu() for t in rows), g.starts.cpu(), torch.float32)
            scale = expected.abs().max()
            assert ((y.cpu().float() - expected).abs() <= 2**-8 * expected.abs() + 2**-8 * scale).all()
            expected = k_grouped_mm_ref(*(t.cpu() for t in sums), g.starts.cpu(), torch.float32)
            scale = expected.abs().max()
            assert ((dw.cpu().float() - expected).abs() <= 2**-8 * expected.abs() + 2**-8 * scale).all()


@pytest.mark.gpu
def test_more_rows_than_int32_holds(monkeypatch):
    """All rows in one group, more than the products whose sum int32 holds."""
    g = routed("one_group", 2, 70_000, "cuda")
    operands = sums_operands(g, 64, 80, DTYPES[0])
    expected = k_grouped_mm_ref(*(t.cpu() for t in operands), g.starts.cpu(), torch.float32)
    monkeypatch.setattr(module, "k_grouped_mm_ref", None)
    assert torch.equal(k_grouped_mm(*operands, g.starts, torch.float32).cpu(), expected)
