"""Chooses the fastest of several implementations of an operation, by timing them once per device and shape.

The choices are kept in a JSON file per device, torch version and state of the kernels, so that a second run times
nothing, and the first one with a changed kernel does. Those of some models' shapes come with the package (`choices/`,
made by `benchmarks/shipped_choices.py`), and a first run does not time them. Where nothing can be timed (no GPU, or
during the capture of a CUDA graph) the first name is chosen: callers put the best in general first. Nothing is timed
under --deterministic.

    QTRAIN_IMPL=triton | cublas | ref   only names with this prefix (ref: the plain PyTorch definition)
    QTRAIN_TUNE=0                       time nothing, choose the first name where no choice is known
    QTRAIN_TUNE=all                     time what comes with the package too
    QTRAIN_CACHE=DIR                    directory of the files; default ~/.cache/qtrain
"""

import json
import os
import re
import statistics
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path

import torch

from qtrain.core.errors import UserError, unknown_name
from qtrain.kernels.compile_together import compile_together, launches_are_left_out

Run = Callable[[str], object]

ROUNDS, FIRST_ROUNDS = 11, 3
SLOW = 1.25
"""Times the best after the first rounds from which a candidate is dropped."""
SWEEPS, SWEEP_BYTES = 8, 2**28
"""Each time, so much is written before: it flushes the L2 cache, and takes longer (500 us) than the host needs to
launch a few kernels."""
SHIPPED = Path(__file__).parent / "choices"
FAMILIES = ("triton", "cublas", "ref")


def forced() -> str | None:
    """The family of QTRAIN_IMPL, or None. UserError for an unknown one."""
    family = os.environ.get("QTRAIN_IMPL")
    if family is not None and family not in FAMILIES:
        raise unknown_name("QTRAIN_IMPL", "family of implementations", family, FAMILIES)
    return family


def tunes() -> bool:
    """Whether candidates are timed. UserError for an unknown QTRAIN_TUNE."""
    return _tune() != "0" and not _paused


def _tune() -> str:
    given = os.environ.get("QTRAIN_TUNE", "1")
    if given not in ("0", "1", "all"):
        raise UserError(
            f"QTRAIN_TUNE: {given!r} is not allowed; 0 times nothing, 1 (the default) times candidates, all also those "
            "of which a choice comes with the package."
        )
    return given


_paused = False


@contextmanager
def without_tuning() -> Iterator[None]:
    """Inside, shapes without a choice take the first name: those that run a few times are not worth the timing."""
    global _paused
    before, _paused = _paused, True
    try:
        yield
    finally:
        _paused = before


def check_environment() -> None:
    """UserError for a QTRAIN_IMPL or QTRAIN_TUNE that means nothing, before anything is written."""
    forced()
    tunes()


def choose(op: str, key: tuple[object, ...], names: Sequence[str], run: Run) -> str:
    """The name for which run(name) is fastest. key: all that this depends on besides the device.

    run is called many times: it must have no side effects.
    """
    family = forced()
    if family is not None:
        names = [name for name in names if name.startswith(family)] or names
    if len(names) == 1:
        return names[0]
    if torch.are_deterministic_algorithms_enabled():
        # Whatever the shape, by tiles that add along K in one order: a row's bits then depend neither on a timing nor
        # on how many rows there are.
        return next((name for name in names if name.startswith("triton") and "split" not in name), names[0])
    checksum = zlib.crc32(" ".join(names).encode())  # other names: another choice
    entry = " ".join([op, *(str(value).removeprefix("torch.") for value in key), f"{checksum:08x}"])
    choices = _choices()  # shared by all operations of the process
    name = choices.get(entry) or (None if _tune() == "all" else _shipped().get(entry))
    if name is not None and name in names:
        return name
    if tunes() and launches_are_left_out():
        for name in names:  # what will be timed is compiled ahead
            with suppress(Exception):
                run(name)
        return names[0]
    if not tunes() or torch.cuda.is_current_stream_capturing():
        return names[0]
    choices[entry] = name = _fastest(names, run)
    _save(choices)
    return name


def _fastest(names: Sequence[str], run: Run) -> str:
    working, out_of_memory = [], None
    with without_tuning():  # a choice within a candidate is made when that runs
        compile_together(partial(run, name) for name in names)
    for name in names:
        try:
            run(name)
            working.append(name)
        except torch.cuda.OutOfMemoryError as error:  # others may need less
            out_of_memory = error.with_traceback(None)  # whose frames would keep what this one has allocated
        except NameError:  # a mistake in our code: left out, nobody would see it
            raise
        except Exception:  # too much shared memory for this GPU, or a shape that a library lacks
            pass
    if out_of_memory and not working:
        raise out_of_memory
    if len(working) < 2:
        return working[0] if working else names[0]
    times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in working}
    sweep = torch.empty(SWEEP_BYTES, dtype=torch.int8, device="cuda")
    for turn in range(ROUNDS):  # interleaved, in alternating order: clocks change as the GPU heats up
        if turn == FIRST_ROUNDS:
            medians = _medians(times)
            working = [name for name in working if medians[name] <= SLOW * min(medians.values())]
        for name in working if turn % 2 else reversed(working):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            for _ in range(SWEEPS):
                sweep.zero_()
            start.record()
            run(name)
            end.record()
            times[name].append((start, end))
    medians = _medians(times)
    return min(working, key=lambda name: medians[name])


def _medians(times: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]]) -> dict[str, float]:
    torch.cuda.synchronize()
    return {name: statistics.median(start.elapsed_time(end) for start, end in runs) for name, runs in times.items()}


@cache
def _choices() -> dict[str, str]:
    """This process's choices, and those that the file had at its start."""
    return _read(_file())


@cache
def _shipped() -> dict[str, str]:
    """The choices of this device and torch version that come with the package."""
    return _read(SHIPPED / f"{_device_name()}.json")


def _read(path: Path) -> dict[str, str]:
    try:
        found = json.loads(path.read_text())
        return {str(key): str(value) for key, value in found.items()}
    except (OSError, ValueError, AttributeError):
        return {}


def _file() -> Path:
    folder = Path(os.environ.get("QTRAIN_CACHE") or Path.home() / ".cache" / "qtrain")
    return folder / f"tuning-{_device_name()}-kernels-{kernels_checksum():08x}.json"


def _device_name() -> str:
    """The device with torch's version, as files are named."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    return re.sub(r"[^A-Za-z0-9.]+", "-", f"{device} torch {torch.__version__}")


@cache
def kernels_checksum() -> int:
    """Of the source of all kernels."""
    return zlib.crc32(b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.rglob("*.py"))))


def _save(choices: dict[str, str]) -> None:
    """Write the file atomically, with what other processes have added to it meanwhile; if the directory is not
    writable, the next run times again."""
    path = _file()
    choices = {**_read(path), **choices}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(f".{path.name}.{os.getpid()}.tmp")  # tempfile's would be its owner's only
        unfinished.write_text(json.dumps(choices, indent=1, sort_keys=True))
        os.replace(unfinished, path)
    except OSError:
        pass
