"""Newton-Schulz: singular values to about one, vectors kept, one matrix at a time or many."""

import pytest
import torch
from torch.optim._muon import _zeropower_via_newtonschulz

from qtrain.optim.newton_schulz import COEFFICIENTS, newton_schulz


def quintic(x: float, steps: int = 5) -> float:
    a, b, c = COEFFICIENTS
    for _ in range(steps):
        x = a * x + b * x**3 + c * x**5
    return x


@pytest.mark.parametrize("shape", [(3, 17, 40), (2, 40, 17), (1, 24, 24), (2, 1, 9)])
def test_maps_every_singular_value_by_the_quintic(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(x, full_matrices=False)
    mapped = (s / s.norm(dim=-1, keepdim=True)).apply_(quintic)
    torch.testing.assert_close(newton_schulz(x), u * mapped.unsqueeze(-2) @ vh, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(newton_schulz(x.float()).double(), newton_schulz(x), rtol=1e-4, atol=1e-4)


def test_is_torchs_for_one_matrix_in_bf16():
    x = torch.randn(48, 32, generator=torch.Generator().manual_seed(1))
    expected = _zeropower_via_newtonschulz(x, COEFFICIENTS, 5, 1e-7).float()
    found = newton_schulz(x.bfloat16()[None])[0].float()
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.01)


def test_zero_stays_zero():
    assert not newton_schulz(torch.zeros(2, 4, 6)).any()
