"""The folder of a run: that of the checkpoint that it resumes from, if this is the run's newest; else a new one.

Resuming an older checkpoint, or one that lies outside of a run folder, starts a new run: its config.json names the
parent run and the step, its metrics.jsonl begins with the parent's, and nothing in the parent's folder changes.
"""

import contextlib
import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from qtrain.core.checks import shown, user_path
from qtrain.core.config import command_line
from qtrain.core.errors import UserError
from qtrain.train.settings import TrainSettings
from qtrain.train.state.checkpoint import resolve_resume, without_recovered
from qtrain.train.state.checkpoint_marker import newest_complete
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
        _check_files(run)
        newest = newest_complete(checkpoint.parent)
        if newest and newest[0].samefile(checkpoint):
            check_unlocked(run)
            return RunFolder(run, checkpoint)
    return RunFolder(_free_path(root, settings.run_name), checkpoint)


def _check_files(run: Path) -> None:
    """UserError for a folder, a FIFO or a device in place of a file of the run: reading it may fail or never end."""
    for name in ("config.json", "metrics.jsonl", "train.log", "run.lock"):
        if (path := run / name).exists() and not path.is_file():
            raise UserError(f"--resume: {path} is not a file; move it away.")


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
    """Make <name>-recovered (or -recovered-2, ...) beside a run folder that is gone. Raises OSError."""
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
