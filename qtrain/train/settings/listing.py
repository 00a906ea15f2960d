"""What `--list` prints: every registry, with one line per entry."""

import textwrap

from qtrain.core.registry import Registry


def listing(vision: bool = False) -> str:
    """All registries as text: each entry with its description and the keys of its JSON options.

    vision: timm's models instead of the language models."""
    # Imported here: a command that lists nothing need not wait for torch.
    from qtrain.data.images.images import IMAGE_SETS
    from qtrain.data.named_sets import NAMED_SETS
    from qtrain.data.stream import DATASETS
    from qtrain.data.tokenizers.tokenizer import TOKENIZERS
    from qtrain.models import EXPORT_FORMATS, list_models
    from qtrain.optim import OPTIMIZERS
    from qtrain.quant import SCHEMES

    blocks = [
        _block("schemes (--quantize)", SCHEMES.describe(), SCHEMES),
        _block("optimizers (--optim)", OPTIMIZERS.describe(), OPTIMIZERS),
        _block("optimizers of other libraries (--optim torch.NAME, ...)", OPTIMIZERS.describe_libraries()),
        _block('dataset types (--train_ds {"type": ...})', DATASETS.describe(), DATASETS),
        _block(
            "datasets of the hub (tokenize_data.py --dataset, the dataset of hf_text)",
            [(name, known.describe()) for name, known in NAMED_SETS.items()],
        ),
        _block("image dataset types (timm_finetune.py)", IMAGE_SETS.describe(), IMAGE_SETS),
        _block("tokenizers", sorted(TOKENIZERS.items())),
        _block("export formats (--export_format, python -m qtrain export --format)", EXPORT_FORMATS.describe()),
        _block("GPUs that --dry_run can plan for (--gpu)", _gpus()),
        _block("links between machines (--wire)", _wires()),
        _vision_models()
        if vision
        else _block("models (--model; also: a .json file, a folder, a hub id)", list_models()),
    ]
    return "\n\n".join(blocks)


def _gpus() -> list[tuple[str, str]]:
    from qtrain.core.hardware.datasheets import DATASHEET, planned_gpus

    gpus = ((name, product, DATASHEET[product]) for name, product in planned_gpus().items())
    return [(name, f"{product}, {gpu.memory_gib} GiB, {gpu.link} in a machine") for name, product, gpu in gpus]


def _wires() -> list[tuple[str, str]]:
    from qtrain.train.settings.machine import WIRES

    return [(name, f"{wire.bandwidth / 1e9:.3g} GB/s a GPU and direction") for name, wire in WIRES.items()]


def _vision_models() -> str:
    """timm's models, those of a module on one line."""
    from qtrain.models.vision import import_timm

    timm = import_timm("--list")
    lines = ["models of timm (--model)"]
    for module in timm.list_modules():
        lines += _wrapped(f"  {module}: ", " ".join(timm.list_models(module=module)))
    return "\n".join(lines)


def _block(title: str, entries: list[tuple[str, str]], registry: Registry | None = None) -> str:
    width = max(len(name) for name, _ in entries)
    lines = [title]
    for name, line in entries:
        lines += _wrapped(f"  {name:{width}}  ", line)
        if registry is not None:
            for key, what in registry.options(name):
                lines += _wrapped(f"  {'':{width}}    {key}: ", what)
    return "\n".join(lines)


def _wrapped(start: str, text: str) -> list[str]:
    """`start` and `text` in lines of at most 160 characters."""
    return textwrap.wrap(text, 160, initial_indent=start, subsequent_indent=" " * (len(start) + 2))
