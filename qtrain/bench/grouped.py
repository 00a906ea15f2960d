"""The table of grouped products: TFLOP/s of every role and format on the shapes of MoEs.

Tokens are split evenly, and each goes to one expert. All rows read the same operands: rows in groups with their tail
(`token_permutation.py`), which this package sets to zero and PyTorch leaves as it is. Quantizing is not timed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.bench.case import Bench, Case, Check, Row, UnavailableError, WrongResultError, check_product, fill_rates
from qtrain.bench.matmuls import BF16_SUM, FP8_SUM, FP32_SUM, need_capability
from qtrain.bench.tables import Table
from qtrain.core.hardware.capabilities import FP8_CAPABILITY
from qtrain.kernels.grouped.grouped_blockwise_mm import k_grouped_blockwise_mm, m_grouped_blockwise_mm
from qtrain.kernels.grouped.grouped_mm import k_grouped_mm, m_grouped_mm
from qtrain.kernels.grouped.grouped_plain_mm import k_grouped_plain_mm, m_grouped_plain_mm
from qtrain.kernels.grouped.per_group import matrices, unstack
from qtrain.kernels.grouped.token_permutation import TokenPermutation, group_rows
from qtrain.kernels.quantize.column_groups import equal_groups
from qtrain.kernels.quantize.operators import quantize, quantize_transposed
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

BF16 = torch.bfloat16
ROLES = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class GroupedProblem:
    """E groups of [N, K], and tokens over all of them."""

    groups: int
    tokens: int
    n: int
    k: int
    device: torch.device

    @property
    def operations(self) -> float:
        return 2.0 * self.tokens * self.n * self.k

    @cached_property
    def rows(self) -> TokenPermutation:
        experts = torch.arange(self.tokens, device=self.device) % self.groups  # int64 [tokens]: even loads
        return group_rows(experts[:, None], self.groups)

    def normal(self, rows: int, columns: int) -> Tensor:
        """bf16 [rows, columns], from a seed of this shape: operands with equal rows would sum squares, which FP8's fast
        accumulation cuts off in one direction."""
        generator = torch.Generator(self.device).manual_seed(rows * 65_537 + columns)
        return torch.randn(rows, columns, dtype=BF16, device=self.device, generator=generator)

    def tokens_in_rows(self, columns: int) -> Tensor:
        """bf16 [R, columns], zero where a row holds no token."""
        return self.normal(self.rows.rows, columns).masked_fill_((self.rows.token_of_row < 0)[:, None], 0)

    def operands(self, role: str) -> tuple[Tensor, Tensor]:
        """The tensors of a role, in bf16: (x, w), (dy, w) or (dy, x)."""
        if role == "grad_weight":
            return self.tokens_in_rows(self.n), self.tokens_in_rows(self.k)
        w = self.normal(self.groups * self.n, self.k)
        return self.tokens_in_rows(self.k if role == "output" else self.n), w


def coded_operands(
    p: GroupedProblem, role: str, fmt: str, granularities: tuple[str, str]
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both operands of a role as its product reads them: K-major codes, whose groups are stacked along rows or
    columns."""
    a, b = p.operands(role)
    grouped = {"group_of_block": p.rows.group_of_block, "groups": p.groups}
    # Both operands are quantized as a training step does: rows of tokens along K, weights per expert.
    granularity_a, granularity_b = granularities
    if role == "grad_weight":
        pairs = [quantize_transposed(t, fmt, g, **grouped) for t, g in zip((a, b), granularities, strict=True)]
    else:
        # grad_input reads w along N: its codes are transposed, with scales of each expert's columns.
        rows_of_b = quantize(b, fmt, granularity_b) if role == "output" else None
        matrix_groups = equal_groups(p.groups, p.n, b.device)
        pairs = [
            quantize(a, fmt, granularity_a),
            rows_of_b or quantize_transposed(b, fmt, granularity_b, group_of_block=matrix_groups, groups=p.groups),
        ]
    coded_a, coded_b = (
        QuantizedTensor(codes, scale, OperandFormat(fmt, granularity))
        for (codes, scale), granularity in zip(pairs, granularities, strict=True)
    )
    return coded_a, coded_b


# ---- checks ----------------------------------------------------------------------------------------------------------


