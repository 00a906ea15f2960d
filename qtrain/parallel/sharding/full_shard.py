"""Full sharding (ZeRO-3): the weights of a block exist in full only while the block runs.

Ranks gather what a block reads before its forward pass, free it afterwards, gather it again before its backward pass,
and reduce the block's gradients as soon as they are complete. On a GPU a second stream gathers the next block, and
reduces the gradients of the last one, while the current one computes. On one process it is the host's memory that has
the weights between their uses, and the sums of gradients (`host_gradients.py`).

The tensors stay the same objects, which autograd has saved: only their memory comes and goes.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.models import Decoder


@dataclass(frozen=True)
class Unit:
    """What is gathered at once: the matrices of `holder`, while `called` runs. backward_reads: whether its backward
    pass reads them too."""

    called: nn.Module
    holder: nn.Module
    backward_reads: bool = True


def decoder_units(decoder: Decoder) -> list[Unit]:
    """What full sharding gathers of a decoder at once, in the order in which it runs. A tied embedding stays in full:
    both ends read it."""
    units = [Unit(layer, layer) for layer in decoder.layers]
    if decoder.config.tie_word_embeddings:
        return units
    # The loss computes the head's gradients in the forward pass; an embedding's need only the ids.
    embedding = Unit(decoder.embed_tokens, decoder.embed_tokens, backward_reads=False)
    return [embedding, *units, Unit(decoder.output, decoder.lm_head, backward_reads=False)]


class ShardedBlock:
    """A unit with its tensors: those whose memory it frees, contiguous ones if it is free already; fill: fills them, or
    with False those that the forward pass reads, through `staging` bytes. receivers: the tensors whose `.grad` receives
    the unit's gradients.

    Its memory is that of the stream that computes, whichever stream fills it: the allocator gives what is freed on one
    stream to that one alone."""

    def __init__(
        self,
        unit: Unit,
        tensors: Sequence[Tensor],
        fill: Callable[[bool, Tensor | None], None],
        receivers: Sequence[Tensor],
        staging: int = 0,
    ):
        self.called, self.backward_reads, self.receivers = unit.called, unit.backward_reads, receivers
        self._tensors, self._fill = tuple(tensors), fill
        self._staging_bytes = staging
        self._staging: Tensor | None = None
        # Several tensors may share one.
        storages = {t.untyped_storage()._cdata: (t, t.untyped_storage()) for t in tensors}
        self._storages = [(found, found.nbytes() or t.numel() * t.element_size()) for t, found in storages.values()]
        self.gathered, self.whole = True, True
        """Whether the tensors have memory, and whether those that the backward pass alone reads are filled too."""
        self.ready: torch.Event | None = None
        """What a stream must wait for before it reads the tensors."""

    def allocate(self) -> None:
        for storage, size in self._storages:
            storage.resize_(size)  # the tensors stay the objects that autograd and compiled code hold
        if self._staging_bytes:
            self._staging = torch.empty(self._staging_bytes, dtype=torch.uint8, device=self._tensors[0].device)

    def fill(self, whole: bool = True) -> None:
        """Fill the tensors; not whole: without what the backward pass alone reads."""
        # What autograd has saved of the forward pass is the same again in the backward pass, not "modified in place".
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(self._tensors):
            self._fill(whole, self._staging)
        self.gathered, self.whole = True, whole

    def filled(self) -> None:
        """What is launched from now on runs after the tensors are filled."""
        self._staging = None

    def free(self) -> None:
        """Free the tensors' memory. A kernel that reads them may still be queued on the current stream, none that fills
        them on another."""
        for storage, _ in self._storages:
            storage.resize_(0)
        self.gathered, self.ready, self._staging = False, None, None


class FullShard:
    """The blocks of a model, in the order in which they run. reduce(i): reduces the gradients of block i, with
    `reduces_apart` on a stream of its own."""

    def __init__(
        self,
        blocks: Sequence[ShardedBlock],
        device: torch.device,
        reduce: Callable[[int], None],
        *,
        reduces_apart: bool = False,
    ):
        self._blocks, self._reduce = list(blocks), reduce
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        apart = self._stream is not None and reduces_apart
        self._reduce_stream = torch.cuda.Stream(device) if apart else self._stream
        self._reducing: torch.Event | None = None
        self._in_flight: list[Tensor | None] = []
        self._reduced: set[int] = set()
        self._calls = [block.called._compiled_call_impl for block in self._blocks]
        # Its backward pass comes next: it stays.
        self._last_read = max(i for i, block in enumerate(self._blocks) if block.backward_reads)
        for index, block in enumerate(self._blocks):
            # What a module's call runs if it is compiled: torch's hooks would be compiled with it.
            call = block.called._compiled_call_impl or block.called._call_impl
            block.called._compiled_call_impl = functools.partial(self._run, index, call)
            block.free()

    @property
    def blocks(self) -> int:
        """How many there are."""
        return len(self._blocks)

    # ---- passes of a block -------------------------------------------------------------------------------------------

    def _run(self, index: int, call: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self._need(index, self._read_at_once(index))
        self._prefetch(index + 1, self._read_at_once(index + 1))
        if args and _trains(args[0]):
            # On the input: when its gradient arrives, those of the block's parameters are complete.
            args = (_AtBackward.apply(args[0], functools.partial(self._after_backward, index)), *args[1:])
        output = call(*args, **kwargs)
        backward_follows = torch.is_grad_enabled() and index == self._last_read
        # The last block's backward pass comes right after its forward pass: freed, it would be gathered twice.
        if not backward_follows:
            self._blocks[index].free()
        first, *others = output if isinstance(output, tuple) else (output,)
        if not _trains(first) or not self._blocks[index].backward_reads:
            return output
        # On the output: the first node of this block that the backward pass reaches.
        first = _AtBackward.apply(first, functools.partial(self._before_backward, index))
        return (first, *others) if isinstance(output, tuple) else first

    def _before_backward(self, index: int) -> None:
        self._need(index)
        if index and self._blocks[index - 1].backward_reads:
            self._prefetch(index - 1)

    def _read_at_once(self, index: int) -> bool:
        """Whether the backward pass reads what block `index` gathers for its forward pass: that of the last one comes
        next, and a loss computes the gradients of its head in the forward pass."""
        return index >= self._last_read or not self._blocks[index].backward_reads

    def _after_backward(self, index: int) -> None:
        block = self._blocks[index]
        block.free()
        self._reduced.add(index)
        if self._reduce_stream is None:
            self._reduce(index)
            return
        # One reduction at a time: gradients of two blocks exist at most.
        self._wait_for_reduction()
        # References until the reduction has run: the allocator must not hand this memory to the current stream.
        self._in_flight = [receiver.grad for receiver in block.receivers]
        self._reduce_stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._reduce_stream):
            self._reduce(index)
            self._reducing = self._reduce_stream.record_event()

    # ---- memory and streams ------------------------------------------------------------------------------------------

    def _need(self, index: int, whole: bool = True) -> None:
        """Have block `index` gathered before anything that is launched from now on."""
        block = self._blocks[index]
        if not block.gathered or (whole and not block.whole):
            self._launch(block, whole)
        if block.ready is not None:
            torch.cuda.current_stream().wait_event(block.ready)
        block.filled()

    def _prefetch(self, index: int, whole: bool = True) -> None:
        if self._stream is not None and 0 <= index < len(self._blocks) and not self._blocks[index].gathered:
            self._launch(self._blocks[index], whole)

    def _launch(self, block: ShardedBlock, whole: bool) -> None:
        block.allocate()
        if self._stream is None:
            block.fill(whole)
            return
        # Kernels that read what this memory held before may still be queued.
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            block.fill(whole)
            block.ready = self._stream.record_event()

    def _wait_for_reduction(self) -> None:
        """Let the current stream wait for the last block's gradients, whose memory is free then."""
        if self._reducing is not None:
            torch.cuda.current_stream().wait_event(self._reducing)
        self._reducing, self._in_flight = None, []

    def end_backward(self) -> None:
        """After a backward pass: wait for all reductions. Blocks that autograd has not announced are reduced now, such
        as the first one where its input has no gradient."""
        for index in range(len(self._blocks)):
            if index not in self._reduced:
                self._after_backward(index)
        self._reduced.clear()
        self._wait_for_reduction()

    def free(self) -> None:
        """Free the blocks that are still gathered: when the weights have changed, or a pass was broken off."""
        self._reduced.clear()
        self._reducing, self._in_flight = None, []
        gathered = [block for block in self._blocks if block.gathered]
        if gathered and self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)  # which may still be filling one
        for block in gathered:
            block.free()

    def gather(self, indices: Iterable[int] | None = None) -> None:
        """Gather these blocks, None: all; each is freed after it has run."""
        for index in range(len(self._blocks)) if indices is None else indices:
            self._need(index)

    def remove(self) -> None:
        """Call the blocks as before."""
        for block, call in zip(self._blocks, self._calls, strict=True):
            block.called._compiled_call_impl = call


def _trains(value: Any) -> bool:
    return torch.is_grad_enabled() and isinstance(value, Tensor) and value.requires_grad


class _AtBackward(torch.autograd.Function):
    """The identity; calls `action` when the backward pass gets here. On a block's output that is where its backward
    pass begins; on its input where its gradients are complete, for autograd accumulates those of parameters before it
    goes on to what the input was computed from."""

    @staticmethod
    def forward(ctx, x: Tensor, action: Callable[[], None]) -> Tensor:
        ctx.action = action
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient: Tensor):
        ctx.action()
        return gradient, None
