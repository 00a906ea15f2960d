"""The measures of tensors and products against the same in fp64, over formats, odd shapes, outliers and zeros."""

import pytest
import torch

from qtrain.kernels.numerics.formats import FORMATS, dequantize
from qtrain.kernels.numerics.philox import NEAREST
from qtrain.quant.health import measures
from qtrain.quant.health.measures import (
    NAMES,
    add_sums,
    code_values,
    direction,
    direction_sums,
    product_error,
    product_squares,
    product_terms,
    spread,
    tensor_measures,
    tensor_sums,
)
from qtrain.quant.quantizers import quantize_columns, quantize_rows
from qtrain.quant.schemes.mxfp8 import E8M0
from qtrain.quant.schemes.nvfp4 import NVFP4
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor
from tests.cases import KINDS, SHAPES, matrix

OPERANDS = [
    OperandFormat("int8", "rowwise"),
    OperandFormat("int8", "tensorwise"),
    OperandFormat("e4m3", "tensorwise"),
    OperandFormat("e5m2", "rowwise"),
    OperandFormat("e4m3", "1x128"),
    OperandFormat("e4m3", "128x128"),
    OperandFormat("int8", "32x32"),
    OperandFormat("e4m3", "1x32", E8M0),
    OperandFormat("int4", "rowwise"),
    NVFP4,
]
HALF_STEP = {"int8": 0.5, "int4": 0.5, "e4m3": 16, "e5m2": 4096, "e2m1": 1}


def in_fp64(t: torch.Tensor, quantized: QuantizedTensor) -> dict[str, float]:
    """The definitions, element by element."""
    fmt = quantized.format
    shape = (quantized.codes.shape[0], t.shape[1])
    scale = quantized.scale.double() * (1 if quantized.tensor_scale is None else quantized.tensor_scale.double())
    values = dequantize(quantized.codes, scale.float(), fmt.fmt, fmt.granularity, shape).double()
    # A scale an element, as what a code of 1 would be.
    ones = torch.ones(shape, dtype=torch.int8)
    scales = dequantize(ones, scale.float(), "int8", fmt.granularity, shape).double()
    t = t.double()
    size, norm = t.abs(), t.square().sum().sqrt()
    zeros = (values == 0) & (t != 0)
    limit = (FORMATS[fmt.fmt].max + HALF_STEP[fmt.fmt]) * scales
    return {
        "saturated": ((size > limit).sum() / t.numel()).item(),
        "flushed": (zeros.sum() / (t != 0).sum().clamp(min=1)).item(),
        "flushed_sum": (size[zeros].sum() / size.sum().clamp(min=1e-300)).item(),
        "amax": size.max().item(),
        "crest": (size.max() / (norm / t.numel() ** 0.5)).nan_to_num(0.0).item(),
        "error": ((values - t).square().sum().sqrt() / norm.clamp(min=1e-300)).item(),
    }


def close(found: torch.Tensor, true: dict[str, float]) -> None:
    for name, value in zip(NAMES, found.tolist(), strict=True):
        assert value == pytest.approx(true[name], rel=2e-5, abs=1e-6), name


@pytest.mark.parametrize("kind", [*KINDS, "zero"])
@pytest.mark.parametrize("fmt", OPERANDS, ids=lambda f: f"{f.fmt}-{f.granularity}")
def test_measures_are_those_in_fp64(fmt, kind):
    for rows, columns in SHAPES:
        if columns % FORMATS[fmt.fmt].packing:
            continue
        t = torch.zeros(rows, columns) if kind == "zero" else matrix(rows, columns, 1, kind)
        quantized = quantize_rows(t.contiguous(), fmt, NEAREST, False)
        close(tensor_measures(t, quantized), in_fp64(t, quantized))


@pytest.mark.parametrize("scale", [1.0, 1e-30])
def test_sums_of_parts_are_those_of_the_whole(scale):
    """Under one scale, of parts whose absmax differ."""
    t = matrix(130, 257, 2, "outlier") * scale
    fmt = OperandFormat("int8", "tensorwise")
    whole = quantize_rows(t, fmt, NEAREST, False)
    pieces = zip(t.split(70), whole.codes.split(70), strict=True)
    parts = [tensor_sums(piece, QuantizedTensor(codes, whole.scale, fmt)) for piece, codes in pieces]
    assert parts[0][-1] != parts[1][-1]
    assert torch.equal(parts[0][:4] + parts[1][:4], tensor_sums(t, whole)[:4]), "counts are exact"
    torch.testing.assert_close(add_sums(torch.stack(parts)), tensor_sums(t, whole), rtol=1e-5, atol=0)


