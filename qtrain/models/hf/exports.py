"""A trained model written in any export format, and what is refused before it is trained."""

import importlib.util
import os
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import nn

from qtrain.core.checksums import NAME as CHECKSUMS
from qtrain.core.errors import UserError, missing_package
from qtrain.models.hf.formats.dense import Dense
from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat, SafetensorsFormat
from qtrain.models.hf.formats.gguf import Gguf
from qtrain.models.hf.formats.table import kept
from qtrain.models.hf.gguf_export import export_gguf
from qtrain.models.hf.io import export_hf
from qtrain.models.hf.quantized_export import HEAD, ExportOptions, HeldCodes, WeightsInCodes, export_quantized
from qtrain.models.hf.source import ModelSource
from qtrain.models.native.decoder import Decoder
from qtrain.quant.choices import LinearChoice


def left_by_training(choices: Iterable[LinearChoice]) -> frozenset[str]:
    """The linears that an export leaves in high precision too: those that a low-bit run left there; of a run that
    quantized none, the output head."""
    choices = list(choices)
    left = {choice.name for choice in choices if choice.reason is not None}
    return frozenset({HEAD} if len(left) == len(choices) else left)


def read_formats(names: Sequence[str], flag: str) -> dict[str, ExportFormat]:
    """The formats of these names, each once. UserError for an unknown one, for none at all, and for one whose package
    is not installed."""
    if not names:
        raise UserError(f"{flag}: no format is named; allowed: {', '.join(EXPORT_FORMATS.names())}.")
    formats = {name: EXPORT_FORMATS.make(name, {}, flag) for name in names}
    for name, fmt in formats.items():
        if fmt.package is not None and importlib.util.find_spec(fmt.package) is None:
            raise missing_package(fmt.package, f"{flag} {name}")
    return formats


def check_exports(
    model: nn.Module, choices: Sequence[LinearChoice], formats: dict[str, ExportFormat], flag: str
) -> None:
    """UserError for a format that cannot hold the weights of `model`, which may be on the meta device. choices: what
    training does to its linears."""
    coded = {name: fmt for name, fmt in formats.items() if not isinstance(fmt, Dense)}
    if coded and not isinstance(model, Decoder):
        raise UserError(f"{flag}: {next(iter(coded))!r} needs qtrain's own decoder; use hf, or --model_impl native.")
    schemes = {choice.scheme for choice in choices if choice.scheme is not None}
    for name, fmt in coded.items():
        assert isinstance(model, Decoder)
        WeightsInCodes(model, fmt, left_by_training(choices), flag)
        if any(scheme.sub_norm for scheme in schemes) and (
            why := fmt.refuses_model(model.config.with_sub_norms("--quantize"))  # which the swap adds
        ):
            raise UserError(f"{flag}: {name!r} {why}; use another format.")
        if (
            fmt.weight is not None
            and fmt.weight.fmt == "ternary"
            and not (schemes and all(kept(scheme, fmt).equal for scheme in schemes))
        ):
            raise UserError(
                f"{flag}: {name!r} holds ternary weights, which --quantize bitnet trains; use another format."
            )


def check_export_folder(folder: Path, flag: str, source: str | None = None) -> None:
    """UserError for a folder that an export cannot replace: one that holds something else, one that cannot be written,
    and the exported folder `source` itself."""
    existing = next(p for p in (folder.absolute(), *folder.absolute().parents) if p.exists() or p.is_symlink())
    if not existing.is_dir():
        raise UserError(f"{flag}: cannot write {folder}: {existing} is a file.")
    if source is not None and folder.is_dir() and Path(source).is_dir() and folder.samefile(source):
        raise UserError(f"{flag}: {folder} is what is exported; name another folder.")
    if folder.is_dir() and any(folder.iterdir()) and not (folder / CHECKSUMS).is_file():
        raise UserError(f"{flag}: {folder} is there and is no export; name another folder.")
    if not os.access(existing if existing != folder.absolute() else existing.parent, os.W_OK | os.X_OK):
        raise UserError(f"{flag}: cannot write {folder}: no permission to write in {existing}.")


def export_as(
    fmt: ExportFormat, model: nn.Module, source: ModelSource, folder: Path, options: ExportOptions
) -> HeldCodes | None:
    """Write `model` into `folder`, which is replaced when all is written. Returns what became of the codes; None: the
    export has none."""
    if isinstance(fmt, Gguf) and isinstance(model, Decoder):
        return export_gguf(model, folder, fmt, options)
    if isinstance(fmt, SafetensorsFormat) and isinstance(model, Decoder):
        return export_quantized(model, source, folder, fmt, options)
    assert isinstance(fmt, Dense), "`check_exports` refuses other models in codes"
    text = None if (card := options.card) is None else lambda: card(None, None)
    export_hf(model, source, folder, options.tokenizer, trained_positions=options.trained_positions, card=text)
    return None
