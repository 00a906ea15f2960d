"""Which measures of a linear are bad, and which scheme would mend them.

A bound is what the scheme's own formats give on Gaussian data, times a factor and plus a margin: 4 bits and ternary
weights have errors that 8 bits must not have. Two are absolute. x and w in 8 bits are compared with e4m3: e5m2 is meant
for gradients. A flush to zero counts where operands are rounded to nearest: rounded stochastically, zeros are right on
average.

The bounds are those that runs without a fault keep, of every scheme and hundreds of steps long
(`tests/train/health/`), with room to spare.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtrain.core.hardware.rates import one_thread
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.quant.choices import LinearChoice, decide
from qtrain.quant.execute import OperandRequest, quantize_operands
from qtrain.quant.health.measures import NAMES, tensor_measures
from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.tensor_roles import READERS, Gemm, TensorName
from qtrain.quant.weight_codes import WeightRequest, quantize_weight
from qtrain.tensors.quantized_tensor import Operand, QuantizedTensor

ALTERNATIVES = ("fp8_rowwise", "fp8_blockwise", "mxfp8", "int8", "nvfp4")
"""The schemes that a sample compares with."""

REMEDIES = ("fp8_rowwise", "fp8_blockwise", "int8")
"""Those to move to, the first one that is as good as any: they run on the tensor cores of every GPU that has their
format."""
REMEDY_SHARE = 0.5
"""Of its bounds on products that a scheme to move to may use: what has brought one scheme over its bound may go on."""
AS_GOOD = 1.5
"""Times the least excess of all: that of a scheme's worst product over its error on Gaussian data, or 1 if it has
none."""
SEVERE = 3.0
"""Times its bound a product must be off for one sample to decide: what it gives is then mostly error."""

SATURATED = 2e-3
"""Of delayed scaling, whose scales are those of earlier steps. Others do not cut off but as their format says (MX)."""
FLUSHED = 0.2
FLOAT_ERROR = 1.6
"""Times that of Gaussian data, which a float format has of almost any data; e5m2 has twice that of e4m3."""
MX_ERROR = 0.03
"""Added: MX scales are rounded down, and may cut off an eighth of the largest elements."""
INTEGER_ERROR = 0.15
"""Added: the step of integers follows the largest element of a row."""
PRODUCT, PRODUCT_MARGIN = 5.0, 0.1


class Finding(NamedTuple):
    """A measure over its bound."""

    gemm: Gemm
    tensor: TensorName | None
    """None: the product."""
    measure: str
    """A name of `measures.NAMES`."""
    value: float
    bound: float

    @property
    def severe(self) -> bool:
        """Whether training is harmed by every step until it ends."""
        return self.tensor is None and self.value > SEVERE * self.bound

    @property
    def cause(self) -> str:
        return f"{self.gemm} {self.tensor or 'product'} {self.measure}"

    def words(self) -> str:
        """What is wrong, as the sentence after the linear and its GEMM has it."""
        share = percent(self.value)
        if self.tensor is None:
            return f"the product is off by {share}"
        return {
            "saturated": f"{share} of {self.tensor} saturates",
            "flushed_sum": f"{share} of the sum of |{self.tensor}| is flushed to zero",
            "error": f"the codes of {self.tensor} are off by {share}",
        }[self.measure]


def percent(share: float) -> str:
    return f"{100 * share:.{1 if share < 0.1 else 0}f}%"


def findings(
    scheme: LowBitScheme, tensors: Mapping[TensorName, Mapping[str, Any]], products: Mapping[Gemm, Any] | None = None
) -> list[Finding]:
    """Of a linear in a scheme. tensors: the measures of x, w and dy, products: the errors of its GEMMs; None for what
    is not finite, which is no finding: training itself stops there."""
    found = []
    for name, measures in tensors.items():
        for what, bound in _bounds(scheme, name).items():
            value = measures.get(what)
            # None is a measure that was not finite.
            if value is not None and value > bound:
                found.append(Finding(READERS[name][0][0], name, what, value, bound))
    for gemm, value in (products or {}).items():
        if value is not None and value > (bound := _product_bound(scheme, gemm)):
            found.append(Finding(gemm, None, "error", value, bound))
    return found


def alternatives(choice: LinearChoice, device: torch.device) -> dict[str, LowBitScheme]:
    """Other schemes of ALTERNATIVES that a linear could run in, as they are for it."""
    schemes = {name: SCHEMES.make(name, {}, "--quantize") for name in ALTERNATIVES}
    decided = {name: decide(choice, scheme, False, device) for name, scheme in schemes.items()}
    return {name: other.scheme for name, other in decided.items() if other.scheme and other.spec != choice.spec}


def remedy(
    found: Iterable[Finding], what_if: Mapping[str, Mapping[str, Any]], schemes: Mapping[str, LowBitScheme]
) -> str:
    """The scheme of REMEDIES that has none of these findings and no other of its own, with products well within their
    bounds; of several the first one whose worst product exceeds what is usual of it as little as any. "bf16" where
    there is none. what_if: the measures of the tensors in other schemes, which are `schemes`, and under "products" the
    errors of these."""
    found, excess = list(found), {}
    for name in REMEDIES:
        if name not in what_if:
            continue
        scheme, products = schemes[name], what_if[name].get("products", {})
        tensors = {tensor: what_if[name][tensor] for tensor in READERS if tensor in what_if[name]}
        # Not only better: the new scheme must be within its own bounds too. What is not finite is within none.
        if (
            None in products.values()
            or findings(scheme, tensors)
            or not all(_mends(f, tensors, products) for f in found)
        ):
            continue
        if all(error <= REMEDY_SHARE * _product_bound(scheme, gemm) for gemm, error in products.items()):
            # Relative to what is usual: of good data INT8 has smaller errors than FP8, which is no reason to prefer it.
            excess[name] = max([1.0, *(error / _usual_product(scheme, gemm) for gemm, error in products.items())])
    return next((name for name, worst in excess.items() if worst <= AS_GOOD * min(excess.values())), "bf16")


def _mends(finding: Finding, tensors: Mapping[TensorName, Mapping[str, Any]], products: Mapping[str, float]) -> bool:
    # The bound is that of the scheme in use, which the finding has exceeded.
    if finding.tensor is None:
        value = products.get(finding.gemm)
        return value is not None and value < finding.bound
    value = tensors.get(finding.tensor, {}).get(finding.measure)
    return value is not None and value < finding.bound


# ---- bounds ----------------------------------------------------------------------------------------------------------


def _bounds(scheme: LowBitScheme, name: TensorName) -> dict[str, float]:
    usual, fmt = expected(scheme, name).rows, scheme.formats_of(name)[0]
    error, rounds = usual["error"], scheme.rounds(name)[0]
    if name != "dy" and fmt is not None and fmt.fmt == "e5m2":
        error /= 2  # a mantissa bit less than e4m3
    is_float = fmt is not None and FORMATS[fmt.fmt].is_float
    cut = MX_ERROR if fmt is not None and fmt.scale_dtype == torch.float8_e8m0fnu else 0.0
    bounds = {
        # Rounded stochastically, an element below the step has an error of the step and no bias.
        "error": FLOAT_ERROR * error + cut if is_float else error + (1.0 if rounds else INTEGER_ERROR),
    }
    if scheme.amax_history and name != "w":
        # Delayed scales are those of x and dy; a weight's scale follows from its current amax.
        bounds["saturated"] = SATURATED
    # Stochastic rounding flushes without bias: its zeros are no finding.
    return bounds if rounds else {**bounds, "flushed_sum": FLUSHED + 3 * usual["flushed_sum"]}


def _product_bound(scheme: LowBitScheme, gemm: Gemm) -> float:
    return PRODUCT * _usual_product(scheme, gemm) + PRODUCT_MARGIN


def _usual_product(scheme: LowBitScheme, gemm: Gemm) -> float:
    """The error of a product of Gaussian data, whose operands have independent errors."""
    readers = [(name, i) for name, pair in READERS.items() for i, (reader, _) in enumerate(pair) if reader == gemm]
    # Independent relative errors add in squares.
    return math.hypot(*(expected(scheme, name)[i]["error"] for name, i in readers))


class Expected(NamedTuple):
    """The measures of a tensor of Gaussian data in a scheme, as its rows and as its columns are read; in high precision
    all are 0."""

    rows: dict[str, float]
    columns: dict[str, float]


_expected: dict[tuple[LowBitScheme, tuple[bool, bool], TensorName], Expected] = {}


def expected(scheme: LowBitScheme, name: TensorName) -> Expected:
    """On a CPU, once a scheme."""
    key = scheme, scheme.rounds(name), name  # what rounds is no field where the scheme is a head's
    if key not in _expected:
        with one_thread():  # a hundred small operations
            _expected[key] = _measured_on_gaussian(scheme, name)
    return _expected[key]


def _measured_on_gaussian(scheme: LowBitScheme, name: TensorName) -> Expected:
    # Large enough for several blocks and scale groups; the fixed seed gives all runs the same bounds.
    data = torch.randn(256, 512, generator=torch.Generator().manual_seed(0))
    philox = torch.zeros(3, dtype=torch.int64)  # RNG key of stochastic rounding
    if name == "w":
        operands = quantize_weight(WeightRequest(scheme, data, philox))
    else:
        operands = quantize_operands(data, OperandRequest(scheme, name, key=philox))
    rows, columns = (_measured(data, operand) for operand in operands)
    return Expected(rows, rows if columns is None else columns)


def _measured(data: Tensor, operand: Operand | None) -> dict[str, float] | MaybeNone:
    """None: of values that are rotated first, of which those that are not rotated say the same."""
    if not isinstance(operand, QuantizedTensor):
        return dict.fromkeys(NAMES, 0.0)
    if operand.format.hadamard:
        return None
    # 256 != 512, so the shape tells which way the codes are stored.
    transposed = operand.codes.shape[0] == data.shape[1]
    return dict(zip(NAMES, tensor_measures(data.t() if transposed else data, operand).tolist(), strict=True))