@pytest.mark.parametrize("fmt", ["int8", "e4m3", "e5m2"])
def test_what_a_delayed_scale_cuts_off(fmt):
    """A scale of a quarter of the absmax."""
    t = matrix(130, 257, 2)
    scale = t.abs().max().view(1) / 4 / FORMATS[fmt].max
    quantized = quantize_rows(t, OperandFormat(fmt, "tensorwise"), NEAREST, False, scale)
    true = in_fp64(t, quantized)
    assert 0.1 < true["saturated"] < 0.5
    close(tensor_measures(t, quantized), true)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_nan_and_nothing_breaks(value):
    t = matrix(17, 33, 3)
    t[3, 4] = value
    found = dict(zip(NAMES, tensor_measures(t, quantize_rows(t, OPERANDS[0], NEAREST, False)).tolist(), strict=True))
    assert found["error"] != found["error"] and not found["amax"] < 1e30


def test_a_large_tensor_is_measured_on_evenly_spread_rows(monkeypatch):
    t = matrix(257, 64, 4)
    t[100] *= 50  # not among the rows
    whole = quantize_rows(t, OPERANDS[0], NEAREST, False)
    monkeypatch.setattr(measures, "LARGE", 8 * 64)
    rows = spread(257, 8, t.device)
    assert rows[0] == 0 and rows[-1] == 256 and len(rows) == 8 and 100 not in rows
    true = in_fp64(t[rows], QuantizedTensor(whole.codes[rows], whole.scale[rows], whole.format))
    found = dict(zip(NAMES, tensor_measures(t, whole).tolist(), strict=True))
    assert found["amax"] == t.abs().max() and found["error"] == pytest.approx(true["error"], rel=1e-5)


@pytest.mark.parametrize("fmt", OPERANDS[:-2], ids=lambda f: f"{f.fmt}-{f.granularity}")
def test_elements_of_transposed_codes(fmt):
    t = matrix(130, 257, 5, "outlier")
    quantized = quantize_columns(t, fmt, NEAREST, False)
    values = dequantize(quantized.codes, quantized.scale.float(), fmt.fmt, fmt.granularity, (257, 130))
    columns, rows = torch.tensor([0, 128, 256]), torch.tensor([5, 129])
    assert torch.equal(code_values(quantized, 130, columns).values, values[columns])
    assert torch.equal(code_values(quantized, 130, columns, rows).values, values[columns][:, rows])


@pytest.mark.parametrize("kind", KINDS)
def test_errors_of_products_are_those_in_fp64(kind):
    a, b = matrix(64, 300, 6, kind), matrix(50, 300, 7)
    a_read, b_read = a + a.abs() * 0.03 * matrix(64, 300, 8), b + 0.03 * matrix(50, 300, 9)
    exact, read = a.double() @ b.double().t(), a_read.double() @ b_read.double().t()
    assert product_error(product_squares(product_terms(a, b, a_read, b_read))).item() == pytest.approx(
        ((read - exact).norm() / exact.norm()).item(), rel=1e-4
    )


def test_a_product_of_zeros_has_no_error():
    zeros, b = torch.zeros(3, 5), matrix(4, 5, 1)
    assert product_error(product_squares(product_terms(zeros, b, zeros, b))) == 0


@pytest.mark.parametrize("scale", [1.0, 1e-25])
def test_direction_is_that_in_fp64(scale):
    exact = matrix(33, 40, 10, "outlier") * scale
    low_bit = exact + 0.3 * matrix(33, 40, 11) * scale
    a, b = low_bit.double().flatten(), exact.double().flatten()
    cosine, ratio = direction(direction_sums(low_bit, exact)).tolist()
    assert cosine == pytest.approx((a @ b / a.norm() / b.norm()).item(), rel=1e-5)
    assert ratio == pytest.approx((a.norm() / b.norm()).item(), rel=1e-5)
