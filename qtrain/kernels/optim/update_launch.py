"""The tables by which one launch of `update_kernel` serves many tensors, built once and kept on the device."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qtrain.kernels.compiler import triton
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.optim.state_formats import StateFormat, row_shape
from qtrain.kernels.optim.update_kernel import factors_kernel, update_kernel
from qtrain.kernels.optim.update_rules import MIX_M, MIX_V, RULES, UPDATE_ROLE, LowBitWeight, Slot, is_stochastic

# Columns of the table: addresses, then sizes.
_COLUMNS = (
    "weight", "m", "m_scale", "v", "v_scale", "extra", "row_length", "chunks", "first_tile", "first_element", "group",
)  # fmt: skip
_FACTORS = 8
_FORMATS = {"fp32": 1, "bf16": 2, "fp8": 3, "int8": 4, "int4": 5}  # 0: no such state
_WEIGHTS = {"fp32": 0, "bf16": 1, "bf16 and master": 2, "int8": 3, "int4": 4}


@dataclass(frozen=True)
class _Kind:
    """What the tensors of one launch have in common: the kernel's constants."""

    weight: str
    grad: torch.dtype
    formats: tuple[StateFormat, ...]
    block: int
    aligned: bool
    tile: int
    loops: int


@dataclass
class _Launch:
    kind: _Kind
    owner: Tensor  # int32 [programs]: which tensor each works on
    warps: int
    registers: int | None  # of a thread, at most
    constants: dict[str, object]


ELEMENTS_A_THREAD = 8
TILE, LOOPS = 256, 16
"""Elements of a tile, and tiles a program."""
REGISTERS = 64
"""Of a thread, so that 32 warps share a multiprocessor: what waits for memory wants others to work meanwhile."""


