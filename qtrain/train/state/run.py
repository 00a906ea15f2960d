"""A run: its folder, and all state that a checkpoint holds, saved and restored together."""

import contextlib
import dataclasses
import logging
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from qtrain.comm.ranks import from_rank_0, leave_world, on_all_ranks, rank
from qtrain.core.errors import TrainingStopped, UserError, explained, first_line, os_errors
from qtrain.core.maybe_none import MaybeNone
from qtrain.models import Decoder
from qtrain.optim import Optimizer
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import QuantizedModel
from qtrain.train.log.report.write import try_write_report
from qtrain.train.log.status import FILE_ONLY, console_of, setup_log
from qtrain.train.settings.machine import choose_dtype
from qtrain.train.settings.settings import TrainSettings
from qtrain.train.state.background_save import BackgroundSave
from qtrain.train.state.checkpoint import Checkpoints
from qtrain.train.state.ema import Ema
from qtrain.train.state.fingerprints import files_entry, fingerprint
from qtrain.train.state.recorded_map import recorded_map
from qtrain.train.state.run_folder import (
    RunFolder,
    make_recovered_folder,
    make_run_folder,
    result_versions,
    save_run_config,
)
from qtrain.train.state.run_lock import locked
from qtrain.train.state.state_dict import TrainState, model_tensors, optimizer_tensors, rng_state

SHARED_SECONDS = 10
"""How long a network file system may take to show a new folder to other machines."""


