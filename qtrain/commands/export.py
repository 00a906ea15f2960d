"""Write a trained model in other formats: what to export > formats > codes > folders.

python -m qtrain export runs/llm_pretrain/RUN --format ct_int8
python -m qtrain export Qwen/Qwen3-0.6B --format fp8_block gguf_q8_0 --output exports

A run is exported from its newest checkpoint, with the codes that its training multiplied with where the format can hold
them. A folder or hub id has dense weights, of which each format makes its own codes.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from qtrain.core.checks import user_path
from qtrain.core.config import parse
from qtrain.core.errors import UserError
from qtrain.train.settings.listing import listing

if TYPE_CHECKING:
    from qtrain.data.tokenizers.tokenizer import Tokenizer
    from qtrain.train.assembly.measured import MeasuredModel

NAME = "-m qtrain export"


@dataclass(frozen=True)
class ExportSettings:
    """Write a trained model in other formats; the first word without dashes is --model."""

    model: str | None = None
    """Run folder (its newest checkpoint, else its export), checkpoint of one, exported folder, or hub id."""
    format: tuple[str, ...] = ()
    """Formats to write, each into a folder of its own; --list shows them."""
    output: str | None = None
    """Folder in which a folder FORMAT is written for each format; None: the run's, of a folder NAME-FORMAT beside it,
    of a hub id NAME-FORMAT here."""
    push_to_hub: str | None = None
    """Upload the export to this repository of the Hugging Face hub, OWNER/NAME, made private if it is new; several
    formats each to OWNER/NAME-FORMAT. Needs a login: hf auth login."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device on which codes are made; auto: the GPU if there is one, else the CPU."""


def main(argv: list[str]) -> None:
    from qtrain.commands.evaluate import as_flags

    export(parse(ExportSettings, as_flags(argv), NAME, listing))


def export(settings: ExportSettings) -> None:
    # Imported here: torch and what needs it take seconds, which a mistyped flag should not have to wait for.
    from qtrain.models import ExportOptions, check_export_folder, check_exports, left_by_training, read_formats
    from qtrain.train.assembly.exports import check_pushes, export_folders, push_exports
    from qtrain.train.assembly.measured import MeasuredModel
    from qtrain.train.settings.machine import choose_device

    # ---- what to export, and where: whatever can be refused is refused here ------------------------------------------
    if settings.model is None:
        raise UserError("--model: nothing to export is named; give a run folder, a checkpoint, a folder or a hub id.")
    formats = read_formats(settings.format, "--format")
    if settings.push_to_hub is not None:
        check_pushes(settings.push_to_hub, [*formats])
    device = choose_device(settings.device)
    measured = MeasuredModel.find(settings.model, "--model", prefer_checkpoint=True)
    folders = {name: folder_of(measured, name, settings.output) for name in formats}
    for folder in folders.values():
        check_export_folder(folder, "--output", measured.exported)
    model, linears = measured.outline(device, native=any(name != "hf" for name in formats))
    check_exports(model, linears, formats, "--format")
    tokenizer = tokenizer_of(measured)

    # ---- codes, folders ----------------------------------------------------------------------------------------------
    positions = measured.settings.seq_len if measured.settings else 0
    with measured.to_export(device) as (model, notes):
        options = ExportOptions(tokenizer, left_by_training(linears), positions)
        lines = export_folders(
            model, measured.source, folders, options, measured.card(settings.model, notes), "--format"
        )
    print("\n".join([*lines, *notes]))
    if settings.push_to_hub is not None:
        print("\n".join(push_exports(folders, settings.push_to_hub)))


def folder_of(measured: "MeasuredModel", name: str, output: str | None) -> Path:
    """The folder of the format `name`."""
    if output is not None:
        return user_path(output, "--output") / name
    if measured.checkpoint is not None:
        return measured.checkpoint.parent.parent / name
    assert measured.exported is not None
    local = Path(measured.exported)
    if not local.is_dir():
        return Path(f"{local.name}-{name}")
    return local.parent / name if measured.settings is not None else local.parent / f"{local.resolve().name}-{name}"


def tokenizer_of(measured: "MeasuredModel") -> "Tokenizer | None":
    """That of the exported folder or, of a checkpoint, of the data that its run trained on."""
    from qtrain.data.stream import dataset_tokenizer, with_chat_template

    found = measured.tokenizer()
    trained = measured.settings
    if found is not None or trained is None or not trained.train_ds:
        return found
    try:
        found = dataset_tokenizer(trained.train_ds, "--train_ds of the run")
        return found and with_chat_template(found, trained.train_ds, "--train_ds of the run")
    except UserError as error:
        print(f"note    the export has no tokenizer. {error}")
        return None
