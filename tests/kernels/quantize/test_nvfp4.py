"""NVFP4's kernels bitwise equal to their definition, along rows, columns and rotated columns; the rotation."""

import pytest
import torch

from qtrain.kernels.numerics.formats import unpack
from qtrain.kernels.numerics.philox import random_bits_ref
from qtrain.kernels.quantize.nvfp4 import SIGNS, launch_quantize_nvfp4, quantize_nvfp4, quantize_nvfp4_ref, rotate_rows
from tests.cases import KINDS, matrix

ROLE = 2
LAYOUTS = [(False, False), (True, False), (True, True)]
"""Transposed, and rotated along the tokens."""


def definition(x, key, transposed, hadamard):
    """On the CPU, where a division by a number is one."""
    x = rotate_rows(x.cpu()) if hadamard else x.cpu()
    bits = None if key is None else random_bits_ref(x.shape, key.cpu(), ROLE)
    return quantize_nvfp4_ref(*((x.t(), None if bits is None else bits.t()) if transposed else (x, bits)))


def with_nonfinite(x):
    x[x.shape[0] // 2, x.shape[1] // 3], x[0, x.shape[1] // 2] = float("nan"), -float("inf")
    return x


def check(x, key, transposed, hadamard):
    found = launch_quantize_nvfp4(x, key, ROLE, transposed, hadamard)
    for got, true in zip(found, definition(x, key, transposed, hadamard), strict=True):
        assert torch.equal(got.cpu().view(torch.uint8), true.view(torch.uint8)), (tuple(x.shape), transposed, hadamard)


@pytest.mark.interpreter
@pytest.mark.parametrize(("transposed", "hadamard"), LAYOUTS)
@pytest.mark.parametrize("stochastic", [False, True])
def test_kernels_in_the_interpreter(transposed, hadamard, stochastic):
    key = torch.tensor([3, 5, 7]) if stochastic else None
    for shape in ((1, 8), (37, 40), (144, 136)):
        x = with_nonfinite(matrix(*shape, 0, "outlier").contiguous())
        check(x, key, transposed, hadamard)
    check(torch.zeros(17, 24), key, transposed, hadamard)
    if not stochastic:
        check(matrix(33, 21, 1).contiguous(), key, transposed, hadamard)


@pytest.mark.gpu
@pytest.mark.parametrize(("transposed", "hadamard"), LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_on_the_gpu(transposed, hadamard, dtype):
    for key in (None, torch.tensor([3, 5, 7], device="cuda")):
        for kind in KINDS:
            for shape in ((1, 512), (1000, 136), (2048, 896)):
                check(matrix(*shape, 0, kind, dtype).contiguous().cuda(), key, transposed, hadamard)


def test_rotation_is_the_hadamard_matrix_times_the_signs():
    x = matrix(40, 6, 0, "outlier").contiguous()
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    padded = torch.nn.functional.pad(x.double(), (0, 0, 0, 8)).unflatten(0, (-1, 16))
    exact = (hadamard * torch.tensor(SIGNS) / 4 @ padded).flatten(0, 1)
    assert (rotate_rows(x).double() - exact).abs().max() < 1e-6 * exact.abs().max()


@pytest.mark.parametrize("hadamard", [False, True])
def test_values_are_near_the_tensor(hadamard):
    """Half of the widest step, 2 of 6, and a sixteenth for the rounded scale, of a group's absmax."""
    x = matrix(64, 96, 0, "outlier").contiguous()
    codes, scale, tensor_scale = quantize_nvfp4(x, None, 0, True, hadamard)
    true = (rotate_rows(x) if hadamard else x).t().double()
    values = unpack(codes, "e2m1", 64).double() * scale.double().repeat_interleave(16, 1) * tensor_scale.double()
    absmax = true.unflatten(1, (-1, 16)).abs().amax(2).repeat_interleave(16, 1)
    assert ((values - true).abs() <= absmax * (1 / 6 + 1 / 16) + tensor_scale * 2**-9).all()


def test_operator():
    torch.library.opcheck(quantize_nvfp4, (torch.randn(24, 40), None, 0, True, True))
    torch.library.opcheck(quantize_nvfp4, (torch.randn(24, 40), torch.tensor([1, 2, 3]), 1))
