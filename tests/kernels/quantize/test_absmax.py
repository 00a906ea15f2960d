"""The absmax of a tensor, its rows and its columns; NaN and Inf are found, not lost."""

import pytest
import torch

from qtrain.kernels.quantize.absmax import absmax, absmax_ref, launch_absmax, supports_bf16x2
from tests.cases import KINDS, SHAPES, matrix


def check_kernel(device, dtype, shapes, kinds):
    for seed, shape in enumerate(shapes):
        for kind in kinds:
            x = matrix(*shape, seed, kind, dtype).contiguous().to(device)
            found = launch_absmax(x, tensor=True, rows=True, columns=True, block=(16, 32), steps=3)
            expected = x.abs().amax(), x.abs().amax(dim=1), x.abs().amax(dim=0)
            for got, true in zip(found, expected, strict=True):
                assert torch.equal(got.view(torch.float32), true.float().view(-1)), (shape, kind)
            assert torch.equal(launch_absmax(x, columns=True)[2], found[2])
            for options in ({}, {"block": (8, 16), "steps": 3}):
                for got, true in zip(launch_absmax(x, rows=True, columns=True, **options)[1:], found[1:], strict=True):
                    assert torch.equal(got, true), (shape, kind, options)


def check_nonfinite(function, device):
    for nonfinite in (float("nan"), float("inf"), -float("inf")):
        x = torch.randn(40, 70)
        x[33, 65] = nonfinite
        out = function(x.to(device)).cpu()
        assert out.isnan() if nonfinite != nonfinite else out == float("inf")


def check_nonfinite_bf16x2(device):
    """In rows and columns of bf16: NaN is above Inf, in either half of a word."""
    for column in (6, 7, 40):
        x = torch.randn(40, 48, dtype=torch.bfloat16)
        x[33, 40], x[33, column] = -float("inf"), float("nan")
        assert supports_bf16x2(x)
        _, rows, columns = (t.view(torch.float32).cpu() for t in launch_absmax(x.to(device), rows=True, columns=True))
        assert rows.isnan().nonzero().tolist() == [[33]] and columns.isnan().nonzero().tolist() == [[column]]
        assert column == 40 or columns[40] == float("inf")
        assert rows[32] == x[32].abs().amax() and columns[0] == x[:, 0].abs().amax()


def test_reference():
    for seed, shape in enumerate(SHAPES):
        x = matrix(*shape, seed, dtype=torch.bfloat16)
        assert absmax_ref(x).item() == x.double().abs().max()
    assert absmax_ref(torch.zeros(0, 4)).tolist() == [0.0]
    check_nonfinite(absmax_ref, "cpu")


@pytest.mark.interpreter
def test_kernel_in_the_interpreter():
    check_kernel("cpu", torch.float32, [(1, 1), (17, 33), (100, 70)], ["normal", "outlier"])
    check_kernel("cpu", torch.bfloat16, [(17, 40), (100, 72)], ["normal", "outlier"])
    check_nonfinite(lambda x: launch_absmax(x, tensor=True)[0].view(torch.float32), "cpu")
    check_nonfinite_bf16x2("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernel(dtype):
    check_kernel("cuda", dtype, [*SHAPES, (3000, 4100), (3000, 4104)], KINDS)
    check_nonfinite(absmax, "cuda")
    check_nonfinite_bf16x2("cuda")


def test_operator():
    torch.library.opcheck(absmax, (torch.randn(5, 7),))
