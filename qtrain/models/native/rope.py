"""Rotary positions: angle tables, in fp32 for every model dtype (bf16 does not distinguish positions 1025 and 1026).
Pairs are (d, d + D/2), the layout of Hugging Face checkpoints; `kernels/norm/qkv_rope.py` rotates them."""

import functools
import math

import torch
from torch import Tensor

from qtrain.models.config.rope import Rope


def inverse_frequencies(rope: Rope, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """Radians per position for each of the D/2 pairs, fp32 [D/2].

    `linear` divides every frequency by `factor` (Chen et al. 2023, arXiv:2306.15595). `llama3` divides those whose
    wavelength exceeds the pretraining context, keeps the short ones and blends between (Llama 3.1's reference code).
    `yarn` does the same by the number of a pair, with a linear ramp (Peng et al. 2023, arXiv:2309.00071).
    """
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device)
    frequencies = 1.0 / (rope.theta ** (steps / head_dim))
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        turns = rope.original_max_position_embeddings * frequencies / (2 * math.pi)  # over the pretraining context
        # 1: many turns, the frequency is kept; 0: few turns, it is divided by `factor`.
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0.0, 1.0)
        return (1 - keep) * frequencies / rope.factor + keep * frequencies
    if rope.kind == "yarn":
        low, high = (_pair_of_turns(rope, head_dim, turns) for turns in (rope.beta_fast, rope.beta_slow))
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        pairs = torch.arange(head_dim // 2, dtype=torch.float32, device=device)
        # 0.001: as in transformers, a ramp of no length is a step instead of 0 / 0.
        scaled = ((pairs - low) / (high - low if high != low else 0.001)).clamp(0.0, 1.0)
        return scaled * frequencies / rope.factor + (1 - scaled) * frequencies
    return frequencies


def _pair_of_turns(rope: Rope, head_dim: int, turns: float) -> float:
    """The number of the pair that turns this often over the pretraining context."""
    wavelength = rope.original_max_position_embeddings / turns
    # Solves wavelength = 2π · theta^(2 · pair / D) for the pair.
    return head_dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.theta))


@functools.lru_cache(maxsize=8)
def rope_tables(rope: Rope, head_dim: int, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions 0..length-1, fp32 [length, D/2] each."""
    with torch.inference_mode(False), torch.no_grad():  # a table cached in evaluation must be usable in training
        positions = torch.arange(length, dtype=torch.float32, device=device)
        angles = torch.outer(positions, inverse_frequencies(rope, head_dim, device))
        return angles.cos() * rope.table_scale, angles.sin() * rope.table_scale


def document_positions(doc_ids: Tensor) -> Tensor:
    """doc_ids [B, S] -> positions that restart at every document, int64 [B, S]; a run of equal ids is a document."""
    index = torch.arange(doc_ids.shape[1], device=doc_ids.device).expand_as(doc_ids)
    starts = torch.ones_like(doc_ids, dtype=torch.bool)
    starts[:, 1:] = doc_ids[:, 1:] != doc_ids[:, :-1]
    # A token's document starts at the last start up to it.
    return index - torch.where(starts, index, 0).cummax(dim=1).values
