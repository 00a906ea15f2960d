"""A run goes on from a checkpoint: the newest that is whole, if it fits; and returns to one of its own."""

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qtrain import SCRIPTS
from qtrain.core.checks import shown
from qtrain.core.errors import UserError
from qtrain.parallel.sharding.checkpoint_layout import refuse_other_tp
from qtrain.quant.scheme_map import scheme_of
from qtrain.train.log.metrics import read_metrics
from qtrain.train.state.checkpoint import Checkpoints, DamagedCheckpoint, damaged, newest_whole, read_meta
from qtrain.train.state.checkpoint_files import complete_checkpoints, incomplete_checkpoints
from qtrain.train.state.fingerprints import check_files, check_frozen, check_teacher
from qtrain.train.state.recorded_map import changed_schemes, made_from
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import changed_settings, changed_versions, that_run_had
from qtrain.train.state.state_dict import (
    OTHER_VERSION,
    OtherTensors,
    TrainState,
    finish_optimizer,
    prepare_optimizer,
    rng_state,
    set_rng_state,
    user_options,
)


def restore(run: Run) -> None:
    """Load the checkpoint that the run resumes from, if there is one; of a damaged one's run, the newest that is
    whole. Prints which it is, and the settings that differ from the saved run's. Raises UserError if it does not
    fit."""
    _ = run.files  # as they are before the first step
    if run.folder.resumed_from is None:
        return
    given, at_fault = user_options(run.optimizer), {}
    # The newest checkpoint that is whole. A damaged one must not end the run, unless it was named itself.
    while True:
        try:
            notes, converted = _load(run, path := run.folder.resumed_from)
            break
        except DamagedCheckpoint as error:
            at_fault[path] = error.why
            older = [other for other, _ in complete_checkpoints(path.parent) if other not in at_fault]
            if _names_checkpoint(run) or not older:
                raise _none_whole(path, error) from None
            run.folder = dataclasses.replace(run.folder, resumed_from=older[0])
    # Newer ones that were not even complete are told too, and set aside later.
    if not _names_checkpoint(run):
        at_fault |= incomplete_checkpoints(path.parent, run.state.step)
    # Not written yet: train.log gets them once the folder is this process's.
    run.notes = [f"--resume: {other} is skipped: {why}" for other, why in at_fault.items()]
    run.damaged = tuple(at_fault)
    run.notes += [f"resumed at step {run.state.step} from {path}", *_consequences(run)]
    pairs = zip(given, user_options(run.optimizer), strict=True)
    kept = {name: (old[name], now[name]) for old, now in pairs for name in old if old[name] != now[name]}
    run.notes += _changes(changed_settings(path, run.settings), kept)
    run.notes += notes
    if converted:
        run.notes.append(f"--resume: optimizer states converted: {', '.join(converted)}")
    print("\n".join(run.notes), flush=True)  # other ranks than 0 print nothing


def rewind(run: Run, path: Path) -> None:
    """Return to a checkpoint of this run, but for the place in the data: what was read since is not read again."""
    data = run.state.data
    run.optimizer.drop_states()
    _load(run, path)
    run.state.data = data


def _names_checkpoint(run: Run) -> bool:
    """Whether --resume names one checkpoint rather than a run."""
    path = run.folder.resumed_from
    return run.settings.resume is not None and path is not None and Path(run.settings.resume).name == path.name


def _none_whole(path: Path, error: DamagedCheckpoint) -> UserError:
    whole = newest_whole(path.parent, {path})
    fix = f"The newest whole one beside it is {whole}." if whole else "No checkpoint beside it is whole."
    return damaged(path, error.why, fix)


def _consequences(run: Run) -> Iterator[str]:
    """What resuming replaces, or where the run continues."""
    if run.folder.parent is not None:
        yield f"--resume: {run.folder.parent} stays as it is; this is a new run, with a folder of its own"
        return
    last = max((record["step"] for record in read_metrics(run.folder.path / "metrics.jsonl")), default=0)
    if last > run.state.step:
        yield f"--resume: the lines of steps {run.state.step + 1} to {last} in metrics.jsonl are replaced"


def _load(run: Run, path: Path) -> tuple[list[str], list[str]]:
    """Load a checkpoint. Returns lines on what it was saved with and this run does not have, and the conversions of
    optimizer states. Raises UserError."""
    meta = read_meta(path)
    if meta.get("script") != run.script:
        saver = f"{meta['script']}.py" if meta.get("script") in SCRIPTS else "the script that saved it"
        raise UserError(f"--resume: {path} was not saved by {run.script}.py; resume with {saver}.")
    kinds = {"state": dict, "optim": dict, "quantized_step": int}
    if not all(isinstance(meta.get(key), kind) for key, kind in kinds.items()):
        raise UserError(OTHER_VERSION)
    state = TrainState.from_meta(meta["state"])
    # An older checkpoint than the one that the run was planned with may have another map.
    changed = changed_schemes(meta.get("schemes"), run.settings, run.quantized.schemes)
    if not made_from(meta.get("schemes"), run.settings):
        state.phase = 0  # of another --quantize_schedule: the model was built as this one begins
    run.parallel.reassign(run.model, {name: scheme_of(spec, "--resume") for name, spec in changed.items()})
    if state.step > run.settings.steps:
        raise UserError(
            f"--n_steps: {run.settings.n_steps} is less than the {state.step} steps of {path}; give more steps."
        )
    saved_tp, tp = meta.get("tp", 1), run.settings.tp
    refuse_other_tp(saved_tp, meta.get("tp_only", []), tp, path)
    rng = rng_state()
    master, layout, optim = run.parallel.master, run.parallel.model_parallel_state, meta["optim"]
    if layout:
        optim = layout.own_meta(optim)
    notes = [
        *check_files(meta.get("files"), run.data_files, run.files, path),
        *check_teacher(meta.get("teacher"), run.teacher, path),
        *changed_versions(meta.get("versions"), run.versions),
    ]
    try:
        tensors = run.tensors(prepare_optimizer(run.optimizer, run.model, optim, master), rng)
        if layout:
            refuse_other_tp(saved_tp, layout.inexact(), tp, path)
        check_frozen(meta.get("frozen"), run.frozen, path, run.settings.model)
        Checkpoints.load(path, tensors)
    except OtherTensors as error:
        raise UserError(f"{error}{_other_settings(run, path, meta)}") from None
    # The masters are filled now; the model's weights and then their codes follow from them.
    converted = finish_optimizer(run.optimizer, run.model, master)
    set_rng_state(rng)
    run.quantized.set_step(meta["quantized_step"])  # keys the stochastic rounding of the weights' codes
    run.parallel.gather()
    run.quantized.refresh()
    run.state = state
    return notes, converted


def _other_settings(run: Run, path: Path, meta: Mapping[str, Any]) -> str:
    """The settings, of those that tensors depend on, that differ from the saved run's, in a sentence."""
    changed = changed_settings(path, run.settings)
    if (saved := meta.get("quantize", run.settings.quantize)) != run.settings.quantize:
        changed = {"quantize": (saved, run.settings.quantize), **changed}
    return that_run_had(changed)


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
