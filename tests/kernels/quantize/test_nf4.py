"""NF4: every value becomes the nearest of its block's sixteen, whatever the shape; the kernel is its reference."""

import pytest
import torch

from qtrain.kernels.numerics.formats import NF4_VALUES
from qtrain.kernels.quantize import nf4
from qtrain.kernels.quantize.nf4 import (
    BLOCK,
    dequantize_nf4,
    dequantize_nf4_ref,
    launch_dequantize_nf4,
    nf4_table,
    quantize_nf4,
)
from tests.cases import KINDS, matrix

ODD = [(1, 1), (1, 2), (3, 64), (17, 130), (5, 33), (2, 4160), (40, 192), (3, 8200)]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(1, 2), (3, 64), (17, 130), (5, 33)])
def test_codes_are_the_nearest_values(rows, columns, kind):
    x = matrix(rows, columns, seed=0, kind=kind)
    codes, scale = quantize_nf4(x)
    assert codes.shape == (rows, -(-columns // 2)) and scale.shape == (rows, -(-columns // BLOCK))
    y = dequantize_nf4(codes, scale, columns, torch.float32)
    absmax = scale.double().repeat_interleave(BLOCK, dim=1)[:, :columns]
    choices = absmax[..., None] * torch.tensor(NF4_VALUES, dtype=torch.float64)
    best = (choices - x.double()[..., None]).abs().amin(dim=-1)
    assert torch.all((y.double() - x.double()).abs() <= best + 1e-6 * absmax)


def test_rows_are_quantized_a_few_at_a_time(monkeypatch):
    x = matrix(17, 130, seed=0)
    whole = quantize_nf4(x)
    monkeypatch.setattr(nf4, "AT_ONCE", 520)
    assert all(torch.equal(a, b) for a, b in zip(quantize_nf4(x), whole, strict=True))


def test_error_on_normal_weights_is_that_of_the_paper():
    x = matrix(64, 4096, seed=1)
    y = dequantize_nf4(*quantize_nf4(x), 4096, torch.bfloat16)
    assert 0.08 < float((y.float() - x).norm() / x.norm()) < 0.10


def check_kernel(device: str, shapes: list[tuple[int, int]], dtypes: list[torch.dtype]) -> None:
    """Codes of every value, and scales from 1e-20 to 1e3, with a zero, an Inf and a NaN."""
    for seed, (rows, columns) in enumerate(shapes):
        generator = torch.Generator().manual_seed(seed)
        codes = torch.randint(0, 256, (rows, -(-columns // 2)), dtype=torch.uint8, generator=generator)
        exponents = torch.rand(rows, -(-columns // BLOCK), generator=generator) * 23 - 20
        scale = torch.randn(exponents.shape, generator=generator).abs() * 10**exponents
        if seed % 2:
            scale.view(-1)[:3] = torch.tensor([0.0, torch.inf, torch.nan])[: scale.numel()]
        for dtype in dtypes:
            inputs = (codes.to(device), scale.to(device), nf4_table(device), columns, dtype)
            found = launch_dequantize_nf4(*inputs).cpu()
            expected = dequantize_nf4_ref(codes, scale, nf4_table(torch.device("cpu")), columns, dtype)
            assert found.shape == (rows, columns) and torch.equal(found.isnan(), expected.isnan())
            bits = torch.int16 if dtype == torch.bfloat16 else torch.int32  # the sign of a zero counts too
            found, expected = (t.nan_to_num(7.0, torch.inf, -torch.inf).view(bits) for t in (found, expected))
            assert torch.equal(found, expected), (rows, columns, dtype)


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    """In fp32: the interpreter does not round to bf16 as a GPU does."""
    check_kernel("cpu", [*ODD, (0, 64), (5, 0)], [torch.float32])


@pytest.mark.gpu
def test_kernel():
    random = torch.Generator().manual_seed(0)
    shapes = [tuple(torch.randint(1, 900, (2,), generator=random).tolist()) for _ in range(100)]
    shapes += [(r, 64 * c) for r, c in torch.randint(1, 90, (100, 2), generator=random).tolist()]
    shapes += [*ODD, (0, 64), (5, 0), (8960, 1536), (70000, 66)]
    check_kernel("cuda", shapes, [torch.float32, torch.bfloat16])


def check_operator(device: str) -> None:
    codes, scale = (t.to(device) for t in quantize_nf4(matrix(5, 130, seed=0)))
    inputs = (codes, scale, 130, torch.float32)
    torch.library.opcheck(dequantize_nf4, inputs)


def test_operator():
    check_operator("cpu")


@pytest.mark.gpu
def test_operator_on_gpu():
    check_operator("cuda")
