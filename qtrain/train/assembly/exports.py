"""The export of a run: a folder for each format of --export_format, and lines that say what is in them."""

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qtrain.comm.ranks import rank
from qtrain.core.config import as_dict
from qtrain.core.errors import UserError
from qtrain.core.hub import check_push, push_folder
from qtrain.core.process import command_line
from qtrain.data.tokenizers.tokenizer import Tokenizer
from qtrain.models import (
    EXPORT_FORMATS,
    ExportOptions,
    Lora,
    ModelSource,
    check_exports,
    export_as,
    keeping,
    left_by_training,
    merge_lora,
    read_formats,
    save_adapter,
)
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.model_card import ModelCard, device_name
from qtrain.train.assembly.prepare import Prepared
from qtrain.train.eval.lm_eval import run_lm_eval
from qtrain.train.plan.phases import last_linears
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.run import Run
from qtrain.train.step.step import export_weights

log = logging.getLogger("qtrain")

FLAG, PUSH = "--export_format", "--push_to_hub"


def check_run_exports(prepared: Prepared) -> None:
    """UserError for a format that cannot hold the weights that the run will have."""
    settings = prepared.language
    if settings.export:
        formats = read_formats(settings.export_format, FLAG)
        check_exports(prepared.architecture.empty, last_linears(prepared.plan, prepared.linears), formats, FLAG)
    if settings.push_to_hub is not None and not settings.dry_run:
        check_pushes(settings.push_to_hub, settings.export_format)


def check_pushes(repo_id: str, names: Sequence[str]) -> None:
    """UserError where the exports could not be uploaded."""
    for target in repositories(repo_id, names).values():
        check_push(target, PUSH)


def repositories(repo_id: str, names: Sequence[str]) -> dict[str, str]:
    """Format -> the repository that its export is uploaded to."""
    return {name: repo_id if len(names) == 1 else f"{repo_id}-{name}" for name in names}


def push_exports(folders: Mapping[str, Path], repo_id: str) -> list[str]:
    """Upload the exports in `folders`, by format. Returns lines for the log; TrainingStopped where that fails."""
    targets = repositories(repo_id, [*folders])
    return [f"uploaded    {push_folder(folder, targets[name], PUSH)}" for name, folder in folders.items()]


def export_paths(run: Run) -> dict[str, Path]:
    """Format -> the folder of the run that its export is in."""
    assert isinstance(run.settings, LanguageSettings)
    return {name: run.folder.path / name for name in run.settings.export_format}


def finish_adapters(run: Run, lora: Lora, merge: bool) -> None:
    """Write the adapters as PEFT has them, and with `merge` make them part of the weights. Every rank that has a part
    to export calls it."""
    assert isinstance(run.settings, LanguageSettings)
    folder, group, writes = run.folder.path / "adapter", run.parallel.mesh.model_group, rank() == 0
    device = run.parallel.device

    def gather(rows: Tensor) -> Tensor:
        assert group is not None
        return group.all_gather_no_grad(rows.to(device), "exported weights")

    save_adapter(run.model, lora, run.settings.model, folder, gather if group is not None else None, writes=writes)
    if writes:
        log.info("adapter     %s (peft.PeftModel.from_pretrained loads it)", folder)
    if merge:
        merge_lora(run.model, experts_only=not writes)


def write_exports(prepared: Prepared, run: Run, model: Any, tokenizer: Tokenizer | None) -> list[str]:
    """Write RUN/FORMAT for each format. model: with the weights to export, of one process, or as `export_hf` takes
    others. Returns lines for the log."""
    settings, folder = prepared.language, run.folder.path
    adapted = getattr(settings, "lora", None) is not None
    whose = whose_weights(run, adapted=adapted)
    assert isinstance(prepared.architecture, LanguageArchitecture)
    source = prepared.architecture.source
    hardware = device_name(prepared.device, prepared.geometry.devices)
    card = ModelCard.from_run(folder, source, as_dict(settings), hardware=hardware, lines=whose)
    options = ExportOptions(tokenizer, left_by_training(prepared.linears), settings.seq_len)
    lines = export_folders(model, source, export_paths(run), options, card)
    if any(name != "hf" for name in settings.export_format):
        lines += whose
    if set(settings.export_format) == {"hf"} and not adapted and (name := _keeping_format(prepared)):
        again = f"{command_line('-m qtrain export')} {folder} --format {name}"
        lines.append(f"codes       the dense export has none; with those that training multiplied with: {again}")
    return lines


def export_run(
    prepared: Prepared,
    run: Run,
    tokenizer: Tokenizer | None,
    record: Callable[[Mapping[str, float]], None],
    *,
    original: Any = None,
    finish: Callable[[], None] | None = None,
) -> None:
    """What --export, --lm_eval and --push_to_hub ask for at the end; all ranks call it. record: takes the results of
    --lm_eval; original: is written in place of the run's model; finish: as `merge` of `export_weights`."""
    settings = prepared.language
    with export_weights(run, finish, gathers=settings.export) as whole:
        if whole is not None and settings.export:
            for line in write_exports(prepared, run, original or whole, tokenizer):
                log.info("%s", line)
    if rank() != 0:
        return
    if settings.lm_eval:
        record(run_lm_eval(settings.lm_eval, run.folder.path / "hf", prepared.device.type))
    if settings.push_to_hub:
        for line in push_exports(export_paths(run), settings.push_to_hub):
            log.info("%s", line)


def _keeping_format(prepared: Prepared) -> str | None:
    """A format that can hold the codes of the run's checkpoint; None: there is none."""
    schemes = {choice.scheme for choice in prepared.linears if choice.scheme is not None}
    for name in keeping(schemes) if prepared.settings.keep_ckpts else ():
        fmt = EXPORT_FORMATS.make(name, {}, FLAG)
        with contextlib.suppress(UserError):  # of sizes that are no multiples of its blocks
            check_exports(prepared.architecture.empty, prepared.linears, {name: fmt}, FLAG)
            return name
    return None


def whose_weights(run: Run, *, adapted: bool) -> list[str]:
    """Lines that say of which weights an export's codes are, where these are not the ones that train."""
    if run.ema is not None or run.optimizer.averages_weights:
        return ["codes       are of the averaged weights, which evaluations read too"]
    return ["codes       are of weights with the adapters added, new where a matrix is adapted"] if adapted else []


def export_folders(
    model: nn.Module,
    source: ModelSource,
    folders: dict[str, Path],
    options: ExportOptions,
    card: ModelCard,
    flag: str = FLAG,
) -> list[str]:
    """Write each format of `folders` into its folder, with its own text of the card. Returns a line or two for each
    format."""
    lines = []
    for name, fmt in read_formats(tuple(folders), flag).items():
        own = dataclasses.replace(options, card=functools.partial(card.text, name, fmt))
        held = export_as(fmt, model, source, folders[name], own)
        lines.append(f"exported    {folders[name]} ({fmt.loaded_by})")
        if held is not None:
            lines.append(f"codes       {name}: {held.describe()}")
    return lines
