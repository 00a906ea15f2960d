"""The frame of optimizers whose update is elementwise: states in any format, weights in any kind, one fused launch.

A subclass names a rule of `kernels.fused_update` and its states; the frame makes the states in their formats, steps all
parameters together, and moves states between formats when a checkpoint of another member of the family is loaded.

A state of a parameter is one plain tensor under its own name, where its dtype says how it is stored (fp32, bf16), or
two, `<name>.<format>.codes` and `<name>.<format>.scale`, as in `exp_avg.int8_256.codes`: a checkpoint can be read
without knowing what wrote it.
"""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from qtrain.errors import UserError
from qtrain.kernels.optim.fused_update import SIGNED_STATES, FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import (
    StateFormat,
    dequantize_state,
    quantize_state,
    zero_state,
)
from qtrain.optim.offload import OffloadedUpdate, host_sizes, staging_bytes
from qtrain.optim.optimizer import OptimizerSpec, ParameterShape
from qtrain.optim.partitioned_optimizer import PartitionedOptimizer
from qtrain.optim.resumable import Described
from qtrain.optim.state_layout import (
    MASTER,
    StateOptions,
    as_sharded,
    first_element,
    local,
    plausible,
    saved_format,
    state_keys,
)


class LowBitSpec(OptimizerSpec):
    """What the specs of such optimizers share: bytes by the formats of their states."""

    @property
    @abstractmethod
    def state_options(self) -> StateOptions:
        """How states are kept."""

    def state_bytes(self, weight_bytes: int) -> float:
        return 0.0 if self.state_options.offload else self.state_options.bytes_per_parameter(weight_bytes)

    def total_state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        """As for any optimizer; of states on the host, the staging buffers, which stay on the device."""
        options = self.state_options
        if not options.offload:
            return super().total_state_bytes(shapes, weight_bytes)
        dtype = torch.bfloat16 if weight_bytes == 2 else torch.float32
        tensors = []
        for shape in shapes:
            weight = torch.empty(shape.shape, dtype=dtype, device="meta")
            formats = options.formats_of(weight, dict.fromkeys(options.formats, True)).values()
            master = options.master and dtype == torch.bfloat16
            tensors += [host_sizes(weight.shape, formats, master=master)] * shape.count
        return staging_bytes(tensors)


@dataclass
class _Part:
    """What updates the parameters of one part; groups: those that they are of."""

    update: FusedUpdate | OffloadedUpdate
    groups: list[int]


