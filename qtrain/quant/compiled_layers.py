"""Compiled layers whose linears run in different schemes.

Layers share their code, and torch compiles it once for each kind of layer that it meets: in training, in evaluation.
It gives up after `recompile_limit` times, 8 by default, which is meant for code whose inputs change without an end.
"""

from collections.abc import Iterable

import torch
from torch import nn

from qtrain.quant.linear import LowBitLinear


def allow_kinds_of(layers: Iterable[nn.Module]) -> None:
    """Let the code of these layers be compiled for each kind of them."""
    kinds = {
        tuple((name, m.scheme if isinstance(m, LowBitLinear) else None) for name, m in layer.named_modules())
        for layer in layers
    }
    allow_kinds(len(kinds) - 1)


def allow_kinds(more: int) -> None:
    """Let code be compiled for so many more kinds of layers than before."""
    if more > 0:
        config = torch._dynamo.config
        config.recompile_limit += 8 * more
        config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, 4 * config.recompile_limit)
