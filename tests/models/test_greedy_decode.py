"""Answers generated with a cache are those of reading everything again, prompt by prompt."""

import pytest
import torch

from qtrain.models import ModelSource, answer, build_model, generate, rows_at_once
from tests.system import TINY
from tests.test_mixture_runs import DEEPSEEK, QWEN

PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [3, 2, 1]]


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model_type": "qwen3", "head_dim": 8},
        {"model_type": "mistral", "sliding_window": 4},
        QWEN,
        DEEPSEEK,
    ],
    ids=["llama", "qwen3", "window", "mixture", "latent attention"],
)
def test_batched_answers_equal_those_of_each_prompt_alone(changes):
    model = build_model(ModelSource("tiny", {**TINY, "initializer_range": 0.3, **changes}, "--model"), seed=4).train()
    found = answer(model, PROMPTS, 12, None, 200)
    for prompt, ids in zip(PROMPTS, found, strict=True):
        alone = generate(model, torch.tensor([prompt]), 12, temperature=0, vocab_size=200)
        assert ids == alone[0, len(prompt) :].tolist()
    assert model.training and all(layer.attn.cache is None for layer in model.layers)
    end = found[0][5]
    stopped = answer(model, PROMPTS, 12, end, 200)
    assert stopped == [ids[: ids.index(end)] if end in ids else ids for ids in found]


def test_prompts_are_answered_in_batches_whose_cache_fits(monkeypatch):
    """2 layers of keys and values, a head of 16, fp32: 256 bytes a place and row."""
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=1)
    assert rows_at_once(model, 100) == 256
    monkeypatch.setattr("qtrain.models.greedy_decode.CACHE_BYTES", 100 * 256 * 7 + 1)
    assert rows_at_once(model, 100) == 7 and rows_at_once(model, 10_000) == 1
