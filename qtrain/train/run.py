"""A run: its folder, and everything whose state a checkpoint holds, saved and restored together."""

import re
import shlex
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from qtrain.config import write_config
from qtrain.errors import UserError
from qtrain.quant import QuantizedModel
from qtrain.train.checkpoint import Checkpoints, read_meta, resolve_resume
from qtrain.train.settings import TrainSettings
from qtrain.train.state import TrainState
from qtrain.train.tensors import model_tensors, optimizer_tensors, prepare_optimizer, rng_state, set_rng_state


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
    if not re.fullmatch(r"[\w.-]+", settings.run_name):
        raise UserError(f"--run_name: {settings.run_name!r} cannot name a folder; use letters, digits, '_', '-', '.'.")
    root = Path(settings.runs_dir) / script
    checkpoint = resolve_resume(settings.resume, root, settings.run_name) if settings.resume else None
    if checkpoint is None:
        return RunFolder(root / f"{time.strftime('%Y%m%d-%H%M%S')}_{settings.run_name}", None)
    # A checkpoint that lies elsewhere than in a run's folder starts a new run from its state.
    inside = checkpoint.parent.name == "checkpoints" and (checkpoint.parent.parent / "config.json").exists()
    new = root / f"{time.strftime('%Y%m%d-%H%M%S')}_{settings.run_name}"
    return RunFolder(checkpoint.parent.parent if inside else new, checkpoint)


def open_run_folder(folder: RunFolder, settings: TrainSettings) -> None:
    """Make the folder and write config.json."""
    try:
        folder.path.mkdir(parents=True, exist_ok=folder.resumed_from is not None)
    except FileExistsError:
        raise UserError(f"--run_name: {folder.path} exists already; start again in a second.") from None
    except OSError as error:
        raise UserError(f"--runs_dir: cannot make {folder.path}: {error.strerror}.") from None
    write_config(settings, folder.path / "config.json", sys.argv)


def resume_command(folder: RunFolder, script: str) -> str:
    """The command that goes on with this run."""
    config = shlex.quote(str(folder.path / "config.json"))
    return f"python {script}.py --config {config} --resume {shlex.quote(str(folder.path))}"


@dataclass
class Run:
    """What training changes; `save` and `restore` move all of it together."""

    settings: TrainSettings
    script: str
    folder: RunFolder
    device: torch.device
    model: nn.Module
    quantized: QuantizedModel
    optimizer: torch.optim.Optimizer
    state: TrainState

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(self.folder.checkpoints, max(self.settings.keep_ckpts, 1))

    def save(self) -> Path:
        """Write a checkpoint of this moment; returns its folder."""
        optim_tensors, optim_meta = optimizer_tensors(self.optimizer, self.model)
        tensors = {"model": model_tensors(self.model), "optim": optim_tensors, "rng": rng_state()}
        meta = {"state": self.state.as_meta(), "optim": optim_meta, "script": self.script}
        return self.checkpoints.save(self.state.step, tensors, meta)

    def restore(self) -> None:
        """Load the checkpoint that the run goes on from, if there is one; later ones of the same run are removed."""
        path = self.folder.resumed_from
        if path is None:
            return
        meta = read_meta(path)
        if meta.get("script") != self.script or not {"state", "optim"} <= meta.keys():
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
            "model": model_tensors(self.model),
            "optim": prepare_optimizer(self.optimizer, self.model, meta["optim"]),
            "rng": rng,
        }
        Checkpoints.load(path, tensors)
        set_rng_state(rng)
        self.quantized.refresh()
        self.state = state
        if path.parent == self.folder.checkpoints:
            self.checkpoints.discard_after(state.step)
