"""How an optimizer keeps its states: each one's format and names, and what of a saved one can be true."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from qtrain.kernels.optim.state_formats import BLOCKS, FormatName, StateFormat, parse_format, state_format

FormatChoice = Literal["weight", "fp32", "bf16", "fp8", "int8", "int4"]
"""A state's format; weight: the dtype of the parameter."""

MASTER = "master"
"""The name of a parameter's fp32 copy among its states."""


@dataclass(frozen=True)
class StateOptions:
    """How states and weights are kept.

    formats: of every state. block: elements a scale; 0: the format's usual. master: keep an fp32 copy of weights in
    bf16. sr: round bf16 weights without a master, and bf16 states, stochastically. small: vectors, and tensors of fewer
    elements, keep fp32 states; by their whole size, so that sharding changes nothing. offload: states on the host.
    """

    formats: Mapping[str, FormatChoice]
    block: int = 0
    master: bool = False
    sr: bool = False
    small: int = 4096
    offload: bool = False

    def formats_of(self, parameter: Tensor, signed: Mapping[str, bool]) -> dict[str, StateFormat]:
        """The format of every state of a parameter."""
        is_small = parameter.ndim < 2 or parameter.numel() < self.small
        names: dict[str, FormatName] = {}
        for state, choice in self.formats.items():
            if choice == "weight":
                names[state] = "bf16" if parameter.dtype == torch.bfloat16 else "fp32"
            else:
                names[state] = "fp32" if is_small and choice in BLOCKS else choice
        block = self.block or min((BLOCKS[name] for name in names.values() if name in BLOCKS), default=0)
        formats = {s: state_format(name, signed=signed[s], block=block) for s, name in names.items()}
        return {s: format.fitted(parameter.shape) for s, format in formats.items()}

    def bytes_per_parameter(self, weight_bytes: int) -> float:
        """Of states and master copy, for large matrices with weights of `weight_bytes` each."""
        dtype = torch.bfloat16 if weight_bytes == 2 else torch.float32
        formats = self.formats_of(
            torch.empty(2**16, 2**10, dtype=dtype, device="meta"), dict.fromkeys(self.formats, True)
        )
        return sum(format.bytes_per_element for format in formats.values()) + 4 * (self.master and weight_bytes == 2)


def state_keys(name: str, format: StateFormat) -> dict[str, str]:
    """Part of the state -> its key among the parameter's states."""
    return {part: f"{name}.{format.id}.{part}" if format.block else name for part in format.parts(torch.Size([1]))}


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def first_element(p: Tensor) -> int:
    """The number, in the whole tensor, of the first element of this rank's shard."""
    if not isinstance(p, DTensor):
        return 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(p.shape, p.device_mesh, p.placements)
    return offset[0] * (p.numel() // max(p.shape[0], 1)) if offset else 0


def as_sharded(value: Tensor, p: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A shard's state as a DTensor of the whole `shape`, where the parameter is one."""
    if not isinstance(p, DTensor):
        return value
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        value, p.device_mesh, p.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )


def saved_format(described: Mapping[str, tuple[Any, torch.dtype]], state: str) -> StateFormat:
    """The format that a state is saved in, by its keys. ValueError if it is none."""
    if state in described:
        plain = {torch.float32: "fp32", torch.bfloat16: "bf16"}.get(described[state][1])
        if plain is None:
            raise ValueError(f"{state} is {described[state][1]}")
        return parse_format(plain)
    ids = {key.split(".")[1] for key in described if key.startswith(f"{state}.") and key.count(".") == 2}
    if len(ids) != 1:
        raise ValueError(f"{state} is in {len(ids)} formats")
    return parse_format(ids.pop())


def plausible(parts: Mapping[str, Tensor], format: StateFormat, signed: bool) -> bool:
    """Whether a state's values are finite, and not negative where they cannot be."""
    values = local(parts["scale" if format.block else "value"])
    if not values.numel():
        return True
    least, most = (float(x) for x in values.float().aminmax())  # NaN comes through
    may_be_negative = (format.name == "fp8" and not format.signed) or (not format.block and signed)
    finite = abs(least) < float("inf") and abs(most) < float("inf")
    if format.name == "fp8":
        finite &= bool(local(parts["codes"]).float().isfinite().all())
    return finite and (may_be_negative or least >= 0)
