"""Measures a linear while it runs: what it is given, what its GEMMs read of that, and what other schemes would do.

The arguments of a probed linear carry a function that is shown each tensor with its operands: `observe` of an
`OperandRequest`. So it sees the tensors of every kind of linear, fused into an MLP, of experts, or under adapters. It
changes nothing: delayed scales are read and no absmax is recorded.

Where activations are recomputed a tensor is seen twice, and where a module runs in chunks of tokens several times: the
first sight counts. Of experts, products are sampled from the rows of the expert that has the most.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS
from qtrain.quant.arguments import LinearArguments
from qtrain.quant.choices import LinearChoice
from qtrain.quant.execute import OperandRequest, quantize_operands
from qtrain.quant.health.measures import SAMPLE, code_values, product_error, spread, tensor_measures
from qtrain.quant.high_precision import HIGH_PRECISION
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import DelayedScale, Gemm, NeedsOperand, TensorName
from qtrain.tensors.quantized_tensor import Operand, Operands, QuantizedTensor
from qtrain.tensors.stored_weight import StoredWeight

_ROWS = NeedsOperand(rows=True, columns=False)

Pair = tuple[Tensor, Tensor]
"""Elements of a tensor, and the same as a GEMM reads them."""


class LinearProbe:
    """The probe of one linear, for one forward and backward pass.

    alternatives: schemes to compare with, by name, as they are for this linear.
    """

    def __init__(self, choice: LinearChoice, linear: LowBitLinear, alternatives: dict[str, LowBitScheme] | None = None):
        self.choice, self.linear = choice, linear
        self.alternatives = alternatives or {}
        self.tensors: dict[TensorName, Tensor] = {}
        """fp32 [6] (`measures.NAMES`) of x, w and dy as the GEMM reads them that reads their rows."""
        self.products: dict[Gemm, Tensor] = {}
        self.what_if: dict[tuple[str, TensorName], Tensor] = {}
        """fp32 [6] of a tensor in another scheme."""
        self.seen: set[TensorName] = set()
        """Those of x and dy that have gone through, in low bits or not."""
        self._x_columns: Pair | None = None
        self._sample: _Sample | MaybeNone = None

    def __call__(self, arguments: LinearArguments) -> LinearArguments:
        """The arguments of a pass that is measured."""
        x_scale, dy_scale = _unrecorded(arguments.x_scale), _unrecorded(arguments.dy_scale)
        return arguments._replace(x_scale=x_scale, dy_scale=dy_scale, observe=self._observe)

    @torch.no_grad()
    def _observe(self, request: OperandRequest, t: Tensor, operands: Operands) -> None:
        if not t.numel():
            return
        if request.name == "x":
            if self._sample is None:
                self._sample = self._choose_rows(request, t)
                self._see_weight()
                self._see_x(request, t, operands)
            if self._x_columns is None and request.needs.columns:
                self._x_columns = self._columns(request, t, operands.columns)
        elif "dy" not in self.seen and self._sample is not None:
            self._see_dy(request, t, operands)

    def _see_x(self, request: OperandRequest, x: Tensor, operands: Operands) -> None:
        self._measure(request, x, operands.rows)
        if (w := self._weight) is not None:
            own = self._matrix_rows(spread(self.choice.out_features, SAMPLE, w.device))
            read = _read_rows(self.linear.weight_codes.operands().rows, w, own)
            x_read = _read_rows(operands.rows, x, self._sample.rows)
            self.products["output"] = product_error(x[self._sample.rows], w[own], x_read, read)

    def _see_dy(self, request: OperandRequest, dy: Tensor, operands: Operands) -> None:
        self._measure(request, dy, operands.rows)
        rows = self._sample.rows
        if request.needs.rows and self._weight is not None:
            exact, read = self._weight_columns()
            self.products["grad_input"] = product_error(dy[rows], exact, _read_rows(operands.rows, dy, rows), read)
        if request.needs.columns and self._x_columns is not None:
            exact, read = self._columns(request, dy, operands.columns)
            if exact.shape[1] == self._x_columns[0].shape[1]:  # else the layer runs in chunks of its tokens
                self.products["grad_weight"] = product_error(exact, self._x_columns[0], read, self._x_columns[1])
        self._x_columns = None  # as long as the activations

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def _measure(self, request: OperandRequest, t: Tensor, operand: Operand | None) -> None:
        """Of x or dy: the run's own codes, and those of other schemes."""
        self.seen.add(request.name)
        if isinstance(operand, QuantizedTensor):
            self.tensors[request.name] = tensor_measures(t, operand)
        self._compare(OperandRequest(request.scheme, request.name, _ROWS, self.linear.key, groups=request.groups), t)

    def _compare(self, request: OperandRequest, t: Tensor) -> None:
        for name, scheme in self.alternatives.items():
            rows = quantize_operands(t, request._replace(scheme=scheme)).rows
            if isinstance(rows, QuantizedTensor):
                self.what_if[name, request.name] = tensor_measures(t, rows)

    def _see_weight(self) -> None:
        if (w := self._weight) is None:
            return
        if isinstance(rows := self.linear.weight_codes.operands().rows, QuantizedTensor):
            self.tensors["w"] = tensor_measures(w, rows)
        self._compare(OperandRequest(self.linear.scheme, "w", _ROWS, self.linear.key, groups=self.linear.groups), w)

    @property
    def _weight(self) -> Tensor | MaybeNone:
        """The weight [N, K] that its codes are made of; None where it is not in memory, or stored as codes itself."""
        weight = self.linear.weight.detach()
        return None if self.linear.codes_only or isinstance(weight, StoredWeight) else weight

    def _columns(self, request: OperandRequest, t: Tensor, operand: Operand | None) -> Pair:
        """Sampled columns of x or dy [64, rows], all rows of them, for a product that sums over these."""
        columns, rows = spread(t.shape[1], SAMPLE, t.device), self._sample.summed
        exact = t[:, columns].t() if rows is None else t[rows][:, columns].t()
        if not isinstance(operand, QuantizedTensor):
            return exact, exact
        if operand.format.sum_dim == 0:
            every = torch.arange(t.shape[0], device=t.device) if rows is None else rows
            return exact, code_values(operand, t.shape[1], every, columns).values.t()
        scale = self._sample.expert, 1 if request.groups is None else request.groups.count
        return exact, code_values(operand, t.shape[0], columns, rows, *scale).values

    def _weight_columns(self) -> Pair:
        """Sampled columns of the weight [64, N], all rows of the matrix, as `grad_input` sums over them."""
        w, operand = self._weight, self.linear.weight_codes.operands().columns
        columns = spread(w.shape[1], SAMPLE, w.device)
        own = self._matrix_rows(torch.arange(self.choice.out_features, device=w.device))
        exact = w[own][:, columns].t()
        if not isinstance(operand, QuantizedTensor):
            return exact, exact
        if operand.format.sum_dim == 0:
            return exact, code_values(operand, w.shape[1], own, columns).values.t()
        return exact, code_values(operand, w.shape[0], columns, own, self._sample.expert, self.choice.groups).values

    # ---- experts -----------------------------------------------------------------------------------------------------

    def _choose_rows(self, request: OperandRequest, t: Tensor) -> "_Sample":
        if request.groups is None:
            return _Sample(spread(t.shape[0], SAMPLE, t.device))
        of_block = request.groups.group_of_block.long()
        counts = torch.bincount(of_block + 1, minlength=request.groups.count + 1)[1:]  # blocks of none are -1
        expert = int(counts.argmax())  # synchronizes: the number of its rows is a shape
        rows = (of_block.repeat_interleave(BLOCK_ROWS) == expert).nonzero().flatten()
        return _Sample(rows[spread(rows.shape[0], SAMPLE, t.device)], rows, expert)

    def _matrix_rows(self, own: Tensor) -> Tensor:
        """Rows of the weight, of the matrix that multiplies the sampled rows."""
        return own + self._sample.expert * self.choice.out_features


