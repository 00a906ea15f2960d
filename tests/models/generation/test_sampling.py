"""Which tokens are kept, against plain definitions and transformers; how often each is drawn."""

import pytest
import torch
from torch import Tensor
from transformers.generation import logits_process

from qtrain.models import Sampling
from qtrain.models.generation.sampling import DRAW_BITS, draws, penalized, sample

LOGITS = torch.randn(3, 40, generator=torch.Generator().manual_seed(0)) * 2.5
N = 5_000


def drawn_shares(logits: Tensor, sampling: Sampling) -> Tensor:
    """How often each token of one row [V] is sampled, of N draws that divide [0, 1) evenly."""
    even = (torch.arange(N) << DRAW_BITS) // N
    tokens = sample(logits.expand(N, -1), sampling, even)
    return torch.bincount(tokens, minlength=len(logits)) / N


def expected(logits: Tensor, sampling: Sampling) -> Tensor:
    """The distribution [V] that transformers samples from."""
    warpers = [logits_process.TemperatureLogitsWarper(sampling.temperature)]
    warpers += [logits_process.TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []
    warpers += [logits_process.TopPLogitsWarper(sampling.top_p)] if sampling.top_p < 1 else []
    warpers += [logits_process.MinPLogitsWarper(sampling.min_p)] if sampling.min_p else []
    scores = logits[None]
    for warper in warpers:
        scores = warper(None, scores)
    return scores.softmax(dim=-1)[0]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.5),
        Sampling(top_k=3),
        Sampling(top_p=0.6),
        Sampling(top_p=0.0),
        Sampling(min_p=0.1),
        Sampling(temperature=1.7, top_k=20, top_p=0.8, min_p=0.05),
    ],
    ids=str,
)
def test_tokens_are_drawn_as_often_as_transformers_says(sampling):
    for logits in LOGITS:
        found, wanted = drawn_shares(logits, sampling), expected(logits, sampling)
        assert ((found > 0) <= (wanted > 0)).all(), "a token was drawn that is left out"
        assert torch.allclose(found, wanted, atol=2 / N)


def test_top_p_and_min_p_keep_what_their_definitions_say():
    logits = torch.tensor([0.5, 0.05, 0.3, 0.15]).log()
    assert (drawn_shares(logits, Sampling(top_p=0.7)) > 0).tolist() == [True, False, True, False]
    assert (drawn_shares(logits, Sampling(top_p=0.81)) > 0).tolist() == [True, False, True, True]
    assert (drawn_shares(logits, Sampling(min_p=0.29)) > 0).tolist() == [True, False, True, True]
    assert (drawn_shares(logits, Sampling(min_p=0.31)) > 0).tolist() == [True, False, True, False]


def test_the_penalty_is_that_of_transformers():
    ids = torch.tensor([[1, 2, 2, 39], [0, 5, 6, 7], [3, 3, 3, 3]])
    seen = torch.zeros(3, 40, dtype=torch.bool).scatter_(1, ids, True)
    wanted = logits_process.RepetitionPenaltyLogitsProcessor(1.3)(ids, LOGITS.clone())
    assert torch.equal(penalized(LOGITS, seen, 1.3), wanted)


def test_random_numbers_are_uniform_and_belong_to_the_seed_the_row_and_the_step():
    rows = torch.arange(300)
    found = draws(5, rows, 200)
    assert found.min() >= 0 and found.max() < 2**DRAW_BITS
    assert (found.double().mean() / 2**DRAW_BITS - 0.5).abs() < 0.005
    assert found.unique().numel() > 59_900  # of 60,000 in 2^28: 7 collisions are expected
    assert torch.equal(draws(5, torch.tensor([7]), 3)[0], found[7, :3])
    assert not torch.equal(draws(6, rows, 200), found)
    assert not torch.equal(draws(5 + 2**32, rows, 200), found)


def test_logits_of_a_model_that_has_diverged_end_no_program():
    assert sample(torch.full((1, 4), torch.nan), Sampling(top_p=0.5), torch.tensor([9])).item() in range(4)
