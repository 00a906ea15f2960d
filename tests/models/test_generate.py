"""Sampling: reproducible, greedy when cold, and it leaves the model as it was."""

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.models import generate
from tests.models.families import batch, drawn, source_of

MODEL = drawn(source_of("llama2"))
PROMPT = batch()[0][:, :5]


def test_same_seed_same_text_and_other_seed_other_text():
    first, same, other = (generate(MODEL, PROMPT, 12, seed=s) for s in (1, 1, 2))
    assert first.shape == (2, 17) and torch.equal(first[:, :5], PROMPT)
    assert torch.equal(first, same) and not torch.equal(first, other)


def test_temperature_zero_takes_the_likeliest_token_and_so_does_top_1():
    greedy = generate(MODEL, PROMPT, 6, temperature=0)
    ids = PROMPT
    for _ in range(6):
        ids = torch.cat([ids, MODEL(ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(greedy, ids)
    assert torch.equal(generate(MODEL, PROMPT, 6, top_k=1, seed=5), ids)


def test_stops_when_every_row_has_ended():
    free = generate(MODEL, PROMPT[:1], 12, temperature=0)
    end = free[0, 7].item()
    stopped = generate(MODEL, PROMPT[:1], 12, temperature=0, eos_id=end)
    first = (free[0, 5:] == end).nonzero()[0].item()
    assert torch.equal(stopped, free[:, : 5 + first + 1])


@pytest.mark.parametrize("training", [True, False])
def test_mode_is_restored(training):
    MODEL.train(training)
    generate(MODEL, PROMPT, 1)
    assert MODEL.training is training


def test_an_empty_prompt_is_refused():
    with pytest.raises(UserError, match="at least one token"):
        generate(MODEL, PROMPT[:, :0], 1)
