"""The known scale, or the tensor's own: bit for bit the one that the quantizer would compute."""

import pytest
import torch

from qtrain.kernels.quantize.delayed_scale import delayed_scale, launch_delayed_scale
from qtrain.kernels.quantize.reference import scale_ref
from tests.cases import matrix


def check(function, device: str) -> None:
    known = torch.tensor([0.37], device=device)
    for fmt in ("e4m3", "e5m2"):
        for power_of_two in (False, True):
            for x in (matrix(33, 300, 0, "outlier"), matrix(1, 5, 1, "tiny"), torch.zeros(4, 4), torch.zeros(0, 4)):
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