def check_group_products(
    p: GroupedProblem, role: str, values: Callable[[int, slice], tuple[Tensor, Tensor]], accumulation: float
) -> Check:
    """A check of the first and the last group against fp64, and of rows of no group.

    values(group, its rows): A and B of that group, fp64 [M, K] and [N, K].
    """
    starts = p.rows.starts.tolist()  # first row of each group, and the end of the last

    def check(out: object) -> float:
        assert isinstance(out, Tensor)
        if role != "grad_weight" and bool((out[starts[-1] :] != 0).any()):
            raise WrongResultError("rows of no group are not zero")
        worst = 0.0
        # Two groups are enough: offsets add up, so a wrong one shows in the last group.
        for group in {0, p.groups - 1}:
            rows = slice(starts[group], starts[group + 1])
            a, b = values(group, rows)
            own = out[rows] if role != "grad_weight" else out.view(p.groups, p.n, p.k)[group]
            worst = max(worst, check_product(lambda a=a: a, lambda b=b: b, accumulation)(own))
        return worst

    return check


def plain_values(p: GroupedProblem, role: str, a: Tensor, b: Tensor) -> Callable[[int, slice], tuple[Tensor, Tensor]]:
    def values(group: int, rows: slice) -> tuple[Tensor, Tensor]:
        if role == "grad_weight":
            return a[rows].t().double(), b[rows].t().double()
        w = b.view(p.groups, p.n, p.k)[group].double()
        return a[rows].double(), w if role == "output" else w.t()

    return values


