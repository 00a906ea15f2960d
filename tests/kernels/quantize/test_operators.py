"""Quantizers by their definition: errors against fp64, non-finite inputs, stochastic rounding, layouts compared."""

import pytest
import torch

from qtrain.kernels.numerics.formats import (
    FORMATS,
    GRANULARITIES,
    LINEAR_FORMATS,
    codes_shape,
    dequantize,
    empty_scale,
    expand_scale,
    group_shape,
    scale_shape,
    unpack,
)
from qtrain.kernels.numerics.philox import Rounding, random_bits_ref
from qtrain.kernels.quantize.delayed_scale import delayed_scale
from qtrain.kernels.quantize.operators import quantize, quantize_dual, quantize_dual_delayed, quantize_transposed
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref
from tests.cases import KINDS, SHAPES, matrix
from tests.kernels.quantize.test_kernels import KEY, same

EVERY = [(fmt, granularity) for fmt in LINEAR_FORMATS for granularity in GRANULARITIES]
# Half the spacing of a format's numbers: relative to the number, and at least absolute, in units of the scale.
HALF_STEP = {"int8": (0, 0.5), "int4": (0, 0.5), "ternary": (0, 0.5), "e4m3": (2**-4, 2**-10), "e5m2": (2**-3, 2**-17)}


def true_scale(x, fmt, granularity):
    """Scales in fp64, group by group, in a loop: independent of the reference."""
    m, k = x.shape
    rows, columns = group_shape(granularity, m, k)
    scales = []
    for i in range(0, m, rows):
        for j in range(0, k, columns):
            group = x[i : i + rows, j : j + columns].double().abs()
            scales.append(float(group.mean()) if fmt == "ternary" else float(group.max()) / FORMATS[fmt].max)
    return torch.tensor(scales, dtype=torch.float64).clamp(min=1e-12).view(scale_shape(granularity, m, k))


@pytest.mark.parametrize("fmt,granularity", EVERY)
def test_nearest_against_fp64(fmt, granularity):
    """Scales are right within fp32 rounding; each value is within half a step of its code, or clamped (ternary)."""
    for seed, (shape, kind) in enumerate(
        [(SHAPES[0], "normal"), *zip(SHAPES[2:], KINDS, strict=False), (SHAPES[6], "outlier")]
    ):
        x = matrix(*shape, seed, kind, torch.bfloat16 if seed % 2 else torch.float32)
        codes, scale = quantize_ref(x, fmt, granularity)
        assert codes.dtype == FORMATS[fmt].dtype and codes.shape == codes_shape(fmt, *shape) and codes.is_contiguous()
        assert scale.dtype == torch.float32 and scale.stride() == empty_scale(granularity, *shape, x).stride()
        assert torch.allclose(scale.double(), true_scale(x, fmt, granularity), rtol=1e-5)
        step = expand_scale(scale, granularity, shape).double()
        value = (x.double() / step).clamp(-FORMATS[fmt].max, FORMATS[fmt].max)
        error = (unpack(codes, fmt, shape[1]).double() - value).abs()
        relative, absolute = HALF_STEP[fmt]
        assert (error <= (relative * value.abs()).clamp(min=absolute) * (1 + 1e-3)).all(), (shape, kind)
        back = dequantize(codes, scale, fmt, granularity, shape)
        assert torch.equal(back, (unpack(codes, fmt, shape[1]).float() * expand_scale(scale, granularity, shape)))


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_power_of_two_scales(fmt):
    """The next power of two: at least the plain scale, less than twice it."""
    x = matrix(70, 100, 4, "outlier")
    x[3] = 0
    plain, rounded = (quantize_ref(x, fmt, "rowwise", power_of_two=p)[1] for p in (False, True))
    assert (torch.frexp(rounded)[0] == 0.5).all()
    assert (rounded >= plain).all() and (rounded < 2 * plain).all()


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_stochastic_rounding_is_unbiased_and_adjacent(fmt):
    """The mean of 10,000 draws lies within 4 standard errors of the value; each draw is a neighbor of the value."""
    x = matrix(1, 64, 3)
    x[0, :8] *= 2.0 ** -torch.arange(3, 11)  # FP8 subnormals too
    scale = quantize_ref(x, fmt, "rowwise")[1]
    draws = 10_000
    bits = random_bits_ref((draws, 64), KEY, 0)
    many, _ = quantize_ref(x.expand(draws, 64), fmt, "tensorwise", bits, scale=scale)
    many = unpack(many, fmt, 64).double()
    exact = (x.double()[0] / scale.double()).clamp(-FORMATS[fmt].max, FORMATS[fmt].max)
    low, high = many.amin(0), many.amax(0)
    relative, absolute = HALF_STEP[fmt]
    step = 2 * (relative * exact.abs()).clamp(min=absolute)
    hardly = 1e-4 * step  # a neighbor that is drawn less often than once in 10,000 times
    assert ((low <= exact + hardly) & (exact <= high + hardly)).all()
    assert (high - low <= step * (1 + 1e-3)).all()
    sigma = ((exact - low) * (high - exact)).clamp(min=0).sqrt() / draws**0.5
    assert ((many.mean(0) - exact).abs() <= 4 * sigma + hardly).all()


