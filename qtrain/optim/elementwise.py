"""Optimizers with an elementwise update: states in any format, weights of any kind, one fused launch for all of them.

A subclass names a rule of `kernels.optim.fused_update` and the rule's states. This file creates the states in their
formats, steps all parameters together, and converts states when a checkpoint of another member of the family is loaded.

A state of a parameter is one plain tensor under its own name, whose dtype (fp32, bf16) says how it is stored, or two,
`<name>.<format>.codes` and `<name>.<format>.scale`, as in `exp_avg.int8_256.codes`: a checkpoint can be read without
knowing which optimizer wrote it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from qtrain.core.errors import UserError
from qtrain.kernels.optim.fused_update import SIGNED_STATES, FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import StateFormat, dequantize_state, quantize_state, zero_state
from qtrain.kernels.optim.update_rules import LowBitWeight, WeightAmax
from qtrain.optim.offload import OffloadedUpdate
from qtrain.optim.optimizer import PartitionedOptimizer, check_finite
from qtrain.optim.state_layout import (
    MASTER,
    StateOptions,
    StateShapes,
    as_sharded,
    local,
    plausible,
    saved_format,
    state_keys,
)


@dataclass
class _PartitionUpdate:
    """The fused update of one partition. groups: indices of the parameter groups that its parameters are in."""

    update: FusedUpdate | OffloadedUpdate
    groups: list[int]


class LowBitOptimizer(PartitionedOptimizer):
    """An elementwise rule over all parameters. Each parameter counts its own steps.

    RULE: a rule of `kernels.optim.fused_update`. STATES: the names of its states.
    """

    RULE: str
    STATES: tuple[str, ...]

    def __init__(self, groups: list[dict[str, Any]], defaults: dict[str, Any], options: StateOptions, *, seed: int = 0):
        self.options, self.seed = options, seed
        self._updates: dict[int, _PartitionUpdate] | None = None
        self._prepared: dict[int, list[Tensor | None]] = {}  # gradients of the next step, by partition
        self.index_of: dict[Tensor, int] = {}  # keys the random bits of each parameter
        self._amax: dict[Tensor, WeightAmax] = {}
        super().__init__(groups, defaults)

    def hyper(self, group: Mapping[str, Any]) -> dict[str, float | Tensor]:
        """A group's options as the hyperparameters of the rule (`update_rules.HYPER`)."""
        # sgd's momentum takes the place of beta1; lion and adamw have both.
        decay_rates = group["betas"] if "betas" in group else (group["momentum"],)
        named = {name: group[name] for name in ("lr", "weight_decay", "eps") if name in group}
        return named | dict(zip(("beta1", "beta2"), decay_rates, strict=False))

    @property
    def signed(self) -> dict[str, bool]:
        return dict(zip(self.STATES, SIGNED_STATES[self.RULE], strict=True))

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        self._forget_updates()
        for p in self.param_groups[-1]["params"]:
            self.index_of[p] = len(self.index_of)
            placements = p.placements if isinstance(p, DTensor) else ()
            if not all(isinstance(x, Replicate) or x == Shard(0) for x in placements):
                # Blocks of a state lie along rows.
                raise UserError("--optim: a parameter is sharded along another dimension than its rows.")
            if p.dtype not in (torch.float32, torch.bfloat16):
                raise UserError(f"--optim: a parameter is {p.dtype}; weights are fp32 or bf16.")

    # ---- stepping ----------------------------------------------------------------------------------------------------

    @property
    def skips_nan_scale(self) -> bool:
        return not self.streams

    @torch.no_grad()
    def prepare_step(self) -> None:
        for index in range(len(self.partitions)):
            grads = self._prepared[index] = self._gradients(index)
            if any(grad is not None for grad in grads):
                update = self._built_updates()[index].update
                if isinstance(update, FusedUpdate):
                    update.prepare(grads)

    def _gradients(self, index: int) -> list[Tensor | None]:
        # Shards only: the update is elementwise, and random bits are those of the elements in the whole tensor.
        return [None if p.grad is None else local(p.grad) for p in self.partitions[index]]

    def zero_grad(self, set_to_none: bool = True) -> None:
        self._prepared.clear()
        super().zero_grad(set_to_none)

    @torch.no_grad()
    def step_partition(self, index: int) -> None:
        grads = self._prepared.pop(index, None) or self._gradients(index)
        if all(grad is None for grad in grads):
            return
        partition = self._built_updates()[index]
        for group in partition.groups:
            partition.update.set_hyper(group, self.hyper(self.param_groups[group]))
        partition.update.step(grads, self.grad_scale)  # clipping is a factor of what the kernel reads

    def record_amax(self, parameter: Tensor) -> WeightAmax | None:
        stored = isinstance(parameter.data, LowBitWeight)
        if self.streams or stored or parameter.dtype != torch.bfloat16:  # a weight may be updated by slices
            return None
        if parameter not in self._amax:
            # In-place changes of a DTensor count on its local tensor too: either counter tells.
            holders = [parameter, parameter._local_tensor] if isinstance(parameter, DTensor) else [parameter]
            self._amax[parameter] = WeightAmax(holders, parameter.device)
            self._forget_updates()
        return self._amax[parameter]

    def partition(self, partitions: Sequence[Sequence[Tensor]]) -> None:
        super().partition(partitions)
        self._forget_updates()

    def _forget_updates(self) -> None:
        """What was built of the states, which change."""
        self._updates = None

    def _built_updates(self) -> dict[int, _PartitionUpdate]:
        """The update of every partition that is not empty, with its states."""
        if self._updates is None:
            # Built at the first step: states may have been loaded, partitions set or an absmax asked for until then.
            group_of = {p: index for index, group in enumerate(self.param_groups) for p in group["params"]}
            self._updates = {i: self._build(members, group_of) for i, members in enumerate(self.partitions) if members}
        return self._updates

    def _build(self, parameters: list[Tensor], group_of: Mapping[Tensor, int]) -> _PartitionUpdate:
        slots = [self._slot(p, group_of[p]) for p in parameters]
        build: Callable[..., FusedUpdate | OffloadedUpdate] = FusedUpdate
        if self.streams:
            build = partial(OffloadedUpdate, names=self.options.offload if self.states_on_host else ())
        # One launch per combination of formats, whatever the number of parameters.
        update = build(self.RULE, slots, groups=len(self.param_groups), seed=self.seed, sr=self.options.sr)
        for p, slot in zip(parameters, slots, strict=True):
            self.state[p]["step"] = slot.step  # a view of the update's counters: a checkpoint reads the present value
            if self.states_on_host:  # they have moved to pinned memory
                self._point_to(p, slot)
        return _PartitionUpdate(update, sorted({slot.group for slot in slots}))

    @property
    def states_on_host(self) -> bool:
        """Whether any are."""
        return bool(self.options.offload) and self._device_of(self.parameters()[0]).type != "cpu"

    @property
    def streams(self) -> bool:
        """Whether states or weights are in host memory."""
        return self.states_on_host or any(self.placement(p).device is not None for p in self.parameters())

    def _device_of(self, p: Tensor) -> torch.device:
        """Where the parameter is updated."""
        return self.placement(p).device or p.device

    def _slot(self, p: Tensor, group: int) -> Slot:
        state, states = self.state[p], []
        for name, format in self.options.formats_of(p, self.signed, self.full_shape(p)).items():
            keys = state_keys(name, format)  # what a checkpoint has filled in is kept
            if not set(keys.values()) <= state.keys():
                state.update({keys[kind]: value for kind, value in self._new_state(p, name, format).items()})
            states.append((format, {kind: local(state[key]) for kind, key in keys.items()}))
        if self._has_master(p) and MASTER not in state:
            # Created where it lives: the masters of all parameters do not fit on a device that needs offload.
            value = local(p.detach()).to(self.state_device(MASTER, p)).float()
            state[MASTER] = as_sharded(value, p, tuple(p.shape))
        master = local(state[MASTER]) if self._has_master(p) else None
        weight = local(p.data) if isinstance(p, DTensor) else p.detach()
        step, amax = state.get("step"), self._amax.get(p)
        # Ranks hold different elements: each rank's parameters have numbers of their own.
        number = self.index_of[p] + self.placement(p).rng_offset
        first, device = self.first_element(p), self.placement(p).device
        return Slot(weight, tuple(states), step, number, group, master, first, amax, device)

    def _point_to(self, p: Tensor, slot: Slot) -> None:
        """Make the slot's tensors the parameter's states."""
        for name, (format, tensors) in zip(self.STATES, slot.states, strict=True):
            shapes = format.parts(p.shape)
            for kind, key in state_keys(name, format).items():
                self.state[p][key] = as_sharded(tensors[kind], p, shapes[kind][0])
        if slot.master is not None:
            self.state[p][MASTER] = as_sharded(slot.master, p, tuple(p.shape))

    def _has_master(self, p: Tensor) -> bool:
        return self.options.master and type(p.data) in (Tensor, DTensor) and p.dtype == torch.bfloat16

    def _new_state(self, p: Tensor, name: str, format: StateFormat) -> dict[str, Tensor]:
        """A state of zeros, sharded as the parameter is."""
        tensors = zero_state(format, local(p.data).shape, self.state_device(name, p))
        return {kind: as_sharded(value, p, format.parts(p.shape)[kind][0]) for kind, value in tensors.items()}

    def synchronize(self) -> None:
        for partition in (self._updates or {}).values():
            if isinstance(partition.update, OffloadedUpdate):
                partition.update.synchronize()

    # ---- loading states ----------------------------------------------------------------------------------------------

    def drop_states(self) -> None:
        super().drop_states()
        self._forget_updates()

    def state_device(self, key: str, parameter: Tensor, saved_on_host: bool = False) -> torch.device:
        on_host = self.states_on_host and self.options.is_offloaded(key)
        return torch.device("cpu") if on_host else self._device_of(parameter)

    def check_saved(self, name: str, parameter: Tensor, saved: StateShapes) -> None:
        # "exp_avg.int8_256.codes" -> "exp_avg": another format of the same state is converted by `adopt_states`.
        found = {key.partition(".")[0] for key in saved} - {"step", MASTER}
        if found != set(self.STATES):
            held = ", ".join(sorted(found)) or "none"
            raise UserError(
                f"--resume: the checkpoint's optimizer keeps other states ({held}) than this one "
                f"({', '.join(self.STATES)}); give --optim as in the run that saved it, or another of its family."
            )
        try:
            expected: StateShapes = {"step": ((), torch.float32)}
            for state in self.STATES:
                format = saved_format(saved, state)
                if format.block and format.signed != self.signed[state]:  # a code means another value then
                    raise ValueError(f"{state} is in {format.id}")
                tensors = format.parts(parameter.shape)
                expected |= {key: tensors[kind] for kind, key in state_keys(state, format).items()}
            if MASTER in saved:
                expected[MASTER] = (tuple(parameter.shape), torch.float32)
            for key in saved.keys() | expected.keys():
                if saved.get(key) != expected.get(key):
                    raise ValueError(f"{key} has shape and dtype {saved.get(key)}, not {expected.get(key)}")
        except (ValueError, KeyError) as error:
            raise UserError(
                f"--resume: the optimizer state of {name} does not fit: {error}; "
                "use the settings of the run that saved it."
            ) from None

    @torch.no_grad()
    def adopt_states(self, names: Mapping[Tensor, str]) -> list[str]:
        self._forget_updates()
        converted: dict[str, None] = {}
        for p in self.parameters():
            if self.state.get(p):
                converted |= dict.fromkeys(self._adopt(p, names[p]))
        return list(converted)

    def _adopt(self, p: Tensor, parameter_name: str) -> list[str]:
        """Bring the loaded states of one parameter into this optimizer's formats; returns what was converted."""
        state, converted = self.state[p], []
        adopted: dict[str, Tensor] = {"step": state["step"]}
        if not float(state["step"]) >= 0:  # also a NaN
            raise UserError(f"--resume: the optimizer state step of {parameter_name} is {float(state['step'])}.")
        for name, wanted in self.options.formats_of(p, self.signed, self.full_shape(p)).items():
            format = saved_format({k: (v.shape, v.dtype) for k, v in state.items()}, name)
            tensors = {kind: state[key] for kind, key in state_keys(name, format).items()}
            if not plausible(tensors, format, self.signed[name]):
                raise UserError(
                    f"--resume: the optimizer state {name} of {parameter_name} holds NaN, Inf or impossible values; "
                    "resume from an earlier checkpoint."
                )
            if format.id != wanted.id:
                converted.append(f"{name} {format.name} -> {wanted.name}")
                tensors = self._convert(tensors, p, format, wanted)
            adopted |= {key: tensors[kind] for kind, key in state_keys(name, wanted).items()}
        if MASTER in state and self._has_master(p):
            check_finite(MASTER, state[MASTER], parameter_name)
            adopted[MASTER] = state[MASTER]
        elif MASTER in state or self._has_master(p):  # not needed, or created from the weight at the next step
            converted.append(f"{MASTER} {'dropped' if MASTER in state else 'created from the weights'}")
        self.state[p] = adopted
        return converted

    def _convert(
        self, tensors: dict[str, Tensor], p: Tensor, format: StateFormat, wanted: StateFormat
    ) -> dict[str, Tensor]:
        # Through fp32, rank by rank: blocks never cross rows, so a shard by rows converts alone.
        value = dequantize_state({k: local(v) for k, v in tensors.items()}, format, local(p.data).shape)
        shapes = wanted.parts(p.shape)
        return {kind: as_sharded(v, p, shapes[kind][0]) for kind, v in quantize_state(value, wanted).items()}

    def state_dict(self) -> dict[str, Any]:
        self.synchronize()
        packed = super().state_dict()
        if self.states_on_host:  # views of one buffer in several dtypes, which `torch.save` refuses
            states = packed["state"].items()
            packed["state"] = {index: {key: t.clone() for key, t in state.items()} for index, state in states}
        return packed
