"""How the next token is chosen from its logits.

In the order of transformers: repetition penalty, temperature, top-k, top-p, min-p, then one draw. The draw inverts the
cumulative distribution in whole numbers: sums of probabilities as 34-bit integers are exact, so the token does not
depend on the order in which a GPU adds. The random number is a function of (seed, row, step): what a row samples does
not depend on the batch that it is in.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.numerics.philox import WORD, philox_ref

PROBABILITY_BITS, DRAW_BITS = 34, 28
"""Of whole-number probabilities and of random numbers; products of the two fit int64."""


@dataclass(frozen=True)
class Sampling:
    """The rule by which a token is chosen."""

    temperature: float = 1.0
    """Logits are divided by it; 0: the likeliest token is taken."""
    top_k: int = 0
    """The k likeliest tokens are kept; 0: all."""
    top_p: float = 1.0
    """The likeliest tokens are kept whose probabilities together reach it."""
    min_p: float = 0.0
    """Tokens are kept whose probability is at least this fraction of the likeliest one's."""
    repetition_penalty: float = 1.0
    """Divides the positive logits of tokens that the text has already, and multiplies their negative ones."""
    seed: int = 0


GREEDY = Sampling(temperature=0.0)


def draws(seed: int, rows: Tensor, steps: int) -> Tensor:
    """The random numbers of `steps` tokens of each row, int64 [B, steps] in [0, 2^DRAW_BITS). rows: int64 [B]."""
    step = torch.arange(steps, device=rows.device)
    counter = (step, torch.zeros_like(step), rows[:, None] & WORD, rows[:, None] >> 32)
    key = (torch.full_like(step, seed & WORD), torch.full_like(step, (seed >> 32) & WORD))
    return philox_ref(counter, key)[0] >> (32 - DRAW_BITS)


def penalized(logits: Tensor, seen: Tensor, penalty: float) -> Tensor:
    """Logits [B, V] with the repetition penalty of Keskar et al. 2019 (arXiv:1909.05858). seen: bool [B, V]."""
    return torch.where(seen, torch.where(logits > 0, logits / penalty, logits * penalty), logits)


def sample(logits: Tensor, sampling: Sampling, draw: Tensor) -> Tensor:
    """One token per row, int64 [B], of logits [B, V], in fp32. draw: int64 [B], of `draws`."""
    if sampling.temperature == 0:
        return logits.argmax(dim=-1)  # in any dtype: a copy in fp32 is as large as what a step reads for a layer
    logits = logits.float()
    # The largest is 0 then: a small temperature cannot overflow.
    logits = (logits - logits.amax(dim=-1, keepdim=True)) / sampling.temperature
    logits, tokens = _likeliest(logits, sampling)
    cumulative = _kept(logits, sampling).cumsum(dim=-1)
    target = (draw * cumulative[:, -1]) >> DRAW_BITS
    # The first whose cumulative probability exceeds the target, and so one that is kept.
    chosen = torch.searchsorted(cumulative, target.unsqueeze(1), right=True).clamp_max(logits.shape[-1] - 1)
    return (chosen if tokens is None else tokens.gather(1, chosen)).squeeze(1)


def _likeliest(logits: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor | None]:
    """Logits [B, K] in descending order and their tokens, as far as top-k keeps them; all as they are, and None, where
    neither top-k nor top-p needs the order."""
    if 0 < sampling.top_k < logits.shape[-1]:
        return logits.topk(sampling.top_k, dim=-1)
    if sampling.top_p < 1:
        return logits.sort(dim=-1, descending=True)
    return logits, None


def _kept(logits: Tensor, sampling: Sampling) -> Tensor:
    """Probabilities as whole numbers [B, K], 0 where top-p or min-p leaves a token out."""
    # NaN, of a model that has diverged, is no whole number.
    weights = (torch.softmax(logits, dim=-1).nan_to_num() * 2.0**PROBABILITY_BITS).round().long()
    if sampling.top_p < 1:
        cumulative = weights.cumsum(dim=-1)
        least = (sampling.top_p * cumulative[:, -1:]).clamp_min(1)  # the likeliest token stays even with 0
        weights = torch.where(cumulative - weights < least, weights, 0)
    if sampling.min_p > 0:
        weights = torch.where(weights >= sampling.min_p * weights.amax(dim=-1, keepdim=True), weights, 0)
    return weights