@dataclass
class Run:
    """Everything that training changes.

    `restore.py` comes first; then, when nothing can be refused any more, `opened_folder`, which is the first to write.
    """

    settings: TrainSettings
    script: str
    folder: RunFolder
    device: torch.device
    model: nn.Module
    quantized: QuantizedModel
    optimizer: Optimizer
    state: TrainState
    ema: Ema | None = None
    parallel: DataParallel | MaybeNone = None
    """None: one rank, for which `__post_init__` makes one."""
    data_files: Sequence[Path] = ()
    """Those that it trains on, as far as they are known."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """The lines that `restore` printed."""
    background: BackgroundSave = dataclasses.field(default_factory=BackgroundSave)
    _text: str = ""
    _locks: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    damaged: tuple[Path, ...] = ()
    """Checkpoints newer than the one that was loaded."""

    def __post_init__(self) -> None:
        self.parallel = self.parallel or DataParallel(self.model, self.quantized, Mesh())

    @property
    def checkpoints(self) -> Checkpoints:
        best = self.state.best_step if self.settings.keep_best else None
        return Checkpoints(self.folder.checkpoints, max(self.settings.keep_ckpts, 1), best=best)

    @cached_property
    def files(self) -> dict[str, Any]:
        """What a checkpoint says of `data_files`."""
        return from_rank_0(lambda: files_entry(self.data_files))

    @cached_property
    def versions(self) -> dict[str, str]:
        """Of the packages that results depend on."""
        return result_versions()

    @cached_property
    def frozen(self) -> dict[str, str]:
        """Fingerprints of the weights that do not train."""
        return fingerprint(self.model, self.parallel.master)

    @cached_property
    def teacher(self) -> dict[str, str] | None:
        """Fingerprints of its weights, of which each rank has all."""
        distillation = self.model.distillation if isinstance(self.model, Decoder) else None
        return None if distillation is None else fingerprint(distillation.teacher)

    def save(self) -> Path:
        """Write a checkpoint of everything but frozen weights. Returns its folder."""
        return self.checkpoints.save(self.state.step, *self._contents())

    def begin_save(self) -> None:
        """Start to write a checkpoint of the state as it is now; `background.finish` ends it."""
        # The contents are a view of the live state: `begin` copies it before it returns.
        self.background.begin(self.checkpoints, self.state.step, *self._contents())

    def _contents(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The tensors of a checkpoint, and its meta."""
        optim_tensors, optim_meta = optimizer_tensors(self.optimizer, self.model, self.parallel.master)
        tensors = self.tensors(optim_tensors, rng_state())
        meta = {
            "state": self.state.as_meta(),
            "optim": optim_meta,
            "script": self.script,
            "quantized_step": self.quantized.step,
            "dtype": "bf16" if choose_dtype(self.settings.dtype, self.device) is torch.bfloat16 else "fp32",
            "quantize": self.settings.quantize,
            "quantize_kwargs": self.settings.quantize_kwargs,
            "schemes": recorded_map(self.settings, self.quantized.schemes),
            "frozen": self.frozen,
            "files": self.files,
            "versions": self.versions,
        }
        if self.teacher is not None:
            meta["teacher"] = self.teacher
        if layout := self.parallel.model_parallel_state:
            meta |= {"optim": layout.whole_meta(optim_meta), "tp": self.settings.tp, "tp_only": layout.inexact()}
        return tensors, meta

    def tensors(self, optim: dict[str, Any], rng: dict[str, Any]) -> dict[str, Any]:
        """The tensors of a checkpoint. optim: of the optimizer; rng: of the generators."""
        model = model_tensors(self.model, trains=True, master=self.parallel.master)
        tensors = {"model": model, "optim": optim, "quantized": self.quantized.tensors(), "rng": rng}
        if self.ema is not None:
            tensors["ema"] = self.ema.tensors()
        # A rank may have parts, saved as slices of the whole tensors, which other degrees load.
        if layout := self.parallel.model_parallel_state:
            tensors |= {"model": layout.model(model), "optim": layout.states(optim)}
        return tensors

    @contextlib.contextmanager
    def opened_folder(self, text: str = "") -> Iterator[logging.Logger]:
        """Take the run folder for this process, write config.json and start train.log with `text`. The logger writes to
        train.log inside. Raises UserError. A new folder is removed again where a user's mistake ends the run before
        its first step."""
        first_step = self.state.step
        self.folder = from_rank_0(lambda: make_run_folder(self.folder, self.settings.run_name))
        self._text = text
        with contextlib.ExitStack() as self._locks:
            # Rank 0 takes the lock and writes config.json; the others go on once they see it.
            from_rank_0(self._take_folder)
            on_all_ranks(self._see_folder)
            if self.folder.is_resumed:
                self.checkpoints.set_aside(self.damaged)
            with os_errors(f"--runs_dir: cannot write {self.folder.path}"):
                log = self._start_log()
            try:
                yield log
            except Exception as error:
                is_new = self.state.step == first_step and not self.folder.is_resumed
                if is_new and isinstance(error, UserError):
                    self._remove_folder()
                else:
                    self._log_failure(error)
                raise
            except SystemExit as stop:
                if stop.code == 0:  # stopped by --max_hours: no rank takes the end of another for a fault
                    leave_world()
                raise
        leave_world()

    def _remove_folder(self) -> None:
        """Rank 0 alone: the other ranks write their logs there."""
        if rank() == 0:
            log = setup_log(None, console_of(logging.getLogger("qtrain")))
            shutil.rmtree(self.folder.path, ignore_errors=True)
            log.info("removed %s: no step was made", self.folder.path)

    def _log_failure(self, error: Exception) -> None:
        """What the script prints of an error that ends the run, for train.log and the report; of an unknown one all."""
        known = explained(error) or (error if isinstance(error, UserError | TrainingStopped) else None)
        log, said = logging.getLogger("qtrain"), str(known or first_line(error))
        log.error("%s", said, extra=FILE_ONLY, exc_info=None if known else error)
        if rank() == 0:
            try_write_report(self.folder.path, failure=said, quiet=True)

    def _take_folder(self) -> None:
        # A new run that continues an older checkpoint names it, and starts with the curves so far.
        parent = self.folder.parent
        continues = None if parent is None else {"run": str(parent), "step": self.state.step}
        with os_errors(f"--runs_dir: cannot write {self.folder.path}"):
            self._locks.enter_context(locked(self.folder.path))
            self._save_config(continues)
            for name in ("metrics.jsonl", "health.jsonl"):
                if parent is not None and (lines := parent / name).exists():
                    shutil.copyfile(lines, self.folder.path / name)

    def _see_folder(self) -> None:
        """UserError on a rank that does not see the folder which rank 0 has made."""
        end = time.monotonic() + SHARED_SECONDS
        while not (self.folder.path / "config.json").exists():
            if time.monotonic() > end:
                raise UserError(
                    f"--runs_dir: rank {rank()} does not see {self.folder.path}, which rank 0 has made; give a folder "
                    "on a file system that all processes share."
                )
            time.sleep(0.2)

    def recover_folder(self) -> bool:
        """If the run folder was deleted or moved away, continue in a new one next to it. Returns whether it was. Raises
        TrainingStopped where none can be made."""
        lost = self.folder.path
        if from_rank_0((lost / "config.json").exists):
            return False
        try:
            self.folder = from_rank_0(self._take_recovered_folder)
            log = self._start_log(console_of(logging.getLogger("qtrain")))
        except OSError as error:
            raise TrainingStopped(
                f"step {self.state.step}: the run folder {lost} is gone, and no other can be made beside it: "
                f"{error.strerror}. Nothing is saved."
            ) from None
        if rank() == 0:
            log.warning("the run folder %s is gone; this run continues in %s", lost, self.folder.path)
        return True

    def _take_recovered_folder(self) -> RunFolder:
        self.folder = make_recovered_folder(self.folder)
        self._locks.enter_context(locked(self.folder.path))
        self._save_config(None)
        return self.folder

    def _save_config(self, parent: Mapping[str, Any] | None) -> None:
        # Without --resume: this file as a recipe starts a new run.
        save_run_config(dataclasses.replace(self.settings, resume=None), self.folder.path, parent)

    def _start_log(self, console: Console | None = None) -> logging.Logger:
        log = setup_log(self.folder.path, console, rank())
        log.info("%s", "\n".join([self._text, *self.notes]), extra=FILE_ONLY)
        log.info("run folder  %s", self.folder.path)
        return log
