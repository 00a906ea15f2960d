"""The folder of a run: that of the checkpoint that it resumes from, if this is the run's newest; else a new one.

Resuming an older checkpoint, or one that lies outside of a run folder, starts a new run: its config.json names the
parent run and the step, its metrics.jsonl begins with the parent's, and nothing in the parent's folder changes.

config.json is what a run trains with now; config.0.json, config.1.json, ... are what it trained with before it was
resumed with other settings, oldest first.
"""

import contextlib
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qtrain import __version__
from qtrain.core.checks import shown, user_path
from qtrain.core.config import as_dict, versions, write_config
from qtrain.core.errors import UserError
from qtrain.core.process import command_line
from qtrain.core.reading import refuse_other
from qtrain.train.log.jsonl import read_object
from qtrain.train.settings.settings import TrainSettings
from qtrain.train.state.checkpoint import cannot_load, newest_whole
from qtrain.train.state.checkpoint_files import (
    INDEX,
    IncompleteCheckpoint,
    incomplete_checkpoints,
    newest_complete,
    read_marker,
)
from qtrain.train.state.run_lock import check_unlocked

RUN_NAME_BYTES = 100
"""File systems allow 255 bytes; a time comes before the name, and "-recovered" may come after it."""


@dataclass(frozen=True)
class RunFolder:
    """Where a run lives, and the checkpoint that it resumes from (None: it starts at step 0)."""

    path: Path
    resumed_from: Path | None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def is_resumed(self) -> bool:
        """Whether it is an earlier run's folder."""
        return self.resumed_from is not None and self.resumed_from.parent == self.checkpoints

    @property
    def parent(self) -> Path | None:
        """The run that this one continues in a folder of its own; of a checkpoint outside of a run, its folder."""
        if self.resumed_from is None or self.is_resumed:
            return None
        return run_of(self.resumed_from) or self.resumed_from.parent


def run_of(checkpoint: Path) -> Path | None:
    """The run folder that a checkpoint lies in, if it lies in one."""
    run = checkpoint.parent.parent
    return run if checkpoint.parent.name == "checkpoints" and (run / "config.json").exists() else None


def find_run_folder(settings: TrainSettings, script: str) -> RunFolder:
    """The folder of a new run, or of the run that --resume names; creates nothing. UserError for a bad --resume, and
    for a run that another process is training."""
    if not re.fullmatch(r"[\w.-]+", settings.run_name) or len(settings.run_name.encode()) > RUN_NAME_BYTES:
        name = shown(settings.run_name)
        raise UserError(
            f"--run_name: {name} cannot name a folder; use letters, digits, '_', '-', '.', at most {RUN_NAME_BYTES} "
            "bytes of UTF-8."
        )
    root = user_path(settings.runs_dir, "--runs_dir") / script
    checkpoint = None if settings.resume is None else resolve_resume(settings.resume, root, settings.run_name)
    if checkpoint and (run := run_of(checkpoint)):
        for name in ("config.json", "metrics.jsonl", "train.log", "run.lock"):
            refuse_other(run / name, "--resume", "; move it away")
        # An older checkpoint starts a new run: this one's later steps stay as they are.
        newest = newest_complete(checkpoint.parent)
        if newest and newest[0].samefile(checkpoint):
            check_unlocked(run)
            return RunFolder(run, checkpoint)
    return RunFolder(_free_path(root, settings.run_name), checkpoint)


def make_run_folder(folder: RunFolder, run_name: str) -> RunFolder:
    """Make the folder of a new run; where another run has taken its name in the meantime, under the next free one.
    Raises UserError."""
    while not folder.is_resumed:
        try:
            folder.path.mkdir(parents=True)
            break
        except FileExistsError:
            folder = RunFolder(_free_path(folder.path.parent, run_name), folder.resumed_from)
        except OSError as error:
            raise UserError(f"--runs_dir: cannot write {folder.path}: {error.strerror}.") from None
    return folder


def make_recovered_folder(folder: RunFolder) -> RunFolder:
    """Make <name>-recovered (or -recovered-2, ...) next to a run folder that is gone. Raises OSError."""
    name = without_recovered(folder.path.name)
    for suffix in ("", *(f"-{number}" for number in range(2, 10_000))):
        path = folder.path.with_name(f"{name}-recovered{suffix}")
        with contextlib.suppress(FileExistsError):
            path.mkdir(parents=True)
            break
    return RunFolder(path, None)


def resume_command(folder: RunFolder, script: str) -> str:
    """The command that resumes this run."""
    program = sys.argv[0] if Path(sys.argv[0]).name == f"{script}.py" else f"{script}.py"
    config = shlex.quote(str(folder.path / "config.json"))
    return f"{command_line(shlex.quote(program))} --config {config} --resume {shlex.quote(str(folder.path))}"


def _free_path(root: Path, run_name: str) -> Path:
    """<root>/<time>_<run_name>, of this second or the first later one without a run: names sort by time."""
    started = time.time()
    while (path := root / f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}_{run_name}").exists():
        started += 1
    return path


NOT_COMPARED = ("resume", "runs_dir", "dry_run", "max_hours", "gpus", "dp_replicate", "dp_shard")
"""Settings that say where and how a run is started, not what it is."""


SHAPING = frozenset(
    {"model", "model_impl", "model_kwargs", "pretrained", "lora", "freeze_embedding_layer", "dtype", "optim"}
    | {"quantize", "quantize_kwargs", "quantize_overrides", "quantize_schedule", "quantize_lm_head"}
    | {"quantize_min_size"}
    | {"ema_decay", "optim_kwargs"}
)
"""Settings that the names, shapes or dtypes of a run's tensors depend on."""


