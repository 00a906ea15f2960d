"""Layers' inputs that live in host memory between forward and backward.

Of a layer that is recomputed as a whole backward keeps nothing but its input, the residual stream [B, S, C]; of long
sequences these are most of what a device holds. A layer's input is copied to the host while the layer and the next one
run, then its memory is freed; it is allocated again, and filled, one layer ahead of its backward. So the device holds
two of them at most. The last layer's stays: its backward comes first.

Nothing that autograd has saved is exchanged: the tensors stay the same objects, only their memory comes and goes, as
that of weights does under full sharding (`parallel/sharding/full_shard.py`). So it is the same for layers that are
compiled, recomputed or neither. On a GPU copies run on a stream of their own, which forks from and joins the current
one by events: a CUDA graph can record them. Host buffers are allocated once, pinned, and used by every micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qtrain.core.hardware.host_memory import host_memory_for
from qtrain.core.maybe_none import MaybeNone


@dataclass
class Residual:
    """A layer's input. storage: its memory, of `size` bytes when it is allocated; copied: when it is in host memory."""

    storage: torch.UntypedStorage
    size: int
    copied: torch.Event | None = None
    arrived: torch.Event | None = None

    @classmethod
    def of(cls, x: Tensor) -> "Residual":
        """The memory of x, which has it for itself."""
        storage = x.untyped_storage()
        assert storage.nbytes() == x.numel() * x.element_size(), "a layer's input shares its memory with other tensors"
        return cls(storage, storage.nbytes())

    @property
    def on_device(self) -> bool:
        return self.storage.nbytes() > 0

    def bytes(self) -> Tensor:
        """The memory as a uint8 tensor of its own: writing to it changes no version that autograd has saved."""
        return torch.empty(0, dtype=torch.uint8, device=self.storage.device).set_(self.storage)


class ResidualOffload:
    """Runs the layers of a decoder, with their inputs in host memory between the passes. One forward pass at a time:
    its backward pass comes before the next one. Where a kind of it puts them: `_put_away`, `_bring_back`."""

    def __init__(self, layers: int):
        self._last = layers - 1
        self._host: dict[int, Tensor] = {}  # by layer
        self._recorded: list[Tensor] = []  # host buffers that CUDA graphs copy to
        self._kept: dict[int, Residual] = {}  # by layer, until its backward begins
        self._pass = 0
        self._stream: torch.cuda.Stream | MaybeNone = None

    @property
    def host_bytes(self) -> int:
        """Of the buffers in host memory."""
        return sum(buffer.nbytes for buffer in self._host.values())

    def run(self, index: int, layer: Callable[..., Any], x: Tensor, *args: Any) -> Any:
        """`layer(x, *args)` of the layer with this index; layers run in order."""
        if not torch.is_grad_enabled():
            return layer(x, *args)
        if index == 0:
            self._kept.clear()  # of a pass that was broken off
            self._pass += 1
        on_gpu = x.device.type == "cuda"
        if on_gpu and self._stream is None:
            self._stream = torch.cuda.Stream(x.device)
        # When x is written: its copy starts there, while the layer runs.
        ready = torch.cuda.current_stream().record_event() if on_gpu else None
        output = layer(x, *args)
        # One layer late: the copy has had the time of two layers.
        if index - 1 in self._kept:
            self._free(self._kept[index - 1])
        first, *others = output if isinstance(output, tuple) else (output,)
        if not first.requires_grad:  # nothing is kept for backward
            return output
        if index < self._last:
            self._kept[index] = self._put_away(index, x, ready)
        first = _AtBackward.apply(first, self, index, self._pass)
        return (first, *others) if isinstance(output, tuple) else first

    def before_backward(self, index: int, pass_number: int) -> None:
        """Have the input of layer `index` on the device, and that of the layer before on its way."""
        if pass_number != self._pass:
            raise RuntimeError("backward of a forward pass that is not the last one: its residuals are overwritten")
        if index in self._kept:
            residual = self._kept.pop(index)  # autograd holds it from here on
            if not residual.on_device:
                self._bring_back(index, residual)
            if residual.arrived is not None:
                torch.cuda.current_stream().wait_event(residual.arrived)
        if index - 1 in self._kept:
            self._bring_back(index - 1, self._kept[index - 1])

    def _put_away(self, index: int, x: Tensor, ready: torch.Event | None) -> Residual:
        residual = Residual.of(x)
        on_host = self._buffer(index, residual)
        if ready is None:
            on_host.copy_(residual.bytes())
            return residual
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            on_host.copy_(residual.bytes(), non_blocking=True)
            residual.copied = self._stream.record_event()
        return residual

    def _free(self, residual: Residual) -> None:
        # The current stream reuses the memory: it waits for the copy.
        if residual.copied is not None:
            torch.cuda.current_stream().wait_event(residual.copied)
        residual.storage.resize_(0)

    def _bring_back(self, index: int, residual: Residual) -> None:
        residual.storage.resize_(residual.size)
        on_host = self._buffer(index, residual)
        if residual.copied is None:
            residual.bytes().copy_(on_host)
            return
        # Memory of the current stream, whose queued kernels may still use it for something else.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            residual.bytes().copy_(on_host, non_blocking=True)
            residual.arrived = self._stream.record_event()

    def _buffer(self, index: int, residual: Residual) -> Tensor:
        """The layer's host buffer, as long as the residual; it is replaced where it has fewer bytes."""
        buffer, device = self._host.get(index), residual.storage.device
        if buffer is None or len(buffer) < residual.size:
            self._host[index] = buffer = host_memory_for(device, residual.size)
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            self._recorded.append(buffer)
        return buffer[: residual.size]


class _AtBackward(torch.autograd.Function):
    """The identity of a layer's output; in backward, which gets here before the layer, it has the layer's input
    fetched."""

    @staticmethod
    def forward(ctx, output: Tensor, offload: ResidualOffload, index: int, pass_number: int) -> Tensor:
        ctx.arguments = offload, index, pass_number
        return output.view_as(output)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        offload, index, pass_number = ctx.arguments
        offload.before_backward(index, pass_number)
        return gradient, None, None, None
