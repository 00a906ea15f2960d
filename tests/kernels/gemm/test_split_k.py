"""Split-K of a last wave: the same INT8 product bit for bit, FP8 within its bounds, offered where it pays."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import sm_count
from qtrain.kernels.gemm import scaled_mm as module
from qtrain.kernels.gemm.persistent import Tiling
from qtrain.kernels.gemm.scaled_mm import TILINGS, launch_scaled_mm, scaled_mm_names, scaled_mm_ref
from qtrain.kernels.gemm.split_k import MIN_STEPS, choose_split
from tests.cases import FULL_SWEEP
from tests.kernels.gemm.test_scaled_mm import DTYPES, E4M3, codes, operands, truth

BF16 = torch.bfloat16
TWO = next(t for t in TILINGS.values() if t.split and t.per_sm == 2 and t.subtiles == 2)
WIDE = next(t for t in TILINGS.values() if t.split and t.subtiles == 4)
SPLIT = [t for t in TILINGS.values() if t.split]
GRADIENTS = [(1152, 896), (896, 896), (9728, 896), (896, 4864)]  # Qwen2.5-0.5B's weights
H200 = 132


def resident_ctas(tiling: Tiling, device: str) -> int:
    return tiling.per_sm * sm_count(torch.device(device))


# ---- what is split, and where it is offered --------------------------------------------------------------------------


@pytest.mark.parametrize("resident", [8, 132, 264])
def test_slices_cover_every_step_once(resident):
    """The last slice is never empty; the tiles that are not split fill whole waves."""
    for tiles in range(1, 3 * resident, 7):
        for steps in (1, 15, 16, 17, 33, 100, 256, 1040):
            split = choose_split(TWO, 128 * tiles, 100, 128 * steps - 16, resident)
            if split is None:
                continue
            assert split.whole % resident == 0 and split.whole + split.rest == tiles and 0 < split.rest < resident
            assert split.slices > 1 and split.steps >= MIN_STEPS
            assert (split.slices - 1) * split.steps < steps <= split.slices * split.steps


def test_nothing_is_cut_without_need():
    assert choose_split(TWO, 128 * 264, 128, 32768, 264) is None, "no tile is left over"
    assert choose_split(TWO, 128 * 260, 128, 32768, 264) is None, "the last wave is nearly full"
    assert choose_split(TWO, 128, 128, 128 * (2 * MIN_STEPS - 1), 264) is None, "K is short"


@pytest.mark.parametrize("m,n", GRADIENTS)
def test_a_nearly_empty_wave_is_cut_to_a_third_or_less(m, n):
    split = choose_split(TWO, m, n, 32768, 2 * H200)
    waves = -(-split.rest * split.slices // (2 * H200))
    assert waves * split.steps <= 256 / 3


def names(monkeypatch, m: int, n: int, k: int, dtype=torch.int8, out_dtype=BF16) -> list[str]:
    monkeypatch.setattr(module, "sm_count", lambda device: H200)
    a, b = (torch.empty(rows, k, dtype=dtype, device="meta") for rows in (m, n))
    return scaled_mm_names(a, b, out_dtype)


@pytest.mark.parametrize(
    "m,n,dtype", [(*shape, torch.int8) for shape in GRADIENTS] + [(1152, 896, E4M3), (896, 4864, E4M3)]
)
def test_split_comes_first_where_the_last_wave_is_nearly_empty(monkeypatch, m, n, dtype):
    found = names(monkeypatch, m, n, 32768, dtype)
    split = [TILINGS[name].split for name in found if name != "cublas"]
    assert split == sorted(split, reverse=True) and split[0] and not split[-1] and len(set(found)) == len(found)


def test_split_comes_second_where_the_waves_are_mostly_full(monkeypatch):
    """2048 x 1536 are 192 tiles for 264 CTAs; 9728 x 896, in large tiles, 304 for 132."""
    for shape, dtype in (((2048, 1536), torch.int8), ((9728, 896), E4M3)):
        first, second, *_ = names(monkeypatch, *shape, 32768, dtype)
        assert not TILINGS[first].split and TILINGS[second] == replace(TILINGS[first], split=True)


@pytest.mark.parametrize("m,n,k", [(4096, 4096, 4096), (1152, 896, 1024), (32768, 1152, 896), (130, 272, 144)])
@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_split_is_not_offered_where_nothing_is_cut(monkeypatch, m, n, k, dtype):
    found = [TILINGS[name] for name in names(monkeypatch, m, n, k, dtype) if name != "cublas"]
    for tiling in found:
        cut = choose_split(tiling, m, n, k, tiling.per_sm * H200) is not None
        assert cut or not tiling.split
    assert not found[0].split


def test_wide_tiles_are_offered_where_large_ones_do_not_fit(monkeypatch):
    found = names(monkeypatch, 1152, 896, 32768, out_dtype=torch.float32)
    assert [name for name in found if "split" in name] == [WIDE.name] and "cublas" in found


# ---- what it computes ------------------------------------------------------------------------------------------------


def check_equal(device: str, out_dtype: torch.dtype, tilings: list[Tiling], shapes: list[tuple[int, int, int]]) -> int:
    """INT8, bit for bit as the plain tiling, with all that the epilogue can do. Returns how many were split."""
    cut = 0
    for number, (m, n, k) in enumerate(shapes):
        a, b, *rowwise = operands(m, n, k, DTYPES[0], number, device=device)
        for tensorwise, biased in ((False, False), (True, True), (False, True)):
            scales = [scale[:1] for scale in rowwise] if tensorwise else rowwise
            bias = torch.randn(n, device=device).to(out_dtype) if biased else None
            for tiling in tilings:
                cut += choose_split(tiling, m, n, k, resident_ctas(tiling, device)) is not None
                out, expected = (
                    launch_scaled_mm(a, b, *scales, torch.empty(m, n, dtype=out_dtype, device=device), t, bias=bias)
                    for t in (tiling, replace(tiling, split=False))
                )
                assert torch.equal(out, expected), ((m, n, k), tensorwise, biased, tiling)
                assert torch.allclose(out, scaled_mm_ref(a, b, *scales, out_dtype, bias), 2**-7, 1e-3)
    return cut


def check_near(
    device: str, out_dtype: torch.dtype, tilings: list[Tiling], shapes, dtypes, fast: bool, bits: int
) -> int:
    """FP8 against fp64, within 2**-bits of the sum of magnitudes. Returns how many were split."""
    cut = 0
    rounding = 2**-23 if out_dtype == torch.float32 else 2**-8
    for number, (m, n, k) in enumerate(shapes):
        a, b, *scales = operands(m, n, k, dtypes, number, number % 2 == 1, device)
        expected, size = truth(a, b, *scales)
        for tiling in tilings:
            cut += choose_split(tiling, m, n, k, resident_ctas(tiling, device)) is not None
            out = torch.empty(m, n, dtype=out_dtype, device=device)
            launch_scaled_mm(a, b, *scales, out, tiling, fast_accum=fast)
            error = (out.double() - expected).abs()
            assert (error <= rounding * expected.abs() + 2**-bits * size).all(), ((m, n, k), tiling)
    return cut


def check_nonfinite_scale(device: str, tiling: Tiling, m: int, n: int, k: int) -> None:
    a, b, scale_a, scale_b = operands(m, n, k, DTYPES[0], device=device)
    scale_a[m - 1], scale_b[n - 1] = float("nan"), float("inf")
    assert choose_split(tiling, m, n, k, resident_ctas(tiling, device)) is not None
    out = torch.zeros(m, n, device=device)
    launch_scaled_mm(a, b, scale_a, scale_b, out, tiling)
    assert out[m - 1].isnan().all() and out[: m - 1, : n - 1].isfinite().all()
    assert not out[:, n - 1].isfinite().any()


SMALL = Tiling(32, 64, 32, 4, 2, group_m=2, per_sm=4, split=True)  # 8 programs in the interpreter
# 1 and 3 tiles; a whole wave of 8 and 4 tiles; 2 waves and 4 tiles. Edges; last steps of 16; last parts that are short.
INTERPRETED = [(32, 64, 1024), (70, 64, 816), (96, 256, 1072), (97, 136, 1296), (300, 68, 944)]


@pytest.mark.interpreter
def test_int8_in_the_interpreter():
    shapes = INTERPRETED if FULL_SWEEP else INTERPRETED[:2]
    assert check_equal("cpu", torch.float32, [SMALL], shapes) == 3 * len(shapes)


@pytest.mark.interpreter
def test_fp8_in_the_interpreter():
    shapes = INTERPRETED if FULL_SWEEP else INTERPRETED[1:2]
    for fast in (True, False):
        assert check_near("cpu", torch.float32, [SMALL], shapes, DTYPES[1], fast, 20) == len(shapes)


@pytest.mark.interpreter
def test_nonfinite_scale_shows_in_the_interpreter():
    check_nonfinite_scale("cpu", SMALL, 40, 68, 1072)


# One wave or less of each tiling; a whole wave and a few tiles more; edges, and a last step of 16.
REAL = [(1152, 896, 8192), (4300, 1000, 8208), (9728, 896, 4096), (896, 4864, 4096), (5, 264, 6160)]


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    """Few outputs, because each takes a binary of its own, and many K."""
    generator = torch.Generator().manual_seed(0)
    outputs = [(m * 23, n * 24) for m, n in torch.randint(1, 120, (6, 2), generator=generator).tolist()]
    depths = torch.randint(1, 120, (count,), generator=generator).tolist()
    return [(*outputs[i % 6], 1024 + k * 48) for i, k in enumerate(depths)]


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.float32, BF16])
def test_int8_kernel(out_dtype):
    assert check_equal("cuda", out_dtype, [WIDE], [*REAL, *random_shapes(100)]) > 100


@pytest.mark.gpu
def test_int8_kernel_of_every_tiling():
    for number, (m, n, k) in enumerate([*REAL, *random_shapes(100)]):
        a, b, *scales = operands(m, n, k, DTYPES[0], number, number % 2 == 1, "cuda")
        expected = scaled_mm_ref(a, b, *scales, BF16)
        for tiling in SPLIT:
            out = launch_scaled_mm(a, b, *scales, torch.empty_like(expected), tiling)
            assert torch.equal(out, expected), ((m, n, k), tiling)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes,fast", [(DTYPES[1], True), (DTYPES[1], False), (DTYPES[2], True)])
def test_fp8_kernel(dtypes, fast):
    """The bounds of the plain tilings; slices are shorter sums."""
    shapes = [*REAL, *random_shapes(100)]
    assert check_near("cuda", BF16, SPLIT, shapes, dtypes, fast, 9 if fast else 12) > 100


@pytest.mark.gpu
def test_nonfinite_scale_shows():
    check_nonfinite_scale("cuda", WIDE, 1000, 904, 8192)


@pytest.mark.gpu
@pytest.mark.parametrize("tiling", SPLIT, ids=lambda t: t.name)
def test_in_a_graph(tiling):
    """Captured once and replayed on other codes: the same bits as without a graph, whatever the order of CTAs."""
    m, n, k = REAL[0]

    def product(a: Tensor, b: Tensor) -> Tensor:
        return launch_scaled_mm(a, b, one, one, torch.empty(m, n, dtype=BF16, device="cuda"), tiling)

    one = torch.ones(1, device="cuda")
    a, b = codes(m, k, E4M3, 0, "cuda"), codes(n, k, E4M3, 1, "cuda")
    product(a, b)  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = product(a, b)
    for seed in (2, 3):
        a.copy_(codes(m, k, E4M3, seed, "cuda"))
        graph.replay()
        assert torch.equal(out, product(a, b))
