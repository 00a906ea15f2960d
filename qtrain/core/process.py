"""This process: how it starts and ends as a script, and what of POSIX it does without on Windows.

`prepare_process` comes first in a program, `run_script` runs its main: errors that are messages, Ctrl-C, closed streams
and pipes, exit codes, one of several ranks.
"""

import atexit
import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from importlib.util import find_spec
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, TextIO

from qtrain.core.errors import LostRank, Restart, TrainingStopped, UserError, explained

STARTED = time.monotonic()
"""When this process started: scripts import this module first."""

# ---- first of all ---------------------------------------------------------------------------------------------------


class _TorchvisionOnCPU(MetaPathFinder):
    """Declares two of torchvision's operators before it is imported by a program with a CPU build of torch.

    No build of torchvision matches those: of the CUDA wheel the Python side imports, its operators do not, and with it
    fail timm and parts of transformers. The schemas of the two let the import through.
    """

    declared: Any = None
    """The library of the schemas; without a reference to it they are withdrawn."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> None:
        """Called before every import; finds nothing itself."""
        if fullname == "torchvision" and self.declared is None:
            import torch

            if torch.version.cuda is None:
                with contextlib.suppress(RuntimeError):  # a torchvision built for this CPU has defined them already
                    self.declared = torch.library.Library("torchvision", "FRAGMENT")
                    self.declared.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
                    self.declared.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def prepare_process(*, script: bool = False) -> None:
    """Let timm and transformers, imported after this call, import torchvision with a CPU build of torch, and have
    PyTorch's CUDA allocator map memory by pages (`expandable_segments`), unless the environment says otherwise.

    It adds a finder to `sys.meta_path` rather than import torch here, which takes seconds. script: also have a Ctrl-C
    during the imports that follow print one line, by `sys.excepthook`, and a package that is not installed. Python then
    ends the process by SIGINT, which shells report as exit code 130.
    """
    if not any(isinstance(finder, _TorchvisionOnCPU) for finder in sys.meta_path):
        sys.meta_path.insert(0, _TorchvisionOnCPU())
    # A segment that grows and shrinks by pages leaves no holes: else what outlives the first steps, in segments of
    # their activations, keeps the rest of these from the CUDA graphs' own pool.
    if not {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_ALLOC_CONF"] = "expandable_segments:True"
    if script:
        sys.excepthook = _one_line


def maps_by_pages() -> bool:
    """Whether the environment asks for `expandable_segments`."""
    settings = (os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"))
    return any("expandable_segments:true" in text.lower().replace(" ", "") for text in settings)


def _one_line(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        if _rank() == "0":
            print("interrupted", file=sys.stderr)
    elif isinstance(error, ModuleNotFoundError) and (missing := _missing_package(error)):
        print(
            f"error: the package {missing!r} is not installed for {sys.executable}. In a clone, after `make setup`, "
            "`source .venv/bin/activate`; elsewhere `pip install -r requirements.txt`.",
            file=sys.stderr,
        )
        sys.exit(UserError.exit_code)  # Python takes the exit code of a hook's SystemExit
    else:
        sys.__excepthook__(kind, error, traceback)


def _rank() -> str:
    """This process's number among several. "0" speaks for all, and for itself where a launcher has set no number, which
    is refused as soon as the settings are read."""
    rank = os.environ.get("RANK", "0") if "WORLD_SIZE" in os.environ else "0"
    return rank if rank.isdecimal() else "0"


def _missing_package(error: ModuleNotFoundError) -> str | None:
    """The package that an import has not found, unless it is there and lacks a module, which is no user's mistake."""
    package = (error.name or "").partition(".")[0]
    return package if package not in ("", "qtrain", *sys.modules) and find_spec(package) is None else None


# ---- a script's main ------------------------------------------------------------------------------------------------

CAUSE_SECONDS = 10
"""How long a process of several keeps an error to itself that rank 0 has too, or that follows from another's."""


def run_script(main: Callable[[list[str]], None], interrupted: str = "interrupted") -> None:
    """Run a script's main on the command line, as `_run_script` says. One of several processes ends without the
    interpreter's finalization.

    A thread that is in C++ then, as in a call of the store or of gloo, is ended by pthread_exit when it asks for the
    GIL, and unwinding through a destructor aborts the process: "terminate called without an active exception"."""
    if os.environ.get("WORLD_SIZE", "1") == "1":
        _run_script(main, interrupted)
        return
    code = 0
    try:
        _run_script(main, interrupted)
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        code = 1
    _exit_rank(code)


def _exit_rank(code: int) -> NoReturn:
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        _write_error(stream)
    os._exit(code)


