"""Data: token shards, text, mixtures and tokenizers; streams of samples that resume exactly; the loader."""

# Each of these modules registers a dataset type: a further type is one file and one line here.
from qtrain.data import hf_text_dataset, mix_dataset, text_dataset, token_dataset  # noqa: F401
from qtrain.data.evaluation import EvalWindows, eval_batches
from qtrain.data.loader import Loader
from qtrain.data.stream import (
    DATASETS,
    IGNORED,
    Batch,
    Sample,
    Stream,
    StreamContext,
    dataset_tokenizer,
    make_dataset,
    open_stream,
)
from qtrain.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

__all__ = [
    "DATASETS",
    "IGNORED",
    "TOKENIZERS",
    "Batch",
    "EvalWindows",
    "Loader",
    "Sample",
    "Stream",
    "StreamContext",
    "Tokenizer",
    "dataset_tokenizer",
    "eval_batches",
    "load_tokenizer",
    "make_dataset",
    "open_stream",
]
