"""Products of 8-bit codes with scales in the epilogue: exact INT8 sums, FP8 within its accumulator, every layout."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm import scaled_mm as module
from qtrain.kernels.gemm import split_k
from qtrain.kernels.gemm.int8_mm import LONGEST_EXACT_K, int8_mm_ref, launch_int8_mm
from qtrain.kernels.gemm.persistent import Tiling, padded_k
from qtrain.kernels.gemm.scaled_mm import SPAN, TILINGS, launch_scaled_mm, scaled_mm, scaled_mm_ref, sum_over_spans

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DTYPES = [(torch.int8, torch.int8), (E4M3, E4M3), (E5M2, E4M3)]


def codes(rows: int, columns: int, dtype: torch.dtype, seed: int, device: str = "cpu") -> Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-127, 128, (rows, columns), dtype=torch.int8, generator=generator, device=device)
    return torch.randn(rows, columns, generator=generator, device=device).mul(30).to(dtype)


def operands(
    m: int, n: int, k: int, dtypes, seed: int = 0, tensorwise: bool = False, device: str = "cpu"
) -> tuple[Tensor, ...]:
    generator = torch.Generator(device).manual_seed(seed)
    a, b = codes(m, k, dtypes[0], seed, device), codes(n, k, dtypes[1], seed + 1, device)
    sizes = (1, 1) if tensorwise else (m, n)
    return a, b, *(torch.rand(size, generator=generator, device=device) * 1e-2 + 1e-3 for size in sizes)


def truth(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> tuple[Tensor, Tensor]:
    """The product in fp64, and the sum of magnitudes of each element."""
    a, b = a.double(), b.double()
    scale = scale_a.double()[:, None] * scale_b.double()[None, :]
    return a @ b.t() * scale, a.abs() @ b.abs().t() * scale


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("tensorwise", [False, True])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_against_fp64(dtypes, tensorwise, out_dtype):
    a, b, scale_a, scale_b = operands(33, 20, 300, dtypes, tensorwise=tensorwise)
    bias = torch.randn(20)
    expected, size = truth(a, b, scale_a, scale_b)
    expected = expected + bias.double()
    out = scaled_mm(a, b, scale_a, scale_b, out_dtype, bias)
    assert out.dtype == out_dtype and out.shape == (33, 20)
    rounding = 2**-23 if out_dtype == torch.float32 else 2**-8
    assert ((out.double() - expected).abs() <= rounding * (size + expected.abs())).all()


def test_longest_sum_does_not_overflow():
    """All codes at their largest, K above what int32 holds: the total is right."""
    k = LONGEST_EXACT_K + 1000
    a, b = torch.full((1, k), 127, dtype=torch.int8), torch.full((1, k), -127, dtype=torch.int8)
    out = scaled_mm(a, b, torch.ones(1), torch.ones(1), torch.float32)
    assert out.item() == pytest.approx(-127 * 127 * k, rel=1e-6)


@pytest.mark.parametrize("dtype", [torch.int8, E4M3])
def test_every_layout(dtype):
    """A·Bᵀ, A·B and Aᵀ·B: an operand's strides say how it is stored."""
    a, b, *scales = operands(48, 32, 64, (dtype, dtype))
    expected = scaled_mm(a, b, *scales, torch.float32)
    a_column_major, b_column_major = a.t().contiguous().t(), b.t().contiguous().t()
    assert torch.equal(scaled_mm(a, b_column_major, *scales, torch.float32), expected)
    assert torch.equal(scaled_mm(a_column_major, b_column_major, *scales, torch.float32), expected)


