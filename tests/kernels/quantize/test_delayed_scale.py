"""The known scale, or the tensor's own: bit for bit the one that the quantizer would compute."""

import pytest
import torch

from qtrain.kernels.arrivals import arrival_counters
from qtrain.kernels.quantize.delayed_scale import (
    delayed_scale,
    launch_delayed_scale,
    launch_record_amax,
    launch_swiglu_delayed_scale,
    record_amax,
    record_amax_ref,
)
from qtrain.kernels.quantize.reference import scale_ref
from tests.cases import matrix
from tests.kernels.swiglu.test_quantize import gate_and_gradient, reference_output


def check(function, device: str) -> None:
    known = torch.tensor([0.37], device=device)
    for fmt in ("e4m3", "e5m2"):
        for power_of_two in (False, True):
            several = matrix(160, 300, 0, "outlier")  # of several CTAs, of which the last merges the absmaxes of all
            for x in (several, matrix(1, 5, 1, "tiny"), torch.zeros(4, 4), torch.zeros(0, 4)):
                x = x.to(device)
                assert torch.equal(function(x, known, fmt, power_of_two), known)
                own = function(x, torch.zeros_like(known), fmt, power_of_two)
                assert torch.equal(own, scale_ref(x, fmt, "tensorwise", power_of_two))
    for nonfinite in (float("nan"), float("inf")):
        x = matrix(9, 1000, 0).to(device)
        x[4, 7] = nonfinite
        own = function(x, torch.zeros_like(known), "e4m3", True)
        assert (
            torch.equal(own.isnan(), torch.tensor([nonfinite != nonfinite], device=device)) and not own.isfinite().any()
        )


def launched(*arguments) -> torch.Tensor:
    """The scale of `launch_delayed_scale`, whose second result is the absmax that a quantizer starts from."""
    scale, amax = launch_delayed_scale(*arguments)
    assert amax.dtype == torch.int32 and amax.tolist() == [0]
    assert not arrival_counters(scale.device).any(), "a later launch would not find its last CTA"
    return scale


def check_record(function, device: str) -> None:
    numbers = [0.0, 1e-30, 0.5, 3.0, float("inf"), float("nan")]
    for seen in numbers:
        for amax in numbers:
            before = [torch.tensor([value], device=device) for value in (seen, amax, 0.37)]
            expected = [t.clone() for t in before]
            scale = function(*before)
            torch.testing.assert_close(scale, record_amax_ref(*expected), rtol=0, atol=0, equal_nan=True)
            torch.testing.assert_close(before, expected, rtol=0, atol=0, equal_nan=True)
            assert scale.isnan().item() == (amax == float("inf") or amax != amax)


def test_operator_on_the_cpu():
    check(delayed_scale, "cpu")
    check_record(record_amax, "cpu")
    torch.library.opcheck(record_amax, (torch.ones(1), torch.ones(1), torch.ones(1)))


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check(launched, "cpu")
    check_record(launch_record_amax, "cpu")


@pytest.mark.gpu
def test_kernel():
    check(delayed_scale, "cuda")
    check(launched, "cuda")
    check_record(record_amax, "cuda")
    x = matrix(4096, 4096, 0).cuda().bfloat16()
    zero = torch.zeros(1, device="cuda")
    assert torch.equal(delayed_scale(x, zero, "e4m3"), scale_ref(x, "e4m3", "tensorwise"))


def check_swiglu(device: str) -> None:
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
def test_swiglu_kernel_in_the_interpreter():
    check_swiglu("cpu")


@pytest.mark.gpu
def test_kernel_on_gpu():
    check_swiglu("cuda")