def that_run_had(changed: Mapping[str, tuple[Any, Any]], names: Collection[str] = SHAPING) -> str:
    """The first three `changed_settings` that are among `names`, in a sentence to end a message; "" without any."""
    found = [
        f"--{name} {shown(old)}, not {shown(new)}"
        for name, (old, new) in changed.items()
        if name.partition(".")[0] in names
    ]
    return f" That run had {'; '.join(found[:3])}." if found else ""


def result_versions() -> dict[str, str]:
    """Versions of what computes a run's results, this package's source among them."""
    found = versions()
    others = {k: v for k, v in found.items() if v and k not in ("source", "git", "tyro", "wandb")}
    return {"qtrain": f"{__version__} (source {found['source']})", **others}


def changed_versions(saved: Any, here: Mapping[str, str]) -> list[str]:
    """A line with the versions that differ from the `saved` ones of a checkpoint, old > new; none where it has none."""
    if not isinstance(saved, dict):
        return []
    changed = [name for name in {**here, **saved} if saved.get(name) != here.get(name)]
    each = ", ".join(f"{name} {saved.get(name, 'none')} > {here.get(name, 'none')}" for name in changed)
    return [f"--resume: it was saved with other versions: {each}"] if changed else []


def save_run_config(settings: TrainSettings, folder: Path, parent: Mapping[str, Any] | None = None) -> None:
    """Write config.json; one of other settings or versions becomes the next config.N.json.

    parent: {"run", "step"} that a new run continues; kept when the run itself is resumed."""
    path, before = folder / "config.json", read_object(folder / "config.json")
    unfinished = folder / ".config.json.tmp"
    parent = parent or before.get("_parent")
    write_config(settings, unfinished, {"_command": sys.argv, **({"_parent": parent} if parent else {})})
    if before and _without_command(before) != _without_command(read_object(unfinished)):
        numbers = (n for n in range(10**6) if not (folder / f"config.{n}.json").exists())
        os.rename(path, folder / f"config.{next(numbers)}.json")
    # Atomic: a reader finds the old file or the new one.
    os.replace(unfinished, path)


def changed_settings(checkpoint: Path, settings: TrainSettings) -> dict[str, tuple[Any, Any]]:
    """(old, new) of every setting that differs from the config.json of the run that saved `checkpoint`, by name; the
    keys of JSON objects apart, as `optim_kwargs.betas`. Nothing where there is no config.json."""
    in_run = checkpoint.parent.name == "checkpoints"
    before = _flat(read_object(checkpoint.parent.parent / "config.json")) if in_run else {}
    if not before:
        return {}
    current = _flat(json.loads(json.dumps(as_dict(settings))))
    return {
        name: (before.get(name), current.get(name))
        for name in {**before, **current}
        if before.get(name) != current.get(name)
        and name not in NOT_COMPARED
        and (name in before or "." in name)  # a setting that the saved run's version did not have
    }


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key.startswith("_"):
            continue
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _without_command(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "_command"}


def without_recovered(name: str) -> str:
    """The name of a run folder without the suffix of one that replaces a deleted one."""
    return re.sub(r"-recovered(-\d+)?$", "", name)


def resolve_resume(value: str, run_root: Path, run_name: str | None = None) -> Path | None:
    """The checkpoint that `--resume value` names.

    `auto` is the one saved last by any run in `run_root` (runs/<script>) that is called `run_name`, if given; None, and
    a printed line, if there is none. A path may be a checkpoint, a folder of checkpoints or a run folder.
    """
    if value == "auto":
        runs = [run for run in run_root.iterdir() if run.is_dir()] if run_root.is_dir() else []
        if run_name is not None:
            runs = [run for run in runs if run_name in (run.name, without_recovered(run.name).partition("_")[2])]
        newest = {run: newest_complete(run / "checkpoints") for run in sorted(runs)}
        damaged = {run: incomplete_checkpoints(run / "checkpoints") for run, best in newest.items() if not best}
        if found := [best for best in newest.values() if best]:
            for path, why in ((path, why) for reasons in damaged.values() for path, why in reasons.items()):
                print(f"--resume auto: {path} is skipped: {why}")
            return max(found, key=lambda best: (best[1].saved_at, best[1].step))[0]
        name = f" of a run named {run_name!r}" if run_name is not None else ""
        for run, reasons in reversed(damaged.items()):
            for path, why in reasons.items():
                fix = (
                    f"{run.name} has no complete checkpoint. To start from step 0, leave --resume out, or rename {path}"
                )
                raise cannot_load(path, why, f"{fix}.")
        print(f"--resume auto: no complete checkpoint{name} in {run_root}; starting from step 0.")
        return None
    path = user_path(value, "--resume")
    if not path.is_dir():
        raise cannot_load(path, "there is no such folder", "Give a checkpoint, a run folder, or auto.")
    # A run folder, or a folder of checkpoints; else the path itself is a checkpoint, or nothing that is known.
    for folder in (path / "checkpoints", path):
        if best := newest_complete(folder):
            return best[0]
        for incomplete, why in incomplete_checkpoints(folder).items():
            raise cannot_load(incomplete, why, f"{folder} has no complete checkpoint.")
    try:
        read_marker(path)
    except IncompleteCheckpoint as reason:
        if whole := newest_whole(path.parent, {path}):
            raise cannot_load(path, str(reason), f"The newest complete one beside it is {whole}.") from None
        if (path / INDEX).exists() or path.name.isdigit():
            raise cannot_load(path, str(reason)) from None
        raise cannot_load(path, "there is no complete checkpoint in it", "Give a checkpoint or a run folder.") from None
    return path