class Launches:
    """The tables of a `FusedUpdate` on its device, and its launches."""

    def __init__(self, rule: str, slots: Sequence[Slot], sr: bool, hyper: Tensor, steps: Tensor, keys: Tensor):
        self.rule, self.slots, self.sr = rule, slots, sr
        self.hyper, self.steps, self.keys = hyper, steps, keys
        device = steps.device
        n = len(self.slots)
        self.table = torch.zeros(n, len(_COLUMNS), dtype=torch.int64, device=device)
        self.factors = torch.zeros(n, _FACTORS, dtype=torch.float32, device=device)
        self.launches: list[_Launch] = []
        self._grad_dtypes: list[torch.dtype | None] = [None] * n
        self.grads = torch.zeros(n, dtype=torch.int64, device=device)
        self._addresses: list[int] = [0] * n
        self._recorded = False
        pinned = device.type == "cuda"
        self._captured = torch.zeros(n, dtype=torch.int64, pin_memory=pinned)  # read by a graph whenever it is replayed

    @property
    def count(self) -> int:
        return 1 + len(self.launches)

    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None) -> None:
        grads = [g if g is None or (g.is_contiguous() and g.data_ptr() % 16 == 0) else _copied(g) for g in grads]
        dtypes = [before if g is None else g.dtype for before, g in zip(self._grad_dtypes, grads, strict=True)]
        if dtypes != self._grad_dtypes:
            self._grad_dtypes = dtypes
            self._build()
        addresses = [0 if g is None else g.data_ptr() for g in grads]
        if addresses != self._addresses or self._recorded:
            self._upload(addresses)
        n = len(self.slots)
        factors_kernel[(triton.cdiv(n, 128),)](
            self.table, self.grads, self.hyper, grad_scale, self.steps, self.keys, self.factors, n,
            RULES[self.rule], grad_scale is not None, len(_COLUMNS), 128,
        )  # fmt: skip
        for launch in self.launches:
            update_kernel[(len(launch.owner),)](
                launch.owner, self.table, self.grads, self.factors, self.keys, UPDATE_ROLE,
                num_warps=launch.warps, maxnreg=launch.registers, **launch.constants,
            )  # fmt: skip

    def _upload(self, addresses: list[int]) -> None:
        """Write the gradients' addresses into the table, without waiting."""
        self._addresses = addresses
        if self.table.is_cuda and torch.cuda.is_current_stream_capturing():
            self._recorded = True  # a replay writes its own addresses: from now on they are not known here
            self._captured.copy_(torch.tensor(addresses))
            self.grads.copy_(self._captured, non_blocking=True)
        else:  # from pageable memory: it has been read when the call returns
            self.grads.copy_(torch.tensor(addresses), non_blocking=True)

    def _build(self) -> None:
        """Sort the tensors into launches, and write the table."""
        kinds: dict[_Kind, list[int]] = {}
        rows = torch.zeros(len(self.slots), len(_COLUMNS), dtype=torch.int64)
        programs = [0] * len(self.slots)
        for i, slot in enumerate(self.slots):
            if not slot.weight.numel():
                continue
            kind, row, programs[i] = self._describe(slot, self._grad_dtypes[i])
            kinds.setdefault(kind, []).append(i)
            rows[i] = torch.tensor(row)
        self.launches = []
        for kind, indices in kinds.items():
            counts = torch.tensor([programs[i] for i in indices])
            rows[indices, _COLUMNS.index("first_tile")] = counts.cumsum(0) - counts
            owner = torch.repeat_interleave(torch.tensor(indices, dtype=torch.int32), counts)
            warps = min(max(kind.tile // (32 * ELEMENTS_A_THREAD), 1), 32)
            registers = REGISTERS if kind.aligned and kind.tile == TILE else None  # the others need more
            owner = owner.to(self.table.device)
            self.launches.append(_Launch(kind, owner, warps, registers, self._constants(kind)))
        self.table.copy_(rows)

    def _describe(self, slot: Slot, grad_dtype: torch.dtype | None) -> tuple[_Kind, list[int], int]:
        """A tensor's kind, its row of the table, and how many programs it takes."""
        weight = slot.weight
        stored = isinstance(weight, LowBitWeight)
        rows, length = row_shape(weight.shape)
        blocks = {format.block for format, _ in slot.states if format.block}
        assert len(blocks) <= 1, f"states of one tensor share a block size, not {sorted(blocks)}"
        has_blocks = bool(blocks)
        block = blocks.pop() if blocks else 256
        if not stored and (not has_blocks or length % block == 0):
            rows, length = 1, rows * length  # blocks do not cross rows by themselves
        kind = weight.format if stored else ("fp32" if weight.dtype == torch.float32 else "bf16")
        if slot.master is not None:
            kind = "bf16 and master"
        tile, loops = max(TILE, block), LOOPS
        if kind == "int8":  # a scale a row: the tile is the row
            tile, loops = max(triton.next_power_of_2(length), block), 1
        codes = weight.codes if stored else weight.detach()
        extra = weight.scale if stored else slot.master
        parts = [dict(parts) for _, parts in slot.states] + [{}] * (2 - len(slot.states))
        tensors = [codes]
        for part in parts:
            tensors += [part.get("codes", part.get("value")), part.get("scale")]
        tensors.append(extra)
        assert all(t is None or t.is_contiguous() for t in tensors), "weights and states are contiguous"
        addresses = [0 if t is None else t.data_ptr() for t in tensors]
        aligned = length % 16 == 0 and slot.first_element % 8 == 0
        aligned &= all(address % 16 == 0 for address in addresses)
        chunks = -(-length // (tile * loops))
        formats = tuple(format for format, _ in slot.states)
        described = _Kind(kind, grad_dtype or weight.dtype, formats, block, aligned, tile, loops)
        return described, [*addresses, length, chunks, 0, slot.first_element, slot.group], rows * chunks

    def _constants(self, kind: _Kind) -> dict[str, object]:
        sr = self.sr
        stochastic = [is_stochastic(format, sr) for format in kind.formats] + [False, False]
        codes = [_FORMATS[format.name] for format in kind.formats] + [0, 0]
        return {
            "RULE": RULES[self.rule],
            "WEIGHT": _WEIGHTS[kind.weight],
            "GRAD": {torch.float32: 1, torch.bfloat16: 2}[kind.grad],
            "M": codes[0],
            "V": codes[1],
            "SR_WEIGHT": sr and kind.weight == "bf16",
            "SR_M": stochastic[0],
            "SR_V": stochastic[1],
            "ALIGNED": kind.aligned,
            "BLOCK": kind.block,
            "TILE": kind.tile,
            "LOOPS": kind.loops,
            "COLUMNS": len(_COLUMNS),
            "N_ROLES": len(ROUNDED_TENSORS),
            "MIX_M": MIX_M,
            "MIX_V": MIX_V,
            "PTX": self.table.is_cuda,
        }


def _copied(grad: Tensor) -> Tensor:
    """A gradient as the kernel wants it: contiguous, at an aligned address."""
    return torch.empty(grad.shape, dtype=grad.dtype, device=grad.device).copy_(grad)
