"""Checkpoints that are either whole or not there, whenever the process dies.

    checkpoints/00000100/
        __<rank>_<n>.distcp   tensors, written by torch.distributed.checkpoint (DCP), each rank its shards
        .metadata             DCP's index of them, a pickle
        meta.json             everything that is not a tensor
        COMPLETE              JSON: step, time, and size and CRC-32 of each file above

A checkpoint is written as `.tmp-<step>-<pid>`; every file is fsynced, then COMPLETE is written and fsynced, then the
folder, and only then is it renamed to its step. COMPLETE comes before the rename because the rename is the one atomic
operation here: a folder with a step for a name has been whole on disk since it got that name. (Marked after the rename,
a kill between the two would leave a whole checkpoint that nobody may trust.) A reader still trusts the marker and the
sizes in it, never the name: folders also get copied, and deleted, halfway.

A checkpoint runs nothing when it is loaded. DCP unpickles `.metadata`, and any entry that is not a tensor, with the
plain pickle; so the first is read here with an unpickler that knows only the index's own classes, and the second kind
of entry is neither written nor accepted. DCP reads tensors with `weights_only=True`.
"""

import contextlib
import json
import os
import pickle
import random
import re
import shutil
import time
import warnings
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from qtrain.errors import TrainingStopped, UserError

MARKER = "COMPLETE"
META = "meta.json"
INDEX = ".metadata"
OTHER_STEPS = "--resume also takes a run folder, and then finds the newest complete checkpoint in it."

T = TypeVar("T")


# ---- on one process or many -----------------------------------------------------------------------------------------


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _gather(mine: T) -> list[T]:
    """`mine` of every rank, on every rank."""
    if not dist.is_initialized():
        return [mine]
    found: list[Any] = [None] * _world()
    dist.all_gather_object(found, mine)
    return found


def _together(action: Callable[[], T]) -> T:
    """Run `action` on every rank; an error of any rank is raised on all, so that no rank waits for one that gave up."""
    result, error = None, None
    try:
        result = action()
    except (UserError, OSError) as raised:
        error = raised
    for raised in _gather(error):
        if raised is not None:
            raise raised
    return result


@contextlib.contextmanager
def _quiet_dcp() -> Iterator[None]:
    """DCP warns whenever it runs without a process group, which is the usual case here."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        yield


# ---- the state of a run as named tensors ----------------------------------------------------------------------------


def _clean_name(name: str) -> str:
    """A parameter's name without the wrappers of torch.compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


