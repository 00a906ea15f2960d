"""How an optimizer stores its states: formats, names in checkpoints, shards, and states of one shape as one tensor.

Matrices of one shape are updated in one launch, so the number of launches grows with the size of a model, not with its
number of layers.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.optim.state_formats import (
    BLOCKS,
    FormatName,
    StateFormat,
    dequantize_state,
    parse_format,
    quantize_state,
    state_format,
    zero_state,
)

FormatChoice = Literal["weight", "fp32", "bf16", "fp8", "int8", "int4"]
"""The format of a state. weight: the dtype of the parameter."""

StateShapes = dict[str, tuple[tuple[int, ...], torch.dtype | MaybeNone]]
"""Key of each of a parameter's states -> its shape and dtype."""

MASTER = "master"
"""Name of a parameter's fp32 master copy among its states."""

HOST_NAMES = ("m", "v", MASTER)
"""What may be kept in host memory, by the names of `--offload`: a rule's first and second state, and the master."""


@dataclass(frozen=True)
class StateOptions:
    """How states and weights are stored.

    formats: of each state. block: elements per scale; 0: the default of the format. master: keep an fp32 master copy of
    bf16 weights. sr: round bf16 weights without a master, and bf16 states, stochastically. small: vectors, and tensors
    with fewer elements than this, keep fp32 states; the unsharded size decides, so sharding changes nothing. offload:
    which of HOST_NAMES are kept in host memory.
    """

    formats: Mapping[str, FormatChoice]
    block: int = 0
    master: bool = False
    sr: bool = False
    small: int = 4096
    offload: frozenset[str] = frozenset()

    @property
    def host_names(self) -> tuple[str, ...]:
        """Those of HOST_NAMES that there are."""
        return (*HOST_NAMES[: len(self.formats)], *([MASTER] if self.master else []))

    def is_offloaded(self, key: str) -> bool:
        """Whether the state with this key is to be in host memory."""
        names = {**dict(zip(self.formats, HOST_NAMES, strict=False)), MASTER: MASTER}
        return names.get(key.partition(".")[0]) in self.offload

    def formats_of(
        self, parameter: Tensor, signed: Mapping[str, bool], full_shape: torch.Size | None = None
    ) -> dict[str, StateFormat]:
        """The format of each state of `parameter`. signed: by state, whether it can be negative. full_shape: of the
        matrix that it is a part of; a shard by rows (DTensor) has the shape of its whole anyway."""
        full_shape = full_shape or parameter.shape
        is_small = parameter.ndim < 2 or full_shape.numel() < self.small
        names: dict[str, FormatName] = {}
        for state, choice in self.formats.items():
            if choice == "weight":
                names[state] = "bf16" if parameter.dtype == torch.bfloat16 else "fp32"
            else:
                names[state] = "fp32" if is_small and choice in BLOCKS else choice
        # One block size for all states of a parameter: a tile of the kernel is a block of each.
        block = self.block or min((BLOCKS[name] for name in names.values() if name in BLOCKS), default=0)
        formats = {s: state_format(name, signed=signed[s], block=block) for s, name in names.items()}
        # A block that divides a row of the full parameter; and, where its columns are split, one of the part's.
        return {s: format.fitted(full_shape).fitted(parameter.shape) for s, format in formats.items()}


def state_keys(name: str, format: StateFormat) -> dict[str, str]:
    """Tensor of the state (`value`, or `codes` and `scale`) -> its key among the parameter's states."""
    return {kind: f"{name}.{format.id}.{kind}" if format.block else name for kind in format.parts(torch.Size([1]))}


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_of_shard(p: Tensor) -> int:
    """Index of the first element of this rank's shard of a DTensor."""
    if not isinstance(p, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return offset[0] * (p.numel() // max(p.shape[0], 1)) if offset else 0  # first row * columns


def as_sharded(value: Tensor, p: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The state of a shard as a DTensor of the unsharded `shape`, if the parameter is a DTensor."""
    if not isinstance(p, DTensor):
        return value
    # The stride of a contiguous tensor of the full shape: DTensor cannot tell it from uneven shards.
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def saved_format(saved: Mapping[str, tuple[Any, torch.dtype]], state: str) -> StateFormat:
    """The format that `state` is saved in, read from the keys and dtypes. ValueError if it is none."""
    if state in saved:
        plain = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(saved[state][1])
        if plain is None:
            raise ValueError(f"{state} is {saved[state][1]}")
        return parse_format(plain)
    # exp_avg.int8_256.codes -> int8_256.
    ids = {key.split(".")[1] for key in saved if key.startswith(f"{state}.") and key.count(".") == 2}
    if len(ids) != 1:
        raise ValueError(f"{state} is in {len(ids)} formats")
    return parse_format(ids.pop())


def plausible(tensors: Mapping[str, Tensor], format: StateFormat, signed: bool) -> bool:
    """Whether a state's values are finite, and not negative where they cannot be."""
    # Codes of integer formats are finite; a block with a NaN or an Inf has it in its scale.
    values = local(tensors["scale" if format.block else "value"])
    if not values.numel():
        return True
    low, high = (float(x) for x in values.float().aminmax())  # propagates NaN
    # A negated scale marks a block of squares.
    may_be_negative = (format.name == "fp8" and not format.signed) or (not format.block and signed)
    finite = abs(low) < float("inf") and abs(high) < float("inf")
    if format.name == "fp8":
        finite &= bool(local(tensors["codes"]).float().isfinite().all())
    return finite and (may_be_negative or low >= 0)


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
        # At least one: a matrix above the limit is a batch of its own.
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
        keys = state_keys(name, format)  # zeros for what neither a step nor a checkpoint has made
        if not set(keys.values()) <= state.keys():
            state |= {keys[kind]: zero for kind, zero in zero_state(format, shape, device).items()}
    return [{kind: state[key] for kind, key in state_keys(name, format).items()} for state, name in refs]


def read_states(refs: Sequence[StateRef], format: StateFormat, like: Tensor) -> Tensor:
    """B states of one shape and format -> fp32 [B, R, ...], the shape of `like`; missing states are zeros.

    Blocks of a format lie within rows, so concatenated states decode as one.
    """
    format = format.fitted(like.shape[1:])
    states = state_tensors(refs, format, like.shape[1:], like.device)
    batched = {kind: torch.cat([state[kind] for state in states]) for kind in states[0]}  # [B * R, ...]
    return dequantize_state(batched, format, like.flatten(0, 1).shape).view(like.shape)


def write_states(refs: Sequence[StateRef], format: StateFormat, values: Tensor) -> None:
    """Store fp32 [B, R, ...] in states that `read_states` has read before."""
    format = format.fitted(values.shape[1:])
    states = state_tensors(refs, format, values.shape[1:], values.device)
    for kind, batched in quantize_state(values.flatten(0, 1), format).items():
        split = batched.view(len(refs), -1, *batched.shape[1:]).unbind(0)  # [B, R, ...]: one per state
        torch._foreach_copy_([state[kind] for state in states], list(split))
