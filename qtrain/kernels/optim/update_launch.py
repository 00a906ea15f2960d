"""The device tables by which one launch of `update_kernel` serves many tensors; built once."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.compiler import triton
from qtrain.kernels.numerics.encode import encoding
from qtrain.kernels.optim.state_formats import StateFormat, row_shape
from qtrain.kernels.optim.update_kernel import TABLE, factors_kernel, update_kernel
from qtrain.kernels.optim.update_rules import MIX_M, MIX_V, UPDATE_ROLE, LowBitWeight, Slot, is_stochastic

FACTORS = 8
"""Columns of the table of factors."""


@dataclass(frozen=True)
class _Kind:
    """What the tensors of one launch have in common: constexprs of the kernel."""

    weight: str
    grad: torch.dtype
    formats: tuple[StateFormat, ...]
    block: int
    aligned: bool
    tile: int
    loops: int


@dataclass
class _Launch:
    owner: Tensor  # int32 [CTAs]: the tensor of each
    warps: int
    registers: int | None  # per thread, at most
    constants: dict[str, object]


ELEMENTS_A_THREAD: int = 8
TILE: int = 256
LOOPS: int = 16
"""Elements of a tile, tiles per CTA."""
REGISTERS = 64
"""Per thread, for 32 resident warps per SM: a memory-bound kernel wants occupancy."""


class Launches:
    """The tables of a `FusedUpdate` on its device, and its launches."""

    def __init__(self, rule: str, slots: Sequence[Slot], sr: bool, hyper: Tensor, steps: Tensor, keys: Tensor):
        self.rule, self.slots, self.sr = rule, slots, sr
        self.hyper, self.steps, self.keys = hyper, steps, keys
        device = steps.device
        n = len(self.slots)
        self.table = torch.zeros(n, len(TABLE), dtype=torch.int64, device=device)
        self.factors = torch.zeros(n, FACTORS, dtype=torch.float32, device=device)
        self.launches: list[_Launch] = []
        self._grad_dtypes: list[torch.dtype | None] = [None] * n
        self.grads = torch.zeros(n, dtype=torch.int64, device=device)
        self._addresses: list[int] = [0] * n  # of the last step's gradients: unchanged ones are not uploaded
        self._recorded = False
        self._prepared: tuple[Sequence[Tensor | None], list[Tensor | None]] | None = None
        pinned = device.type == "cuda"
        self._captured = torch.zeros(n, dtype=torch.int64, pin_memory=pinned)  # read by every replay of a CUDA graph

    @property
    def count(self) -> int:
        return 1 + len(self.launches)

    def prepare(self, given: Sequence[Tensor | None]) -> None:
        """Write the table of these gradients, for a `step` of the same sequence."""
        grads = [None if g is None else aligned(g) for g in given]  # views into a flat buffer may be misaligned
        self._prepared = given, grads
        dtypes = [before if g is None else g.dtype for before, g in zip(self._grad_dtypes, grads, strict=True)]
        if dtypes != self._grad_dtypes:  # at the first step; a tensor without a gradient keeps the dtype it had
            self._grad_dtypes = dtypes
            self._build()
        addresses = [0 if g is None else g.data_ptr() for g in grads]
        if addresses != self._addresses or self._recorded:
            self._upload(addresses)

    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None) -> None:
        if self._prepared is None or self._prepared[0] is not grads:
            self.prepare(grads)
        n = len(self.slots)
        factors_kernel[(triton.cdiv(n, 128),)](
            self.table, self.grads, self.hyper, grad_scale, self.steps, self.keys, self.factors, n,
            RULE=self.rule, BLOCK=128,
        )  # fmt: skip
        for launch in self.launches:
            update_kernel[(len(launch.owner),)](
                launch.owner, self.table, self.grads, self.factors, self.keys, UPDATE_ROLE,
                num_warps=launch.warps, maxnreg=launch.registers, **launch.constants,
            )  # fmt: skip
        self._prepared = None

    def _upload(self, addresses: list[int]) -> None:
        """Write the gradients' addresses into the table, without synchronizing."""
        self._addresses = addresses
        if self.table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._recorded = True  # a replay writes its own addresses: these are not known from now on
            self._captured.copy_(torch.tensor(addresses))
            self.grads.copy_(self._captured, non_blocking=True)
        else:  # from pageable memory: the copy has been staged when the call returns
            self.grads.copy_(torch.tensor(addresses), non_blocking=True)

    def _build(self) -> None:
        """Group the tensors by kind into launches, and write the table."""
        kinds: dict[_Kind, list[int]] = {}  # a launch each: what the kernel is compiled for
        rows = torch.zeros(len(self.slots), len(TABLE), dtype=torch.int64)
        ctas = [0] * len(self.slots)
        for i, slot in enumerate(self.slots):
            if not slot.weight.numel():
                continue
            kind, row, ctas[i] = _describe(slot, self._grad_dtypes[i])
            kinds.setdefault(kind, []).append(i)
            rows[i] = torch.tensor(row)
        self.launches = []
        for kind, indices in kinds.items():
            counts = torch.tensor([ctas[i] for i in indices])
            # CTAs of a launch are numbered tensor by tensor: its own number in a tensor is pid - first_cta.
            rows[indices, TABLE.index("first_cta")] = counts.cumsum(0) - counts
            owner = torch.repeat_interleave(torch.tensor(indices, dtype=torch.int32), counts)
            # A thread has eight elements (`packed_words.py`); 32 warps are the most of a CTA.
            warps = min(max(kind.tile // (32 * ELEMENTS_A_THREAD), 1), 32)
            registers = REGISTERS if kind.aligned and kind.tile == TILE else None  # the others need more
            owner = owner.to(self.table.device)
            amax = any(self.slots[i].amax is not None for i in indices)
            self.launches.append(_Launch(owner, warps, registers, self._constants(kind, amax)))
        self.table.copy_(rows)

    def _constants(self, kind: _Kind, amax: bool) -> dict[str, object]:
        m, v, *_ = [format.name for format in kind.formats] + ["", ""]
        sr_m, sr_v, *_ = [is_stochastic(format, self.sr) for format in kind.formats] + [False, False]
        return {
            "RULE": self.rule,
            "WEIGHT": kind.weight,
            "GRAD": {torch.float32: "fp32", torch.bfloat16: "bf16"}[kind.grad],
            "M": m,
            "V": v,
            "SR_WEIGHT": self.sr and kind.weight == "bf16",
            "SR_M": sr_m,
            "SR_V": sr_v,
            "AMAX": amax,
            "ALIGNED": kind.aligned,
            "BLOCK": kind.block,
            "TILE": kind.tile,
            "LOOPS": kind.loops,
            "MIX_M": MIX_M,
            "MIX_V": MIX_V,
            "CODE": encoding("e4m3", self.table.device),
        }


def _describe(slot: Slot, grad_dtype: torch.dtype | None) -> tuple[_Kind, list[int], int]:
    """A tensor's kind, its row of the table, and its number of CTAs."""
    weight = slot.weight
    stored = isinstance(weight, LowBitWeight)
    rows, length = row_shape(weight.shape)
    blocks = {format.block for format, _ in slot.states if format.block}
    assert len(blocks) <= 1, f"states of one tensor share a block size, not {sorted(blocks)}"
    block = max(blocks, default=256)  # without blocks: what a warp has, eight elements a thread
    # A tensor whose blocks tile its rows is one long row: fewer, fuller CTAs.
    if not stored and (not blocks or length % block == 0):
        rows, length = 1, rows * length  # no block crosses a row anyway
    kind = weight.format if stored else ("fp32" if weight.dtype == torch.float32 else "bf16")
    if slot.master is not None:
        kind = "bf16 and master"
    tile, loops = max(TILE, block), LOOPS
    if kind == "int8":  # a scale per row: the tile is the row
        tile, loops = max(triton.next_power_of_2(length), block), 1
    tensors: list[Tensor | None] = [weight.codes if stored else weight.detach()]
    for state in [dict(state) for _, state in slot.states] + [{}] * (2 - len(slot.states)):  # {}: addresses of 0
        tensors += [state.get("codes", state.get("value")), state.get("scale")]
    tensors.append(weight.scale if stored else slot.master)
    assert all(t is None or t.is_contiguous() for t in tensors), "weights and states are contiguous"
    addresses = [0 if t is None else t.data_ptr() for t in tensors]
    # 16 elements: whole words of 4-bit codes, and 16-byte loads of all else, at the start of every row.
    aligned = length % 16 == 0 and slot.first_element % 8 == 0
    aligned &= all(address % 16 == 0 for address in addresses)
    chunks = -(-length // (tile * loops))
    formats = tuple(format for format, _ in slot.states)
    described = _Kind(kind, grad_dtype or weight.dtype, formats, block, aligned, tile, loops)
    amax = 0 if slot.amax is None else slot.amax.bits.data_ptr()
    return described, [*addresses, length, chunks, 0, slot.first_element, slot.group, amax], rows * chunks


def aligned(t: Tensor) -> Tensor:
    """t, or a copy of it: contiguous and at an address in multiples of 16 bytes."""
    if t.is_contiguous() and t.data_ptr() % 16 == 0:
        return t
    return torch.empty(t.shape, dtype=t.dtype, device=t.device).copy_(t)
