"""What a scheme's declaration says of memory: bytes of a weight, of its codes, of the input that backward keeps, and of
what is read and written where a tensor is quantized."""

from typing import NamedTuple

from qtrain.kernels.gemm.low_rank_mm import LARGEST_RANK
from qtrain.models.cost.linear_bytes import LinearBytes
from qtrain.quant import LowBitScheme
from qtrain.quant.adapted_linear import adapters_read_codes
from qtrain.quant.gemm_table import adds_low_rank, is_dequantized
from qtrain.quant.tensor_roles import NeedsOperand, TensorName
from qtrain.quant.weight_codes import reads_codes_only, wire_format
from qtrain.tensors.stored_weight import STORED_FORMATS


def weight_bytes(scheme: LowBitScheme, element: int) -> float:
    """Bytes per element of the weight itself in a model whose dtype has `element` bytes."""
    return element if scheme.stored_format is None else STORED_FORMATS[scheme.stored_format].bytes_per_element


def code_bytes(scheme: LowBitScheme) -> float:
    """Bytes of codes kept beside the master weight, per weight element."""
    rows, columns = scheme.formats_of("w")
    if columns is not None and columns.sum_dim == 0:  # they are the row codes
        columns = None
    if scheme.stored_format is not None and rows is not None and rows == STORED_FORMATS[scheme.stored_format]:
        rows = None  # the stored weight's own
    return sum(fmt.bytes_per_element for fmt in (rows, columns) if fmt)


class OtherLayout(NamedTuple):
    """Bytes per element of transposed codes that a product makes: at once, and read and written."""

    kept: float = 0.0
    moved: float = 0.0


def other_layout_bytes(scheme: LowBitScheme) -> OtherLayout:
    """What --weight_codes one costs."""
    if not scheme.one_weight_layout:
        return OtherLayout()
    # Codes with a scale per row are read for the scales of columns, and again.
    rowwise = scheme.stored_format and STORED_FORMATS[scheme.stored_format].granularity == "rowwise"
    return OtherLayout(1.0, 3.0 if rowwise else 2.0)


def kept_input_bytes(scheme: LowBitScheme, element: int) -> float:
    """Bytes of a linear's input kept for backward, per element of `element` bytes."""
    kept = scheme.formats_of("x")[1]
    return kept.bytes_per_element if kept else element


def operand_code_bytes(scheme: LowBitScheme, name: TensorName, *, frozen: bool) -> float:
    """Bytes of the codes of x or dy, in all layouts that are read, per element. frozen: there is no grad_weight."""
    return sum(fmt.bytes_per_element for fmt in scheme.formats_of(name, NeedsOperand(columns=not frozen)) if fmt)


def quantizer_bytes(scheme: LowBitScheme, name: TensorName, element: int, *, frozen: bool) -> float:
    """Bytes that the quantizer of x or dy reads and writes, per element; 0: the GEMMs read the tensor itself. frozen:
    there is no grad_weight."""
    rows, columns = scheme.formats_of(name, NeedsOperand(columns=not frozen))
    formats = [fmt for fmt in (rows, columns) if fmt]
    # The absmax of all, or of a column, takes a read before that in which codes are computed.
    whole = any(fmt.granularity == "tensorwise" for fmt in formats) and not scheme.amax_history
    whole |= columns is not None and columns.granularity == "rowwise"
    return operand_code_bytes(scheme, name, frozen=frozen) + element * (1 + whole) * bool(formats)


def adapter_passes(scheme: LowBitScheme | None, columns: int) -> float:
    """Times that each element of y, or of dx, is read or written because a product of rank `columns` is added to it."""
    if scheme is None:
        return 4.0  # a product of its own, written; the addition reads both and writes the sum
    gemms = [scheme.operand_formats(gemm) for gemm in ("output", "grad_input")]
    # In the epilogue of the GEMM, or by a second one that reads and writes the result.
    return 0.0 if columns <= LARGEST_RANK and all(adds_low_rank(*formats) for formats in gemms) else 2.0


def linear_bytes(
    scheme: LowBitScheme | None, element: int, columns: int, adapted: bool, in_full: bool, reads_codes: bool
) -> LinearBytes:
    """columns: of the adapters' product with the input, 0 without adapters. adapted: the linear is frozen and keeps
    nothing; its adapters keep the input, or the codes of it that they read. in_full: it keeps the weight as well as
    codes of it. reads_codes: whether its adapters may read codes at all."""
    passes = adapter_passes(scheme, columns) if columns else 0.0
    if scheme is None:
        return LinearBytes(element, adapter_passes=passes)
    kept = kept_input_bytes(scheme, element)
    if adapted:
        in_codes = columns and reads_codes and adapters_read_codes(scheme, "x")
        kept = operand_code_bytes(scheme, "x", frozen=True) if in_codes else element
    wire = wire_format(scheme)
    operands = [scheme.operand_formats(gemm) for gemm in ("output", "grad_input")]
    # Dequantized for a product in high precision; NF4 becomes the codes of one in 8 bits.
    read = [
        element if other is None or is_dequantized(other, w) else float(w.fmt == "nf4")
        for other, w in operands
        if w is not None
    ]
    made = other_layout_bytes(scheme)
    return LinearBytes(
        weight=weight_bytes(scheme, element),
        codes=code_bytes(scheme),
        kept_input=None if kept == element else kept,
        codes_only=reads_codes_only(scheme) and not in_full,
        wire=wire.bytes_per_element if wire and reads_codes_only(scheme) else 0.0,
        temporary=max(*read, made.kept, 0.0),
        remade=made.moved,
        x_quantizer=quantizer_bytes(scheme, "x", element, frozen=adapted),
        dy_quantizer=quantizer_bytes(scheme, "dy", element, frozen=adapted),
        dy_codes=operand_code_bytes(scheme, "dy", frozen=adapted),
        adapter_passes=passes,
    )
