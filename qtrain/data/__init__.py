"""Data: token shards, text, mixtures and tokenizers; streams of samples that resume exactly; the loader."""

# Each of these modules registers a dataset type, of text or of images: a further type is one file and one line here.
from qtrain.data import (  # noqa: F401
    chat_dataset,
    hf_text_dataset,
    image_folder,
    image_rows,
    image_wds,
    instruct_dataset,
    mix_dataset,
    sklearn_digits,
    text_dataset,
    token_dataset,
)
from qtrain.data.augment import Augmentation, ImageTransform, Mixer, make_augmentation
from qtrain.data.evaluation import EvalWindows, eval_batches
from qtrain.data.examples import ExampleDataset
from qtrain.data.image_loader import BatchMaker, ImageBatch, ImageLoader
from qtrain.data.images import IMAGE_SETS, Images, check_same_classes, open_images
from qtrain.data.loader import Loader
from qtrain.data.stream import (
    DATASETS,
    IGNORED,
    Batch,
    Sample,
    Stream,
    StreamContext,
    TensorBatch,
    dataset_tokenizer,
    make_dataset,
    open_stream,
)
from qtrain.data.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

__all__ = [
    "DATASETS",
    "IGNORED",
    "IMAGE_SETS",
    "TOKENIZERS",
    "Augmentation",
    "Batch",
    "BatchMaker",
    "EvalWindows",
    "ExampleDataset",
    "ImageBatch",
    "ImageLoader",
    "ImageTransform",
    "Images",
    "Loader",
    "Mixer",
    "Sample",
    "Stream",
    "StreamContext",
    "TensorBatch",
    "Tokenizer",
    "check_same_classes",
    "dataset_tokenizer",
    "eval_batches",
    "load_tokenizer",
    "make_augmentation",
    "make_dataset",
    "open_images",
    "open_stream",
]
