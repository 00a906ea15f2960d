"""Optimizer states that live on the host and pass through the device during a step.

Parameters are put into buckets. While one bucket is updated, the next one's states are on their way to the device and
the last one's on their way back: three staging buffers on the device, all that the states take there. The states of
tensors that share a bucket lie side by side in one piece of pinned memory, so that a copy is one transfer at the speed
of the bus. A tensor with more states than a bucket holds is cut between rows, and each piece is a bucket. The update
itself is the one of states on the device, from the whole gradients, so results are the same bit for bit: no block of a
state crosses rows, and a piece knows its place in the tensor, by which its random bits are drawn.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from qtrain.kernels.optim.fused_update import FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import StateFormat
from qtrain.tensors.stored_weight import StoredWeight

BUCKET_BYTES = 256 * 2**20
"""States that are moved at once, at most; only what cannot be cut may be more."""
STAGES = 3
_ALIGNMENT = 256
_ROWS = 16
"""Pieces begin at multiples of it: whatever a row's length, 16 rows keep weights and gradients aligned for the kernel,
which would copy a gradient that is not."""


@dataclass(frozen=True)
class HostSizes:
    """What a tensor keeps on the host. rows: between which it may be cut, 1 for not at all; row_bytes: bytes a row of
    each of its states' tensors, and of its master."""

    rows: int
    row_bytes: tuple[int, ...]

    def total(self, rows: int) -> int:
        """Bytes of so many rows in a buffer."""
        return sum(_padded(size * rows) for size in self.row_bytes)

    def piece_rows(self) -> int:
        """Rows of each piece but the last, all of about the same size."""
        fitting = max((BUCKET_BYTES - _ALIGNMENT * len(self.row_bytes)) // sum(self.row_bytes), 1)
        unit = _ROWS if fitting >= _ROWS else 1
        pieces = -(-self.rows // (fitting // unit * unit))
        return -(-self.rows // (pieces * unit)) * unit


@dataclass(frozen=True)
class Piece:
    """What a bucket holds of the tensor with number `owner`. rows: None for all of it."""

    owner: int
    rows: slice | None = None


def host_sizes(
    shape: torch.Size, formats: Iterable[StateFormat], *, master: bool = False, whole: bool = False
) -> HostSizes:
    """Of a parameter of `shape` with states in `formats`. whole: it must not be cut."""
    formats = list(formats)
    parts = [part for format in formats for part in format.parts(shape).values()]
    if master:
        parts.append((tuple(shape), torch.float32))
    has_rows = len(shape) > any(format.block for format in formats)  # to blocks, a vector is one row
    rows = max(shape[0], 1) if has_rows and not whole else 1
    return HostSizes(rows, tuple(math.prod(s) * dtype.itemsize // rows for s, dtype in parts))


def cut(tensors: Sequence[HostSizes]) -> list[list[Piece]]:
    """Buckets of at most BUCKET_BYTES: several whole tensors, or one piece of a larger one."""
    buckets: list[list[Piece]] = []
    shared: list[Piece] = []
    filled = 0
    for owner, sizes in enumerate(tensors):
        size = sizes.total(sizes.rows)
        if size > BUCKET_BYTES and sizes.rows > 1:
            step = sizes.piece_rows()
            starts = range(0, sizes.rows, step)
            buckets += [[Piece(owner, slice(start, min(start + step, sizes.rows)))] for start in starts]
            continue
        if not shared or filled + size > BUCKET_BYTES:
            shared, filled = [], 0
            buckets.append(shared)
        shared.append(Piece(owner))
        filled += size
    return buckets


def staging_bytes(tensors: Sequence[HostSizes]) -> int:
    """Bytes of the staging buffers on the device."""
    sizes = _bucket_bytes(cut(tensors), tensors)
    return min(STAGES, len(sizes)) * max(sizes, default=0)


def _bucket_bytes(buckets: Sequence[Sequence[Piece]], tensors: Sequence[HostSizes]) -> list[int]:
    def size(piece: Piece) -> int:
        sizes = tensors[piece.owner]
        return sizes.total(sizes.rows if piece.rows is None else piece.rows.stop - piece.rows.start)

    return [sum(map(size, bucket)) for bucket in buckets]


class OffloadedUpdate:
    """`FusedUpdate` over slots whose states (and masters) lie on the host; they move to pinned memory."""

    def __init__(
        self,
        rule: str,
        slots: Sequence[Slot],
        *,
        groups: int = 1,
        seed: int = 0,
        sr: bool = True,
        kernel: bool | None = None,
    ):
        self.slots = list(slots)
        self.device = slots[0].weight.device
        on_cuda = self.device.type == "cuda"
        tensors = [_sizes_of(slot, on_cuda if kernel is None else kernel) for slot in self.slots]
        buckets = cut(tensors)
        sizes = _bucket_bytes(buckets, tensors)
        self._stages = [
            torch.empty(max(sizes), dtype=torch.uint8, device=self.device) for _ in range(min(STAGES, len(sizes)))
        ]
        self._buckets: list[_Bucket] = []
        for number, pieces in enumerate(buckets):
            rows = pieces[0].rows
            if rows is None or rows.start == 0:  # a tensor that is cut moves whole: its states stay single tensors
                host = _move([self.slots[piece.owner] for piece in pieces], pinned=on_cuda)
            stage = _Packed(self._stages[number % len(self._stages)])
            kept = [_rows_of(self.slots[piece.owner], piece.rows) for piece in pieces]
            staged = [_with_host_tensors(slot, stage.place_for) for slot in kept]
            update = FusedUpdate(rule, staged, groups=groups, seed=seed, sr=sr, kernel=kernel)
            for piece, slot in zip(pieces, staged, strict=True):
                # Pieces begin from one count and have a gradient in the same steps, so their counters stay the same.
                self.slots[piece.owner].step = slot.step
            if rows is None:
                transfers = [(host, stage.memory[: len(host)])]
            else:
                transfers = list(zip(_host_tensors(kept[0]), _host_tensors(staged[0]), strict=True))
            self._buckets.append(_Bucket(pieces, update, transfers))
        self._in, self._out = (torch.cuda.Stream() for _ in range(2)) if on_cuda else (None, None)

    def set_hyper(self, group: int, values: Mapping[str, float | Tensor]) -> None:
        """As `FusedUpdate.set_hyper`."""
        for bucket in self._buckets:
            bucket.update.set_hyper(group, values)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None = None) -> None:
        """As `FusedUpdate.step`."""
        if self._in is None:
            for bucket in self._buckets:
                bucket.fetch()
                bucket.step(grads, grad_scale)
                bucket.put_back()
            return
        computing = torch.cuda.current_stream()
        self._in.wait_stream(self._out)  # a bucket of the last step may still be on its way back
        self._in.wait_stream(computing)
        left = [torch.cuda.Event() for _ in self._buckets]
        for number, bucket in enumerate(self._buckets):
            with torch.cuda.stream(self._in):
                if number >= len(self._stages):
                    self._in.wait_event(left[number - len(self._stages)])
                bucket.fetch()
                arrived = self._in.record_event()
            computing.wait_event(arrived)
            bucket.step(grads, grad_scale)
            self._out.wait_stream(computing)
            with torch.cuda.stream(self._out):
                bucket.put_back()
                left[number].record(self._out)

    def synchronize(self) -> None:
        """Wait until the host's states are those after the last step."""
        if self._out is not None:
            self._out.synchronize()

    @property
    def launches(self) -> int:
        return sum(bucket.update.launches for bucket in self._buckets)


@dataclass
class _Bucket:
    """transfers: memory of the host, and its place in the bucket's stage."""

    pieces: list[Piece]
    update: FusedUpdate
    transfers: list[tuple[Tensor, Tensor]]

    def fetch(self) -> None:
        for host, staged in self.transfers:
            staged.copy_(host, non_blocking=True)

    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None) -> None:
        whole = [grads[piece.owner] for piece in self.pieces]
        own = [g if g is None or p.rows is None else g[p.rows] for p, g in zip(self.pieces, whole, strict=True)]
        self.update.step(own, grad_scale)

    def put_back(self) -> None:
        for host, staged in self.transfers:
            host.copy_(staged, non_blocking=True)


class _Packed:
    """A piece of memory that is given out to one tensor after the other."""

    def __init__(self, memory: Tensor):
        self.memory, self._filled = memory, 0

    def place_for(self, tensor: Tensor) -> Tensor:
        """The next place, of the tensor's shape and dtype."""
        begin, size = self._filled, tensor.numel() * tensor.element_size()
        self._filled += _padded(size)
        return self.memory[begin : begin + size].view(tensor.dtype).view(tensor.shape)


def _padded(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _sizes_of(slot: Slot, use_kernel: bool) -> HostSizes:
    # Without the kernel, a stored weight draws its random bits as if it began with its tensor's first element.
    whole = isinstance(slot.weight, StoredWeight) and not use_kernel
    formats = (format for format, _ in slot.states)
    return host_sizes(slot.weight.shape, formats, master=slot.master is not None, whole=whole)


def _host_tensors(slot: Slot) -> list[Tensor]:
    tensors = [tensor for _, parts in slot.states for tensor in parts.values()]
    return tensors if slot.master is None else [*tensors, slot.master]


def _with_host_tensors(slot: Slot, change: Callable[[Tensor], Tensor]) -> Slot:
    """A slot with what `change` makes of its states and master."""
    states = tuple((format, {name: change(t) for name, t in parts.items()}) for format, parts in slot.states)
    return replace(slot, states=states, master=None if slot.master is None else change(slot.master))


def _rows_of(slot: Slot, rows: slice | None) -> Slot:
    """The slot of some rows, which are views of the whole's."""
    if rows is None:
        return slot
    weight = slot.weight
    first = slot.first_element + rows.start * (weight.shape.numel() // weight.shape[0])
    if isinstance(weight, StoredWeight):
        codes, scale = weight.codes[rows], weight.scale[rows]
        weight = StoredWeight(codes, scale, weight.format, torch.Size([len(codes), weight.shape[1]]), weight.dtype)
    else:
        weight = weight[rows]
    return replace(_with_host_tensors(slot, lambda tensor: tensor[rows]), weight=weight, first_element=first)


def _move(slots: Sequence[Slot], *, pinned: bool) -> Tensor:
    """Move the states of slots into one piece of memory, which is returned."""
    size = sum(_padded(t.numel() * t.element_size()) for slot in slots for t in _host_tensors(slot))
    host = _Packed(torch.empty(size, dtype=torch.uint8, pin_memory=pinned))
    for slot in slots:
        moved = _with_host_tensors(slot, lambda tensor: host.place_for(tensor).copy_(tensor))
        slot.states, slot.master = moved.states, moved.master
    return host.memory
