"""The scale of a SwiGLU's output and of its gradient: the one that the tensor itself would have, bit for bit."""

import pytest
import torch

from qtrain.kernels.quantize.reference import scale_ref
from qtrain.kernels.swiglu.delayed_scale import launch_swiglu_delayed_scale
from tests.kernels.swiglu.test_quantize import gate_and_gradient, reference_output


def check(device: str) -> None:
    """Of y and of the gradient of x: of any shape, and with a NaN."""
    known = torch.tensor([0.37], device=device)
    for m, width, kind in ((16, 128, "outlier"), (3, 50, "normal"), (16, 128, "nonfinite")):
        x, dy = gate_and_gradient(m, width, 0, kind, device)
        for d in (None, dy):
            own = launch_swiglu_delayed_scale(x, d, torch.zeros_like(known), "e4m3", False)[0]
            expected = scale_ref(reference_output(x, d), "e4m3", "tensorwise")
            assert torch.equal(own.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)), (m, kind, d is None)
            scale, amax = launch_swiglu_delayed_scale(x, d, known, "e4m3", False)
            assert torch.equal(scale, known) and amax.tolist() == [0]


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check("cpu")


@pytest.mark.gpu
def test_kernel_on_gpu():
    check("cuda")
