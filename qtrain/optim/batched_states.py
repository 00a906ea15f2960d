"""Many matrices of one shape in one launch: batches of parameters, and their states as one tensor.

The number of launches grows with the size of a model, not with its number of layers.
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from qtrain.kernels.optim.state_formats import StateFormat, dequantize_state, quantize_state, zero_state
from qtrain.optim.optimizer import StateShapes
from qtrain.optim.state_layout import state_keys

BATCH_ELEMENTS = 1 << 26
"""Elements of a batch at most: 256 MiB in fp32."""

StateRef = tuple[dict[str, Any], str]
"""One state of one parameter: the parameter's states, and the state's name among them."""


def batches_by_shape(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors that share shape, dtype, device and type, at most BATCH_ELEMENTS together."""
    kinds: dict[tuple, list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.shape, tensor.dtype, tensor.device, type(tensor)), []).append(i)
    for indices in kinds.values():
        size = max(1, BATCH_ELEMENTS // max(tensors[indices[0]].numel(), 1))
        for start in range(0, len(indices), size):
            yield indices[start : start + size]


def state_shapes(name: str, format: StateFormat, shape: tuple[int, ...]) -> StateShapes:
    """The tensors that one state consists of."""
    format = format.fitted(torch.Size(shape))
    tensors = format.parts(torch.Size(shape))
    return {key: tensors[kind] for kind, key in state_keys(name, format).items()}


def state_size(format: StateFormat, shape: tuple[int, ...]) -> int:
    """Bytes of a state of this shape, scales included."""
    return sum(math.prod(size) * dtype.itemsize for size, dtype in state_shapes("", format, shape).values())


def state_tensors(
    refs: Sequence[StateRef], format: StateFormat, shape: torch.Size, device: torch.device
) -> list[dict[str, Tensor]]:
    """The tensors of each state by the names of `StateFormat.parts`; missing states are created as zeros."""
    for state, name in refs:
        keys = state_keys(name, format)
        if not set(keys.values()) <= state.keys():
            state |= {keys[kind]: zero for kind, zero in zero_state(format, shape, device).items()}
    return [{kind: state[key] for kind, key in state_keys(name, format).items()} for state, name in refs]


def read_states(refs: Sequence[StateRef], format: StateFormat, like: Tensor) -> Tensor:
    """B states of one shape and format -> fp32 [B, R, ...], the shape of `like`; missing states are zeros.

    Blocks of a format lie within rows, so concatenated states decode as one.
    """
    format = format.fitted(like.shape[1:])
    states = state_tensors(refs, format, like.shape[1:], like.device)
    batched = {kind: torch.cat([state[kind] for state in states]) for kind in states[0]}
    return dequantize_state(batched, format, like.flatten(0, 1).shape).view(like.shape)


def write_states(refs: Sequence[StateRef], format: StateFormat, values: Tensor) -> None:
    """Store fp32 [B, R, ...] in states that `read_states` has read before."""
    format = format.fitted(values.shape[1:])
    states = state_tensors(refs, format, values.shape[1:], values.device)
    for kind, batched in quantize_state(values.flatten(0, 1), format).items():
        split = batched.view(len(refs), -1, *batched.shape[1:]).unbind(0)
        torch._foreach_copy_([state[kind] for state in states], list(split))
