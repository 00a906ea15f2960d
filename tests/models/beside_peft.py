"""A model with adapters trained beside PEFT's, step by step."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn


def train_beside_peft(own: nn.Module, theirs: nn.Module, batches: Iterable[torch.Tensor]) -> list[float]:
    """AdamW steps of both on batches of token ids [B, S], each with the same loss; those of `own`."""
    trained, their_trained = ([p for p in m.parameters() if p.requires_grad] for m in (own, theirs))
    assert sum(p.numel() for p in trained) == sum(p.numel() for p in their_trained) > 0
    own_optimizer, their_optimizer = (torch.optim.AdamW(ps, 1e-2) for ps in (trained, their_trained))
    losses: list[float] = []
    for ids in batches:
        loss = own(ids[:, :-1], ids[:, 1:].contiguous()).loss / ids[:, 1:].numel()
        their_loss = theirs(input_ids=ids, labels=ids).loss
        losses.append(loss.item())
        assert losses[-1] == pytest.approx(their_loss.item(), abs=1e-4)
        for optimizer, value in ((own_optimizer, loss), (their_optimizer, their_loss)):
            value.backward()
            optimizer.step()
            optimizer.zero_grad()
    return losses
