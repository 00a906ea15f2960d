"""Low-bit gradients: their error against fp64, no bias, their size, and values that no gradient should have."""

import pytest
import torch

from qtrain.kernels.numerics.formats import FORMATS
from qtrain.parallel.sharding.gradient_wire import GRADIENT_WIRES

LOW_BIT = [name for name, wire in GRADIENT_WIRES.items() if wire is not None]


def key(step: int = 0) -> torch.Tensor:
    return torch.tensor([1, step, 1 << 20])


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("elements", [0, 1, 255, 256, 1000])
def test_every_element_comes_back_within_one_step_of_its_block(name, elements):
    wire, generator = GRADIENT_WIRES[name], torch.Generator().manual_seed(elements)
    sent = torch.randn(elements, generator=generator).mul(torch.rand(elements, generator=generator).mul(8).exp())
    encoded = wire.encode(sent, key())
    assert encoded.dtype == torch.uint8 and len(encoded) == wire.size(elements)
    received = wire.decode(encoded, elements)
    assert received.dtype == torch.float32 and received.shape == sent.shape
    for block, back in zip(sent.double().split(wire.block), received.double().split(wire.block), strict=True):
        if not len(block):
            continue
        step = block.abs().max() / FORMATS[wire.fmt].max
        if FORMATS[wire.fmt].is_float:  # the distance to the next code: 2^-3 of the value, at least the subnormals'
            step = (block.abs() / 8).clamp(min=float(step) * 2**-9)
        assert bool(((back - block).abs() <= step * (1 + 1e-6)).all())


@pytest.mark.parametrize(("name", "most"), [("int8", 1.05), ("fp8", 1.05), ("int4", 0.5625)])
def test_bytes_per_element(name, most):
    wire = GRADIENT_WIRES[name]
    assert wire.size(1 << 20) / (1 << 20) == wire.bytes_per_element <= most


@pytest.mark.parametrize("name", LOW_BIT)
def test_the_mean_of_1000_draws_is_the_gradient(name):
    """Of each element the mean is within 5 standard errors of a uniform rounding error, over 512 elements."""
    wire, draws = GRADIENT_WIRES[name], 1000
    sent = torch.randn(512, generator=torch.Generator().manual_seed(3)).bfloat16()
    total = torch.zeros(512, dtype=torch.float64)
    for step in range(draws):
        total += wire.decode(wire.encode(sent, key(step)), 512)
    error = (total / draws - sent.double()).abs()
    scale = torch.cat([b.abs().max().expand(len(b)) for b in sent.double().split(wire.block)]) / FORMATS[wire.fmt].max
    step = torch.maximum(sent.double().abs() / 8, scale * 2**-9) if FORMATS[wire.fmt].is_float else scale
    assert bool((error <= 5 * 0.5 * step / draws**0.5 + 1e-7).all())


@pytest.mark.parametrize("name", LOW_BIT)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_nonfinite_gradient_arrives_nonfinite(name, value):
    """So that the step is refused before the update."""
    wire = GRADIENT_WIRES[name]
    sent = torch.ones(700)
    sent[300] = value
    received = wire.decode(wire.encode(sent, key()), 700)
    assert not torch.isfinite(received[300]) and bool(torch.isfinite(received[512:]).all())


@pytest.mark.parametrize("name", LOW_BIT)
def test_a_block_of_zeros_is_zeros(name):
    wire = GRADIENT_WIRES[name]
    assert bool((wire.decode(wire.encode(torch.zeros(512), key()), 512) == 0).all())
