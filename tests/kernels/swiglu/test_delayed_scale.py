"""The scale of a SwiGLU's output and of its gradient: the one that the tensor itself would have, bit for bit."""

import pytest
import torch

from qtrain.kernels.quantize.delayed_scale import delayed_scale
from qtrain.kernels.quantize.reference import scale_ref
from qtrain.kernels.swiglu.delayed_scale import launch_swiglu_delayed_scale, swiglu_delayed_scale
from qtrain.kernels.swiglu.quantize import activation
from tests.kernels.swiglu.test_quantize import gate_and_gradient, reference_output


def check(device: str) -> None:
    """Of y and of the gradient of x: of any shape, and with a NaN."""
    known = torch.tensor([0.37], device=device)
    for m, width, kind in ((16, 128, "outlier"), (3, 50, "normal"), (16, 128, "nonfinite")):
        x, dy = gate_and_gradient(m, width, 0, kind, device)
        for d in (None, dy):
            own = launch_swiglu_delayed_scale(x, d, torch.zeros_like(known), "e4m3", False)
            expected = scale_ref(reference_output(x, d), "e4m3", "tensorwise")
            assert torch.equal(own.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)), (m, kind, d is None)
            assert torch.equal(launch_swiglu_delayed_scale(x, d, known, "e4m3", False), known)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check("cpu")


@pytest.mark.gpu
def test_kernel_on_gpu():
    check("cuda")


def test_operator():
    x, dy = gate_and_gradient(3, 50, 0, "normal", "cpu")
    for d in (None, dy):
        zero = torch.zeros(1)
        assert torch.equal(swiglu_delayed_scale(x, d, zero, "e4m3"), delayed_scale(activation(x, d), zero, "e4m3"))
        torch.library.opcheck(torch.ops.qtrain.swiglu_delayed_scale.default, (x, d, zero, "e4m3"))
