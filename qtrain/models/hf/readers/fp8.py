"""Fine-grained FP8 (`quant_method` fp8, mxfp8), as DeepSeek-V3's checkpoints have it: `weight`, `weight_scale_inv`.

A scale multiplies, in spite of its name. Blocks at the edges of a matrix may be shorter.
"""

from collections.abc import Mapping
from typing import Any

from qtrain.core.checks import check_value
from qtrain.core.errors import UserError
from qtrain.models.hf.readers.declared import READERS, DeclaredCodes, codes_of_linears
from qtrain.models.hf.readers.reader import EXPONENTS, FLOATS, EightBits

_BLOCKS = {(128, 128): "128x128", (1, 128): "1x128", (1, 32): "1x32"}


def read_fp8(config: Mapping[str, Any], where: str) -> DeclaredCodes:
    """UserError for blocks of another size, or other codes."""
    if config.get("fmt", "e4m3") != "e4m3":
        raise UserError(f"{where}.fmt: {config['fmt']!r} is not read; only 'e4m3' is.")
    # transformers' value of a missing key; null: one scale for the tensor.
    size = check_value(f"{where}.weight_block_size", config.get("weight_block_size", [128, 128]), list[int] | None)
    granularity = "tensorwise" if size is None else _BLOCKS.get(tuple(size))
    if granularity is None:
        allowed = ", ".join(str(list(blocks)) for blocks in _BLOCKS)
        raise UserError(f"{where}.weight_block_size: {size} is not read; only {allowed} and null are.")
    reader = EightBits("e4m3", granularity, "weight_scale_inv", FLOATS + EXPONENTS)
    return codes_of_linears(config, reader, "modules_to_not_convert", where)


READERS["fp8"] = READERS["mxfp8"] = read_fp8
