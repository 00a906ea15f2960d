"""States of many parameters as one tensor, read and written together, in launches that do not grow with them."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from qtrain.kernels.optim.state_formats import StateFormat, dequantize_state, quantize_state, zero_state
from qtrain.optim.resumable import Described
from qtrain.optim.state_layout import state_keys

Slot = tuple[dict[str, Any], str]
"""One state of one parameter: the parameter's states, and the state's name among them."""

Parts = dict[str, Tensor]


def describe_state(name: str, format: StateFormat, shape: tuple[int, ...]) -> Described:
    """The tensors of one state."""
    format = format.fitted(torch.Size(shape))
    parts = format.parts(torch.Size(shape))
    return {key: parts[part] for part, key in state_keys(name, format).items()}


def state_size(format: StateFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a state of this shape, scales counted."""
    return sum(math.prod(size) * dtype.itemsize for size, dtype in describe_state("", format, shape).values())


def make_states(slots: Sequence[Slot], format: StateFormat, shape: torch.Size, device: torch.device) -> list[Parts]:
    """The tensors of each state by the names of `StateFormat.parts`; states that are new become zeros."""
    for state, name in slots:
        keys = state_keys(name, format)
        if not set(keys.values()) <= state.keys():
            state |= {keys[part]: zero for part, zero in zero_state(format, shape, device).items()}
    return [{part: state[key] for part, key in state_keys(name, format).items()} for state, name in slots]


def read_states(slots: Sequence[Slot], format: StateFormat, like: Tensor) -> Tensor:
    """States of one shape and format -> fp32 [B, R, ...], the shape of `like`; zeros where one is new.

    Blocks of a format lie within rows, so that stacked states decode as one.
    """
    format = format.fitted(like.shape[1:])
    states = make_states(slots, format, like.shape[1:], like.device)
    parts = {part: torch.cat([state[part] for state in states]) for part in states[0]}
    return dequantize_state(parts, format, like.flatten(0, 1).shape).view(like.shape)


def write_states(slots: Sequence[Slot], format: StateFormat, values: Tensor) -> None:
    """Store fp32 [B, R, ...] as states that `read_states` has read before."""
    format = format.fitted(values.shape[1:])
    states = make_states(slots, format, values.shape[1:], values.device)
    for part, stacked in quantize_state(values.flatten(0, 1), format).items():
        pieces = stacked.view(len(slots), -1, *stacked.shape[1:]).unbind(0)
        torch._foreach_copy_([state[part] for state in states], list(pieces))