class LowBitOptimizer(PartitionedOptimizer):
    """An elementwise rule over all parameters. Every parameter counts its own steps.

    RULE: of `kernels.fused_update`. STATES: the names of its states.
    """

    RULE: ClassVar[str]
    STATES: ClassVar[tuple[str, ...]]

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], options: StateOptions, *, seed: int = 0):
        self.options, self.seed = options, seed
        self._updates: dict[int, _Part] | None = None
        self.numbers: dict[Tensor, int] = {}
        super().__init__(groups, defaults)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        """A group's options as the rule's numbers."""
        raise NotImplementedError

    @property
    def rule(self) -> str:
        """The rule in force."""
        return self.RULE

    @property
    def signed(self) -> dict[str, bool]:
        return dict(zip(self.STATES, SIGNED_STATES[self.rule], strict=True))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._updates = None
        for p in self.param_groups[-1]["params"]:
            self.numbers[p] = len(self.numbers)
            placements = p.placements if isinstance(p, DTensor) else ()
            if not all(isinstance(x, Replicate) or x == Shard(0) for x in placements):
                raise UserError("--optim: a parameter is sharded along another dimension than its rows.")
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise UserError(f"--optim: a parameter is {p.dtype}; weights are fp32 or bf16.")

    # ---- stepping ----------------------------------------------------------------------------------------------------

    def push_hyper(self) -> None:
        """Bring learning rate and the other numbers to the device. `step` does it; a recorded step needs it before its
        replay."""
        for part in self._ready().values():
            self._push(part)

    def _push(self, part: _Part) -> None:
        for number in part.groups:
            part.update.set_hyper(number, self.hyper(self.param_groups[number]))

    @torch.no_grad()
    def step_part(self, number: int) -> None:
        grads = [None if p.grad is None else local(p.grad) for p in self.parts[number]]
        if any(grad is not None for grad in grads):
            part = self._ready()[number]
            self._push(part)
            part.update.step(grads, self.grad_scale)

    def split(self, parts: Sequence[Sequence[Tensor]]) -> None:
        super().split(parts)
        self._updates = None

    def _ready(self) -> dict[int, _Part]:
        """The fused update of every part that is not empty, with its states."""
        if self._updates is None:
            group_of = {p: number for number, group in enumerate(self.param_groups) for p in group["params"]}
            self._updates = {n: self._make_part(part, group_of) for n, part in enumerate(self.parts) if part}
        return self._updates

    def _make_part(self, parameters: list[Tensor], group_of: Mapping[Tensor, int]) -> _Part:
        slots = [self._slot(p, group_of[p]) for p in parameters]
        make = OffloadedUpdate if self.states_on_host else FusedUpdate
        update = make(self.rule, slots, groups=len(self.param_groups), seed=self.seed, sr=self.options.sr)
        for p, slot in zip(parameters, slots, strict=True):
            self.state[p]["step"] = slot.step
            if self.states_on_host:  # they have moved to pinned memory
                self._point_to(p, slot)
        return _Part(update, sorted({slot.group for slot in slots}))

    @property
    def states_on_host(self) -> bool:
        first = self.param_groups[0]["params"][0]
        return self.options.offload and first.device.type != "cpu"

    def _slot(self, p: Tensor, group: int) -> Slot:
        state, states = self.state[p], []
        for name, format in self.options.formats_of(p, self.signed).items():
            keys = state_keys(name, format)
            if not set(keys.values()) <= state.keys():
                state.update({keys[part]: value for part, value in self._new_state(p, format).items()})
            states.append((format, {part: local(state[key]) for part, key in keys.items()}))
        if self._has_master(p) and MASTER not in state:
            # made where it lives: all masters at once would not fit on a device that offload is chosen for
            value = local(p.detach()).to(self.home(MASTER, p)).float()
            state[MASTER] = as_sharded(value, p, tuple(p.shape))
        master = local(state[MASTER]) if self._has_master(p) else None
        weight = local(p.data) if isinstance(p, DTensor) else p.detach()
        return Slot(weight, tuple(states), state.get("step"), self.numbers[p], group, master, first_element(p))

    def _point_to(self, p: Tensor, slot: Slot) -> None:
        """Make a slot's tensors the parameter's states."""
        for name, (format, parts) in zip(self.STATES, slot.states, strict=True):
            shapes = format.parts(p.shape)
            for part, key in state_keys(name, format).items():
                self.state[p][key] = as_sharded(parts[part], p, shapes[part][0])
        if slot.master is not None:
            self.state[p][MASTER] = as_sharded(slot.master, p, tuple(p.shape))

    def _has_master(self, p: Tensor) -> bool:
        return self.options.master and type(p.data) in (Tensor, DTensor) and p.dtype == torch.bfloat16

    def _new_state(self, p: Tensor, format: StateFormat) -> dict[str, Tensor]:
        """A state of zeros, sharded as the parameter is."""
        shard = local(p.data)
        device = torch.device("cpu") if self.states_on_host else p.device
        parts = zero_state(format, shard.shape, device)
        return {part: as_sharded(value, p, format.parts(p.shape)[part][0]) for part, value in parts.items()}

    def synchronize(self) -> None:
        """Wait until states on the host are those after the last step."""
        for part in (self._updates or {}).values():
            if isinstance(part.update, OffloadedUpdate):
                part.update.synchronize()

    # ---- states from elsewhere ---------------------------------------------------------------------------------------

    def home(self, key: str, parameter: Tensor) -> torch.device:
        return torch.device("cpu") if self.states_on_host else parameter.device

    def check_saved(self, name: str, p: Tensor, described: Described) -> None:
        found = {key.partition(".")[0] for key in described} - {"step", MASTER}
        if found != set(self.STATES):
            kept = ", ".join(sorted(found)) or "none"
            raise UserError(
                f"--resume: the checkpoint's optimizer keeps other states ({kept}) than this one "
                f"({', '.join(self.STATES)}); give --optim as in the run that saved it, or another of its family."
            )
        try:
            expected: Described = {"step": ((), torch.float32)}
            for state in self.STATES:
                format = saved_format(described, state)
                if format.block and format.signed != self.signed[state]:
                    raise ValueError(f"{state} is in {format.id}")
                parts = format.parts(p.shape)
                expected |= {key: parts[part] for part, key in state_keys(state, format).items()}
            if MASTER in described:
                expected[MASTER] = (tuple(p.shape), torch.float32)
            for key in described.keys() | expected.keys():
                if described.get(key) != expected.get(key):
                    raise ValueError(f"{key} has shape and dtype {described.get(key)}, not {expected.get(key)}")
        except (ValueError, KeyError) as error:
            raise UserError(
                f"--resume: the optimizer state of {name} does not fit: {error}; "
                "use the settings of the run that saved it."
            ) from None

    @torch.no_grad()
    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]:
        self._updates = None
        converted: dict[str, None] = {}
        for p in self.parameters():
            state = self.state.get(p)
            if not state:
                continue
            adopted: dict[str, Tensor] = {"step": state["step"]}
            if not float(state["step"]) >= 0:
                raise UserError(f"--resume: the optimizer state step of {names[p]} is {float(state['step'])}.")
            for name, wanted in self.options.formats_of(p, self.signed).items():
                format = saved_format({k: (v.shape, v.dtype) for k, v in state.items()}, name)
                parts = {part: state[key] for part, key in state_keys(name, format).items()}
                if not plausible(parts, format, self.signed[name]):
                    raise UserError(
                        f"--resume: the optimizer state {name} of {names[p]} holds NaN, Inf or impossible values; "
                        "resume from an earlier checkpoint."
                    )
                if format.id != wanted.id:
                    converted[f"{name} {format.name} -> {wanted.name}"] = None
                    parts = self._convert(parts, p, format, wanted)
                adopted |= {key: parts[part] for part, key in state_keys(name, wanted).items()}
            if MASTER in state and self._has_master(p):
                if not bool(local(state[MASTER]).isfinite().all()):
                    raise UserError(f"--resume: the optimizer state {MASTER} of {names[p]} holds NaN or Inf.")
                adopted[MASTER] = state[MASTER]
            elif MASTER in state or self._has_master(p):  # made anew from the weight, or not needed
                converted[f"{MASTER} {'dropped' if MASTER in state else 'made from the weights'}"] = None
            self.state[p] = adopted
        return list(converted)

    def _convert(
        self, parts: dict[str, Tensor], p: Tensor, format: StateFormat, wanted: StateFormat
    ) -> dict[str, Tensor]:
        value = dequantize_state({k: local(v) for k, v in parts.items()}, format, local(p.data).shape)
        shapes = wanted.parts(p.shape)
        return {part: as_sharded(v, p, shapes[part][0]) for part, v in quantize_state(value, wanted).items()}

    def state_dict(self) -> dict[str, Any]:
        self.synchronize()
        packed = super().state_dict()
        if self.states_on_host:  # views of one piece of memory, of several dtypes: `torch.save` takes no such thing
            states = packed["state"].items()
            packed["state"] = {number: {key: t.clone() for key, t in state.items()} for number, state in states}
        return packed
