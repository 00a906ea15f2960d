"""Checkpoints that are either complete or absent, whenever the process dies.

    checkpoints/00000100/
        __<rank>_<n>.distcp   tensors, written by torch.distributed.checkpoint (DCP), each rank its shards
        .metadata             DCP's index of them, a pickle
        meta.json             everything that is not a tensor
        COMPLETE              JSON: step, time, and size and CRC-32 of each file above

A checkpoint is written as `.tmp-<step>-<pid>`: every file is fsynced, then COMPLETE is written and fsynced, then the
folder, and only then is the folder renamed to its step. COMPLETE comes before the rename because the rename is the only
atomic operation: a folder named by its step has been complete on disk since it got that name. (With the marker after
the rename, a kill between the two would leave a complete checkpoint without a marker.) A reader still trusts the marker
and the sizes in it, not the name: folders also get copied and deleted, and that can stop halfway.

Loading a checkpoint runs no code from it. DCP would unpickle `.metadata`, and every entry that is not a tensor, with
the unrestricted pickle. So `.metadata` is read here with an unpickler that knows only the classes of the index, and
entries other than tensors are neither written nor accepted. DCP reads tensors with `weights_only=True`.
"""

import contextlib
import json
import os
import pickle
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import Metadata

from qtrain.comm.ranks import all_gather, on_all_ranks, rank, world
from qtrain.core.errors import TrainingStopped, UserError, first_line
from qtrain.core.process import sync_to_disk
from qtrain.core.reading import read_small
from qtrain.train.state.checkpoint_files import (
    INDEX,
    MARKER,
    MAX_BYTES,
    META,
    CheckedReader,
    IncompleteCheckpoint,
    Marker,
    checksum,
    complete_checkpoints,
    newest_complete,
    read_index,
    read_marker,
    seal,
)
from qtrain.train.state.run_lock import process_exists
from qtrain.train.state.state_dict import OtherTensors

OTHER_STEPS = "--resume also takes a run folder, and then finds the newest whole checkpoint in it."


class DamagedCheckpoint(UserError):
    """A checkpoint that is incomplete, or whose files are not the saved ones. why: the reason alone."""

    why = ""


# On one rank. Not in a context around the calls: those set a list of the whole process, and a thread may be writing.
warnings.filterwarnings("ignore", message="torch.distributed is disabled")