def test_nonfinite_scale_shows():
    """A row whose scale is NaN is a row of NaN in the product, whatever its codes."""
    a, b, scale_a, scale_b = operands(5, 8, 16, DTYPES[0])
    scale_a[3] = float("nan")
    out = scaled_mm(a, b, scale_a, scale_b, torch.bfloat16)
    assert out[3].isnan().all() and out[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("m,n,k", [(0, 8, 16), (8, 0, 16), (8, 8, 0)])
def test_empty(m, n, k):
    a, b = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8)
    assert torch.equal(scaled_mm(a, b, torch.ones(m), torch.ones(n), torch.float32), torch.zeros(m, n))


@pytest.mark.parametrize("k", [1, 127, 128, 129, 300])
def test_a_long_int8_sum_is_exact_in_each_span(k, monkeypatch):
    """Spans cover K once; each is an exact int32 product, and they are added in fp32."""
    monkeypatch.setattr(module, "LONGEST_EXACT_K", 128)
    monkeypatch.setattr(module, "SPAN", 128)
    a, b = codes(5, k, torch.int8, 0), codes(7, k, torch.int8, 1)
    lengths = []

    def multiply(x: Tensor, y: Tensor) -> Tensor:
        lengths.append(x.shape[1])
        return int8_mm_ref(x, y)

    total = sum_over_spans(a, b, multiply)
    assert torch.equal(total.double(), a.double() @ b.double().t())  # sums below 2**24
    assert sum(lengths) == k and max(lengths) <= 128 and len(lengths) == -(-k // 128)


def test_a_span_is_exact_and_aligned():
    assert SPAN <= LONGEST_EXACT_K and SPAN % 128 == 0


@pytest.mark.interpreter
def test_spans_of_the_kernel_in_the_interpreter(monkeypatch):
    """Rows of a span are slices of longer ones: the kernel reads them in place."""
    monkeypatch.setattr(module, "LONGEST_EXACT_K", 64)
    monkeypatch.setattr(module, "SPAN", 64)
    a, b = codes(40, 208, torch.int8, 0), codes(80, 208, torch.int8, 1)
    total = sum_over_spans(a, b, lambda x, y: launch_int8_mm(x, y, SMALL))
    assert torch.equal(total, sum_over_spans(a, b, int8_mm_ref))


@pytest.mark.interpreter
def test_a_span_is_split_in_the_interpreter(monkeypatch):
    """Bit for bit `int8_mm`, from slices of longer rows; and it is what is timed against that."""
    monkeypatch.setattr(split_k, "MIN_STEPS", 1)
    monkeypatch.setattr(split_k, "OVERHEAD_STEPS", 0)
    caches = split_k.choose_split, module._tiling_names
    for cache in caches:
        cache.cache_clear()
    monkeypatch.setattr(module, "choose", lambda op, key, names, run: names[-1])
    a, b = (codes(rows, 400, torch.int8, rows)[:, :384] for rows in (40, 80))
    total = module._exact_span(a, b)
    for cache in caches:
        cache.cache_clear()
    assert total.dtype == torch.float32 and torch.equal(total, int8_mm_ref(a, b).float())


@pytest.mark.gpu
@pytest.mark.parametrize(
    "m,n,k", [(64, 256, 2 * SPAN + 4096), (896, 1152, 2 * SPAN + 4096), (33, 80, SPAN + 1000), (5, 7, SPAN + 333)]
)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
def test_more_tokens_than_int32_holds_run_through_the_kernels(m, n, k, out_dtype, monkeypatch):
    """Bit for bit the definition, without running it."""
    a, b, *scales = operands(m, n, k, DTYPES[0], device="cuda")
    expected = scaled_mm_ref(a, b, *scales, out_dtype)
    monkeypatch.setattr(module, "scaled_mm_ref", None)
    assert torch.equal(scaled_mm(a, b, *scales, out_dtype), expected)


@pytest.mark.parametrize("a_dtype,b_dtype", [(torch.int8, E4M3), (E5M2, torch.int8), (torch.bfloat16, torch.bfloat16)])
def test_other_dtypes_are_refused(a_dtype, b_dtype):
    a, b = torch.zeros(4, 16, dtype=a_dtype), torch.zeros(8, 16, dtype=b_dtype)
    with pytest.raises(AssertionError, match="both int8 or both FP8"):
        scaled_mm(a, b, torch.ones(1), torch.ones(1), torch.float32)


def test_another_k_is_refused():
    a, b, *scales = operands(4, 8, 32, DTYPES[0])
    with pytest.raises(AssertionError, match="K = 32 and 16"):
        scaled_mm(a, b[:, :16].contiguous(), *scales, torch.float32)


@pytest.mark.filterwarnings("ignore")
def test_operators():
    a, b, *scales = operands(3, 8, 16, DTYPES[0])
    torch.library.opcheck(scaled_mm, (a, b, *scales, torch.bfloat16))


def check_int8(device: str, out_dtype: torch.dtype, tilings: list[Tiling], shapes: list[tuple[int, int, int]]) -> None:
    """Bitwise equal to the definition: the sum is exact, and both round the same fp32 product."""
    for number, shape in enumerate(shapes):
        for tensorwise in (False, True):
            a, b, *scales = operands(*shape, DTYPES[0], number, tensorwise, device)
            expected = scaled_mm_ref(a, b, *scales, out_dtype)
            for tiling in tilings:
                out = torch.empty(shape[:2], dtype=out_dtype, device=device)
                launch_scaled_mm(a, b, *scales, out, tiling)
                assert torch.equal(out, expected), (shape, tensorwise, tiling)


SMALL = Tiling(32, 64, 64, 4, 2)


@pytest.mark.interpreter
def test_int8_in_the_interpreter():
    check_int8("cpu", torch.float32, [SMALL], [(1, 16, 16), (70, 144, 80), (3, 68, 208)])


@pytest.mark.interpreter
def test_bias_in_the_interpreter():
    a, b, *scales = operands(40, 80, 96, DTYPES[0])
    bias = torch.randn(80)
    out = launch_scaled_mm(a, b, *scales, torch.empty(40, 80), SMALL, bias=bias)
    assert torch.equal(out, scaled_mm_ref(a, b, *scales, torch.float32, bias))


def random_shapes(count: int) -> list[tuple[int, int, int]]:
    generator = torch.Generator().manual_seed(0)
    draws = [torch.randint(1, 40, (3,), generator=generator).tolist() for _ in range(count)]
    return [(m * 13, n * 16, k * 16) for m, n, k in draws]


def fits(tiling: Tiling, out_dtype: torch.dtype) -> bool:
    """Whether a tile's output leaves room in shared memory."""
    return not tiling.split and tiling.block_n * tiling.block_m <= (2**18 if out_dtype.itemsize <= 2 else 2**14)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "out_dtype,name", [(d, n) for d in (torch.float32, torch.bfloat16) for n, t in TILINGS.items() if fits(t, d)]
)
def test_int8_kernel(out_dtype, name):
    shapes = [(1, 16, 16), (130, 272, 144), (4096, 4096, 1024), *random_shapes(200)]
    check_int8("cuda", out_dtype, [TILINGS[name]], shapes)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "dtypes,fast_accum,name",
    [
        (dtypes, fast_accum, name)
        for dtypes, fast_accum, tilings in ((DTYPES[1], True, 6), (DTYPES[1], False, 2), (DTYPES[2], True, 2))
        for name in list(TILINGS)[:tilings]
    ],
)
def test_fp8_kernel(dtypes, fast_accum, name):
    """Against fp64. The tensor cores add 32 products at a time and keep about 13 bits of the running sum: with fast
    accumulation over all K, in K / 32 roundings, otherwise over a block of K."""
    bits = 9 if fast_accum else 12
    for number, shape in enumerate([(1, 16, 16), (130, 272, 144), (512, 512, 8192), *random_shapes(200)]):
        a, b, *scales = operands(*shape, dtypes, number, number % 2 == 1, "cuda")
        expected, size = truth(a, b, *scales)
        out = torch.empty(shape[:2], dtype=torch.bfloat16, device="cuda")
        launch_scaled_mm(a, b, *scales, out, TILINGS[name], fast_accum=fast_accum)
        error = (out.double() - expected).abs()
        assert (error <= 2**-8 * expected.abs() + 2**-bits * size).all(), shape


