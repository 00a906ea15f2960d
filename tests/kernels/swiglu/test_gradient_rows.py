"""Row codes of the gradient of SwiGLU's input: bitwise those of the gradient, then quantized."""

import pytest
import torch

from qtrain.kernels.numerics.philox import NEAREST
from qtrain.kernels.quantize.reference import quantize_ref
from qtrain.kernels.swiglu.gradient_rows import (
    launch_swiglu_gradient_rows,
    quantize_swiglu_gradient_rows,
    supports_gradient_rows,
)
from qtrain.kernels.swiglu.swiglu import swiglu_backward
from tests.kernels.quantize.test_dual_bf16x2 import rounding_of
from tests.kernels.quantize.test_kernels import KEY, same
from tests.kernels.swiglu.test_quantize import gate_and_gradient, reference_output

FORMATS = ("int8", "e4m3", "e5m2")


def check(m: int, width: int, kind: str, fmt: str, stochastic: bool = False, device: str = "cpu") -> None:
    """x [M, 2 * width] and dy [M, width] of a kind."""
    x, dy = gate_and_gradient(m, width, 7, kind, device)
    rounding = rounding_of("rows", x.device) if stochastic else NEAREST
    dx, power_of_two = reference_output(x, dy), kind == "outlier"
    expected = quantize_ref(dx, fmt, "rowwise", rounding.bits(dx.shape)[0], power_of_two)
    found = launch_swiglu_gradient_rows(x, dy, fmt, rounding, power_of_two)
    same(found, expected, (m, width, kind, fmt, stochastic))


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("m,width,kind", [(3, 336, "outlier"), (1, 16, "nonfinite"), (5, 128, "zero_row")])
def test_in_the_interpreter(fmt, m, width, kind):
    check(m, width, kind, fmt)
    check(m, width, kind, fmt, stochastic=True)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("width", [16, 336, 4864, 8960, 18944])
def test_on_a_gpu(fmt, stochastic, width):
    for m, kind in ((1, "outlier"), (300, "nonfinite"), (129, "zero_row")):
        check(m, width, kind, fmt, stochastic, "cuda")


@pytest.mark.parametrize("key", [None, KEY])
def test_without_the_kernel(key):
    """On a CPU it is the two operations; so are rows that are too long for a CTA, or no whole words."""
    x, dy = gate_and_gradient(6, 40, 1, "outlier", "cpu")
    found = quantize_swiglu_gradient_rows(x, dy, "int8", key, 1)
    bits = None if key is None else rounding_of("rows", x.device)._replace(key=key, role=1).bits(x.shape)[0]
    same(found, quantize_ref(swiglu_backward(dy, x), "int8", "rowwise", bits), (key,))
    assert supports_gradient_rows(2 * 18944, "int8") and not supports_gradient_rows(2 * 28672, "int8")
    assert not supports_gradient_rows(2 * 40, "int8") and not supports_gradient_rows(2 * 64, "e2m1")


def test_operator():
    x, dy = gate_and_gradient(4, 32, 1, "outlier", "cpu")
    torch.library.opcheck(quantize_swiglu_gradient_rows, (x, dy, "e4m3"))
