"""Sampling a continuation, for the log of a run. There is no KV cache: each step reads the whole text."""

import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt_ids: Tensor,
    max_new_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    eos_id: int | None = None,
    vocab_size: int | None = None,
) -> Tensor:
    """Continue prompt_ids, int64 [B, T] with T >= 1, to int64 [B, T + n], n <= max_new_tokens.

    temperature 0 takes the most likely token; otherwise one is sampled from the top_k most likely (None: all), the same
    ones for the same seed. A row that sampled eos_id continues with eos_id; when all have, sampling stops. Only ids
    below vocab_size are sampled: a model's vocabulary is often padded beyond its tokenizer's. A model with a table of
    positions (`max_positions`) reads the last that fit it.
    """
    if prompt_ids.ndim != 2 or prompt_ids.shape[1] == 0:
        raise UserError(f"generate: the prompt has the shape {tuple(prompt_ids.shape)}; give at least one token.")
    was_training = model.training
    model.eval()
    generator = torch.Generator(prompt_ids.device).manual_seed(seed)
    ids, longest = prompt_ids, getattr(model, "max_positions", None) or 0
    done = torch.zeros(len(ids), dtype=torch.bool, device=ids.device)
    try:
        with torch.compiler.set_stance("force_eager"):  # every length is a new shape
            for _ in range(max_new_tokens):
                logits = model(ids[:, -longest:])[:, -1, :vocab_size].float()  # [B, V]
                token = _sample(logits, temperature, top_k, generator)
                if eos_id is not None:
                    token = torch.where(done, eos_id, token)
                    done = done | (token == eos_id)
                ids = torch.cat((ids, token.unsqueeze(1)), dim=1)
                if eos_id is not None and done.all():
                    break
    finally:
        model.train(was_training)
    return ids


def _sample(logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator) -> Tensor:
    """One token id per row, int64 [B], from logits [B, V]."""
    if temperature == 0:
        return logits.argmax(dim=-1)
    if top_k is not None:
        least = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    probabilities = torch.softmax(logits / temperature, dim=-1)
    return torch.multinomial(probabilities, 1, generator=generator).squeeze(1)
