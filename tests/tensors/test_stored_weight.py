"""Weights stored in low bits: what they hold, how they change, and that PyTorch takes them for the tensors they stand
for."""

import copy

import pytest
import torch
from torch import nn

from qtrain.tensors.stored_weight import StoredWeight
from tests.cases import matrix, sampled

FORMATS = {"int8": 127, "int4": 7}


def stored(format: str, n: int = 24, k: int = 200, dtype=torch.float32) -> nn.Parameter:
    return nn.Parameter(StoredWeight.from_value(matrix(n, k, 0, dtype=dtype), format))


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("kind", ["normal", "outlier", "zero_row", "strided"])
def test_values_are_within_half_a_code(format, kind):
    """Against fp64: no element is further off than half a step of its own group, odd shapes included."""
    for n, k in [(1, 2), (5, 130), (24, 256), (3, 300)]:
        value = matrix(n, k, 1, kind)
        weight = StoredWeight.from_value(value, format)
        groups = value.double().split(k if format == "int8" else 128, dim=1)
        step = torch.cat([g.abs().amax(1, keepdim=True).expand_as(g) / FORMATS[format] for g in groups], dim=1)
        assert ((weight.dequantize(torch.float32).double() - value.double()).abs() <= 0.5001 * step + 1e-12).all()
        assert weight.codes.nbytes == n * k * (1 if format == "int8" else 0.5)


@pytest.mark.parametrize("format", sampled([*FORMATS], lambda format: format == "int8"))
def test_small_updates_survive_on_average_with_a_key_only(format):
    """A hundredth of a code added 4000 times over different keys: right in the mean; to nearest it is lost."""
    value = matrix(4, 128, 0)
    value[:, 0] = 4.0  # the absmax, which keeps the scale
    weight = StoredWeight.from_value(value, format)
    before, scale = weight.dequantize(), 4.0 / FORMATS[format]
    target = before + 0.01 * scale * (before.abs() < 3)
    assert torch.allclose(weight.clone().store_(target).dequantize(), before, rtol=1e-6, atol=0)
    draws = 4000
    total = torch.zeros_like(before, dtype=torch.float64)
    for step in range(draws):
        fresh = weight.clone()
        fresh.store_(target, torch.tensor([7, step, 0]))
        total += fresh.dequantize().double()
    sigma = scale * (0.01 * 0.99 / draws) ** 0.5
    assert ((total / draws - target.double()).abs() < 4.5 * sigma).all()


def test_rounding_is_a_function_of_its_key():
    value = matrix(24, 200, 3)
    a, b, c = (stored("int8") for _ in range(3))
    a.store_(value, torch.tensor([1, 2, 3]))
    b.store_(value, torch.tensor([1, 2, 3]))
    c.store_(value, torch.tensor([1, 2, 4]))
    assert torch.equal(a.codes, b.codes) and not torch.equal(a.codes, c.codes)


@pytest.mark.parametrize("format", FORMATS)
def test_it_is_a_parameter(format):
    """Gradients are plain and in the outward dtype; state_dict, deepcopy and `to` keep codes; likenesses are plain."""
    weight = stored(format, dtype=torch.bfloat16)
    assert isinstance(weight, nn.Parameter) and weight.requires_grad and weight.dtype == torch.bfloat16
    x = matrix(3, 200, 5, dtype=torch.bfloat16)
    (x @ weight.t()).sum().backward()
    assert type(weight.grad) is torch.Tensor and weight.grad.dtype == torch.bfloat16
    assert torch.equal(weight.grad, x.sum(0).expand(24, -1)) or torch.allclose(
        weight.grad.float(), x.float().sum(0).expand(24, -1), rtol=0.02, atol=0.02
    )
    module = nn.Linear(200, 24, bias=False, dtype=torch.bfloat16)
    module.weight = weight
    other = copy.deepcopy(module)
    assert isinstance(other.weight, StoredWeight) and other.weight.codes.data_ptr() != weight.codes.data_ptr()
    other.weight.store_(matrix(24, 200, 9))
    assert not torch.equal(other.weight.codes, weight.codes)
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight.codes, weight.codes) and torch.equal(other.weight.scale, weight.scale)
    module.to(torch.float32)
    assert isinstance(module.weight, StoredWeight) and module.weight.dtype == torch.float32
    assert type(torch.zeros_like(weight)) is torch.Tensor
    assert torch.empty_like(weight, dtype=torch.float32).dtype == torch.float32


def test_plain_values_may_be_copied_in_and_out():
    weight, value, out = stored("int8"), matrix(24, 200, 4), torch.empty(24, 200)
    with torch.no_grad():
        weight.copy_(value)
        out.copy_(weight)
    assert torch.equal(out, weight.dequantize())
    assert (out - value).abs().max() < 0.02


@pytest.mark.parametrize("write", [lambda w: w.add_(1), lambda w: w.zero_(), lambda w: torch._foreach_mul_([w], 2.0)])
def test_writes_that_would_be_lost_are_refused(write):
    weight = stored("int4")
    with torch.no_grad(), pytest.raises(TypeError, match="cannot write to a weight stored in low bits"):
        write(weight)


def test_a_change_counts_as_one():
    weight = stored("int8")
    before = weight._version
    weight.store_(weight.dequantize())
    assert weight._version > before
