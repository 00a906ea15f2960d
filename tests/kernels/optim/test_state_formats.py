"""State formats: errors within half a step, blocks within rows, zeros, non-finite values, unbiased rounding."""

import pytest
import torch

from qtrain.kernels.optim.state_formats import (
    BLOCKS,
    dequantize_state,
    parse_format,
    quantize_state,
    round_to_bf16,
    state_format,
    zero_state,
)

SHAPES = [(512,), (8, 256), (7, 192), (5, 33), (3, 5, 7), (1, 1), (2, 130)]
FORMATS = [(name, signed) for name in ("fp32", "bf16", "fp8", "int8", "int4") for signed in (True, False)]
LOW_BIT = [(name, signed) for name, signed in FORMATS if name in BLOCKS]


def values(shape, signed: bool, seed: int = 0) -> torch.Tensor:
    """Numbers over six orders of magnitude, like those of states."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator) * 10 ** torch.empty(shape).uniform_(-3, 0, generator=generator)
    return x if signed else x * x


def fitted(name: str, signed: bool, shape):
    return state_format(name, signed=signed).fitted(torch.Size(shape))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("name", "signed"), FORMATS)
def test_shapes_and_errors_are_those_of_the_format(name, signed, shape):
    format, x = fitted(name, signed, shape), values(shape, signed)
    parts = quantize_state(x, format)
    assert {k: (tuple(v.shape), v.dtype) for k, v in parts.items()} == format.parts(x.shape)
    error = (dequantize_state(parts, format, x.shape) - x).abs().double()
    if not format.block:
        assert (error <= x.abs() * (2**-8 if name == "bf16" else 0)).all()
        return
    rows = x.reshape(1, -1) if x.ndim < 2 else x.reshape(x.shape[0], -1)
    scale = torch.stack([b.abs().amax(1) for b in rows.split(format.block, 1)], 1)
    share = (rows.abs() / scale.repeat_interleave(format.block, 1)[:, : rows.shape[1]]).double().reshape(shape)
    unit = scale.repeat_interleave(format.block, 1)[:, : rows.shape[1]].double().reshape(shape)
    if name == "fp8":
        allowed = share * 2**-4 + (2**-10 if signed else 2**-9) / 448
    else:  # half a step of the code, along the power's slope at the far end of it
        power, largest = {("int8", True): (2, 127), ("int8", False): (4, 256), ("int4", True): (2, 7)}.get(
            (name, signed), (2, 16)
        )
        y = share ** (1 / power)
        low = torch.zeros_like(y) if signed else torch.full_like(y, 1 / largest)
        allowed = torch.maximum((y + 0.5 / largest) ** power - share, share - (y - 0.5 / largest).clamp(min=0) ** power)
        allowed = torch.maximum(allowed, low**power)
    assert (error <= allowed * unit * (1 + 1e-5)).all()


@pytest.mark.parametrize(("name", "signed"), LOW_BIT)
def test_a_block_stays_in_its_row_so_that_rows_quantized_alone_are_the_same(name, signed):
    x = values((6, 330), signed)
    format = fitted(name, signed, x.shape)
    whole, part = quantize_state(x, format), quantize_state(x[2:4], format)
    assert all(torch.equal(whole[k][2:4].view(torch.uint8), part[k].view(torch.uint8)) for k in whole)


@pytest.mark.parametrize(("name", "signed"), LOW_BIT)
def test_zeros_stay_zero_and_nonfinite_values_show(name, signed):
    format, x = fitted(name, signed, (4, 256)), values((4, 256), signed)
    assert not dequantize_state(zero_state(format, x.shape, x.device), format, x.shape).any()
    x[0] = 0
    x[1, 3], x[2, 3] = torch.nan, torch.inf
    found = dequantize_state(quantize_state(x, format), format, x.shape)
    assert not found[0].any() and found[3].isfinite().all()
    assert not found[1, : format.block].isfinite().all() and not found[2, : format.block].isfinite().all()


@pytest.mark.parametrize("name", list(BLOCKS))
def test_an_unsigned_state_is_zero_only_where_its_block_is(name):
    """AdamW divides by its root."""
    x = values((4, 256), False)
    x[0, :60] = 0
    format = fitted(name, False, x.shape)
    assert (dequantize_state(quantize_state(x, format), format, x.shape) > 0).all()


def test_a_block_is_halved_to_divide_a_row_and_not_below_64():
    format = state_format("int8", signed=True)
    blocks = {n: format.fitted(torch.Size((3, n))).block for n in (512, 896, 960, 96, 33)}
    assert blocks == {512: 256, 896: 128, 960: 64, 96: 256, 33: 256}


@pytest.mark.parametrize(("name", "signed"), FORMATS)
def test_a_format_is_known_by_its_id(name, signed):
    format = state_format(name, signed=signed)
    known = parse_format(format.id)
    assert known.name == name and known.block == format.block and (not format.block or known.signed == signed)


@pytest.mark.parametrize("id", ["", "int8", "int8_", "int8_7", "int8_32", "int9_256", "uu8", "int8_-256", "fp64", "u"])
def test_unknown_formats_are_refused(id):
    with pytest.raises(ValueError):
        parse_format(id)


# ---- stochastic rounding ---------------------------------------------------------------------------------------------


def mean_over_draws(round_once, draws: int = 4096) -> torch.Tensor:
    """The mean of many roundings with evenly spaced random bits."""
    total = 0.0
    for i in range(draws):
        total = total + round_once(i * (65536 // draws) + 7)
    return total / draws


def test_bf16_is_unbiased_and_keeps_nonfinite_values():
    x = values((64,), True)
    mean = mean_over_draws(lambda bits: round_to_bf16(x, torch.full((64,), bits, dtype=torch.int32)).double())
    assert ((mean - x.double()).abs() <= x.abs().double() * 2**-8 / 2000).all()
    nonfinite = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0])
    rounded = round_to_bf16(nonfinite, torch.full((5,), 65535, dtype=torch.int32))
    assert rounded[0].isnan() and rounded[1] == torch.inf and rounded[2] == -torch.inf and not rounded[3:].any()


def test_int4_momentum_is_unbiased():
    x = values((1, 128), True)
    format = fitted("int4", True, x.shape)

    def once(bits: int) -> torch.Tensor:
        given = torch.full(x.shape, bits, dtype=torch.int32)
        return dequantize_state(quantize_state(x, format, given), format, x.shape).double()

    assert ((mean_over_draws(once, 512) - x).abs() <= x.abs().max() * 15 / 49 / 200).all()


@pytest.mark.parametrize(("name", "largest", "power"), [("int8", 256, 4), ("int4", 16, 2)])
def test_a_second_moment_is_unbiased_as_a_root(name, largest, power):
    x = values((1, 128), False)
    format = fitted(name, False, x.shape)

    def once(bits: int) -> torch.Tensor:
        given = torch.full(x.shape, bits, dtype=torch.int32)
        return dequantize_state(quantize_state(x, format, given), format, x.shape).double() ** (1 / power)

    root = x.double() ** (1 / power)
    above = root > root.max() / largest  # smaller ones are held at the smallest code
    assert ((mean_over_draws(once, 512) - root).abs() <= root.max() / largest / 200)[above].all()


def test_a_second_moment_decays_though_a_step_is_less_than_half_a_code():
    """beta2 0.999: rounded to nearest it would not change."""
    x = torch.full((1, 256), 0.5)
    x[0, 0] = 1.0
    format, generator = fitted("int8", False, x.shape), torch.Generator().manual_seed(0)
    nearest, stochastic = quantize_state(x, format), quantize_state(x, format)
    for _ in range(300):
        for parts, random in ((nearest, False), (stochastic, True)):
            v = dequantize_state(parts, format, x.shape)
            v[0, 1:] *= 0.999
            bits = torch.randint(0, 65536, x.shape, generator=generator, dtype=torch.int32)
            parts.update(quantize_state(v, format, bits if random else None))
    found = [float(dequantize_state(parts, format, x.shape)[0, 1:].mean()) for parts in (nearest, stochastic)]
    assert found[0] > 0.49 and found[1] == pytest.approx(0.5 * 0.999**300, rel=0.03)
