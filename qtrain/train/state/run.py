"""A run: its folder, and all state that a checkpoint holds, saved and restored together."""

import contextlib
import dataclasses
import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qtrain.checks import shown
from qtrain.errors import UserError
from qtrain.optim import Optimizer
from qtrain.quant import QuantizedModel
from qtrain.train.log.status import FILE_ONLY, setup_log
from qtrain.train.settings import TrainSettings
from qtrain.train.state.checkpoint import Checkpoints, read_meta
from qtrain.train.state.ema import Ema
from qtrain.train.state.frozen_weights import check_frozen, fingerprint
from qtrain.train.state.run_config import changed_settings, save_run_config
from qtrain.train.state.run_folder import RunFolder, make_run_folder
from qtrain.train.state.run_lock import locked
from qtrain.train.state.state_dict import (
    finish_optimizer,
    model_tensors,
    optimizer_tensors,
    prepare_optimizer,
    rng_state,
    set_rng_state,
    user_options,
)
from qtrain.train.state.train_state import TrainState


@dataclass
class Run:
    """Everything that training changes.

    `restore` comes first; then, when nothing can be refused any more, `opened_folder`, which is the first to write.
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
    notes: list[str] = dataclasses.field(default_factory=list)
    """The lines that `restore` printed."""

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder.checkpoints, max(self.settings.keep_ckpts, 1))

    @cached_property
    def _frozen(self) -> dict[str, str]:
        return fingerprint(self.model)

    def save(self) -> Path:
        """Write a checkpoint of everything but frozen weights. Returns its folder."""
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
        """Load the checkpoint that the run resumes from, if there is one, and print the settings that differ from the
        saved run's. Raises UserError if the checkpoint does not fit."""
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
        given = user_options(self.optimizer)
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
        converted = finish_optimizer(self.optimizer, self.model)
        set_rng_state(rng)
        self.quantized.set_step(meta["quantized_step"])  # keys the stochastic rounding of the weights' codes
        self.quantized.refresh(frozen=True)
        self.state = state
        pairs = zip(given, user_options(self.optimizer), strict=True)
        kept = {name: (old[name], now[name]) for old, now in pairs for name in old if old[name] != now[name]}
        self.notes = [*_changes(changed_settings(path, self.settings), kept)]
        if converted:
            self.notes.append(f"--resume: optimizer states converted: {', '.join(converted)}")
        if self.notes:
            print("\n".join(self.notes), flush=True)

    @contextlib.contextmanager
    def opened_folder(self, text: str = "") -> Iterator[logging.Logger]:
        """Take the run folder for this process, write config.json and start train.log with `text`; a resumed run loses
        the checkpoints of later steps. The logger writes to train.log inside. Raises UserError."""
        self.folder = make_run_folder(self.folder, self.settings.run_name)
        with locked(self.folder.path):
            try:
                # Without --resume: this file as a recipe starts a new run.
                save_run_config(dataclasses.replace(self.settings, resume=None), self.folder.path)
            except OSError as error:
                raise UserError(f"--runs_dir: cannot write {self.folder.path}: {error.strerror}.") from None
            if self.folder.is_resumed:
                self.checkpoints.discard_after(self.state.step)
            log = setup_log(self.folder.path)
            log.info("%s", "\n".join([text, *self.notes]), extra=FILE_ONLY)
            log.info("run folder  %s", self.folder.path)
            yield log


def _changes(settings: Mapping[str, tuple[Any, Any]], kept_options: Mapping[str, tuple[Any, Any]]) -> Iterator[str]:
    """A line for each setting that differs from the checkpoint's run, old > new. kept_options: (given, saved) of the
    optimizer's options for which the checkpoint's value holds."""
    kept = {n if n == "weight_decay" else f"optim_kwargs.{n}": options for n, options in kept_options.items()}
    changed = {name: f"{shown(old)} > {shown(new)}" for name, (old, new) in settings.items() if name not in kept}
    changed |= {
        name: f"{shown(saved)} > {shown(given)} has no effect: the checkpoint's optimizer options hold"
        for name, (given, saved) in kept.items()
    }
    for name in sorted(changed):
        yield f"--resume: {name} {changed[name]}"
