"""A native model and transformers' own, loaded from what the native one exports, on the same batch."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtrain.models import Decoder, export_hf
from tests.models.families import batch, drawn, source_of


def backward_of_both(
    name: str, folder: Path, close: Callable[[torch.Tensor, torch.Tensor], bool]
) -> tuple[Decoder, nn.Module]:
    """Both models of a family, with gradients; asserts that logits are `close` and losses equal to 1e-5."""
    from transformers import AutoModelForCausalLM

    source = source_of(name)
    ours = drawn(source)
    export_hf(ours, source, folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder)
    assert theirs.config.to_dict()["model_type"] == source.config["model_type"]
    ids, labels = batch()
    logits = theirs(ids).logits
    assert close(ours(ids), logits)

    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    sums = ours(ids, labels)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert sums.nll.item() == pytest.approx(expected.item(), rel=1e-5) and not sums.nll.requires_grad
    return ours, theirs
