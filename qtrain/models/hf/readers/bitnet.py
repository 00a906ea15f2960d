"""BitNet's packed ternary weights, of which `formats/bitnet.py` has the tensors.

`weight_scale` divides where the linear is a `bitlinear` and multiplies where it is an `autobitlinear`, as transformers
reads them. Weights of `quantization_mode` online are in high precision.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.kernels.numerics.formats import pack
from qtrain.models.hf.readers.declared import READERS, DeclaredCodes, codes_of_linears
from qtrain.models.hf.readers.reader import FLOATS, MatrixReader, Part, Unreadable, check_ternary
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor


class PackedTernary(MatrixReader):
    """Byte (r, k) holds the codes + 1 of rows r, r + N/4, r + N/2 and r + 3N/4, the first in the lowest bits."""

    format = OperandFormat("ternary", "rowwise")  # q, k and v have a scale each, and are one linear here

    def __init__(self, divides: bool):
        """divides: whether `weight_scale` does."""
        self._divides = divides

    def parts(self, n: int, k: int) -> dict[str, Part]:
        return {"weight": Part(("U8",), ((-(-n // 4), k),)), "weight_scale": Part(FLOATS, ((1,), ()))}

    def codes(self, parts: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        if n % 4:
            raise Unreadable(f"has {n} rows, which are packed in fours")
        packed = parts["weight"]
        codes = torch.cat([(packed >> 2 * i) & 3 for i in range(4)]).view(torch.int8) - 1  # [N, K]
        check_ternary(codes)
        scale = parts["weight_scale"].float().reshape(1)
        scale = scale.reciprocal() if self._divides else scale
        return QuantizedTensor(pack(codes, "ternary"), scale.expand(n).contiguous(), self.format)


def read_bitnet(config: Mapping[str, Any], where: str) -> DeclaredCodes | None:
    """UserError for linears with a norm of their own, which no architecture here has."""
    if config.get("use_rms_norm"):
        raise UserError(f"{where}.use_rms_norm: true is not read: no linear here has a norm of its own.")
    kind, mode = config.get("linear_class", "bitlinear"), config.get("quantization_mode", "offline")
    for key, value, allowed in (
        ("linear_class", kind, ("bitlinear", "autobitlinear")),
        ("quantization_mode", mode, ("offline", "online")),
    ):
        if value not in allowed:
            raise UserError(f"{where}.{key}: {value!r} is not allowed; it must be {' or '.join(map(repr, allowed))}.")
    if mode == "online":
        return None
    return codes_of_linears(config, PackedTernary(kind == "bitlinear"), "modules_to_not_convert", where)


READERS["bitnet"] = read_bitnet
