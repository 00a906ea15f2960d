"""Sums of gradients in host memory: on the GPU those of two units exist at most.

As soon as a unit's backward pass is over, its gradients are added to the sum of the step's earlier micro-batches, which
comes from the host in pieces through one small buffer, and return there, all while the next unit's backward pass runs:
the first micro-batch writes the sum without reading it. Additions are on the device, in the gradients' dtype, as
autograd adds them. So is the sum of squares, of every micro-batch's sum: that of the last one is the gradient's.

On a GPU copies to the host have a stream of their own. Copies to the device and additions run on a second one, which
the caller sets. Both fork from the main stream and join it by events: a CUDA graph can record them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from qtrain.core.hardware.host_memory import PIECE_BYTES, host_tensor_like
from qtrain.kernels.optim.sum_of_squares import sum_of_squares_ref
from qtrain.parallel.sharding.shards import Sharded


class HostGradients:
    """The sums of each group of parameters that are updated in host memory; others stay where autograd adds them."""

    def __init__(self, groups: Sequence[Sequence[Sharded]], device: torch.device):
        self._groups = [[(s, host_tensor_like(s.master, device)) for s in group if s.on_host] for group in groups]
        self._squares = torch.zeros(len(groups), dtype=torch.float64, device=device)
        largest = max((total.nbytes for total in self.tensors), default=0)
        self._buffer = torch.empty(min(PIECE_BYTES, largest), dtype=torch.uint8, device=device)
        self._out = torch.cuda.Stream(device) if device.type == "cuda" else None

    @property
    def tensors(self) -> list[Tensor]:
        """The sums."""
        return [total for group in self._groups for _, total in group]

    @torch.no_grad()
    def add_group(self, index: int, *, first: bool) -> None:
        """Add the gradients of a group to its sums, and free them. first: of a step; they replace the sums."""
        if not self._groups[index]:
            return
        gradients = []
        for sharded, total in self._groups[index]:
            gradient, sharded.parameter.grad = sharded.parameter.grad, None
            assert gradient is not None, f"{sharded.name} took no part in the loss"
            gradients.append(gradient)
            self._add(total.view(-1), gradient.view(-1), first)
        # Not the kernel, whose table of addresses comes from the host's pageable memory: a capture refuses that copy.
        self._squares[index].copy_(sum_of_squares_ref(gradients))
        if self._out is not None:  # whoever waits for the current stream finds the sums in host memory
            torch.cuda.current_stream().wait_stream(self._out)

    def _add(self, total: Tensor, gradient: Tensor, first: bool) -> None:
        length = len(self._buffer) // total.element_size()
        for on_host, piece in zip(total.split(length), gradient.split(length), strict=True):
            if not first:
                earlier = self._buffer.view(total.dtype)[: len(piece)]
                earlier.copy_(on_host, non_blocking=True)  # behind the addition that has read the last piece
                piece += earlier
            if self._out is None:
                on_host.copy_(piece)
                continue
            self._out.wait_stream(torch.cuda.current_stream())  # until the piece is complete
            with torch.cuda.stream(self._out):
                on_host.copy_(piece, non_blocking=True)

    def finish(self) -> None:
        """Give the masters the sums as gradients."""
        for group in self._groups:
            for sharded, total in group:
                sharded.master.grad = total

    def squares(self) -> Tensor:
        """Sum of all squared gradients, fp64 scalar on the device."""
        return self._squares.sum()
