"""What `--list` prints: every registry with one line an entry."""

from qtrain.data import DATASETS, TOKENIZERS
from qtrain.models import list_models
from qtrain.optim import OPTIMIZERS
from qtrain.quant import SCHEMES


def registries() -> dict[str, list[tuple[str, str]]]:
    """(name, description) of every entry, by the flag or key that takes it."""
    return {
        "schemes (--quantize)": SCHEMES.describe(),
        "optimizers (--optim)": OPTIMIZERS.describe(),
        'dataset types (--train_ds {"type": ...})': DATASETS.describe(),
        "tokenizers (also: a .model file, a tokenizer.json, a folder, a hub id)": sorted(TOKENIZERS.items()),
        "models (--model; also: a .json file, a folder, a hub id)": list_models(),
    }


def listing() -> str:
    """All registries as text."""
    blocks = []
    for title, entries in registries().items():
        width = max(len(name) for name, _ in entries)
        blocks.append("\n".join([title, *(f"  {name:{width}}  {line}" for name, line in entries)]))
    return "\n\n".join(blocks)
