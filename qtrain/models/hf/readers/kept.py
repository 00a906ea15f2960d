"""Which linears of a native decoder can keep the codes that a checkpoint declares."""

from torch import nn

from qtrain.kernels.numerics.formats import GRANULARITIES
from qtrain.models.config.hf_layout import TensorSlice, layout
from qtrain.models.hf.readers.declared import DeclaredCodes
from qtrain.models.native.decoder import Decoder
from qtrain.quant.choices import find_linears

IN_HIGH_PRECISION = "--model has it in high precision"


def matrices_in_codes(declared: DeclaredCodes, model: Decoder) -> int:
    """How many of a checkpoint's matrices are codes."""
    return sum(declared.reader(_module(e)) is not None for found in _tensors(model).values() for _, e in found)


def linears_without_codes(declared: DeclaredCodes, model: Decoder) -> dict[str, str]:
    """The linears, by name, that cannot keep codes, with the reason. A linear may fuse several tensors."""
    down, across = GRANULARITIES[declared.format.granularity]
    left = {}
    for name, found in _tensors(model).items():
        linear = found[0][0]
        if any(declared.reader(_module(entry)) is None for _, entry in found):
            left[name] = IN_HIGH_PRECISION
        elif down is not None and any(entry.start % down for _, entry in found):
            left[name] = f"its projections are no multiples of {down} rows, so that their blocks do not fit together"
        elif declared.format.fmt == "nf4" and linear.in_features % across:
            left[name] = f"blocks of {across} cross the rows of {linear.in_features} elements"
    return left


def _tensors(model: Decoder) -> dict[str, list[tuple[nn.Linear, TensorSlice]]]:
    """Name of each linear -> the tensors of a checkpoint that it consists of."""
    linears = {name: linear for linear, names in find_linears(model).items() for name in names}
    found: dict[str, list[tuple[nn.Linear, TensorSlice]]] = {}
    for entry in layout(model.config):
        owner, _, kind = (entry.name or "").rpartition(".")
        if kind == "weight" and owner in linears:
            found.setdefault(owner, []).append((linears[owner], entry))
    return found


def _module(entry: TensorSlice) -> str:
    return entry.hf_name.removesuffix(".weight")
