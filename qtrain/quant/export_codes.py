"""The codes that a linear's `output` multiplied with, held in the format of an export.

A format holds codes of another granularity where each of its groups lies within one group of theirs: the scale is then
repeated. A scale per tensor fits formats with a scale per row or per block, and a scale per row fits blocks of one row.
Integer codes fit wider integers. Codes never change; where none of this applies, the format's own rule makes new ones.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES, pack, scale_shape, unpack
from qtrain.kernels.numerics.philox import NEAREST
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.quantizers import quantize_rows
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.weight_codes import WeightRequest, quantize_weight
from qtrain.tensors.lazy import initial_value
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor
from qtrain.tensors.stored_weight import STORED_FORMATS, StoredWeight

# ---- what a declaration says -----------------------------------------------------------------------------------------


def trained_formats(scheme: LowBitScheme) -> list[OperandFormat]:
    """The formats of a weight's codes in training: what `output` multiplies, then what the weight is stored in. Empty
    where `output` reads the weight in high precision."""
    if scheme.packed_weight is not None:
        return [scheme.packed_weight]
    read = scheme.formats_of("w")[0]
    stored = scheme.stored_format and STORED_FORMATS[scheme.stored_format]
    return list(dict.fromkeys(fmt for fmt in (read, stored) if fmt))


def why_not_held(trained: OperandFormat, wanted: OperandFormat) -> str | None:
    """Why `wanted` cannot hold codes in the format `trained`; None: it can."""
    ours, theirs = FORMATS[trained.fmt], FORMATS[wanted.fmt]
    integers = not (ours.is_float or theirs.is_float or ours.values or theirs.values)
    # Integer codes fit a wider integer format; values of floats and lookup tables do not.
    if ours is not theirs and not (integers and theirs.max >= ours.max):
        return f"{trained.fmt} codes, not {wanted.fmt}"
    if trained.scale_dtype != wanted.scale_dtype:
        return f"scales in {_short(trained.scale_dtype)}, not {_short(wanted.scale_dtype)}"
    for size, own in zip(GRANULARITIES[trained.granularity], GRANULARITIES[wanted.granularity], strict=True):
        if size is not None and (own is None or size % own):
            return f"{trained.granularity} scales, not {wanted.granularity}"
    return None


def _short(dtype: torch.dtype) -> str:
    names = {torch.float32: "fp32", torch.float8_e8m0fnu: "E8M0", torch.float8_e4m3fn: "e4m3"}
    return names[dtype]


# ---- codes -----------------------------------------------------------------------------------------------------------


@torch.no_grad()
def trained_codes(linear: LowBitLinear) -> list[QuantizedTensor]:
    """The codes of the weight [N, K] in `trained_formats`, of its present value: the bits that training multiplies."""
    value, scheme = initial_value(linear.weight), linear.scheme
    if linear.reduce is not None:  # the scale is that of all processes, which the codes have
        rows = linear.weight_codes.operands().rows
    else:
        key = linear.weight_key if scheme.stochastic_rounding else None
        plain = value if isinstance(value, StoredWeight) else value.detach()
        rows = quantize_weight(WeightRequest(scheme, plain, key, linear.groups)).rows
    if isinstance(rows, QuantizedTensor) and scheme.packed_weight is not None:
        fmt = scheme.packed_weight
        rows = QuantizedTensor(pack(rows.codes, fmt.fmt), rows.scale, fmt)
    found = [rows] if isinstance(rows, QuantizedTensor) else []
    if isinstance(value, StoredWeight) and value.quantized.format not in [codes.format for codes in found]:
        found.append(value.quantized)
    return [codes._replace(format=codes.format._replace(sum_dim=1)) for codes in found]


class Rows(NamedTuple):
    """Rows [start, stop) of a weight of `columns` columns."""

    start: int
    stop: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.stop - self.start, self.columns


def take_rows(codes: QuantizedTensor, rows: Rows, wanted: OperandFormat) -> QuantizedTensor | None:
    """These rows of `codes` as `wanted` holds them; None where it cannot. Blocks of several rows begin at the first."""
    if why_not_held(codes.format, wanted) is not None:
        return None
    group, (down, across) = GRANULARITIES[codes.format.granularity], GRANULARITIES[wanted.granularity]
    assert group[0] is None or not rows.start % (down or 1), "tensors are whole blocks of rows"
    n, k = rows.shape
    scale = codes.scale
    if codes.format.granularity != "tensorwise":
        # [groups down, groups across]; of FP8 and E8M0 the bytes, which can be indexed on every device.
        scale = scale.reshape(len(scale), -1).view(torch.uint8 if scale.itemsize == 1 else scale.dtype)
        first = torch.arange(rows.start, rows.stop, down or max(n, 1), device=scale.device)  # of each wanted group
        left = torch.arange(0, k, across or max(k, 1), device=scale.device)
        scale = scale[first // (group[0] or 1)][:, left // (group[1] or max(k, 1))]
    shape = scale_shape(wanted.granularity, n, k)
    # One scale per tensor is repeated to all groups.
    scale = (scale.expand(shape) if scale.numel() == 1 else scale.reshape(shape)).view(wanted.scale_dtype)
    held = codes.codes[rows.start : rows.stop]  # [n, K], packed where the format is
    if codes.format.fmt != wanted.fmt:
        held = pack(unpack(held, codes.format.fmt, k), wanted.fmt)
    return QuantizedTensor(held.contiguous(), scale.contiguous(), wanted, codes.tensor_scale)


def held_codes(trained: Sequence[QuantizedTensor], rows: Rows, wanted: OperandFormat) -> QuantizedTensor | None:
    """These rows of the first of `trained_codes` that `wanted` can hold; None where it holds none of them."""
    # What `output` multiplies comes first, then what the weight is stored in.
    return next((held for codes in trained if (held := take_rows(codes, rows, wanted)) is not None), None)


def why_new(trained: Sequence[QuantizedTensor], wanted: OperandFormat) -> str:
    """Why an export's codes are not those of training, where `held_codes` finds none."""
    if not trained:
        return "trained in high precision"
    why = why_not_held(trained[0].format, wanted)
    assert why is not None, "codes that the format holds were not taken"
    return why


