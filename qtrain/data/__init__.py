"""Data: token shards, text, mixtures, examples, images and tokenizers; streams that resume exactly; the loaders.

Import order: tokenizers < this folder's own files < text, examples, images. Whoever reads text or writes shards needs
no torch: the names below are imported when they are first asked for.
"""

import importlib
from typing import Any

_MODULES = {
    "batch": ("IGNORED", "Batch", "Sample", "TensorBatch"),
    "eval_windows": ("eval_batches",),
    "examples.examples": ("ExampleDataset",),
    "images.augment": ("ImageTransform", "Mixer", "make_augmentation"),
    "images.image_loader": ("BatchMaker", "ImageBatch", "ImageLoader"),
    "images.images": ("IMAGE_SETS", "Images", "check_same_classes", "open_images"),
    "loader": ("Loader",),
    "stream": (
        "DATASETS",
        "Stream",
        "StreamContext",
        "dataset_tokenizer",
        "open_stream",
        "with_chat_template",
    ),
    "tokenizers.tokenizer": ("TOKENIZERS", "Tokenizer", "load_tokenizer"),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [*_HOMES]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
