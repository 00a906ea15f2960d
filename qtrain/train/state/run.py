"""A run: its folder, and everything whose state a checkpoint holds, saved and restored together."""

import contextlib
import dataclasses
import logging
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from torch import nn

from qtrain.checks import shown
from qtrain.config import write_config
from qtrain.errors import UserError
from qtrain.optim import Optimizer
from qtrain.quant import QuantizedModel
from qtrain.train.log.status import FILE_ONLY, setup_log
from qtrain.train.settings import TrainSettings
from qtrain.train.state.checkpoint import Checkpoints, read_meta, resolve_resume
from qtrain.train.state.ema import Ema
from qtrain.train.state.frozen_weights import check_frozen, fingerprint
from qtrain.train.state.state_dict import (
    finish_optimizer,
    model_tensors,
    optimizer_tensors,
    prepare_optimizer,
    rng_state,
    set_rng_state,
)
from qtrain.train.state.train_state import TrainState


@dataclass(frozen=True)
class RunFolder:
    """Where a run lives, and the checkpoint that it goes on from (None: from the beginning)."""

    path: Path
    resumed_from: Path | None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"


def find_run_folder(settings: TrainSettings, script: str) -> RunFolder:
    """The folder of a new run, or of the run that --resume names; creates nothing. UserError for a bad --resume."""
    if not re.fullmatch(r"[\w.-]{1,100}", settings.run_name):
        name = shown(settings.run_name)
        raise UserError(f"--run_name: {name} cannot name a folder; use at most 100 letters, digits, '_', '-', '.'.")
    root = Path(settings.runs_dir) / script
    checkpoint = None if settings.resume is None else resolve_resume(settings.resume, root, settings.run_name)
    if checkpoint and checkpoint.parent.name == "checkpoints" and (checkpoint.parents[1] / "config.json").exists():
        return RunFolder(checkpoint.parents[1], checkpoint)
    # A checkpoint that lies elsewhere than in a run's folder starts a new run from its state.
    started = time.time()
    while (path := root / f"{_timestamp(started)}_{settings.run_name}").exists():
        started += 1  # another run began in this second; names go on sorting by time
    return RunFolder(path, checkpoint)


def _timestamp(seconds: float) -> str:
    return time.strftime("%Y%m%d-%H%M%S", time.localtime(seconds))


def resume_command(folder: RunFolder, script: str) -> str:
    """The command that goes on with this run."""
    program = sys.argv[0] if Path(sys.argv[0]).name == f"{script}.py" else f"{script}.py"
    config = shlex.quote(str(folder.path / "config.json"))
    return f"python {shlex.quote(program)} --config {config} --resume {shlex.quote(str(folder.path))}"


@dataclass
class Run:
    """What training changes; `save` and `restore` move all of it together.

    `restore` first, then, when nothing can be refused any more, `opened_folder`: it is the first to write.
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

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder.checkpoints, max(self.settings.keep_ckpts, 1))

    @cached_property
    def _frozen(self) -> dict[str, str]:
        return fingerprint(self.model)

    def save(self) -> Path:
        """Write a checkpoint of this moment, but for the weights that do not train; returns its folder."""
        optim_tensors, optim_meta = optimizer_tensors(self.optimizer, self.model)
        tensors = {
            "model": model_tensors(self.model, trains=True),
            "optim": optim_tensors,
            "quantized": self.quantized.tensors(),
            "rng": rng_state(),
        }
        if self.ema is not None:
            tensors["ema"] = self.ema.tensors()
        meta = {
            "state": self.state.as_meta(),
            "optim": optim_meta,
            "script": self.script,
            "quantized_step": self.quantized.step,
            "quantize_kwargs": self.settings.quantize_kwargs,
            "frozen": self._frozen,
        }
        return self.checkpoints.save(self.state.step, tensors, meta)

    def restore(self) -> None:
        """Load the checkpoint that the run goes on from, if there is one. UserError where it does not fit."""
        path = self.folder.resumed_from
        if path is None:
            return
        meta = read_meta(path)
        if meta.get("script") != self.script or not {"state", "optim", "quantized_step"} <= meta.keys():
            raise UserError(
                f"--resume: {path} was not saved by {self.script}.py; resume with the script that saved it."
            )
        state = TrainState.from_meta(meta["state"])
        if state.step > self.settings.n_steps:
            raise UserError(
                f"--n_steps: {self.settings.n_steps} is less than the {state.step} steps of {path}; give more steps."
            )
        rng = rng_state()
        tensors = {
            "model": model_tensors(self.model, trains=True),
            "optim": prepare_optimizer(self.optimizer, self.model, meta["optim"]),
            "quantized": self.quantized.tensors(),
            "rng": rng,
        }
        if self.ema is not None:
            tensors["ema"] = self.ema.tensors()
        check_frozen(meta.get("frozen"), self._frozen, path, self.settings.model)
        Checkpoints.load(path, tensors)
        if converted := finish_optimizer(self.optimizer, self.model):
            print(f"--resume: optimizer states converted: {', '.join(converted)}", flush=True)
        set_rng_state(rng)
        self.quantized.set_step(meta["quantized_step"])  # stochastically rounded codes come from the draws of then
        self.quantized.refresh(frozen=True)
        self.state = state

    @contextlib.contextmanager
    def opened_folder(self, text: str = "") -> Iterator[logging.Logger]:
        """Make the run folder, write config.json and start train.log with `text`; a resumed run loses the checkpoints
        of later steps. The logger writes to train.log inside."""
        self._make_folder()
        log = setup_log(self.folder.path)
        log.info("%s", text, extra=FILE_ONLY)
        log.info("run folder  %s", self.folder.path)
        yield log

    def _make_folder(self) -> None:
        try:
            self.folder.path.mkdir(parents=True, exist_ok=self.folder.resumed_from is not None)
            # Without --resume: whoever takes config.json for a recipe wants a new run.
            write_config(dataclasses.replace(self.settings, resume=None), self.folder.path / "config.json", sys.argv)
        except FileExistsError:
            raise UserError(f"--run_name: {self.folder.path} exists already; start again in a second.") from None
        except OSError as error:
            raise UserError(f"--runs_dir: cannot write {self.folder.path}: {error.strerror}.") from None
        if self.folder.resumed_from and self.folder.resumed_from.parent == self.folder.checkpoints:
            self.checkpoints.discard_after(self.state.step)