@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_stochastic_rounding_keeps_exact_codes(fmt):
    """Numbers that the format holds, among them the largest, are not changed, whatever the draw."""
    values = torch.tensor([0.0, 1.0, -1.0, FORMATS[fmt].max, -FORMATS[fmt].max])
    x = values.repeat(2000, 1)
    codes, _ = quantize_ref(x, fmt, "tensorwise", random_bits_ref(x.shape, KEY, 1), scale=torch.ones(1))
    assert torch.equal(unpack(codes, fmt, 5).float(), x)


@pytest.mark.parametrize("fmt,granularity", EVERY)
@pytest.mark.parametrize("nonfinite", [float("nan"), -float("inf")])
def test_nonfinite_values_show_in_their_group_only(fmt, granularity, nonfinite):
    for key in (None, KEY):
        x = matrix(140, 136, 1)
        x[130, 5] = nonfinite
        codes, scale = quantize(x, fmt, granularity, key)
        back = dequantize(codes, scale, fmt, granularity, x.shape)
        rows, columns = group_shape(granularity, *x.shape)
        group = torch.zeros(x.shape, dtype=torch.bool)
        group[130 // rows * rows : 130 // rows * rows + rows, :columns] = True
        assert back[group].isnan().all() and back[~group].isfinite().all()
        assert (unpack(codes, fmt, 136)[group].float() == 0).all()


def test_given_scale():
    """It is used unchanged; numbers out of its range saturate, and FP8 keeps a NaN."""
    x = torch.tensor([[1.0, -3.0, 1e6, float("-inf"), float("nan")]])
    for fmt, last in (("int8", 0.0), ("e4m3", float("nan")), ("e5m2", float("nan"))):
        codes, scale = quantize(x, fmt, "tensorwise", scale=torch.tensor([0.5]))
        largest = FORMATS[fmt].max
        expected = torch.tensor([[2.0, -6.0, largest, -largest, last]])
        assert torch.equal(codes.float().nan_to_num(nan=-1), expected.nan_to_num(nan=-1)) and scale.item() == 0.5


@pytest.mark.parametrize("fmt,granularity", EVERY)
def test_layouts_agree(fmt, granularity):
    """Transposed: the quantizer of the transpose. Dual: both. An element draws the same bits in each layout."""
    for seed, shape in enumerate([(1, 8), (17, 33), (130, 136)]):
        x = matrix(*shape, seed, "strided")
        of_transpose = quantize(x.t(), fmt, granularity)
        transposed = quantize_transposed(x, fmt, granularity)
        assert torch.allclose(of_transpose[1], transposed[1], rtol=1e-6 if fmt == "ternary" else 0)
        if fmt != "ternary":  # a mean depends on the order
            assert torch.equal(of_transpose[0].view(torch.uint8), transposed[0].view(torch.uint8))
        for key in (None, KEY):
            separate = [*quantize(x, fmt, granularity, key, 1), *quantize_transposed(x, fmt, granularity, key, 1)]
            same(quantize_dual(x, fmt, granularity, granularity, key, 1), separate, (fmt, granularity, shape))
        codes, scale = quantize(x, fmt, "tensorwise", KEY)
        codes_t, _ = quantize_transposed(x, fmt, "tensorwise", KEY, scale=scale)
        assert torch.equal(unpack(codes, fmt, shape[1]).float(), unpack(codes_t, fmt, shape[0]).float().t())


@pytest.mark.parametrize("rows,columns", [(True, False), (False, True), (True, True), (False, False)])
def test_each_layout_is_rounded_as_requested(rows, columns):
    """A layout that the request leaves out is rounded to nearest."""
    x, scale, rounding = matrix(34, 40, 0), torch.tensor([0.01]), Rounding(KEY, 1, rows, columns)
    row_key, column_key = KEY if rows else None, KEY if columns else None
    assert rounding.row_key is row_key and rounding.column_key is column_key
    for fmt, granularity in EVERY:
        expected = [
            *quantize(x, fmt, granularity, row_key, 1),
            *quantize_transposed(x, fmt, granularity, column_key, 1),
        ]
        found = quantize_dual(x, fmt, granularity, granularity, *rounding)
        same(found, expected, (fmt, granularity))
    for fmt in ("int8", "e5m2"):
        codes, codes_t, *_ = quantize_dual_delayed(x, fmt, scale, *rounding)
        expected = quantize(x, fmt, "tensorwise", row_key, 1, scale=scale)[0]
        expected_t = quantize_transposed(x, fmt, "tensorwise", column_key, 1, scale=scale)[0]
        same([codes, codes_t], [expected, expected_t], fmt)


def test_two_formats_and_given():
    x, scale = matrix(30, 40, 0), torch.tensor([0.01])
    codes, _, codes_t, _ = quantize_dual(x, "e4m3", "1x128", "rowwise", fmt_t="e5m2")
    assert codes.dtype == torch.float8_e4m3fn and codes_t.dtype == torch.float8_e5m2
    for known in (scale, torch.zeros(1)):
        codes, codes_t, used, amax, _ = quantize_dual_delayed(x, "int8", known)
        assert torch.equal(used, delayed_scale(x, known, "int8")) and amax.item() == x.abs().max()
        assert torch.equal(codes, quantize(x, "int8", "tensorwise", scale=used)[0]) and torch.equal(codes, codes_t.t())


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)])
def test_empty(shape):
    for fmt, granularity in EVERY:
        codes, scale = quantize(torch.zeros(shape), fmt, granularity)
        assert codes.shape == codes_shape(fmt, *shape) and scale.shape == scale_shape(granularity, *shape)
        if fmt != "ternary":
            assert (scale == torch.tensor(1e-12)).all()
        quantize_transposed(torch.zeros(shape), fmt, granularity)


