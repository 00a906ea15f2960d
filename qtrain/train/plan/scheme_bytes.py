"""What a scheme's declaration says of memory: bytes of a weight, of its codes, of the input that backward keeps."""

from typing import NamedTuple

from qtrain.quant import LowBitScheme
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
    # Codes of a stored weight: by way of its values in fp32, which are read for their scales, and again.
    # At once: fp32 and new codes, 4 + 1. Moved: codes read, fp32 written and twice read, codes written.
    by_values = scheme.stored_format and STORED_FORMATS[scheme.stored_format].granularity == "rowwise"
    return OtherLayout(5.0, 1.0 + 4 + 2 * 4 + 1) if by_values else OtherLayout(1.0, 2.0)


def kept_input_bytes(scheme: LowBitScheme, element: int) -> float:
    """Bytes of a linear's input kept for backward, per element of `element` bytes."""
    kept = scheme.formats_of("x")[1]
    return kept.bytes_per_element if kept else element
