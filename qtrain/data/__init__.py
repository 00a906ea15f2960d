"""Data: token shards, text, mixtures, examples, images and tokenizers; streams that resume exactly; the loaders.

Import order: tokenizers < this folder's own files < text, examples, images.
"""

# Modules imported for no name register dataset types: a new type is one file and one line here.
from qtrain.data.batch import IGNORED, Batch, Sample, TensorBatch
from qtrain.data.examples import chat_dataset, instruct_dataset  # noqa: F401
from qtrain.data.examples.examples import ExampleDataset
from qtrain.data.images import image_folder, image_rows, image_wds, sklearn_digits  # noqa: F401
from qtrain.data.images.augment import ImageTransform, Mixer, make_augmentation
from qtrain.data.images.image_loader import BatchMaker, ImageBatch, ImageLoader
from qtrain.data.images.images import IMAGE_SETS, Images, check_same_classes, open_images
from qtrain.data.loader import Loader
from qtrain.data.stream import DATASETS, Stream, StreamContext, dataset_tokenizer, open_stream
from qtrain.data.text import hf_text_dataset, mix_dataset, text_dataset, token_dataset  # noqa: F401
from qtrain.data.text.eval_windows import eval_batches
from qtrain.data.tokenizers.tokenizer import TOKENIZERS, Tokenizer, load_tokenizer

__all__ = [
    "DATASETS",
    "IGNORED",
    "IMAGE_SETS",
    "TOKENIZERS",
    "Batch",
    "BatchMaker",
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
    "open_images",
    "open_stream",
]
