"""NF4 as bitsandbytes stores it (QLoRA, arXiv:2305.14314): blocks along the flattened matrix, double quantization too.

    weight                               uint8 [N * K / 2, 1], two codes a byte, the first in the high half
    weight.absmax                        fp32, one per block or, quantized again, uint8 codes
    weight.quant_map                     fp32 [16]: the value of each code
    weight.nested_absmax, .nested_quant_map    fp32: absmax = quant_map[code] * nested_absmax + nested_offset
    weight.quant_state.bitsandbytes__nf4       JSON: quant_type, blocksize, shape, nested_blocksize, nested_offset

Where blocks are 64 elements and divide rows, these are our own NF4 codes but for the order of the halves.
"""

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import torch
from torch import Tensor

from qtrain.core.checks import Range, check_value, parse_json, shown
from qtrain.core.errors import UserError
from qtrain.kernels.numerics.formats import NF4_VALUES
from qtrain.kernels.quantize.nf4 import BLOCK
from qtrain.models.hf.readers.declared import READERS, DeclaredCodes, codes_of_linears
from qtrain.models.hf.readers.reader import AT_ONCE, MatrixReader, Part, Unreadable, refuse_nonfinite_scale
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

_STATE = "weight.quant_state.bitsandbytes__nf4"
_NESTED = ("weight.nested_absmax", "weight.nested_quant_map")
_MAX_STATE = 4096
"""Bytes of the JSON."""


class Nf4(MatrixReader):
    """Codes of 4 bits. nested: whether the blocks' absmax are quantized too."""

    format = OperandFormat("nf4", "1x64")
    refused: ClassVar = {"SCB": "INT8 codes of bitsandbytes", "weight.quant_state.bitsandbytes__fp4": "FP4 codes"}

    def __init__(self, nested: bool):
        self.nested = nested

    def parts(self, n: int, k: int) -> dict[str, Part]:
        found = {
            "weight": Part(("U8",), ((-(-n * k // 2), 1), (1, -(-n * k // 2)))),
            "weight.absmax": Part(("U8",) if self.nested else ("F32",), ((None,),)),
            "weight.quant_map": Part(("F32",), ((16,),)),
            _STATE: Part(("U8",), ((None,),)),
        }
        return found | ({name: Part(("F32",), ((None,),)) for name in _NESTED} if self.nested else {})

    def codes(self, parts: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        absmax, block = self._absmax(parts, n, k)
        table = parts["weight.quant_map"].cpu()
        if block != BLOCK or k % BLOCK or not torch.equal(table, torch.tensor(NF4_VALUES)):
            why = f"blocks of {block}" if block != BLOCK else f"{k} in-features" if k % BLOCK else "another table"
            raise Unreadable(f"has {why}: its codes are not those of NF4 with blocks of {BLOCK} along rows")
        packed = parts["weight"].reshape(n, k // 2)
        # Our codes have the first element in the low half of a byte.
        return QuantizedTensor(packed >> 4 | packed << 4, absmax.view(n, k // BLOCK), self.format)

    def values(self, parts: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> Tensor:
        absmax, block = self._absmax(parts, n, k)
        refuse_nonfinite_scale(absmax)
        packed, table = parts["weight"].reshape(-1), parts["weight.quant_map"]
        values = torch.empty(2 * len(packed), dtype=dtype, device=packed.device)
        elements = max(1, AT_ONCE // (2 * block)) * 2 * block  # whole blocks and whole bytes
        for start in range(0, len(values), elements):
            piece = packed[start // 2 : (start + elements) // 2]
            codes = torch.stack((piece >> 4, piece & 15), dim=1).flatten()  # the high half first
            scale = absmax[start // block : -(-(start + elements) // block)].repeat_interleave(block)[: len(codes)]
            values[start : start + elements] = table[codes.int()] * scale
        return values[: n * k].view(n, k)

    def _absmax(self, parts: Mapping[str, Tensor], n: int, k: int) -> tuple[Tensor, int]:
        """(absmax of each block in fp32, elements of a block)."""
        state = _quant_state(parts[_STATE], n, k)
        block, absmax = state["blocksize"], parts["weight.absmax"]
        count = -(-n * k // block)
        if len(absmax) != count:
            raise Unreadable(f"has {len(absmax)} scales for {count} blocks of {block}")
        if not self.nested:
            return absmax, block
        nested, table = (parts[name] for name in _NESTED)
        width = state["nested_blocksize"]
        if len(table) != 256 or len(nested) != -(-count // width):
            raise Unreadable(f"has {len(nested)} scales of {count} scales in blocks of {width}")
        return table[absmax.int()] * nested.repeat_interleave(width)[:count] + state["nested_offset"], block


def _quant_state(stored: Tensor, n: int, k: int) -> dict[str, Any]:
    """The checked JSON of a matrix."""
    if len(stored) > _MAX_STATE:
        raise Unreadable(f"has a quant_state of {len(stored)} bytes")
    size = Annotated[int, Range(1, 1 << 16)]
    types = {"quant_type": str, "blocksize": size, "shape": list[int]}
    try:
        state = parse_json(bytes(stored.tolist()).decode(), "its quant_state")
        check_value("its quant_state", state, dict[str, Any])
        if "nested_offset" in state:
            types |= {"nested_blocksize": size, "nested_offset": float}
        state = {key: check_value(f"its quant_state: {key}", state.get(key), kind) for key, kind in types.items()}
    except (UserError, UnicodeDecodeError) as error:
        raise Unreadable(f"cannot be read: {error}") from None
    if state["quant_type"] != "nf4" or state["shape"] != [n, k]:
        said = f"{state['quant_type']} {state['shape']}"
        raise Unreadable(f"has a quant_state of {said[:60]}, but the config says nf4 {[n, k]}")
    return state


def read_bitsandbytes(config: Mapping[str, Any], where: str) -> DeclaredCodes:
    """UserError for INT8 and FP4."""
    if config.get("load_in_8bit") or config.get("_load_in_8bit"):
        raise UserError(f"{where}: 8-bit weights of bitsandbytes are not read; only NF4 is.")
    if (kind := config.get("bnb_4bit_quant_type", "fp4")) != "nf4":
        raise UserError(f"{where}.bnb_4bit_quant_type: {shown(kind)} is not read; only 'nf4' is.")
    nested = check_value(f"{where}.bnb_4bit_use_double_quant", config.get("bnb_4bit_use_double_quant", False), bool)
    return codes_of_linears(config, Nf4(nested), "llm_int8_skip_modules", where)


READERS["bitsandbytes"] = read_bitsandbytes