def check_ternary(value: Tensor, wanted: OperandFormat, fmt: str, name: str) -> None:
    """UserError for a value that a ternary format would change. fmt: the flag and its value; name: of the weight."""
    if wanted.fmt == "ternary" and not is_ternary(value):
        raise UserError(
            f"{fmt} holds ternary weights, and {name} has others; train with --quantize bitnet, or use another format."
        )


@torch.no_grad()
def new_codes(value: Tensor, wanted: OperandFormat) -> QuantizedTensor:
    """Codes of a value [N, K] by the format's own rule, to nearest even."""
    if wanted.fmt == "ternary":
        return _ternary_codes(value, wanted)
    return quantize_rows(value, wanted, NEAREST, False)


def values_of(codes: QuantizedTensor, like: Tensor) -> Tensor:
    """The values of codes of `like` [N, K], in its dtype."""
    return codes.values(like.dtype)[:, : like.shape[1]]  # packed rows may be padded


def _ternary_codes(value: Tensor, wanted: OperandFormat) -> QuantizedTensor:
    """Codes of a value that has been ternary already. Its mean is not its scale, unless no element is 0."""
    scale = value.abs().amax().float().view(1)
    codes = QuantizedTensor(pack(value.sign().to(torch.int8), "ternary"), scale, OperandFormat("ternary", "tensorwise"))
    held = take_rows(codes, Rows(0, *value.shape), wanted)
    assert held is not None, f"{wanted}: ternary formats have fp32 scales"
    return held


def is_ternary(value: Tensor) -> bool:
    """Whether all elements are -a, 0 or a for some a."""
    absolute = value.abs()
    return bool(((absolute == 0) | (absolute == absolute.amax())).all())
