"""The sum of squares of many tensors in one launch per dtype: the gradient norm, at the bandwidth of memory.

As in `fused_update.py` a table on the device holds the tensors' addresses and sizes, and a second one the tensor of
every CTA. Squares of bf16 are exact in fp32; all sums are in fp64, in which the order of additions does not show once
the norm is rounded to fp32.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.optim.update_launch import aligned

TILE, LOOPS = 2048, 32
"""Elements of a tile, tiles per CTA: eight elements a thread, and enough CTAs for large tensors."""


def sum_of_squares_ref(tensors: Sequence[Tensor]) -> Tensor:
    """The sum over all elements of all tensors, fp64 scalar."""
    return torch.stack(torch._foreach_norm(list(tensors), 2, dtype=torch.float64)).square().sum()


@triton.jit
def _sum_of_squares_kernel(
    # int32 [CTAs], the tensor of each; int64 [tensors]; int64 [tensors, 2], elements and first CTA.
    owner_ptr, address_ptr, extent_ptr,
    # fp64 [CTAs]: a partial sum each, added by torch in a fixed order.
    out_ptr,
    # LARGE: elements are fp32, else bf16.
    LARGE: tl.constexpr, TILE: tl.constexpr, LOOPS: tl.constexpr,
):  # fmt: skip
    pid = tl.program_id(0)
    owner = tl.load(owner_ptr + pid)
    address = tl.load(address_ptr + owner)
    size, first = tl.load(extent_ptr + owner * 2), tl.load(extent_ptr + owner * 2 + 1)
    begin = (pid - first) * (TILE * LOOPS)
    left = tl.minimum(size - begin, TILE * LOOPS).to(tl.int32)
    # 16-byte aligned, which an address from a table does not tell the compiler: loads are vectorized by this hint.
    x_ptr = tl.multiple_of(address.to(tl.pointer_type(tl.float32 if LARGE else tl.bfloat16)), 16) + begin
    total = tl.zeros((TILE,), tl.float64)
    for start in range(0, left, TILE):
        element = start + tl.arange(0, TILE)
        x = tl.load(x_ptr + element, element < left, 0.0).to(tl.float32)
        if LARGE:
            wide = x.to(tl.float64)
            total += wide * wide
        else:
            total += (x * x).to(tl.float64)  # exact: 8 bits of mantissa squared are 16
    tl.store(out_ptr + pid, tl.sum(total, 0))


class SumOfSquares:
    """`sum_of_squares_ref` of lists of tensors on one device; the tables of each list are built once."""

    def __init__(self) -> None:
        self._launches: dict[tuple[tuple[torch.dtype, int], ...], list[_Launch]] = {}

    @torch.no_grad()
    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        """tensors: at least one, fp32 or bf16, of any shapes and strides -> fp64 scalar on their device."""
        if not tensors[0].is_cuda:
            return sum_of_squares_ref(tensors)
        return self.launch([aligned(t) for t in tensors])

    def launch(self, tensors: Sequence[Tensor]) -> Tensor:
        """The kernel; tensors are contiguous, at addresses in multiples of 16 bytes."""
        sizes = tuple((t.dtype, t.numel()) for t in tensors)  # the tables depend on nothing else
        if sizes not in self._launches:
            self._launches[sizes] = _launches(tensors)
        parts = [torch.zeros(1, dtype=torch.float64, device=tensors[0].device)]
        for launch in self._launches[sizes]:
            members = [tensors[i] for i in launch.members]
            # From pageable memory: the copy has been staged when the call returns.
            launch.addresses.copy_(torch.tensor([t.data_ptr() for t in members]), non_blocking=True)
            parts.append(torch.empty(len(launch.owner), dtype=torch.float64, device=launch.owner.device))
            _sum_of_squares_kernel[(len(launch.owner),)](
                launch.owner, launch.addresses, launch.extents, parts[-1],
                LARGE=members[0].dtype == torch.float32, TILE=TILE, LOOPS=LOOPS, num_warps=TILE // 256,
            )  # fmt: skip
        return torch.cat(parts).sum()


@dataclass(frozen=True)
class _Launch:
    """The tensors of one dtype."""

    members: list[int]
    owner: Tensor  # int32 [CTAs]: the member of each
    addresses: Tensor  # int64 [members]
    extents: Tensor  # int64 [members, 2]: elements, first CTA


def _launches(tensors: Sequence[Tensor]) -> list[_Launch]:
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, t in enumerate(tensors):
        assert t.dtype in (torch.float32, torch.bfloat16), f"a sum of squares of {t.dtype}"
        if t.numel():
            by_dtype.setdefault(t.dtype, []).append(i)
    launches, device = [], tensors[0].device
    for members in by_dtype.values():
        sizes = torch.tensor([tensors[i].numel() for i in members])
        ctas = (sizes + TILE * LOOPS - 1) // (TILE * LOOPS)
        owner = torch.repeat_interleave(torch.arange(len(members), dtype=torch.int32), ctas)
        extents = torch.stack([sizes, ctas.cumsum(0) - ctas], dim=1)
        launches.append(_Launch(members, owner.to(device), torch.zeros_like(sizes).to(device), extents.to(device)))
    return launches
