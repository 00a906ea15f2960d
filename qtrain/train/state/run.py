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

from qtrain import SCRIPTS
from qtrain.comm.ranks import from_rank_0, leave_world, on_all_ranks, rank
from qtrain.core.checks import shown
from qtrain.core.errors import TrainingStopped, UserError, explained, first_line
from qtrain.core.maybe_none import MaybeNone
from qtrain.models import Decoder
from qtrain.optim import Optimizer
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.checkpoint_layout import refuse_other_tp
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import QuantizedModel
from qtrain.quant.scheme_map import scheme_of
from qtrain.train.log.metrics import read_metrics
from qtrain.train.log.report.write import try_write_report
from qtrain.train.log.status import FILE_ONLY, console_of, setup_log
from qtrain.train.settings.machine import choose_dtype
from qtrain.train.settings.settings import TrainSettings
from qtrain.train.state.background_save import BackgroundSave
from qtrain.train.state.checkpoint import Checkpoints, DamagedCheckpoint, damaged, newest_whole, read_meta
from qtrain.train.state.checkpoint_files import complete_checkpoints, incomplete_checkpoints
from qtrain.train.state.ema import Ema
from qtrain.train.state.fingerprints import check_files, check_frozen, check_teacher, files_entry, fingerprint
from qtrain.train.state.recorded_map import changed_schemes, made_from, recorded_map
from qtrain.train.state.run_folder import (
    RunFolder,
    changed_settings,
    changed_versions,
    make_recovered_folder,
    make_run_folder,
    result_versions,
    save_run_config,
    that_run_had,
)
from qtrain.train.state.run_lock import locked
from qtrain.train.state.state_dict import (
    OTHER_VERSION,
    OtherTensors,
    TrainState,
    finish_optimizer,
    model_tensors,
    optimizer_tensors,
    prepare_optimizer,
    rng_state,
    set_rng_state,
    user_options,
)

