"""Philox gives the published words, and bits that are uniform and depend on every part of their key."""

import pytest
import torch

from qtrain.kernels.numerics.philox import NEAREST, Rounding, normal, philox_ref, random_bits_ref


@pytest.mark.parametrize(
    "rounds,words",
    [
        (
            7,
            [
                (0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48),
                (0x5207DDC2, 0x45165E59, 0x4D8EE751, 0x8C52F662),
                (0x4DFCCABA, 0x190A87F0, 0xC47362BA, 0xB6B5242A),
            ],
        ),
        (
            10,
            [
                (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
                (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
                (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
            ],
        ),
    ],
)
def test_known_answers(rounds, words):
    """The known-answer vectors of Random123 for philox4x32."""
    inputs = [
        ((0, 0, 0, 0), (0, 0)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2),
        ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0)),
    ]
    for (counter, key), expected in zip(inputs, words, strict=True):
        as_tensors = [tuple(torch.tensor([w]) for w in part) for part in (counter, key)]
        assert tuple(int(w) for w in philox_ref(*as_tensors, rounds)) == expected


def uniform(shape=(64, 33), seed=5, step=7, linear=2, role=1):
    """Each draw as the center of its interval in (0, 1)."""
    return (random_bits_ref(shape, torch.tensor([seed, step, linear]), role).float() + 0.5) * 2.0**-16


def test_uniform_is_a_function_of_its_key():
    assert torch.equal(uniform(), uniform())
    for changed in ({"seed": 6}, {"step": 8}, {"linear": 3}, {"role": 2}, {"seed": 5 + 2**32}):
        assert (uniform() != uniform(**changed)).float().mean() > 0.99
    # An element's draw depends on its index alone: the same leading elements, whatever follows them.
    assert torch.equal(uniform((10,)), uniform((1000,))[:10])


def test_uniform_is_uniform():
    """Mean, variance and range of 2**18 draws, within 5 standard errors; never 0 or 1."""
    u = uniform((512, 512)).double().flatten()
    assert u.min() > 0 and u.max() < 1
    assert abs(u.mean() - 0.5) < 5 * (1 / 12 / u.numel()) ** 0.5
    assert abs(u.var() - 1 / 12) < 5 * (1 / 180 / u.numel()) ** 0.5
    counts = torch.histc(u, bins=64, min=0, max=1)
    assert ((counts - u.numel() / 64) ** 2 / (u.numel() / 64)).sum() < 63 + 5 * (2 * 63) ** 0.5


KEY, SHAPE = torch.tensor([7, 3, 2]), (3, 16)


@pytest.mark.parametrize("rows", [False, True])
@pytest.mark.parametrize("columns", [False, True])
def test_layouts(rows, columns):
    rounding = Rounding(KEY, 2, rows, columns)
    assert (rounding.row_key is KEY, rounding.column_key is KEY) == (rows, columns)
    assert rounding.same == (rows == columns)
    for bits, stochastic in zip(rounding.bits(SHAPE), (rows, columns), strict=True):
        assert torch.equal(bits, random_bits_ref(SHAPE, KEY, 2)) if stochastic else bits is None


def test_nearest():
    for rounding in (NEAREST, Rounding(None, 1, True, False)):
        assert rounding.row_key is rounding.column_key is None and rounding.same
        assert rounding.bits(SHAPE) == (None, None)


def test_is_standard_normal():
    x = normal(torch.tensor([[3, 0, 0], [3, 0, 1]]), 50_000).double().flatten()
    assert abs(x.mean()) < 0.01 and abs(x.std() - 1) < 0.01
    assert abs((x**4).mean() - 3) < 0.1 and abs((x**3).mean()) < 0.05
    levels = torch.tensor([-2.0, -1.0, 0.0, 0.5, 1.5], dtype=torch.float64)
    expected = torch.special.ndtr(levels)
    assert ((x[:, None] < levels).double().mean(0) - expected).abs().max() < 0.006


def test_a_key_is_a_vector_and_a_count_a_prefix():
    keys = torch.tensor([[3, 0, 0], [3, 0, 1], [3, 1, 0], [4, 0, 0]])
    x = normal(keys, 1001)
    assert torch.equal(normal(keys[2:3], 1001)[0], x[2])
    correlation = torch.corrcoef(x) - torch.eye(4)
    assert correlation.abs().max() < 0.15
    assert torch.equal(normal(keys, 10), x[:, :10])
