"""The choices of `--quantize`, one a file. Importing this package registers every scheme."""

from qtrain.quant.schemes import (  # noqa: F401  (each registers itself)
    auto,
    bf16,
    binary,
    bitnet,
    fp8_blockwise,
    fp8_rowwise,
    fp8_rowwise_gw_hp,
    fp8_tensorwise,
    int4,
    int4_weight,
    int8,
    int8_blockwise,
    int8_weight,
    mxfp8,
    nvfp4,
    qat,
    switchback,
)