SHARED_SECONDS = 10
"""How long a network file system may take to show a new folder to other machines."""


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
    parallel: DataParallel | MaybeNone = None
    """None: one rank, for which `__post_init__` makes one."""
    data_files: Sequence[Path] = ()
    """Those that it trains on, as far as they are known."""
    notes: list[str] = dataclasses.field(default_factory=list)
    """The lines that `restore` printed."""
    background: BackgroundSave = dataclasses.field(default_factory=BackgroundSave)
    _text: str = ""
    _loaded_notes: list[str] = dataclasses.field(default_factory=list)
    """Of the checkpoint that was loaded: what it was saved with and this run does not have."""
    _locks: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    _damaged: tuple[Path, ...] = ()
    """Checkpoints newer than the one that was loaded."""

    def __post_init__(self) -> None:
        self.parallel = self.parallel or DataParallel(self.model, self.quantized, Mesh())

    @property
    def checkpoints(self) -> Checkpoints:
        best = self.state.best_step if self.settings.keep_best else None
        return Checkpoints(self.folder.checkpoints, max(self.settings.keep_ckpts, 1), best=best)

    @cached_property
    def _files(self) -> dict[str, Any]:
        return from_rank_0(lambda: files_entry(self.data_files))

    @cached_property
    def _versions(self) -> dict[str, str]:
        return result_versions()

    @cached_property
    def _frozen(self) -> dict[str, str]:
        return fingerprint(self.model, self.parallel.mesh.model_group, self.parallel.master)

    @cached_property
    def _teacher(self) -> dict[str, str] | None:
        """Each rank has all of it."""
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
        tensors = self._tensors(optim_tensors, rng_state())
        meta = {
            "state": self.state.as_meta(),
            "optim": optim_meta,
            "script": self.script,
            "quantized_step": self.quantized.step,
            "dtype": "bf16" if choose_dtype(self.settings.dtype, self.device) is torch.bfloat16 else "fp32",
            "quantize": self.settings.quantize,
            "quantize_kwargs": self.settings.quantize_kwargs,
            "schemes": recorded_map(self.settings, self.quantized.schemes),
            "frozen": self._frozen,
            "files": self._files,
            "versions": self._versions,
        }
        if self._teacher is not None:
            meta["teacher"] = self._teacher
        if divided := self.parallel.divided_state:
            meta |= {"optim": divided.whole_meta(optim_meta), "tp": self.settings.tp, "tp_only": divided.inexact()}
        return tensors, meta

    def _tensors(self, optim: dict[str, Any], rng: dict[str, Any]) -> dict[str, Any]:
        """The tensors of a checkpoint. optim: of the optimizer; rng: of the generators."""
        model = model_tensors(self.model, trains=True, master=self.parallel.master)
        tensors = {"model": model, "optim": optim, "quantized": self.quantized.tensors(), "rng": rng}
        if self.ema is not None:
            tensors["ema"] = self.ema.tensors()
        # A rank may have parts, saved as slices of the whole tensors, which other degrees load.
        if divided := self.parallel.divided_state:
            tensors |= {"model": divided.model(model), "optim": divided.states(optim)}
        return tensors

    def restore(self) -> None:
        """Load the checkpoint that the run resumes from, if there is one; of a damaged one's run, the newest that is
        whole. Prints which it is, and the settings that differ from the saved run's. Raises UserError if it does not
        fit."""
        _ = self._files  # as they are before the first step
        if self.folder.resumed_from is None:
            return
        given, at_fault = user_options(self.optimizer), {}
        # The newest checkpoint that is whole. A damaged one must not end the run, unless it was named itself.
        while True:
            try:
                converted = self._load(path := self.folder.resumed_from)
                break
            except DamagedCheckpoint as error:
                at_fault[path] = error.why
                older = [other for other, _ in complete_checkpoints(path.parent) if other not in at_fault]
                if self._names_checkpoint or not older:
                    raise self._none_whole(path, error) from None
                self.folder = dataclasses.replace(self.folder, resumed_from=older[0])
        # Newer ones that were not even complete are told too, and set aside later.
        if not self._names_checkpoint:
            at_fault |= incomplete_checkpoints(path.parent, self.state.step)
        # Not written yet: train.log gets them once the folder is this process's.
        self.notes = [f"--resume: {other} is skipped: {why}" for other, why in at_fault.items()]
        self._damaged = tuple(at_fault)
        self.notes += [f"resumed at step {self.state.step} from {path}", *self._consequences()]
        pairs = zip(given, user_options(self.optimizer), strict=True)
        kept = {name: (old[name], now[name]) for old, now in pairs for name in old if old[name] != now[name]}
        self.notes += _changes(changed_settings(path, self.settings), kept)
        self.notes += self._loaded_notes
        if converted:
            self.notes.append(f"--resume: optimizer states converted: {', '.join(converted)}")
        print("\n".join(self.notes), flush=True)  # other ranks than 0 print nothing

    def rewind(self, path: Path) -> None:
        """Return to a checkpoint of this run, but for the place in the data: what was read since is not read again."""
        data = self.state.data
        self.optimizer.drop_states()
        self._load(path)
        self.state.data = data

    @property
    def _names_checkpoint(self) -> bool:
        """Whether --resume names one checkpoint rather than a run."""
        path = self.folder.resumed_from
        return self.settings.resume is not None and path is not None and Path(self.settings.resume).name == path.name

    def _none_whole(self, path: Path, error: DamagedCheckpoint) -> UserError:
        whole = newest_whole(path.parent, {path})
        fix = f"The newest whole one beside it is {whole}." if whole else "No checkpoint beside it is whole."
        return damaged(path, error.why, fix)

    def _consequences(self) -> Iterator[str]:
        """What resuming replaces, or where the run continues."""
        if self.folder.parent is not None:
            yield f"--resume: {self.folder.parent} stays as it is; this is a new run, with a folder of its own"
            return
        last = max((record["step"] for record in read_metrics(self.folder.path / "metrics.jsonl")), default=0)
        if last > self.state.step:
            yield f"--resume: the lines of steps {self.state.step + 1} to {last} in metrics.jsonl are replaced"

    def _load(self, path: Path) -> list[str]:
        """Load a checkpoint. Returns the conversions of optimizer states. Raises UserError."""
        meta = read_meta(path)
        if meta.get("script") != self.script:
            saver = f"{meta['script']}.py" if meta.get("script") in SCRIPTS else "the script that saved it"
            raise UserError(f"--resume: {path} was not saved by {self.script}.py; resume with {saver}.")
        kinds = {"state": dict, "optim": dict, "quantized_step": int}
        if not all(isinstance(meta.get(key), kind) for key, kind in kinds.items()):
            raise UserError(OTHER_VERSION)
        state = TrainState.from_meta(meta["state"])
        # An older checkpoint than the one that the run was planned with may have another map.
        changed = changed_schemes(meta.get("schemes"), self.settings, self.quantized.schemes)
        if not made_from(meta.get("schemes"), self.settings):
            state.phase = 0  # of another --quantize_schedule: the model was built as this one begins
        self.parallel.reassign(self.model, {name: scheme_of(spec, "--resume") for name, spec in changed.items()})
        if state.step > self.settings.steps:
            raise UserError(
                f"--n_steps: {self.settings.n_steps} is less than the {state.step} steps of {path}; give more steps."
            )
        saved_tp, tp = meta.get("tp", 1), self.settings.tp
        refuse_other_tp(saved_tp, meta.get("tp_only", []), tp, path)
        rng = rng_state()
        master, divided, optim = self.parallel.master, self.parallel.divided_state, meta["optim"]
        if divided:
            optim = divided.own_meta(optim)
        self._loaded_notes = [
            *check_files(meta.get("files"), self.data_files, self._files, path),
            *check_teacher(meta.get("teacher"), self._teacher, path),
            *changed_versions(meta.get("versions"), self._versions),
        ]
        try:
            tensors = self._tensors(prepare_optimizer(self.optimizer, self.model, optim, master), rng)
            if divided:
                refuse_other_tp(saved_tp, divided.inexact(), tp, path)
            check_frozen(meta.get("frozen"), self._frozen, path, self.settings.model)
            Checkpoints.load(path, tensors)
        except OtherTensors as error:
            raise UserError(f"{error}{self._other_settings(path, meta)}") from None
        # The masters are filled now; the model's weights and then their codes follow from them.
        converted = finish_optimizer(self.optimizer, self.model, master)
        set_rng_state(rng)
        self.quantized.set_step(meta["quantized_step"])  # keys the stochastic rounding of the weights' codes
        self.parallel.gather()
        self.quantized.refresh()
        self.state = state
        return converted

    def _other_settings(self, path: Path, meta: Mapping[str, Any]) -> str:
        """The settings, of those that tensors depend on, that differ from the saved run's, in a sentence."""
        changed = changed_settings(path, self.settings)
        if (saved := meta.get("quantize", self.settings.quantize)) != self.settings.quantize:
            changed = {"quantize": (saved, self.settings.quantize), **changed}
        return that_run_had(changed)

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
                self.checkpoints.set_aside(self._damaged)
            try:
                log = self._start_log()
            except OSError as error:
                raise UserError(f"--runs_dir: cannot write {self.folder.path}: {error.strerror}.") from None
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
        try:
            self._locks.enter_context(locked(self.folder.path))
            self._save_config(continues)
            for name in ("metrics.jsonl", "health.jsonl"):
                if parent is not None and (lines := parent / name).exists():
                    shutil.copyfile(lines, self.folder.path / name)
        except OSError as error:
            raise UserError(f"--runs_dir: cannot write {self.folder.path}: {error.strerror}.") from None

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