def _run_script(main: Callable[[list[str]], None], interrupted: str) -> None:
    """Run a script's main on the command line. UserError and TrainingStopped are printed on stderr, without traceback;
    so are errors that a function registered with `errors.explains` knows.

    Text that the console's encoding lacks is escaped. interrupted: the message for a Ctrl-C that main does not handle.
    """
    _open_missing_streams()
    prepare_process()
    watch_launcher()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    rank = _rank()
    if "WORLD_SIZE" in os.environ:  # else torch, not imported yet, reports each lost connection with a stack of C++
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if rank != "0":  # one of several processes: rank 0 speaks for all
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    try:
        _check_working_directory()
        _run(main)
    except Restart as error:
        if RESTART_FILE in os.environ:
            _ask_launcher(error)
        print(error, file=sys.stderr)
        sys.stdout.flush()
        # Not a child: the memory of the GPU is free only once this process image is gone.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:], *error.flags])
    except (UserError, TrainingStopped) as error:
        if rank != "0" or isinstance(error, LostRank):
            time.sleep(CAUSE_SECONDS)  # rank 0 or the launcher gives the cause; the latter then ends this process
        if rank != "0":
            print(f"rank {rank}: ", end="", file=sys.stderr)
        message = " ".join(str(error).split("\n")) if isinstance(error, UserError) else str(error)
        print(f"error: {_shortened(message)}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        if rank == "0":
            print(interrupted, file=sys.stderr)
        sys.exit(130)
    except OSError:
        if (error := _write_error(sys.stdout, "\n")) is None:
            raise  # of another file or pipe, such as a data worker's
        _exit_unwritten(error)
    finally:
        if error := _write_error(sys.stdout):
            _exit_unwritten(error)


def _ask_launcher(error: Restart) -> NoReturn:
    """End this rank and have the launcher start all of them again."""
    asked = Path(os.environ[RESTART_FILE])
    own = asked.with_name(f"{os.getpid()}.json")
    own.write_text(json.dumps({"message": str(error), "flags": error.flags}))
    own.replace(asked)  # in one piece: several ranks may ask at once
    sys.exit(RESTART_CODE)


def _run(main: Callable[[list[str]], None]) -> None:
    try:
        main(sys.argv[1:])
    except Exception as error:
        if (message := explained(error)) is None:
            raise
        raise message from None


def _shortened(message: str) -> str:
    """A message with words of hundreds of characters, such as a path that was not meant as one, cut in the middle."""
    return re.sub(r"\S{250,}", lambda word: f"{word[0][:60]}...{word[0][-20:]}", message)


def _open_missing_streams() -> None:
    """The null device for streams that the parent has closed (`>&-`): else Python's are None, and the next file that is
    opened takes their descriptor, with what libraries print."""
    for descriptor, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is not None:
            continue
        opened = os.open(os.devnull, os.O_RDWR)  # takes the lowest free descriptor
        if opened != descriptor:
            os.dup2(opened, descriptor)
            os.close(opened)
        setattr(sys, name, os.fdopen(descriptor, mode))


def _check_working_directory() -> None:
    try:
        os.getcwd()
    except OSError:  # libraries look for their files in it, and end the process
        raise UserError("the working directory no longer exists; change to another one, and start again.") from None


def _write_error(stream: TextIO, text: str = "") -> OSError | None:
    """Why `text` and what is still buffered cannot be written; None where it can."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        return error
    return None


def _exit_unwritten(error: OSError) -> NoReturn:
    """Exit as by SIGPIPE where the reader, as `| head`, has ended; else say why nobody reads what was printed."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it at exit
    if isinstance(error, BrokenPipeError):
        sys.exit(141)
    print(f"error: stdout cannot be written: {error.strerror}", file=sys.stderr)
    sys.exit(1)


def command_line(prog: str) -> str:
    """How a user starts the script `prog`: with Python, or by its console command if that is what runs here."""
    if Path(sys.argv[0]).name.startswith("qtrain-") and prog.endswith(".py"):
        return f"qtrain-{Path(prog).stem.replace('_', '-')}"
    return f"python {prog}"


# ---- a rank of --gpus N and its launcher ----------------------------------------------------------------------------

# A launcher that is killed (SIGKILL, out of memory) cannot end its ranks, which would wait minutes for the store that
# it hosted. So each rank watches its parent process, from before it imports torch. PR_SET_PDEATHSIG would do the same
# on Linux alone, and without a message.

LAUNCHER = "QTRAIN_LAUNCHER"
"""Environment variable: the process id of the launcher, which is the parent of every rank."""
WATCH_SECONDS = 1.0

RESTART_FILE = "QTRAIN_RESTART_FILE"
"""Environment variable of a rank: where it says, as JSON, with which flags the launcher is to start all ranks again."""
RESTART_CODE = 75
"""Exit code of a rank that has said so: EX_TEMPFAIL of sysexits.h."""


def can_restart() -> bool:
    """Whether a `Restart` is carried out: by this process alone, or by the launcher of --gpus N; not by torchrun."""
    return os.environ.get("WORLD_SIZE", "1") == "1" or RESTART_FILE in os.environ


def watch_launcher() -> None:
    """In a rank of --gpus N: end this process, without saving, once its launcher has ended. Elsewhere nothing."""
    launcher = os.environ.pop(LAUNCHER, "")  # data workers, which inherit the environment, have another parent
    if launcher.isdecimal():
        threading.Thread(target=_watch, args=(int(launcher),), name="launcher watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(WATCH_SECONDS)
    if os.environ.get("RANK") == "0":  # speaks for all
        text = f"error: the launcher (process {launcher}) was killed; all ranks end. Go on with --resume auto.\n"
        os.write(2, text.encode())  # not print: the main thread may hold the stream's lock
    os._exit(1)


# ---- what POSIX has and Windows lacks -------------------------------------------------------------------------------

GROUP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
"""Signals that reach all processes of a run, of those that the platform has."""


def sync_to_disk(path: Path) -> None:
    """fsync a written file, or a folder, whose entries Windows can neither open nor sync."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY if hasattr(os, "O_DIRECTORY") else os.O_RDWR)  # Windows syncs writable files
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peak_resident_bytes() -> int:
    """The largest resident memory of this process so far."""
    try:
        import resource
    except ImportError:
        import psutil

        # pyrefly: ignore[missing-attribute]  # of Windows, which has no `resource`
        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