def test_reproducible():
    x = matrix(16, 64, 0)
    bits = random_bits_ref(x.shape, KEY, 2)
    for fmt in LINEAR_FORMATS:
        first, _ = quantize_ref(x, fmt, "rowwise", bits)
        assert torch.equal(first.view(torch.uint8), quantize(x, fmt, "rowwise", KEY, 2)[0].view(torch.uint8))
        other = quantize_transposed_ref(x, fmt, "rowwise", random_bits_ref(x.shape, KEY + 1, 2))[0].view(torch.uint8)
        assert not torch.equal(other, quantize_transposed(x, fmt, "rowwise", KEY, 2)[0].view(torch.uint8))


@pytest.mark.parametrize("key", [None, torch.tensor([3, 1, 0])])
def test_operators(key):
    x, scale = torch.randn(5, 16), torch.ones(1)
    for fmt, granularity in (("int8", "rowwise"), ("e4m3", "tensorwise"), ("int4", "1x32"), ("ternary", "rowwise")):
        torch.library.opcheck(quantize, (x, fmt, granularity, key, 1))
        torch.library.opcheck(quantize_transposed, (x, fmt, granularity, key, 1))
        torch.library.opcheck(quantize_dual, (x, fmt, granularity, "32x32", key, 1, True, True, True))
    torch.library.opcheck(quantize, (x, "int8", "tensorwise", key, 0, False, scale))
    torch.library.opcheck(
        quantize_dual, (x, "e5m2", "tensorwise", "tensorwise", key, 0), {"scale": scale, "fmt_t": "e4m3"}
    )
    torch.library.opcheck(quantize_dual_delayed, (x, "e4m3", scale, key, 1))
    torch.library.opcheck(quantize_dual_delayed, (x, "e4m3", scale, key, 1, True, False))
    torch.library.opcheck(quantize_dual_delayed, (x, "e4m3", scale), {"sums": True})
    torch.library.opcheck(quantize_dual, (x, "int8", "rowwise", "rowwise", key, 1), {"rows": False})