class _Sample(NamedTuple):
    """The rows of x and dy that products are sampled on."""

    rows: Tensor
    summed: Tensor | None = None
    """Those that the gradient of the weight sums over; None: all."""
    expert: int = 0
    """The matrix that they are multiplied with."""


def _unrecorded(scale: DelayedScale | None) -> DelayedScale | None:
    return None if scale is None else scale._replace(amax=None)


def _read_rows(operand: Operand | None, t: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor as the GEMM reads them that reads its rows."""
    return code_values(operand, t.shape[1], rows).values if isinstance(operand, QuantizedTensor) else t[rows]


def in_high_precision(arguments: LinearArguments) -> LinearArguments:
    """The arguments of a linear whose products run in the weights' own dtype. Weights stored as codes stay these."""
    stored = arguments.scheme.stored_format is not None
    weight = arguments.weight if stored else Operands(None, None)
    return arguments._replace(scheme=HIGH_PRECISION, key=None, weight=weight, x_scale=None, dy_scale=None)


@contextmanager
def probing(probes: Sequence[LinearProbe]) -> Iterator[None]:
    """Inside, these linears are measured as they run."""
    try:
        for probe in probes:
            probe.linear.probe = probe
        yield
    finally:
        for probe in probes:
            probe.linear.probe = None


@contextmanager
def high_precision(linears: Sequence[LowBitLinear]) -> Iterator[None]:
    """Inside, these linears multiply their weights, in the weights' own dtype."""
    try:
        for linear in linears:
            linear.probe = in_high_precision
        yield
    finally:
        for linear in linears:
            linear.probe = None