def model_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name, the very tensors of the model; tied ones once."""
    found, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert isinstance(tensor, Tensor), f"{name}: only tensors are saved, not {type(tensor).__name__}"
        if id(tensor) not in seen:
            seen.add(id(tensor))
            found[_clean_name(name)] = tensor
    return found


def rng_state() -> dict[str, dict[str, Tensor]]:
    """This rank's generators (python, numpy, torch CPU, the current CUDA device) as new tensors, under its number."""
    _, python_words, python_gauss = random.getstate()
    _, numpy_words, numpy_position, has_gauss, numpy_gauss = np.random.get_state()
    state = {
        "python": torch.tensor(python_words, dtype=torch.int64),  # [625]
        "python_gauss": torch.tensor([python_gauss is not None, python_gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, numpy_words), numpy_position], dtype=torch.int64),  # [625]
        "numpy_gauss": torch.tensor([has_gauss, numpy_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {str(_rank()): state}


def set_rng_state(state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Put back what `rng_state` gave."""
    mine = state[str(_rank())]
    has_gauss, gauss = mine["python_gauss"].tolist()
    random.setstate((3, tuple(mine["python"].tolist()), gauss if has_gauss else None))
    *words, position = mine["numpy"].tolist()
    has_gauss, gauss = mine["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", np.array(words, dtype=np.uint32), position, int(has_gauss), gauss))
    torch.set_rng_state(mine["torch"])
    if "cuda" in mine:
        torch.cuda.set_rng_state(mine["cuda"])


# How the step is computed, not what it computes: that is for the machine that resumes.
_HOW = ("params", "fused", "foreach", "capturable", "differentiable")


def optimizer_tensors(
    optimizer: torch.optim.Optimizer, model: nn.Module
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """An optimizer's state by parameter name: ({parameter: {state: tensor}}, the rest as JSON).

    torch's own get/set_optimizer_state_dict are not exact: saving before the first step takes a step, and loading casts
    floating states to the parameter's dtype.
    """
    names = {id(p): _clean_name(name) for name, p in model.named_parameters()}
    tensors: dict[str, dict[str, Tensor]] = {}
    states: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _HOW}
        groups.append({"params": [names[id(p)] for p in group["params"]], "options": options})
        for parameter in group["params"]:
            name = names[id(parameter)]
            for key, value in optimizer.state.get(parameter, {}).items():
                described = states.setdefault(name, {})
                if not isinstance(value, Tensor):
                    described[key] = {"value": value}
                    continue
                assert value.ndim == 0 or isinstance(value, DTensor) == isinstance(parameter, DTensor), (
                    f"{name}.{key}: the state of a sharded parameter must be a DTensor, else ranks overwrite each other"
                )
                tensors.setdefault(name, {})[key] = value
                described[key] = {
                    "shape": list(value.shape),
                    "dtype": str(value.dtype).removeprefix("torch."),
                    "on_host": value.device.type == "cpu" and parameter.device.type != "cpu",
                }
    return tensors, {"groups": groups, "states": states}


def prepare_optimizer(
    optimizer: torch.optim.Optimizer, model: nn.Module, saved: Mapping[str, Any]
) -> dict[str, dict[str, Tensor]]:
    """Give a new optimizer the state that `saved` (from `optimizer_tensors`) describes; returns its tensors, unfilled.

    `Checkpoints.load` fills them in place. Group options come from `saved` too, `lr` and `weight_decay` among them.
    Raises UserError when the optimizer holds other parameters than the saved one.
    """
    parameters = {_clean_name(name): p for name, p in model.named_parameters()}
    names = {id(p): name for name, p in parameters.items()}
    try:
        before = [group["params"] for group in saved["groups"]]
        now = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        if before != now:
            flat_before, flat_now = {n for g in before for n in g}, {n for g in now for n in g}
            odd = sorted(flat_before ^ flat_now)
            why = f"{odd[0]} is trained in only one of them" if odd else "they are grouped differently"
            raise UserError(f"--resume: the checkpoint's optimizer and this one differ: {why}. Use the run's settings.")
        optimizer.state.clear()
        tensors: dict[str, dict[str, Tensor]] = {}
        for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
            for key, value in saved_group["options"].items():
                _restore_option(group, key, value)
            on_device = bool(group.get("fused") or group.get("capturable"))
            for name in saved_group["params"]:
                for key, described in saved["states"].get(name, {}).items():
                    if "value" in described:
                        optimizer.state[parameters[name]][key] = described["value"]
                        continue
                    state = _empty_state(described, parameters[name], on_device)
                    optimizer.state[parameters[name]][key] = state
                    tensors.setdefault(name, {})[key] = state
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(f"--resume: the checkpoint's optimizer entry cannot be read ({error!r}).") from None
    return tensors


def _restore_option(group: dict[str, Any], key: str, value: Any) -> None:
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(current, tuple) else value


def _empty_state(described: Mapping[str, Any], parameter: Tensor, scalars_on_device: bool) -> Tensor:
    shape, dtype = torch.Size(described["shape"]), getattr(torch, described["dtype"])
    device = torch.device("cpu") if described["on_host"] else parameter.device
    if not shape:
        return torch.empty((), dtype=dtype, device=parameter.device if scalars_on_device else device)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(shape, dtype=dtype, device=device)


def _flatten(tensors: Mapping[str, Any], prefix: str = "") -> dict[str, Tensor]:
    """Nested names joined by dots."""
    flat: dict[str, Tensor] = {}
    for key, value in tensors.items():
        inner = _flatten(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
        assert not flat.keys() & inner.keys(), f"two tensors are called {(flat.keys() & inner.keys()).pop()}"
        assert all(isinstance(t, Tensor) for t in inner.values()), f"{prefix}{key}: only tensors; the rest is meta"
        flat |= inner
    return flat


# ---- what is on disk ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Marker:
    """The content of COMPLETE. `files` maps a name to (bytes, CRC-32)."""

    step: int
    saved_at: float
    files: dict[str, tuple[int, int]]


class _Incomplete(Exception):
    """A folder is not a complete checkpoint; the message says why."""


def _read_marker(path: Path) -> Marker:
    """The marker of a checkpoint whose files are all there at full size; else _Incomplete."""
    try:
        raw = json.loads((path / MARKER).read_bytes())
        files = {str(name): (int(size), int(crc)) for name, (size, crc) in raw["files"].items()}
        marker = Marker(int(raw["step"]), float(raw["saved_at"]), files)
    except (FileNotFoundError, NotADirectoryError):
        raise _Incomplete(f"it has no {MARKER} file, so it was not written to the end") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise _Incomplete(f"its {MARKER} file is damaged") from None
    if not {META, INDEX} <= files.keys() or any(Path(name).name != name for name in files):
        raise _Incomplete(f"its {MARKER} file is damaged")
    for name, (size, _) in files.items():
        try:
            actual = (path / name).stat().st_size
        except OSError:
            raise _Incomplete(f"its file {name} is missing") from None
        if actual != size:
            raise _Incomplete(f"its file {name} has {actual:,} of {size:,} bytes")
    return marker


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _free_gib(folder: Path) -> float:
    existing = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    return shutil.disk_usage(existing).free / 1024**3


def _checksum(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            crc = zlib.crc32(block, crc)
    return crc


def _seal(path: Path) -> tuple[int, int]:
    """Force a written file to disk; returns its size and CRC-32."""
    _fsync(path)  # DCP's own fsync of its index comes before Python's buffer is flushed
    return path.stat().st_size, _checksum(path)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def newest_complete(folder: Path) -> tuple[Path, Marker] | None:
    """The complete checkpoint of the highest step among the folders in `folder`; None if there is none."""
    best = None
    for path in sorted(folder.iterdir()) if folder.is_dir() else ():
        # .old-* is the former checkpoint of a step that is being replaced: whole, until the new one has its name.
        if not path.name.isdigit() and not path.name.startswith(".old-"):
            continue
        with contextlib.suppress(_Incomplete):
            marker = _read_marker(path)
            if best is None or marker.step >= best[1].step:
                best = (path, marker)
    return best


# ---- reading DCP's index without running it -------------------------------------------------------------------------


class _IndexUnpickler(pickle.Unpickler):
    """Knows the classes that DCP's index is made of, and no other name."""

    KNOWN = frozenset(
        {
            ("torch", "Size"),
            ("torch.serialization", "_get_layout"),
            ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
            ("torch.distributed.checkpoint.metadata", "Metadata"),
            ("torch.distributed.checkpoint.metadata", "MetadataIndex"),
            ("torch.distributed.checkpoint.metadata", "StorageMeta"),
            ("torch.distributed.checkpoint.metadata", "TensorStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "TensorProperties"),
            ("torch.distributed.checkpoint.metadata", "ChunkStorageMetadata"),
            ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
            ("pathlib", "PosixPath"),
            ("pathlib._local", "PosixPath"),
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if not is_dtype and (module, name) not in self.KNOWN:
            raise pickle.UnpicklingError(f"it names {module}.{name}, which no checkpoint of this program does")
        return super().find_class(module, name)


def _read_index(path: Path, files: Mapping[str, Any]) -> Metadata:
    """DCP's index, checked: only tensors, each covered by its pieces, each piece in a file of this checkpoint."""
    with (path / INDEX).open("rb") as file:
        index = _IndexUnpickler(file).load()
    if not isinstance(index, Metadata) or not isinstance(index.storage_data, dict):
        raise ValueError("it is not an index")
    for name, entry in index.state_dict_metadata.items():
        if not isinstance(entry, TensorStorageMetadata):
            raise ValueError(f"{name} is not a tensor")
        if sum(chunk.sizes.numel() for chunk in entry.chunks) != entry.size.numel():
            raise ValueError(f"{name} is not covered by its pieces")
    for piece, stored in index.storage_data.items():
        if not isinstance(piece, MetadataIndex) or not isinstance(stored, _StorageInfo):
            raise ValueError("a piece is not described as one")
        if stored.relative_path not in files or stored.transform_descriptors:
            raise ValueError(f"{piece.fqn} lies outside the checkpoint")
    return index


class _Reader(dcp.FileSystemReader):
    """DCP's reader over an index that has been read and checked already."""

    def __init__(self, path: Path, index: Metadata):
        super().__init__(path)
        self._index = index

    def read_metadata(self) -> Metadata:  # without **kwargs, so that DCP does not look for an index per rank
        return self._index


def _first_difference(index: Metadata, wanted: Mapping[str, Tensor]) -> str | None:
    """How the saved tensors differ from the `wanted` ones in name, shape or dtype; None if they do not."""
    saved = index.state_dict_metadata
    names = {name for name in {*saved, *wanted} if not name.startswith("rng.")}  # one entry per rank, as many as ran
    missing, extra = sorted(names - saved.keys()), sorted(names - wanted.keys())
    if missing:
        return f"it lacks {len(missing)} of this run's tensors, first {missing[0]}"
    if extra:
        return f"it has {len(extra)} tensors that this run has not, first {extra[0]}"
    for name, tensor in wanted.items():
        if name in saved and saved[name].size != tensor.shape:
            return f"{name} has shape {list(saved[name].size)} in it and {list(tensor.shape)} in this run"
        if name in saved and saved[name].properties.dtype != tensor.dtype:
            return f"{name} is {saved[name].properties.dtype} in it and {tensor.dtype} in this run"
    return None


def _refusal(path: Path, why: str, fix: str = OTHER_STEPS) -> UserError:
    return UserError(f"--resume: {path} cannot be loaded: {why}. {fix}")


def _verified(path: Path) -> tuple[Marker, dict[str, Any]]:
    """Marker and meta of a checkpoint that looks complete; UserError otherwise."""
    if not path.is_dir():
        raise _refusal(path, "there is no such folder")
    try:
        marker = _read_marker(path)
        data = (path / META).read_bytes()
        meta = json.loads(data) if zlib.crc32(data) == marker.files[META][1] else None
    except _Incomplete as reason:
        raise _refusal(path, str(reason)) from None
    except (OSError, ValueError, RecursionError):
        meta = None
    if not isinstance(meta, dict):
        raise _refusal(path, f"its file {META} is damaged")
    return marker, meta


def read_meta(path: Path) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors; what `prepare_optimizer` needs before `Checkpoints.load`."""
    return _together(lambda: _verified(Path(path))[1])


# ---- saving, loading, finding ---------------------------------------------------------------------------------------


class Checkpoints:
    """The checkpoints of one run: `folder` holds one folder a step, the newest `keep` complete ones are kept.

    With a process group every method is called by all ranks; the folder must be one that all of them see.
    """

    def __init__(self, folder: Path, keep: int):
        assert keep >= 1
        self.folder = Path(folder)
        self.keep = keep

    def save(self, step: int, tensors: Mapping[str, Any], meta: Mapping[str, Any]) -> Path:
        """Write nested `tensors` and JSON `meta` (NaN and Inf allowed); returns the folder once it is complete on disk.

        A checkpoint of the same step is replaced. TrainingStopped if it cannot be written; earlier ones are untouched.
        """
        flat, meta_text = _flatten(tensors), json.dumps(meta)
        final = self.folder / f"{step:08d}"
        pid = _gather(os.getpid())[0]
        temporary = self.folder / f".tmp-{step}-{pid}"
        try:
            _together(lambda: self._start(temporary))
            with _quiet_dcp():
                dcp.save(flat, storage_writer=dcp.FileSystemWriter(temporary, sync_files=False))
            mine = _together(lambda: {p.name: _seal(p) for p in temporary.glob(f"__{_rank()}_*.distcp")})
            files = {name: sealed for part in _gather(mine) for name, sealed in part.items()}
            _together(lambda: self._finish(step, temporary, final, files, meta_text))
        except (OSError, CheckpointException) as error:
            if _rank() == 0:
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
        if _rank() == 0:
            shutil.rmtree(temporary, ignore_errors=True)  # left by a dead process that had the same number
            temporary.mkdir(parents=True)

    def _finish(self, step: int, temporary: Path, final: Path, files: dict[str, Any], meta: str) -> None:
        if _rank() != 0:
            return
        (temporary / META).write_text(meta, encoding="utf-8")
        files |= {name: _seal(temporary / name) for name in (META, INDEX)}
        marker = temporary / MARKER
        marker.write_text(json.dumps({"step": step, "saved_at": time.time(), "files": files}), encoding="utf-8")
        _fsync(marker)
        _fsync(temporary)
        if final.exists():  # a folder cannot be replaced in one operation; see newest_complete
            os.rename(final, self.folder / f".old-{final.name}-{os.getpid()}")
        os.rename(temporary, final)
        _fsync(self.folder)
        with contextlib.suppress(OSError):  # the new one is complete, whatever becomes of the old ones
            self._prune(final)

    def _prune(self, written: Path) -> None:
        """Remove complete checkpoints beyond the newest `keep`, and what dead processes left. Never `written`."""
        complete = {}
        for path in self.folder.iterdir():
            left = re.fullmatch(r"\.tmp-\d+-(\d+)", path.name)
            if path.name.startswith(".old-") or (left and (int(left[1]) == os.getpid() or not _alive(int(left[1])))):
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.isdigit() and path != written:
                with contextlib.suppress(_Incomplete):
                    complete[_read_marker(path).step] = path
        for step in sorted(complete, reverse=True)[self.keep - 1 :]:
            self._remove(step, complete[step])

    def _remove(self, step: int, path: Path) -> None:
        """Take the name away first: a kill halfway through deleting leaves nothing that looks like a checkpoint."""
        doomed = self.folder / f".tmp-{step}-{os.getpid()}"
        shutil.rmtree(doomed, ignore_errors=True)
        os.rename(path, doomed)
        shutil.rmtree(doomed, ignore_errors=True)

    def discard_after(self, step: int) -> None:
        """Remove the checkpoints of later steps: a run that goes on from `step` in this folder makes its own."""
        if _rank() == 0:
            while (found := newest_complete(self.folder)) and found[1].step > step:
                self._remove(found[1].step, found[0])
        _gather(None)

    def latest(self) -> Path | None:
        """The complete checkpoint of the highest step, or None."""
        found = newest_complete(self.folder)
        return found[0] if found else None

    @staticmethod
    def load(path: Path, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Fill nested `tensors` in place from the checkpoint `path`, wherever it lies; returns its meta.

        Names, shapes and dtypes must be those that were saved, sharding need not be. Generator states ("rng") of ranks
        that the saved run did not have stay as they are. UserError, naming --resume and the path, for a checkpoint that
        is missing, incomplete, damaged or of another model; nothing is filled then, unless DCP itself fails midway.
        """
        path, flat = Path(path), _flatten(tensors)
        index, meta = _together(lambda: _checked(path, flat))
        known = {name: tensor for name, tensor in flat.items() if name in index.state_dict_metadata}
        try:
            with _quiet_dcp():
                dcp.load(known, storage_reader=_Reader(path, index))
        except CheckpointException as error:
            raise _refusal(path, _reason(error)) from None
        return meta


def _checked(path: Path, wanted: Mapping[str, Tensor]) -> tuple[Metadata, dict[str, Any]]:
    """Index and meta of a complete, undamaged checkpoint that holds the `wanted` tensors."""
    marker, meta = _verified(path)
    for name, (_, crc) in sorted(marker.files.items())[_rank() :: _world()]:  # ranks share the reading
        if _checksum(path / name) != crc:
            raise _refusal(path, f"its file {name} is damaged (checksum)")
    try:
        index = _read_index(path, marker.files)
    except Exception as error:  # a damaged pickle can raise anything
        raise _refusal(path, f"its file {INDEX} is not a checkpoint's ({error})") from None
    if difference := _first_difference(index, wanted):
        raise _refusal(path, difference, "Resume with the settings of the run that saved it.")
    return index, meta


def _reason(error: BaseException) -> str:
    """The first line of what went wrong; DCP wraps the errors of its ranks."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    cause: BaseException | None = error
    while cause is not None:  # torch.save reports its own confusion after the disk's error
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
        cause = cause.__context__
    return (str(error).splitlines() or [type(error).__name__])[0]


def resolve_resume(value: str, run_root: Path, run_name: str | None = None) -> Path | None:
    """The checkpoint that `--resume value` means.

    `auto` is the one saved last by any run in `run_root` (runs/<script>), of the name `run_name` if given; None, and a
    line that says so, if there is none. A path may be a checkpoint, a folder of checkpoints or a run folder.
    """
    if value == "auto":
        runs = [run for run in run_root.iterdir() if run.is_dir()] if run_root.is_dir() else []
        if run_name is not None:
            runs = [run for run in runs if run.name == run_name or run.name.partition("_")[2] == run_name]
        found = [best for run in runs if (best := newest_complete(run / "checkpoints"))]
        if not found:
            name = f" of a run named {run_name!r}" if run_name is not None else ""
            print(f"--resume auto: no complete checkpoint{name} in {run_root}; starting from step 0.")
            return None
        return max(found, key=lambda best: (best[1].saved_at, best[1].step))[0]
    path = Path(value)
    if not path.is_dir():
        raise _refusal(path, "there is no such folder", "Give a checkpoint, a run folder, or auto.")
    for folder in (path / "checkpoints", path):
        if best := newest_complete(folder):
            return best[0]
    try:
        _read_marker(path)
    except _Incomplete as reason:
        if best := newest_complete(path.parent):
            raise _refusal(path, str(reason), f"The newest complete one beside it is {best[0]}.") from None
        if (path / INDEX).exists() or path.name.isdigit():
            raise _refusal(path, str(reason)) from None
        raise _refusal(path, "there is no complete checkpoint in it", "Give a checkpoint or a run folder.") from None
    return path