@pytest.mark.parametrize("tensorwise", [False, True])
def test_int8_sums_of_a_library_are_scaled_in_slices_of_rows(tensorwise, monkeypatch):
    """So that int32 sums of all logits never exist at once."""
    a, b, *scales = operands(70, 48, 64, DTYPES[0], tensorwise=tensorwise)
    bias = torch.randn(48)
    expected = scaled_mm_ref(a, b, *scales, torch.bfloat16, bias)
    rows, multiply = [], module.scaled_mm_ref
    monkeypatch.setattr(module, "SUMS_BYTES", 4 * 48 * 33)
    monkeypatch.setattr(module, "scaled_mm_ref", lambda a, *rest: rows.append(len(a)) or multiply(a, *rest))
    assert torch.equal(module._scaled_mm_cublas(a, b, *scales, torch.bfloat16, bias, True), expected)
    assert rows == [33, 33, 4]


@pytest.mark.gpu
@pytest.mark.parametrize("family", ["triton", "cublas", "ref"])
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (5, 7, 3), (0, 8, 16), (64, 40, 48), (300, 528, 272)])
def test_operator_takes_every_shape(family, dtypes, m, n, k, monkeypatch):
    monkeypatch.setenv("QTRAIN_IMPL", family)
    a, b, *scales = operands(m, n, k, dtypes)
    out = scaled_mm(a.cuda(), b.cuda(), *(s.cuda() for s in scales), torch.bfloat16)
    expected, size = truth(a, b, *scales)
    assert ((out.cpu().double() - expected).abs() <= 2**-8 * expected.abs() + 2**-12 * size).all()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["cublas", "cublas 1"])
