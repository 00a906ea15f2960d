"""Batches of text through a language model: the loss for training and evaluation, and sampled text."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from qtrain.data import Batch, Tokenizer
from qtrain.models import LossSums, generate

Forward = Callable[[Batch], LossSums]


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
        doc_ids = None if doc_mask_eos is None else document_ids(input_ids, doc_mask_eos)
        if batch.doc_ids is not None:
            doc_ids = batch.doc_ids.to(device, non_blocking=True)
        return model(input_ids, labels, doc_ids)

    return forward


def sample_texts(
    model: nn.Module, tokenizer: Tokenizer, prompts: Iterable[str], max_new_tokens: int, seed: int
) -> list[tuple[str, str]]:
    """(prompt, continuation) of each prompt: temperature 0.8, top-k 50, deterministic in `seed`."""
    device = next(model.parameters()).device
    samples = []
    for prompt in prompts:
        start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        ids = tokenizer.encode(prompt) or [start or 0]
        out = generate(
            model,
            torch.tensor([ids], device=device),
            max_new_tokens,
            temperature=0.8,
            top_k=50,
            seed=seed,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
        )
        samples.append((prompt, tokenizer.decode(out[0, len(ids) :].tolist())))
    return samples
