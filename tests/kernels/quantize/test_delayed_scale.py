"""A scale that is known, or that of the tensor: as the quantizer would choose it, bit for bit."""

import pytest
import torch

from qtrain.kernels.quantize.delayed_scale import delayed_scale, launch_delayed_scale, swiglu_delayed_scale
from qtrain.kernels.quantize.operators import scale_ref
from qtrain.kernels.swiglu.quantize import activation
from tests.cases import matrix
from tests.kernels.swiglu.test_quantize import gate_and_gradient, made


def check(function, device: str) -> None:
    known = torch.tensor([0.37], device=device)
    for fmt in ("e4m3", "e5m2"):
        for power_of_two in (False, True):
            for x in (matrix(33, 300, 0, "outlier"), matrix(1, 5, 1, "tiny"), torch.zeros(4, 4), torch.zeros(0, 4)):
                x = x.to(device)
                assert torch.equal(function(x, known, fmt, power_of_two), known)
                own = function(x, torch.zeros_like(known), fmt, power_of_two)
                assert torch.equal(own, scale_ref(x, fmt, "tensorwise", power_of_two))
    for bad in (float("nan"), float("inf")):
        x = matrix(9, 1000, 0).to(device)
        x[4, 7] = bad
        own = function(x, torch.zeros_like(known), "e4m3", True)
        assert torch.equal(own.isnan(), torch.tensor([bad != bad], device=device)) and not own.isfinite().any()


def test_operator_on_the_cpu():
    check(delayed_scale, "cpu")


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check(launch_delayed_scale, "cpu")


@pytest.mark.gpu
def test_kernel():
    check(delayed_scale, "cuda")
    x = matrix(4096, 4096, 0).cuda().bfloat16()
    zero = torch.zeros(1, device="cuda")
    assert torch.equal(delayed_scale(x, zero, "e4m3"), scale_ref(x, "e4m3", "tensorwise"))


def check_gated(device: str) -> None:
    """Of what a gated MLP makes: of any shape, and with a NaN."""
    known = torch.tensor([0.37], device=device)
    for m, width, kind in ((16, 128, "outlier"), (3, 50, "normal"), (16, 128, "bad")):
        x, dy = gate_and_gradient(m, width, 0, kind, device)
        for d in (None, dy):
            own = launch_delayed_scale(x, torch.zeros_like(known), "e4m3", False, True, d)
            expected = scale_ref(made(x, d), "e4m3", "tensorwise")
            assert torch.equal(own.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0)), (m, kind, d is None)
            assert torch.equal(launch_delayed_scale(x, known, "e4m3", False, True, d), known)


@pytest.mark.interpreter
def test_gated_in_the_interpreter():
    check_gated("cpu")


@pytest.mark.gpu
def test_gated_on_gpu():
    check_gated("cuda")


def test_gated_operator():
    x, dy = gate_and_gradient(3, 50, 0, "normal", "cpu")
    for d in (None, dy):
        zero = torch.zeros(1)
        assert torch.equal(swiglu_delayed_scale(x, d, zero, "e4m3"), delayed_scale(activation(x, d), zero, "e4m3"))
        torch.library.opcheck(torch.ops.qtrain.swiglu_delayed_scale.default, (x, d, zero, "e4m3"))