def test_a_library_takes_a_bias_in_fp32(name, monkeypatch):
    """As a master weight's; a name is chosen by shapes alone."""
    monkeypatch.setattr(module, "choose", lambda op, key, names, run: name)
    codes = operands(304, 528, 272, DTYPES[1], tensorwise=True, device="cuda")
    bias = torch.randn(528, device="cuda")
    expected, size = truth(*codes)
    error = (scaled_mm(*codes, torch.bfloat16, bias).double() - (expected + bias.double())).abs()
    assert (error <= 2**-8 * (expected.abs() + 2 * bias.abs()) + 2**-9 * size).all()


def test_rows_that_tma_cannot_take_end_in_zeros():
    for dtype in (torch.int8, E4M3, E5M2):
        x = codes(3, 21, dtype, 0)
        padded = padded_k(x)
        assert padded.shape == (3, 32) and padded.dtype == dtype and padded.is_contiguous()
        assert torch.equal(padded[:, :21].float(), x.float()) and not padded[:, 21:].float().any()
        assert padded_k(x[:, :16]).shape == (3, 16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("k", [8, 1000, 5803])
def test_a_sum_over_any_number_of_tokens_runs_by_a_kernel(dtypes, k, monkeypatch):
    """Of a weight's gradient. FP8 had the reference, an fp32 product: 8.6 GB of operands for a head of 150,000."""
    a, b, *scales = operands(96, 64, k, dtypes, device="cuda")
    expected, size = truth(a, b, *scales)
    if dtypes != DTYPES[0]:  # a block of cuBLAS's INT8 sums is scaled by it
        monkeypatch.setattr(module, "scaled_mm_ref", None)
    error = (scaled_mm(a, b, *scales, torch.bfloat16).double() - expected).abs()
    assert (error <= 2**-8 * expected.abs() + 2**-9 * size).all()