def flatten(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Tensors by their nested names, joined by dots."""
    flat: dict[str, Tensor] = {}
    for key, value in tensors.items():
        inner = flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        assert not flat.keys() & inner.keys(), f"two tensors are named {(flat.keys() & inner.keys()).pop()}"
        assert all(isinstance(t, Tensor) for t in inner.values()), f"{prefix}{key}: not a tensor; it belongs into meta"
        flat |= inner
    return flat


def _free_gib(folder: Path) -> float:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free / 1024**3


def newest_whole(folder: Path, other_than: Collection[Path] = ()) -> Path | None:
    """The newest checkpoint in `folder` that can be read and whose files have the right checksums, all of which are
    read."""
    # Reads all files of each candidate: sizes alone do not show flipped bits.
    for path, marker in complete_checkpoints(folder):
        if not any(path.samefile(other) for other in other_than if other.exists()):
            with contextlib.suppress(DamagedCheckpoint):
                _verified(path)
                _check_checksums(path, marker.files)
                _index(path, marker)
                return path
    return None


def _first_difference(index: Metadata, wanted: Mapping[str, Tensor]) -> str | None:
    """How the saved tensors first differ from the `wanted` ones in name, shape or dtype; None if they do not."""
    saved: dict[str, Any] = index.state_dict_metadata
    names = {name for name in {*saved, *wanted} if not name.startswith("rng.")}  # one entry per rank of the saved run
    missing, extra = sorted(names - saved.keys()), sorted(names - wanted.keys())
    if missing:
        return f"it lacks {len(missing)} of this run's tensors, first {missing[0]}"
    if extra:
        return f"it has {len(extra)} tensors that this run lacks, first {extra[0]}"
    for name, tensor in wanted.items():
        if name in saved and saved[name].size != tensor.shape:
            return f"{name} has shape {list(saved[name].size)} in it and {list(tensor.shape)} in this run"
        if name in saved and saved[name].properties.dtype != tensor.dtype:
            return f"{name} is {saved[name].properties.dtype} in it and {tensor.dtype} in this run"
    return None


def cannot_load(path: Path, why: str, fix: str = OTHER_STEPS) -> UserError:
    """The error for a checkpoint that --resume names."""
    return UserError(f"--resume: {path} cannot be loaded: {why}. {fix}")


def damaged(path: Path, why: str, fix: str = OTHER_STEPS) -> DamagedCheckpoint:
    """The error for a damaged checkpoint; it survives pickling, as between ranks."""
    error = DamagedCheckpoint(str(cannot_load(path, why, fix)))
    error.why = why
    return error


def _verified(path: Path) -> tuple[Marker, dict[str, Any]]:
    """Marker and meta of a complete checkpoint; checksums of the other files are not read. Raises UserError."""
    if not path.is_dir():
        raise damaged(path, "there is no such folder")
    try:
        marker = read_marker(path)
        data = read_small(path / META, MAX_BYTES)
        meta = json.loads(data) if zlib.crc32(data) == marker.files[META][1] else None
    except IncompleteCheckpoint as reason:
        raise damaged(path, str(reason)) from None
    except (OSError, ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise damaged(path, f"its file {META} is damaged")
    return marker, meta


def read_meta(path: Path) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors, which `prepare_optimizer` needs before `Checkpoints.load`."""
    return on_all_ranks(lambda: _verified(Path(path))[1])


class Checkpoints:
    """The checkpoints of one run: one folder per saved step in `folder`, of which the newest `keep` are kept, and
    that of the step `best`.

    With a process group, all ranks call every method, and the folder is on a file system that all of them share.
    group: what `save` communicates over, in a thread of its own; None: the process group of the steps.
    """

    def __init__(self, folder: Path, keep: int, group: dist.ProcessGroup | None = None, best: int | None = None):
        assert keep >= 1
        self.folder = Path(folder)
        self.keep, self.best = keep, best
        self._group = group

    def save(self, step: int, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Write nested `tensors` and JSON `meta` (NaN and Inf allowed). Returns the folder once it is complete on disk.

        A checkpoint of the same step is replaced. Raises TrainingStopped if writing fails; earlier ones stay intact.
        """
        flat, meta_text, group = flatten(tensors), json.dumps(meta), self._group
        final = self.folder / f"{step:08d}"
        # All ranks write into one folder, named by rank 0's process: `_prune` can tell whether that is alive.
        pid = all_gather(os.getpid(), group)[0]
        temporary = self.folder / f".tmp-{step}-{pid}"
        try:
            on_all_ranks(lambda: self._start(temporary), group=group)
            # Not synced by DCP: `seal` does it, and reads the checksum of what is on disk.
            writer = dcp.FileSystemWriter(temporary, sync_files=False)
            dcp.save(flat, storage_writer=writer, process_group=group)
            written = temporary.glob(f"__{rank()}_*.distcp")
            # Each rank seals the files that it has written; rank 0 then writes all sums into the marker.
            own = on_all_ranks(lambda: {path.name: seal(path) for path in written}, group=group)
            files = {name: sealed for rank_entries in all_gather(own, group) for name, sealed in rank_entries.items()}
            on_all_ranks(lambda: self._finish(step, temporary, final, files, meta_text), group=group)
        except (OSError, CheckpointException) as error:
            if rank() == 0:
                shutil.rmtree(temporary, ignore_errors=True)
            last = self.latest()
            intact = f"The checkpoint {last} is intact." if last else "There is no earlier one."
            raise TrainingStopped(
                f"step {step}: the checkpoint {final} could not be saved: {_reason(error)} "
                f"({_free_gib(self.folder):.1f} GiB are free there). {intact}"
            ) from None
        return final

    @staticmethod
    def _start(temporary: Path) -> None:
        if rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # of a dead process with the same pid
            temporary.mkdir(parents=True)

    def _finish(self, step: int, temporary: Path, final: Path, files: dict[str, Any], meta: str) -> None:
        if rank() != 0:
            return
        # The order matters (see the top): files, marker, folder, rename.
        (temporary / META).write_text(meta, encoding="utf-8")
        files |= {name: seal(temporary / name) for name in (META, INDEX)}
        marker = temporary / MARKER
        marker.write_text(json.dumps({"step": step, "saved_at": time.time(), "files": files}), encoding="utf-8")
        sync_to_disk(marker)
        sync_to_disk(temporary)
        if final.exists():  # a folder cannot be replaced atomically; see newest_complete
            os.rename(final, self.folder / f".old-{final.name}-{os.getpid()}")
        os.rename(temporary, final)
        sync_to_disk(self.folder)
        with contextlib.suppress(OSError):  # the new one is complete; old ones may stay
            self._prune(final)

    def _prune(self, written: Path) -> None:
        """Remove complete checkpoints beyond the newest `keep`, and leftovers of dead processes. Never `written`, nor
        that of the step `best`."""
        complete = {}
        for path in self.folder.iterdir():
            temporary = re.fullmatch(r"\.tmp-\d+-(\d+)", path.name)
            if path.name.startswith(".old-") or (
                temporary and (int(temporary[1]) == os.getpid() or not process_exists(int(temporary[1])))
            ):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.isdigit() and path != written:
                with contextlib.suppress(IncompleteCheckpoint):
                    complete[read_marker(path).step] = path
        for step in sorted(complete, reverse=True)[self.keep - 1 :]:
            if step != self.best:
                self._remove(step, complete[step])

    def _remove(self, step: int, path: Path) -> None:
        """Rename, then delete: a kill halfway through leaves nothing that is named like a checkpoint."""
        doomed = self.folder / f".tmp-{step}-{os.getpid()}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    @staticmethod
    def set_aside(damaged: Iterable[Path]) -> None:
        """Rename damaged checkpoints to damaged-<step>: they neither count as checkpoints nor are replaced."""
        for path in damaged if rank() == 0 else ():
            names = (f"damaged-{path.name.lstrip('.')}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
            os.rename(path, next(new for name in names if not (new := path.with_name(name)).exists()))
        all_gather(None)

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest step, or None."""
        found = newest_complete(self.folder)
        return found[0] if found else None

    @staticmethod
    def load(path: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Fill nested `tensors` in place from the checkpoint `path`. Returns its meta.

        Names, shapes and dtypes must be the saved ones; the sharding may differ. Generator states ("rng") of ranks that
        the saved run did not have stay unchanged. UserError naming --resume and the path for a checkpoint that is
        missing, incomplete, damaged (DamagedCheckpoint) or of another model; nothing is filled then, unless DCP itself
        fails midway.
        """
        path, flat = Path(path), flatten(tensors)
        # What is wanted is known by all ranks together: each has the names of its own shards only.
        shapes = {name: torch.empty(t.shape, dtype=t.dtype, device="meta") for name, t in flat.items()}
        everywhere = {name: tensor for rank_entries in all_gather(shapes) for name, tensor in rank_entries.items()}
        index, meta = on_all_ranks(lambda: _checked(path, everywhere))
        # All but generator states of ranks that the saved run did not have.
        known = {name: tensor for name, tensor in flat.items() if name in index.state_dict_metadata}
        try:
            dcp.load(known, storage_reader=CheckedReader(path, index))
        except CheckpointException as error:
            raise cannot_load(path, _reason(error)) from None
        return meta


def _checked(path: Path, everywhere: Mapping[str, Tensor]) -> tuple[Metadata, dict[str, Any]]:
    """Index and meta of a complete checkpoint with right checksums that holds the tensors wanted `everywhere`, on some
    rank each."""
    marker, meta = _verified(path)
    _check_checksums(path, dict(sorted(marker.files.items())[rank() :: world()]))  # each rank checks some files
    index = _index(path, marker)
    if difference := _first_difference(index, everywhere):
        raise OtherTensors(str(cannot_load(path, difference, "Resume with the settings of the run that saved it.")))
    return index, meta


def _index(path: Path, marker: Marker) -> Metadata:
    try:
        return read_index(path, marker.files)
    except Exception as error:  # damaged pickles raise errors of any type
        raise damaged(path, f"its file {INDEX} is not a checkpoint's ({first_line(error)})") from None


def _check_checksums(path: Path, files: Mapping[str, tuple[int, int]]) -> None:
    for name, (_, crc) in files.items():
        try:
            found = checksum(path / name)
        except OSError as error:
            raise damaged(path, f"its file {name} cannot be read ({error.strerror})") from None
        if found != crc:
            raise damaged(path, f"its file {name} is damaged (checksum)")


def _reason(error: BaseException) -> str:
    """The first line of an error, with the rank that it happened on, if there are several; DCP wraps those of its
    ranks."""
    failed_rank = getattr(error, "failed_rank", None)
    if isinstance(error, CheckpointException) and error.failures:
        failed_rank, (error, _) = next(iter(error.failures.items()))
    where = f"rank {failed_rank}: " if failed_rank is not None and world() > 1 else ""
    if isinstance(error, pickle.UnpicklingError):  # torch's advice is to load it with weights_only=False
        return f"{where}a file of it holds other objects than tensors"
    cause: BaseException | None = error
    while cause is not None:  # torch.save raises a second error after the disk's
        if isinstance(cause, OSError) and cause.strerror:
            return where + cause.strerror
        cause = cause.__context__
    return where + first_line(error)
