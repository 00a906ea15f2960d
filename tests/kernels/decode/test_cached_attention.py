"""Attention of the newest tokens over a cache: against fp64, for all kinds of heads, lengths and windows."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.decode import cached_attention as module
from qtrain.kernels.decode.cached_attention import (
    Heads,
    cached_attention,
    cached_attention_ref,
    launch_cached_attention,
)

# batch, query heads, KV heads, head size, places, window, whether heads are normed
CASES = [
    (1, 7, 1, 64, 300, 0, False),
    (3, 4, 4, 32, 200, 0, True),
    (2, 8, 2, 64, 500, 40, True),
    (1, 1, 1, 64, 3, 0, False),
]


def inputs(case, dtype=torch.float32, device: str = "cpu"):
    batch, heads, kv_heads, d, places, window, norm = case
    generator = torch.Generator().manual_seed(places)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    at = torch.tensor([(places - 1, 0, 77)[row % 3] for row in range(batch)], device=device)
    angles = draw(places, d // 2)
    qkv, keys, values = draw(batch, (heads + 2 * kv_heads) * d), *draw(2, batch, kv_heads, places, d)
    qkv[:, :d] *= 8  # one head attends to few keys
    for row, place in enumerate(at.tolist()):  # places that nothing has written yet
        keys[row, :, place:] = values[row, :, place:] = torch.nan
    norms = [(1 + 0.3 * draw(d)).to(device, dtype) if norm else None for _ in range(2)]
    cache = [t.to(device, dtype) for t in (qkv, keys, values)]
    return *cache, at, angles.cos().to(device), angles.sin().to(device), Heads(d**-0.5, window, *norms, 1e-6)


def truth(qkv, keys, values, at, cos, sin, heads):
    """fp64, of the keys as the reference has stored them."""
    heads = heads._replace(
        **{name: None if (w := getattr(heads, name)) is None else w.double() for name in ("q_norm", "k_norm")}
    )
    rows = []
    for row, place in enumerate(at.tolist()):
        d = keys.shape[3]
        q = module._rotated(
            qkv[row : row + 1, :].unflatten(1, (-1, d)), heads.q_norm, heads.eps, cos[[place]], sin[[place]]
        )
        q = q[0, : qkv.shape[1] // d - 2 * keys.shape[1]].double().unflatten(0, (keys.shape[1], -1))
        first = max(0, place + 1 - heads.window) if heads.window else 0
        k, v = (t[row, :, first : place + 1].double() for t in (keys, values))
        rows.append(((q @ k.transpose(1, 2) * heads.scale).softmax(-1) @ v).flatten())
    return torch.stack(rows)


@pytest.mark.parametrize("case", CASES)
def test_against_fp64(case, monkeypatch):
    monkeypatch.setattr(module, "sm_count", lambda device: 132)  # several parts for each head
    qkv, keys, values, at, *rest = inputs(case)
    plain, launched = [(keys.clone(), values.clone()) for _ in range(2)]
    reference = cached_attention_ref(qkv, *plain, at, *rest)
    y = launch_cached_attention(qkv, *launched, at, *rest)
    expected = truth(qkv, *plain, at, *rest)
    for found in (reference, y):
        torch.testing.assert_close(found.double(), expected, rtol=1e-5, atol=1e-5)
    for ours, theirs in zip(launched, plain, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES, (32, 28, 4, 128, 700, 0, False), (64, 32, 8, 128, 900, 100, True)])
def test_on_the_gpu(case):
    qkv, keys, values, at, *rest = inputs(case, torch.bfloat16, "cuda")
    plain, launched = [(keys.clone(), values.clone()) for _ in range(2)]
    cached_attention_ref(qkv, *plain, at, *rest)
    first = cached_attention(qkv, *launched, at, *rest)
    torch.testing.assert_close(first.double(), truth(qkv, *plain, at, *rest), rtol=2e-2, atol=2e-2)
    for _ in range(3):  # in the same order every time, whichever part comes last
        assert torch.equal(first, cached_attention(qkv, *launched, at, *rest))


@pytest.mark.parametrize(
    ("shared", "keys", "d", "expected"),
    [(232448, 592, 128, (128, 8, 3)), (232448, 148, 128, (64, 4, 3)), (101376, 592, 128, (64, 4, 3)),
     (101376, 592, 256, (32, 4, 2)), (101376, 40, 64, (32, 4, 2))],
)  # fmt: skip
def test_blocks_fit_in_shared_memory(shared, keys, d, expected, monkeypatch):
    monkeypatch.setattr(module, "shared_memory", lambda device: shared)
    assert module._block(keys, 2 * d, torch.device("cpu")) == expected
