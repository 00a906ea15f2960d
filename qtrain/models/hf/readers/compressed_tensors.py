"""The formats of the package compressed-tensors, of which `formats/compressed_tensors.py` has the tensors.

Each group of modules has a format of its own. Scales of activations and of the KV cache are for inference: no weight
depends on them.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from qtrain.core.checks import check_value, shown
from qtrain.core.errors import UserError
from qtrain.models.hf.readers.declared import READERS, DeclaredCodes, Group, NameMatch, compiled
from qtrain.models.hf.readers.reader import FLOATS, EightBits, MatrixReader, Part, Unreadable, blocks_of
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

_GROUPS = {16: "1x16", 32: "1x32", 64: "1x64", 128: "1x128"}


class PackedInt4(MatrixReader):
    """Codes + 8 in int32, eight each, the first in the lowest bits; a scale per row or per group of a row."""

    refused: ClassVar = EightBits.refused

    def __init__(self, granularity: str):
        self.format = OperandFormat("int4", granularity)

    def parts(self, n: int, k: int) -> dict[str, Part]:
        return {
            "weight_packed": Part(("I32",), ((n, -(-k // 8)),)),
            "weight_scale": Part(FLOATS, (blocks_of(self.format.granularity, n, k),)),
            "weight_shape": Part(("I64", "I32"), ((2,),)),
        }

    def codes(self, parts: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        if (shape := parts["weight_shape"].tolist()) != [n, k]:
            raise Unreadable(f"has a weight_shape of {shape}, but its config says {[n, k]}")
        packed = parts["weight_packed"].contiguous().view(torch.uint8)[:, : -(-k // 2)]
        # Two codes a byte, the first in the low half, as ours; + 8 flips the sign bit of two's complement.
        codes, scale = packed ^ 0x88, parts["weight_scale"].float()
        if k % 2:
            codes[:, -1] &= 0x0F
        return QuantizedTensor(codes, scale.reshape(-1) if self.format.granularity == "rowwise" else scale, self.format)


class PackedNvFp4(MatrixReader):
    """e2m1 codes, two a byte; e4m3 scales of 16, and one of the tensor that divides."""

    refused: ClassVar = EightBits.refused
    # The product of both scales, in fp32.
    format = OperandFormat("e2m1", "1x16")

    def parts(self, n: int, k: int) -> dict[str, Part]:
        return {
            "weight_packed": Part(("U8",), ((n, -(-k // 2)),)),
            "weight_scale": Part(("F8_E4M3",), (blocks_of("1x16", n, k),)),
            "weight_global_scale": Part(("F32",), ((1,), ())),
        }

    def codes(self, parts: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        scale = parts["weight_scale"].float() / parts["weight_global_scale"].reshape(1)
        return QuantizedTensor(parts["weight_packed"], scale, self.format)


def read_compressed_tensors(config: Mapping[str, Any], where: str) -> DeclaredCodes:
    """UserError for formats, strategies and additions that are not read."""
    if config.get("quantization_status", "compressed") != "compressed":
        raise UserError(f"{where}.quantization_status: {shown(config['quantization_status'])} is not 'compressed'.")
    for key, what in (("sparsity_config", "sparse weights"), ("transform_config", "rotated weights")):
        declared = config.get(key) or {}
        if declared and not (isinstance(declared, dict) and declared.get("format") == "dense"):
            raise UserError(f"{where}.{key}: {what} are not read; use a checkpoint without them.")
    groups = check_value(f"{where}.config_groups", config.get("config_groups"), dict[str, dict[str, Any]])
    if not groups:
        raise UserError(f"{where}.config_groups: there is none.")
    ignored = _names(config.get("ignore") or [], f"{where}.ignore", linears=False)
    found = []
    for name, group in groups.items():
        here = f"{where}.config_groups.{name}"
        layout = group.get("format") or config.get("format")
        args = check_value(f"{here}.weights", group.get("weights"), dict[str, Any])
        matches = _names(group.get("targets") or [], f"{here}.targets", linears=True)
        found.append(Group(matches, _reader(layout, args, f"{here}.weights")))
    return DeclaredCodes("compressed-tensors", tuple(found), ignored)


def _names(given: Any, where: str, linears: bool) -> NameMatch:
    names = check_value(where, given, list[str])
    expressions = tuple(compiled(name.removeprefix("re:"), where) for name in names if name.startswith("re:"))
    return NameMatch(linears and "Linear" in names, tuple(names), (), expressions)


def _reader(layout: Any, args: Mapping[str, Any], where: str) -> MatrixReader:
    kind, bits, strategy = args.get("type", "int"), args.get("num_bits", 8), args.get("strategy")
    if not args.get("symmetric", True):
        raise UserError(f"{where}.symmetric: false is not read; only codes without zero points are.")
    size, blocks = args.get("group_size"), args.get("block_structure")
    strategy = strategy or ("group" if size else "tensor")
    granularity = {"tensor": "tensorwise", "channel": "rowwise"}.get(strategy)
    if strategy == "group" and isinstance(size, int):
        granularity = _GROUPS.get(size)
    if strategy == "block" and blocks in ([128, 128], "128x128"):
        granularity = "128x128"
    eight = {"float": "e4m3", "int": "int8"}.get(kind)
    if bits == 8 and layout in ("float-quantized", "int-quantized", "naive-quantized") and eight and granularity:
        return EightBits(eight, granularity, "weight_scale")
    if (layout, kind, bits, granularity) == ("mxfp8-quantized", "float", 8, "1x32"):
        return EightBits("e4m3", "1x32", "weight_scale", ("U8",))
    if (layout, kind, bits) == ("pack-quantized", "int", 4) and granularity not in (None, "tensorwise"):
        return PackedInt4(granularity)
    if (layout, kind, bits, size) == ("nvfp4-pack-quantized", "float", 4, 16):
        return PackedNvFp4()
    given = {"format": layout, "type": kind, "num_bits": bits, "strategy": strategy, "group_size": size}
    given |= {"block_structure": blocks} if blocks else {}
    raise UserError(
        f"{where}: {', '.join(f'{key} {shown(value)}' for key, value in given.items())} is not read; FP8 and INT8 "
        "with a scale per tensor, channel or 128x128, packed INT4, NVFP4 and MXFP8 are."
    )


READERS["compressed-tensors"] = read_compressed_tensors
