"""Measures a linear while it runs: what it is given, what its GEMMs read of that, and what other schemes would do.

The arguments of a probed linear carry a function that is shown each tensor with its operands: `observe` of an
`OperandRequest`. So it sees the tensors of every kind of linear, fused into an MLP, of experts, or under adapters. It
changes nothing: delayed scales are read and no absmax is recorded.

Where activations are recomputed a tensor is seen twice, and where a module runs in chunks of tokens several times: the
first sight counts. Of experts, products are sampled from the rows of the expert that has the most.

Several processes may share a linear or its weight: what a probe has is sums, which add up over the parts of a tensor,
and terms of products that sum over a dimension which is split. An error of a probe is kept, not raised: the layers go
on, for other processes may wait for theirs.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS
from qtrain.quant.arguments import LinearArguments
from qtrain.quant.choices import LinearChoice
from qtrain.quant.execute import OperandRequest, quantize_operands
from qtrain.quant.health.measures import (
    SAMPLE,
    code_values,
    measures,
    product_error,
    product_squares,
    product_terms,
    spread,
    tensor_sums,
)
from qtrain.quant.high_precision import HIGH_PRECISION
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import DelayedScale, Gemm, NeedsOperand, TensorName
from qtrain.quant.weight_codes import WeightRequest, quantize_weight
from qtrain.tensors.quantized_tensor import Operand, Operands, QuantizedTensor
from qtrain.tensors.stored_weight import StoredWeight

_ROWS, _COLUMNS = NeedsOperand(rows=True, columns=False), NeedsOperand(rows=False, columns=True)


class SchemeErrors:
    """What the GEMMs of a linear read in one scheme: how far its tensors and products are off."""

    def __init__(self, scheme: LowBitScheme):
        self.scheme = scheme
        self.sums: dict[TensorName, Tensor] = {}
        """fp64 [9] (`measures.SUMS`) of x, w and dy as the GEMM reads them that reads their rows."""
        self.squares: dict[Gemm, Tensor] = {}
        """fp64 [2] (`measures.product_squares`) of each product on a sample of its elements."""
        self.terms: dict[Gemm, Tensor] = {}
        """fp32 [2, 64, 64] (`measures.product_terms`) of the products that have terms on other processes too."""
        self.w_rows: Tensor | MaybeNone = None
        """fp32 [64, K], the sampled rows of the weight as `output` reads them."""
        self.w_columns: Tensor | MaybeNone = None
        """fp32 [64, N], its sampled columns as `grad_input` reads them."""
        self.x_columns: Tensor | MaybeNone = None
        """fp32 [64, rows], sampled columns of x as `grad_weight` reads them."""

    @property
    def tensors(self) -> dict[TensorName, Tensor]:
        """fp64 [6] (`measures.NAMES`)."""
        return {name: measures(sums) for name, sums in self.sums.items()}

    @property
    def products(self) -> dict[Gemm, Tensor]:
        """fp64, the error of each product."""
        return {gemm: product_error(squares) for gemm, squares in self.squares.items()}


class LinearProbe:
    """The probe of one linear, for one forward and backward pass.

    alternatives: schemes to compare with, by name, as they are for this linear. split: the GEMMs of which other
    processes compute other terms of the same elements. weight: gives the weight [N, K] of a linear that has only its
    codes in memory; it is called as the linear first runs, whatever the tensors.
    """

    def __init__(
        self,
        choice: LinearChoice,
        linear: LowBitLinear,
        alternatives: dict[str, LowBitScheme] | None = None,
        split: Collection[Gemm] = (),
        weight: Callable[[], Tensor] | None = None,
    ):
        self.choice, self.linear = choice, linear
        self._split, self._give_weight = split, weight
        self.error: Exception | None = None
        """What ended the measuring."""
        self.expert_rows = 0
        """Of experts, the rows of the one that products are sampled from."""
        self.own = SchemeErrors(linear.scheme)
        self.compared = alternatives is not None
        self.what_if = {name: SchemeErrors(scheme) for name, scheme in (alternatives or {}).items()}
        self._sample: _Sample | MaybeNone = None
        self._saw_dy = False
        self._given_weight: Tensor | MaybeNone = None
        self._w_columns: Tensor | MaybeNone = None
        """[64, N], the exact values of `SchemeErrors.w_columns`."""
        self._x_columns: Tensor | MaybeNone = None
        """[64, rows], the exact values of `SchemeErrors.x_columns`."""

    def __call__(self, arguments: LinearArguments) -> LinearArguments:
        """The arguments of a pass that is measured."""
        x_scale, dy_scale = _unrecorded(arguments.x_scale), _unrecorded(arguments.dy_scale)
        if self._give_weight is not None:
            # Here, and not where x is seen: all processes take part, also one that has no rows of x.
            self._given_weight, self._give_weight = self._give_weight(), None
        return arguments._replace(x_scale=x_scale, dy_scale=dy_scale, observe=self._observe)

    @torch.no_grad()
    def _observe(self, request: OperandRequest, t: Tensor, operands: Operands) -> None:
        if self.error is None and t.numel():
            try:
                self._see(request, t, operands)
            except Exception as error:  # such as too little memory
                self.error = error.with_traceback(None)  # its frames hold tensors
        if request.name == "x":
            self._given_weight = None

    def _see(self, request: OperandRequest, t: Tensor, operands: Operands) -> None:
        if request.name == "x":
            if self._sample is None:
                sample = self._choose_rows(request, t)
                if not sample.rows.numel():  # no expert has any
                    return
                self._sample = sample
                self._see_weight()
                self._see_rows(request, t, operands, "output")
                self._forget("w_rows")
            if self._x_columns is None and request.needs.columns:
                self._x_columns = self._sampled_columns(t)
                for errors, read in self._each(request, t, operands, _COLUMNS):
                    errors.x_columns = self._read_columns(read.columns, t)
        elif not self._saw_dy and self._sample is not None:
            self._saw_dy = True
            self._see_rows(request, t, operands, "grad_input")
            if request.needs.columns and self._x_columns is not None:
                self._see_gradient(request, t, operands)
            self._forget("w_columns", "x_columns")
            self._w_columns = self._x_columns = None  # the latter are as long as the activations

    # ---- tensors and products ----------------------------------------------------------------------------------------

    def _each(
        self, request: OperandRequest, t: Tensor, operands: Operands, needs: NeedsOperand
    ) -> Iterator[tuple[SchemeErrors, Operands]]:
        """The operands of x or dy in the run's own scheme, and in the others."""
        yield self.own, operands
        for errors in self.what_if.values():
            own = OperandRequest(errors.scheme, request.name, needs, self.linear.key, groups=request.groups)
            yield errors, quantize_operands(t, own)

    def _see_rows(self, request: OperandRequest, t: Tensor, operands: Operands, gemm: Gemm) -> None:
        """x [M, K] in `output`, or dy [M, N] in `grad_input`: the tensor, and its product with the weight."""
        rows, exact = self._sample.rows, None
        if request.needs.rows and self._w_columns is not None:
            if gemm == "output":
                exact = self._weight[self._weight_rows()]
            else:
                exact = self._w_columns
                self.own.w_columns = self._read_weight_columns(self.linear.weight_codes.operands().columns)
        for errors, read in self._each(request, t, operands, _ROWS):
            if isinstance(read.rows, QuantizedTensor):
                errors.sums[request.name] = tensor_sums(t, read.rows)
            if exact is not None:
                w = errors.w_rows if gemm == "output" else errors.w_columns
                self._keep_product(errors, gemm, product_terms(t[rows], exact, _read_rows(read.rows, t, rows), w))

    def _keep_product(self, errors: SchemeErrors, gemm: Gemm, terms: Tensor) -> None:
        if gemm in self._split:
            errors.terms[gemm] = terms
        else:
            errors.squares[gemm] = product_squares(terms)

    def _see_gradient(self, request: OperandRequest, dy: Tensor, operands: Operands) -> None:
        """dy in `grad_weight`."""
        exact = self._sampled_columns(dy)  # [64, rows]
        if exact.shape[1] != self._x_columns.shape[1]:
            return  # the layer runs in chunks of its tokens
        for errors, read in self._each(request, dy, operands, _COLUMNS):
            own = self._read_columns(read.columns, dy)
            terms = product_terms(exact, self._x_columns, own, errors.x_columns)
            self._keep_product(errors, "grad_weight", terms)

    def _forget(self, *names: str) -> None:
        for errors in (self.own, *self.what_if.values()):
            for name in names:
                setattr(errors, name, None)

    def _see_weight(self) -> None:
        if (w := self._weight) is None:
            return
        rows, columns = self._weight_rows(), spread(w.shape[1], SAMPLE, w.device)
        first = self._sample.expert * self.choice.out_features
        self._w_columns = w[first : first + self.choice.out_features, columns].t()
        for errors in (self.own, *self.what_if.values()):
            if errors is self.own:
                read = self.linear.weight_codes.operands()
            else:
                read = quantize_weight(WeightRequest(errors.scheme, w, self.linear.weight_key, self.linear.groups))
                # The run's own codes stay in memory until backward; these do not.
                errors.w_columns = self._read_weight_columns(read.columns)
            if isinstance(read.rows, QuantizedTensor):
                errors.sums["w"] = tensor_sums(w, read.rows)
            errors.w_rows = _read_rows(read.rows, w, rows)

    @property
    def _weight(self) -> Tensor | MaybeNone:
        """The weight [N, K] that its codes are made of; None where it is not in memory, or stored as codes itself."""
        if self.linear.codes_only:
            return self._given_weight
        weight = self.linear.weight.detach()
        return None if isinstance(weight, StoredWeight) else weight

    def _read_weight_columns(self, operand: Operand | None) -> Tensor:
        """Sampled columns of the weight [64, N], all rows of the matrix, as `grad_input` sums over them."""
        if not isinstance(operand, QuantizedTensor):
            return self._w_columns
        device, (n, k) = operand.codes.device, self.choice.shape
        columns = spread(k, SAMPLE, device)
        matrix = self._matrix_rows(torch.arange(self.choice.out_features, device=device))
        if operand.format.sum_dim == 0:
            return code_values(operand, k, matrix, columns).values.t()
        return code_values(operand, n, columns, matrix, self._sample.expert, self.choice.groups).values

    def _sampled_columns(self, t: Tensor) -> Tensor:
        """Sampled columns of x or dy [64, rows], all rows of them, for a product that sums over these."""
        columns, rows = spread(t.shape[1], SAMPLE, t.device), self._sample.summed
        return t[:, columns].t() if rows is None else t[rows][:, columns].t()

    def _read_columns(self, operand: Operand | None, t: Tensor) -> Tensor:
        """The same as a GEMM reads it."""
        if not isinstance(operand, QuantizedTensor):
            return self._sampled_columns(t)
        columns, rows = spread(t.shape[1], SAMPLE, t.device), self._sample.summed
        if operand.format.sum_dim == 0:
            every = torch.arange(t.shape[0], device=t.device) if rows is None else rows
            return code_values(operand, t.shape[1], every, columns).values.t()
        return code_values(operand, t.shape[0], columns, rows, self._sample.expert, self._sample.experts).values

    # ---- experts -----------------------------------------------------------------------------------------------------

    def _choose_rows(self, request: OperandRequest, t: Tensor) -> "_Sample":
        if request.groups is None:
            return _Sample(spread(t.shape[0], SAMPLE, t.device))
        expert_of_row = request.groups.group_of_block.long().repeat_interleave(BLOCK_ROWS)  # -1: of none
        # Blocks are filled up with zeros; where experts are on several processes, blocks of others' have nothing else.
        used = torch.linalg.vector_norm(t, ord=torch.inf, dim=1) > 0
        counts = torch.bincount(expert_of_row + 1, weights=used.float(), minlength=request.groups.count + 1)[1:]
        expert = int(counts.argmax())  # synchronizes: the number of its rows is a shape
        rows = ((expert_of_row == expert) & used).nonzero().flatten()
        self.expert_rows = rows.shape[0]
        return _Sample(rows[spread(rows.shape[0], SAMPLE, t.device)], rows, expert, request.groups.count)

    def _weight_rows(self) -> Tensor:
        """The sampled rows of the weight."""
        return self._matrix_rows(spread(self.choice.out_features, SAMPLE, self.linear.weight.device))

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
    experts: int = 1


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


def probing(probes: Sequence[LinearProbe]) -> AbstractContextManager[None]:
    """Inside, these linears are measured as they run."""
    return _probed({probe.linear: probe for probe in probes})


def high_precision(linears: Sequence[LowBitLinear]) -> AbstractContextManager[None]:
    """Inside, these linears multiply their weights, in the weights' own dtype."""
    return _probed(dict.fromkeys(linears, in_high_precision))


@contextmanager
def _probed(probes: Mapping[LowBitLinear, Callable[[LinearArguments], LinearArguments]]) -> Iterator[None]:
    try:
        for linear, probe in probes.items():
            linear.probe, linear.in_high_precision = probe, probe is in_high_precision
        yield
    finally:
        for linear in probes:
            linear.probe, linear.in_high_precision = None, False
