"""Optimizer states that live on the host and pass through the device during a step.

Parameters are cut into buckets. While one bucket is updated, the next one's states are on their way to the device and
the last one's on their way back: three staging buffers on the device, all that the states take there. A bucket's states
lie side by side in one piece of pinned memory, so that a copy is one transfer at the speed of the bus. The update
itself is the one of states on the device, from the whole gradients, so results are the same bit for bit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from qtrain.kernels.fused_update import FusedUpdate, Slot

BUCKET_BYTES = 256 * 2**20
"""States that are moved at once; one tensor with more has a bucket of its own."""
STAGES = 3
_ALIGNMENT = 256


class OffloadedUpdate:
    """`FusedUpdate` over slots whose states (and masters) lie on the host; they move to pinned memory."""

    def __init__(self, rule: str, slots: Sequence[Slot], *, groups: int = 1, seed: int = 0, sr: bool = True):
        self.slots = list(slots)
        self.device = slots[0].weight.device
        self._buckets = _cut(self.slots)
        sizes = [sum(_padded(t) for i in bucket for t in _host_tensors(self.slots[i])) for bucket in self._buckets]
        self._stages = [
            torch.empty(max(sizes), dtype=torch.uint8, device=self.device) for _ in range(min(STAGES, len(sizes)))
        ]
        self._hosts = [torch.empty(size, dtype=torch.uint8, pin_memory=self.device.type == "cuda") for size in sizes]
        self._updates = []
        for number, (bucket, host) in enumerate(zip(self._buckets, self._hosts, strict=True)):
            staged = _move(self.slots, bucket, host, self._stages[number % len(self._stages)])
            update = FusedUpdate(rule, staged, groups=groups, seed=seed, sr=sr)
            for i, slot in zip(bucket, staged, strict=True):
                self.slots[i].step = slot.step
            self._updates.append(update)
        self._in, self._out = (torch.cuda.Stream() for _ in range(2)) if self.device.type == "cuda" else (None, None)

    def set_hyper(self, group: int, values: Mapping[str, float | Tensor]) -> None:
        """As `FusedUpdate.set_hyper`."""
        for update in self._updates:
            update.set_hyper(group, values)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None = None) -> None:
        """As `FusedUpdate.step`."""
        if self._in is None:
            for number, bucket in enumerate(self._buckets):
                self._stage(number).copy_(self._hosts[number])
                self._updates[number].step([grads[i] for i in bucket], grad_scale)
                self._hosts[number].copy_(self._stage(number))
            return
        computing = torch.cuda.current_stream()
        self._in.wait_stream(self._out)  # a bucket of the last step may still be on its way back
        self._in.wait_stream(computing)
        left = [torch.cuda.Event() for _ in self._buckets]
        for number, bucket in enumerate(self._buckets):
            with torch.cuda.stream(self._in):
                if number >= len(self._stages):
                    self._in.wait_event(left[number - len(self._stages)])
                self._stage(number).copy_(self._hosts[number], non_blocking=True)
                arrived = self._in.record_event()
            computing.wait_event(arrived)
            self._updates[number].step([grads[i] for i in bucket], grad_scale)
            self._out.wait_stream(computing)
            with torch.cuda.stream(self._out):
                self._hosts[number].copy_(self._stage(number), non_blocking=True)
                left[number].record(self._out)

    def _stage(self, number: int) -> Tensor:
        return self._stages[number % len(self._stages)][: len(self._hosts[number])]

    def synchronize(self) -> None:
        """Wait until the host's states are those after the last step."""
        if self._out is not None:
            self._out.synchronize()

    @property
    def launches(self) -> int:
        return sum(update.launches for update in self._updates)


def _host_tensors(slot: Slot) -> list[Tensor]:
    tensors = [tensor for _, parts in slot.states for tensor in parts.values()]
    return tensors if slot.master is None else [*tensors, slot.master]


def _padded(tensor: Tensor) -> int:
    return -(-tensor.numel() * tensor.element_size() // _ALIGNMENT) * _ALIGNMENT


def _cut(slots: Sequence[Slot]) -> list[list[int]]:
    """Indices of slots, in buckets of about BUCKET_BYTES of states."""
    buckets: list[list[int]] = []
    filled = BUCKET_BYTES
    for i, slot in enumerate(slots):
        size = sum(map(_padded, _host_tensors(slot)))
        if not buckets or filled + size > BUCKET_BYTES:
            buckets.append([])
            filled = 0
        buckets[-1].append(i)
        filled += size
    return buckets


def _move(slots: list[Slot], bucket: Sequence[int], host: Tensor, stage: Tensor) -> list[Slot]:
    """Move a bucket's states into `host`; returns its slots with states at the same places in `stage`."""
    staged, place = [], 0

    def moved(tensor: Tensor) -> tuple[Tensor, Tensor]:
        nonlocal place
        size = tensor.numel() * tensor.element_size()
        views = [m[place : place + size].view(tensor.dtype).view(tensor.shape) for m in (host, stage)]
        views[0].copy_(tensor)
        place += _padded(tensor)
        return views[0], views[1]

    for i in bucket:
        slot, states = slots[i], []
        for format, parts in slot.states:
            views = {name: moved(tensor) for name, tensor in parts.items()}
            parts.update({name: pair[0] for name, pair in views.items()})
            states.append((format, {name: pair[1] for name, pair in views.items()}))
        master = None
        if slot.master is not None:
            slot.master, master = moved(slot.master)
        staged.append(replace(slot, states=tuple(states), master=master))
    return staged
