"""Checkpoints whose matrices are codes: what their `quantization_config` declares, and how they are read. Importing
this package registers every family of formats."""

from qtrain.models.hf.readers import (  # noqa: F401  (each registers its own)
    bitnet,
    bitsandbytes,
    compressed_tensors,
    fp8,
)