def coded_values(
    p: GroupedProblem, role: str, a: QuantizedTensor, b: QuantizedTensor
) -> Callable[[int, slice], tuple[Tensor, Tensor]]:
    granularity_a, granularity_b = a.format.granularity, b.format.granularity

    def scale_of(operand: QuantizedTensor, group: int, rows: slice) -> Tensor:
        """Of what is summed over rows."""
        if operand.format.granularity == "rowwise":
            return operand.scale.view(p.groups, -1)[group]
        # Block scales [columns, R / along]: groups start at multiples of 128 rows, so no block is shared.
        along = 32 if operand.format.granularity == "32x32" else 128
        return operand.scale[:, rows.start // along : rows.stop // along]

    def exact(operand: QuantizedTensor, codes: Tensor, scale: Tensor) -> Tensor:
        return operand._replace(codes=codes, scale=scale).dequantize(torch.float64)

    def values(group: int, rows: slice) -> tuple[Tensor, Tensor]:
        if role == "grad_weight":
            left, right = (exact(t, t.codes[:, rows].contiguous(), scale_of(t, group, rows)) for t in (a, b))
            return left, right
        down = 32 if granularity_a == "32x32" else 1  # rows of a scale of A
        w = matrices(b.codes, a.codes.shape[1], p.groups)[group].contiguous()
        if granularity_b == "rowwise":
            scale_w = b.scale.view(p.groups, -1)[group]
        else:
            scale_w = unstack(b.scale, p.groups, role == "output")[group]
        return exact(a, a.codes[rows], a.scale[rows.start // down : rows.stop // down]), exact(b, w, scale_w)

    return values


# ---- rows ------------------------------------------------------------------------------------------------------------


def _plain(role: str, family: str | None, p: GroupedProblem) -> Case:
    a, b = p.operands(role)
    groups = p.rows.group_of_block, p.rows.starts

    def run(a: Tensor, b: Tensor) -> Tensor:
        if role == "grad_weight":
            return k_grouped_plain_mm(a.t(), b.t(), p.rows.starts, BF16)
        return m_grouped_plain_mm(a, b if role == "output" else b.t(), *groups)

    return Case((a, b), run, check_group_products(p, role, plain_values(p, role, a, b), BF16_SUM), family)


def _pytorch_bf16(role: str, p: GroupedProblem) -> Case:
    a, b = p.operands(role)
    offs = p.rows.starts[1:]

    def run(a: Tensor, b: Tensor) -> Tensor:
        if role == "grad_weight":
            return F.grouped_mm(a.t(), b, offs=offs)
        w = b.view(p.groups, p.n, p.k)
        return F.grouped_mm(a, w.transpose(1, 2) if role == "output" else w, offs=offs)

    return Case((a, b), run, _without_tail(p, role, plain_values(p, role, a, b), BF16_SUM))


def _without_tail(
    p: GroupedProblem, role: str, values: Callable[[int, slice], tuple[Tensor, Tensor]], accumulation: float
) -> Check:
    """PyTorch does not write rows of no group."""
    # The tail is uninitialized memory there.
    check, last = check_group_products(p, role, values, accumulation), int(p.rows.starts[-1])
    return lambda out: check(out if role == "grad_weight" else out[:last])


def _pytorch_fp8(role: str, p: GroupedProblem) -> Case:
    if p.device.type != "cuda":
        raise UnavailableError("PyTorch's scaled grouped products run on a GPU only")
    need_capability("FP8", FP8_CAPABILITY, p.device)
    a, b = coded_operands(p, role, "e4m3", ("rowwise", "rowwise"))
    offs = p.rows.starts[1:]

    def run(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        options = {"offs": offs, "out_dtype": BF16, "use_fast_accum": True}
        if role == "grad_weight":
            return torch._scaled_grouped_mm(a, b.t(), scale_a, scale_b, **options)
        w = matrices(b, a.shape[1], p.groups)
        return torch._scaled_grouped_mm(a, w.transpose(1, 2), scale_a, scale_b.view(p.groups, -1), **options)

    check = _without_tail(p, role, coded_values(p, role, a, b), FP8_SUM)
    return Case((a.codes, b.codes, a.scale, b.scale), run, check)


def _coded(role: str, fmt: str, granularities: tuple[str, str], family: str | None, p: GroupedProblem) -> Case:
    if fmt == "e4m3":
        need_capability("FP8", FP8_CAPABILITY, p.device)
    a, b = coded_operands(p, role, fmt, granularities)
    groups, rowwise = (p.rows.group_of_block, p.rows.starts), granularities[0] == "rowwise"

    def run(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor) -> Tensor:
        operands = a, b, scale_a, scale_b
        if rowwise:
            if role == "grad_weight":
                return k_grouped_mm(*operands, p.rows.starts, BF16)
            return m_grouped_mm(*operands, *groups, BF16)
        if role == "grad_weight":
            return k_grouped_blockwise_mm(*operands, *granularities, p.rows.starts, BF16)
        return m_grouped_blockwise_mm(*operands, *granularities, *groups, BF16)

    check = check_group_products(p, role, coded_values(p, role, a, b), FP32_SUM if fmt == "int8" else FP8_SUM)
    return Case((a.codes, b.codes, a.scale, b.scale), run, check, family)


def _rows() -> list[Row[GroupedProblem]]:
    found = []
    for role in ROLES:
        blocks = [("1x128", "128x128"), *([("1x128", "1x128")] if role == "grad_weight" else [])]
        found += [
            Row(f"{role}, BF16 PyTorch", "bf16", partial(_pytorch_bf16, role)),
            Row(f"{role}, BF16 Triton", "bf16", partial(_plain, role, "triton")),
            Row(f"{role}, BF16 qtrain", "bf16", partial(_plain, role, None)),
            Row(f"{role}, FP8 PyTorch, rowwise", "fp8", partial(_pytorch_fp8, role)),
        ]
        for fmt, arithmetic in (("e4m3", "fp8"), ("int8", "int8")):
            for who, family in (("Triton", "triton"), ("qtrain", None)) if fmt == "e4m3" else (("qtrain", None),):
                name = f"{role}, {arithmetic.upper()} {who}"
                case = partial(_coded, role, fmt, ("rowwise", "rowwise"), family)
                found.append(Row(f"{name}, rowwise", arithmetic, case))
            for pair in blocks:
                name = f"{role}, {arithmetic.upper()} qtrain, {' · '.join(pair)}"
                found.append(Row(name, arithmetic, partial(_coded, role, fmt, pair, None)))
        name = f"{role}, INT8 qtrain, 32x32 · 32x32"
        found.append(Row(name, "int8", partial(_coded, role, "int8", ("32x32", "32x32"), None)))
    return found


GROUPED_ROWS = _rows()


def grouped_table(problems: dict[str, GroupedProblem], rows: Sequence[Row[GroupedProblem]], bench: Bench) -> Table:
    """TFLOP/s of every row on every problem; rows of no token are not counted."""
    table = Table("Grouped products, experts x tokens x N x K", "TFLOP/s; TOPS for integers", list(problems))
    fill_rates(table, problems, rows, bench)
    return table
