"""Optimizer states, weights and gradients that live in host memory and stream through the device during a step.

Parameters are grouped into buckets. While one bucket is updated, the states of the next are copied to the device and
those of the previous one are copied back, through three staging buffers, the only device memory that the states take.
The states of a bucket are adjacent in one pinned buffer, so a copy is a single transfer at bus bandwidth. A tensor
whose states exceed a bucket is split between rows, and each slice is a bucket. The update itself is that of states on
the device and bitwise identical to it: no block of a state crosses rows, and a slice knows its offset in the tensor,
which keys its random bits.

A weight in host memory passes with its states, and its gradient comes with them; neither is moved there by this file.
"""

import functools
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from qtrain.core.hardware.host_memory import host_memory_for
from qtrain.kernels.optim.fused_update import FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import StateFormat
from qtrain.optim.state_layout import HOST_NAMES, MASTER
from qtrain.tensors.stored_weight import StoredWeight

BUCKET_BYTES = 256 * 2**20
"""State bytes of a bucket at most; only a tensor that cannot be split may exceed it."""
STAGES = 3
_ALIGNMENT = 256
_ROW_UNIT = 16
"""Slices start at multiples of it: 16 rows of any length keep weights and gradients aligned. The kernel would copy a
misaligned gradient."""


@dataclass(frozen=True)
class HostSizes:
    """Size of a parameter's tensors in host memory. rows: between which it may be split, 1 if it may not; row_bytes:
    bytes per row of each of them."""

    rows: int
    row_bytes: tuple[int, ...]

    def total(self, rows: int) -> int:
        """Bytes of that many rows in a buffer."""
        return sum(_padded(size * rows) for size in self.row_bytes)

    def slice_rows(self) -> int:
        """Rows of each slice but the last; slices are of about equal size."""
        # Rows that fit in a bucket with every tensor's padding; then as few slices as that takes, of equal size.
        fitting = max((BUCKET_BYTES - _ALIGNMENT * len(self.row_bytes)) // sum(self.row_bytes), 1)
        unit = _ROW_UNIT if fitting >= _ROW_UNIT else 1
        slices = -(-self.rows // (fitting // unit * unit))
        return -(-self.rows // (slices * unit)) * unit


@dataclass(frozen=True)
class RowSlice:
    """What a bucket holds of the tensor with index `owner`. rows: None for all of it."""

    owner: int
    rows: slice | None = None


def host_sizes(
    shape: torch.Size,
    formats: Iterable[StateFormat],
    *,
    master: bool = False,
    whole: bool = False,
    names: Collection[str] = HOST_NAMES,
    weight: torch.dtype | None = None,
) -> HostSizes:
    """For a parameter of `shape` with states in `formats`. whole: it must not be split. names: which of HOST_NAMES are
    in host memory. weight: the dtype of a weight that is there too, with its gradient."""
    formats = list(formats)
    moved = [format for name, format in zip(HOST_NAMES, formats, strict=False) if name in names]
    tensors = [tensor for format in moved for tensor in format.parts(shape).values()]
    if master and MASTER in names:
        tensors.append((tuple(shape), torch.float32))
    if weight is not None:
        tensors += [(tuple(shape), weight)] * 2
    # Without blocks a vector may be split between elements, with them only a matrix, between rows.
    has_rows = len(shape) > any(format.block for format in formats)  # blocks treat a vector as one row
    rows = max(shape[0], 1) if has_rows and not whole else 1
    return HostSizes(rows, tuple(math.prod(s) * dtype.itemsize // rows for s, dtype in tensors))


def fill_buckets(tensors: Sequence[HostSizes]) -> list[list[RowSlice]]:
    """Buckets of at most BUCKET_BYTES: several whole tensors, or one slice of a larger one."""
    buckets: list[list[RowSlice]] = []
    shared: list[RowSlice] = []
    filled = 0
    for owner, sizes in enumerate(tensors):
        size = sizes.total(sizes.rows)
        if size > BUCKET_BYTES and sizes.rows > 1:
            step = sizes.slice_rows()
            starts = range(0, sizes.rows, step)
            buckets += [[RowSlice(owner, slice(start, min(start + step, sizes.rows)))] for start in starts]
            continue
        if not shared or filled + size > BUCKET_BYTES:
            shared, filled = [], 0
            buckets.append(shared)
        shared.append(RowSlice(owner))
        filled += size
    return buckets


@functools.cache  # --fit auto asks for hundreds of plans of the same tensors
def staging_bytes(tensors: tuple[HostSizes, ...]) -> int:
    """Bytes of the staging buffers on the device."""
    sizes = _bucket_bytes(fill_buckets(tensors), tensors)
    return min(STAGES, len(sizes)) * max(sizes, default=0)


def _bucket_bytes(buckets: Sequence[Sequence[RowSlice]], tensors: Sequence[HostSizes]) -> list[int]:
    def size(owned: RowSlice) -> int:
        sizes = tensors[owned.owner]
        return sizes.total(sizes.rows if owned.rows is None else owned.rows.stop - owned.rows.start)

    return [sum(map(size, bucket)) for bucket in buckets]


class OffloadedUpdate:
    """`FusedUpdate` over slots of whose states and masters those that `names` say (HOST_NAMES) are in host memory; the
    constructor moves them to pinned memory. Weights are there of slots that have a `device`. options: of the update."""

    def __init__(self, rule: str, slots: Sequence[Slot], *, names: Collection[str] = HOST_NAMES, **options: Any):
        self.slots = list(slots)
        self.device = slots[0].device or slots[0].weight.device
        on_cuda = self.device.type == "cuda"
        use_kernel = on_cuda if (kernel := options.get("kernel")) is None else kernel
        tensors = [_sizes_of(slot, names, use_kernel) for slot in self.slots]
        buckets = fill_buckets(tensors)
        sizes = _bucket_bytes(buckets, tensors)
        self._stages = [torch.empty(max(sizes), dtype=torch.uint8, device=self.device) for _ in sizes[:STAGES]]
        self._buckets: list[_Bucket] = []
        host = torch.empty(0, dtype=torch.uint8)
        for index, slices in enumerate(buckets):
            rows = slices[0].rows
            # Buckets take turns in the staging buffers; the states of several tensors are one transfer.
            if rows is None or rows.start == 0:  # a tensor that is split moves whole: its states stay single tensors
                host = _move([self.slots[owned.owner] for owned in slices], names, self.device)
            stage = _Arena(self._stages[index % len(self._stages)])
            on_host = [_rows_of(self.slots[owned.owner], owned.rows) for owned in slices]
            staged = [_changed(slot, stage.allocate_like, names) for slot in on_host]
            if rows is None:
                transfers = [(host, stage.memory[: len(host)])]
            else:
                pair = (_host_tensors(slot, names) for slot in (on_host[0], staged[0]))
                transfers = list(zip(*pair, strict=True))
            gradients: list[Tensor | None] = [None] * len(slices)
            for i, slot in enumerate(on_host):
                if slot.device is not None:
                    weight, gradients[i] = (stage.allocate_like(slot.weight) for _ in range(2))
                    staged[i] = replace(staged[i], weight=weight, device=None)
                    transfers.append((slot.weight, weight))  # there and back; the gradient only there
            update = FusedUpdate(rule, staged, **options)
            for owned, slot in zip(slices, staged, strict=True):
                # The slices of a tensor start from the same step count and get gradients in the same steps.
                self.slots[owned.owner].step = slot.step
            self._buckets.append(_Bucket(slices, update, transfers, gradients))
        self._in, self._out = (torch.cuda.Stream(), torch.cuda.Stream()) if on_cuda else (None, None)

    def set_hyper(self, group: int, values: Mapping[str, float | Tensor]) -> None:
        """As `FusedUpdate.set_hyper`."""
        for bucket in self._buckets:
            bucket.update.set_hyper(group, values)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None = None) -> None:
        """As `FusedUpdate.step`."""
        if self._in is None or self._out is None:
            for bucket in self._buckets:
                bucket.to_device(grads)
                bucket.step(grads, grad_scale)
                bucket.to_host()
            return
        # Three streams: in, compute, out. Bucket i + 1 arrives and i - 1 returns while i is updated.
        computing = torch.cuda.current_stream()
        self._in.wait_stream(self._out)  # the last step may still be copying a bucket back
        self._in.wait_stream(computing)  # gradients and weights of this step are ready there
        returned = [torch.cuda.Event() for _ in self._buckets]
        for index, bucket in enumerate(self._buckets):
            with torch.cuda.stream(self._in):
                if index >= len(self._stages):  # the buffer's last bucket must be back before it is overwritten
                    self._in.wait_event(returned[index - len(self._stages)])
                bucket.to_device(grads)
                arrived = self._in.record_event()
            computing.wait_event(arrived)  # on the device: the host enqueues the whole step without waiting
            bucket.step(grads, grad_scale)
            self._out.wait_stream(computing)  # the update of this bucket
            with torch.cuda.stream(self._out):
                bucket.to_host()
                returned[index].record(self._out)
        if any(slot.device is not None for slot in self.slots):
            computing.wait_stream(self._out)  # the next forward pass reads the weights there

    def synchronize(self) -> None:
        """Wait until the states in host memory are those after the last step."""
        if self._out is not None:
            self._out.synchronize()


@dataclass
class _Bucket:
    """transfers: host memory and its place in the bucket's staging buffer. gradients: of each slice the place of those
    that are in host memory."""

    slices: list[RowSlice]
    update: FusedUpdate
    transfers: list[tuple[Tensor, Tensor]]
    gradients: list[Tensor | None]

    def to_device(self, grads: Sequence[Tensor | None]) -> None:
        for host, staged in self.transfers:
            staged.copy_(host, non_blocking=True)
        for own, staged in zip(self._own(grads), self.gradients, strict=True):
            if own is not None and staged is not None:
                staged.copy_(own, non_blocking=True)

    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None) -> None:
        pairs = zip(self._own(grads), self.gradients, strict=True)
        self.update.step([own if own is None or staged is None else staged for own, staged in pairs], grad_scale)

    def _own(self, grads: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Of the gradients of all tensors those of the slices."""
        whole = [grads[owned.owner] for owned in self.slices]
        return [g if g is None or s.rows is None else g[s.rows] for s, g in zip(self.slices, whole, strict=True)]

    def to_host(self) -> None:
        for host, staged in self.transfers:
            host.copy_(staged, non_blocking=True)


class _Arena:
    """A buffer that tensors are allocated from one after the other."""

    def __init__(self, memory: Tensor):
        self.memory, self._filled = memory, 0

    def allocate_like(self, tensor: Tensor) -> Tensor:
        """A view of the next free bytes with the tensor's shape and dtype."""
        # 256-byte starts: what the kernel's 16-byte loads and the allocator's own alignment ask for.
        begin, size = self._filled, tensor.numel() * tensor.element_size()
        self._filled += _padded(size)  # the next tensor starts aligned
        return self.memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _sizes_of(slot: Slot, names: Collection[str], use_kernel: bool) -> HostSizes:
    # Without the kernel, a stored weight draws random bits from element 0 of its tensor on.
    whole = isinstance(slot.weight, StoredWeight) and not use_kernel
    formats = (format for format, _ in slot.states)
    weight = None if slot.device is None else slot.weight.dtype
    own = {"master": slot.master is not None, "whole": whole, "weight": weight}
    return host_sizes(slot.weight.shape, formats, names=names, **own)


def _host_tensors(slot: Slot, names: Collection[str]) -> list[Tensor]:
    moved = [stored for name, (_, stored) in zip(HOST_NAMES, slot.states, strict=False) if name in names]
    tensors = [tensor for stored in moved for tensor in stored.values()]
    return tensors if slot.master is None or MASTER not in names else [*tensors, slot.master]


def _changed(slot: Slot, change: Callable[[Tensor], Tensor], names: Collection[str] = HOST_NAMES) -> Slot:
    """The slot with `change` applied to those of its states and master copy that have one of these names."""
    states = tuple(
        (format, {kind: change(t) if name in names else t for kind, t in tensors.items()})
        for name, (format, tensors) in zip(HOST_NAMES, slot.states, strict=False)
    )
    master = slot.master if slot.master is None or MASTER not in names else change(slot.master)
    return replace(slot, states=states, master=master)


def _rows_of(slot: Slot, rows: slice | None) -> Slot:
    """The slot restricted to `rows`: views of its tensors."""
    if rows is None:
        return slot
    weight = slot.weight
    first = slot.first_element + rows.start * (weight.shape.numel() // weight.shape[0])
    if isinstance(weight, StoredWeight):
        codes, scale = weight.codes[rows], weight.scale[rows]
        weight = StoredWeight(codes, scale, weight.format, torch.Size([len(codes), weight.shape[1]]), weight.dtype)
    else:
        weight = weight[rows]
    return replace(_changed(slot, lambda tensor: tensor[rows]), weight=weight, first_element=first)


def _move(slots: Sequence[Slot], names: Collection[str], device: torch.device) -> Tensor:
    """Move what `names` say of the states of `slots` into one host buffer, which is returned."""
    # Those of all slots are adjacent: one transfer.
    size = sum(_padded(t.numel() * t.element_size()) for slot in slots for t in _host_tensors(slot, names))
    host = _Arena(host_memory_for(device, size))
    for slot in slots:
        moved = _changed(slot, lambda tensor: host.allocate_like(tensor).copy_(tensor), names)
        slot.states, slot.master = moved.states, moved.master
    return host.memory
