"""Which linears of a native decoder can keep the codes that a checkpoint declares."""

from torch import nn

from qtrain.kernels.numerics.formats import GRANULARITIES
from qtrain.models.config.hf_layout import TensorSlice, weights_of
from qtrain.models.hf.readers.declared import DeclaredCodes
from qtrain.models.native.decoder import Decoder
from qtrain.quant.choices import find_linears

IN_HIGH_PRECISION = "--model has it in high precision"


def matrices_in_codes(declared: DeclaredCodes, model: Decoder) -> int:
    """How many of a checkpoint's matrices are codes."""
    found = weights_of(model.config, _linears(model))
    return sum(declared.reader(_module(entry)) is not None for entries in found.values() for entry in entries)


def linears_without_codes(declared: DeclaredCodes, model: Decoder) -> dict[str, str]:
    """The linears, by name, that cannot keep codes, with the reason. A linear may fuse several tensors."""
    fmt = declared.format
    assert fmt is not None, "codes of several formats are not kept"
    down, across = GRANULARITIES[fmt.granularity]
    left, linears = {}, _linears(model)
    for name, entries in weights_of(model.config, linears).items():
        columns = linears[name].in_features
        if any(declared.reader(_module(entry)) is None for entry in entries):
            left[name] = IN_HIGH_PRECISION
        elif down is not None and any(entry.start % down for entry in entries):
            left[name] = f"its projections are no multiples of {down} rows, so that their blocks do not fit together"
        elif fmt.fmt == "nf4" and across is not None and columns % across:
            left[name] = f"blocks of {across} cross the rows of {columns} elements"
    return left


def _linears(model: Decoder) -> dict[str, nn.Linear]:
    return {name: linear for linear, names in find_linears(model).items() for name in names}


def _module(entry: TensorSlice) -> str:
    return entry.hf_name.removesuffix(".weight")
