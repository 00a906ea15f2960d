"""Logits with the cache are those of a pass over the whole text, for every kind of decoder."""

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from qtrain.models.generation import cache
from qtrain.models.generation.cache import rows_at_once
from qtrain.models.generation.reader import CachedReader
from tests.models.families import FAMILIES, MIXTURES, batch, drawn, source_of

STEPS = 6


@torch.no_grad()
def cached_logits(model, ids: Tensor, lengths: tuple[int, ...]) -> Tensor:
    """[steps, B, V], where the newest tokens are those of `ids`."""
    reader = CachedReader(model, len(lengths), ids.shape[1], ids.device)
    start = torch.tensor(lengths)
    prompts = torch.zeros(len(lengths), max(lengths), dtype=torch.int64)
    for row, own, length in zip(prompts, ids, lengths, strict=True):
        row[:length] = own[:length]
    reader.at.copy_(start - 1)
    found = [reader.read_prompts(prompts)]
    for _ in range(STEPS):
        reader.at += 1
        reader.token.copy_(ids.gather(1, reader.at[:, None])[:, 0])
        found.append(reader.step())
    reader.close()
    return torch.stack(found)


CASES = [(family, (7, 3, 12)) for family in (*FAMILIES, *MIXTURES)]
CASES += [(family, (5,)) for family in ("llama3", "mistral-window", "qwen3_moe", "deepseek_v2")]


@pytest.mark.parametrize(("family", "lengths"), CASES, ids=str)
def test_logits_are_those_of_the_whole_text(family, lengths):
    """With the lengths of the prompts of a batch, or of one alone."""
    model = drawn(source_of(family), seed=3).eval()
    ids, _ = batch(rows=len(lengths))
    with torch.no_grad():
        whole = model(ids)
    found = cached_logits(model, ids, lengths)
    for row, length in enumerate(lengths):
        expected = whole[row, length - 1 : length + STEPS]
        assert (found[:, row] - expected).abs().max() < 1e-5 * expected.abs().max()
    assert all(layer.attn.cache is None for layer in model.layers)


class _HostReads(TorchDispatchMode):
    """Collects operators that wait for the device, or whose shapes depend on values."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket._qualified_op_name in ("aten::_local_scalar_dense", "aten::nonzero", "aten::_unique2"):
            self.found.append(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["llama3", "mistral-window", "deepseek_v2"])
@torch.no_grad()
def test_a_step_reads_nothing_on_the_host_and_leaves_memory_where_it_is(family):
    model = drawn(source_of(family)).eval()
    reader = CachedReader(model, 2, 12, torch.device("cpu"))
    reader.at.fill_(3)
    reader.read_prompts(batch(length=4)[0])
    addresses = [layer.attn.cache.keys.data_ptr() for layer in model.layers]
    with _HostReads() as reads:
        reader.at += 1
        reader.step()
    assert not reads.found
    assert addresses == [layer.attn.cache.keys.data_ptr() for layer in model.layers]
    reader.close()


def test_prompts_are_read_in_batches_whose_cache_fits(monkeypatch):
    """3 layers of keys and values, 2 heads of 16, fp32: 768 bytes a place and row."""
    model = drawn(source_of("qwen3"))
    assert rows_at_once(model, 100) == 256
    monkeypatch.setattr(cache, "CACHE_BYTES", 100 * 768 * 7 + 1)
    assert rows_at_once(model, 100) == 7 and rows_at_once(model, 10_000) == 1
