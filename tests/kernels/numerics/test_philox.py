"""Philox gives the published words, and bits that are uniform and depend on every part of their key."""

import pytest
import torch

from qtrain.kernels.numerics.philox import philox_ref, random_bits_ref


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
