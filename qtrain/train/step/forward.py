"""Batches of text or images through a model: the summed loss, for training and evaluation."""

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.data.batch import Batch
from qtrain.data.images.image_loader import ImageBatch
from qtrain.models import LossSums

Forward = Callable[[Any], LossSums]


def document_ids(input_ids: Tensor, eos_id: int) -> Tensor:
    """input_ids [B, S] -> index of each token's document [B, S]. An end token belongs to the document that it ends."""
    ends = (input_ids == eos_id).int()
    return ends.cumsum(dim=1) - ends


def language_forward(model: nn.Module, doc_mask_eos: int | None) -> Forward:
    """The function batch -> summed losses.

    Attention stays within documents: those of the batch's `doc_ids` or, with `doc_mask_eos`, those that end with this
    token id."""
    device = next(model.parameters()).device

    def forward(batch: Batch) -> LossSums:
        input_ids = batch.input_ids.to(device, non_blocking=True)
        labels = batch.labels.to(device, non_blocking=True)
        # Packed examples come with their ids; of plain text they follow from the end tokens.
        doc_ids = None if doc_mask_eos is None else document_ids(input_ids, doc_mask_eos)
        if batch.doc_ids is not None:
            doc_ids = batch.doc_ids.to(device, non_blocking=True)
        return model(input_ids, labels, doc_ids)

    return forward


def vision_forward(model: nn.Module) -> Callable[[ImageBatch], LossSums]:
    """The function batch -> cross-entropy with its targets, summed over the images."""
    parameter = next(model.parameters())
    device, dtype = parameter.device, parameter.dtype

    def forward(batch: ImageBatch) -> LossSums:
        images = batch.images.to(device, non_blocking=True).to(dtype)
        logits = model(images).float()  # the loss of bf16 logits would be rounded before it is summed
        loss = F.cross_entropy(logits, batch.targets.to(device, non_blocking=True), reduction="sum")
        return LossSums(loss, loss.detach())

    return forward
