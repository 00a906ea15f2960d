"""The choices of `--export_format`, a file for each family of formats. Importing this package registers all."""

from qtrain.models.hf.formats import (  # noqa: F401  (each registers its own)
    bitnet,
    compressed_tensors,
    dense,
    fp8_block,
    gguf,
    torchao,
)
