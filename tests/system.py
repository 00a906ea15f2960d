"""What the tests of whole scripts share: a tiny model and its data, a script called in this process, and real processes
that are forked from one that has torch imported already (a start of Python and torch takes seconds)."""

import atexit
import contextlib
import fcntl
import functools
import io
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from qtrain.core import process
from qtrain.core.process import run_script
from qtrain.train.log.metrics import read_metrics
from tests.worlds import environment

T = TypeVar("T")
ROOT = Path(__file__).parent.parent
PYTHON_FIRST = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
"""An environment in which `python`, as printed commands have it, is this one."""

TINY = {
    "model_type": "llama",
    "vocab_size": 258,  # the tokenizer `byte`
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def write_model(path: Path, **changes: Any) -> str:
    """Write a tiny model's config with some keys changed (None: left out); returns the path."""
    path.write_text(json.dumps({k: v for k, v in {**TINY, **changes}.items() if v is not None}))
    return str(path)


def flags(**values: Any) -> list[str]:
    """Settings as a command line: dictionaries as JSON, True and False as switches, lists as several words."""
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no_{name}")
        elif isinstance(value, list):
            words += [f"--{name}", *map(str, value)]
        else:
            words.append(f"--{name}={json.dumps(value) if isinstance(value, dict) else value}")
    return words


@dataclass(frozen=True)
class Outcome:
    """What a finished script left: its exit code and what it printed."""

    code: int
    out: str
    err: str


def call(main: Callable[[list[str]], None], argv: list[str]) -> Outcome:
    """Run a script's main in this process, as `python SCRIPT.py` would. An error that is no message is raised."""
    out, err, code, threads = io.StringIO(), io.StringIO(), 0, torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        patch.setattr(sys, "argv", ["script.py", *argv])
        patch.setattr(process, "_exit_rank", sys.exit)  # the tests' process goes on
        try:
            run_script(main)
        except SystemExit as stop:
            code = stop.code or 0
        finally:
            torch.set_num_threads(threads)
    return Outcome(code, out.getvalue(), err.getvalue())


def tree(folder: Path) -> dict[str, tuple[int, int] | None]:
    """Size and time of change of every file in a folder; the names of the folders."""
    found = {str(p.relative_to(folder)): None if p.is_dir() else p.stat() for p in folder.rglob("*")}
    return {name: stat and (stat.st_size, stat.st_mtime_ns) for name, stat in found.items()}


def only_run(runs: Path, script: str = "llm_pretrain") -> Path:
    """The one run folder there is."""
    (run,) = (runs / script).iterdir()
    return run


def last_step(runs: Path) -> int:
    """The last step that the one run in `runs` has logged; 0 before it has."""
    records = [r for path in runs.glob("*/*/metrics.jsonl") for r in read_metrics(path)]
    return max((r["step"] for r in records if "loss" in r), default=0)


def losses(run: Path) -> list[tuple]:
    """Of the log what time cannot touch: step, loss, gradient norm, rate, tokens, data position, evaluation."""
    keys = ("step", "loss", "grad_norm", "lr", "tokens", "data", "eval_loss", "images", "top1")
    return [tuple(place(r.get(k)) for k in keys) for r in read_metrics(run / "metrics.jsonl")]


def place(position: Any) -> Any:
    """A data position without the inner state of the `datasets` library, which spells one place in several ways."""
    if isinstance(position, dict):
        return {key: place(value) for key, value in position.items() if key != "state"}
    return [place(value) for value in position] if isinstance(position, list) else position


def contents(checkpoint: Path) -> dict[str, torch.Tensor]:
    """Every tensor of a checkpoint by its name, which begins with model, optim or rng."""
    found: dict[str, torch.Tensor] = {}

    def walk(value: Any, name: str) -> None:
        for key, inner in value.items():
            walk(inner, f"{name}{key}.") if isinstance(inner, dict) else found.setdefault(f"{name}{key}", inner)

    with tempfile.NamedTemporaryFile() as scratch:
        dcp_to_torch_save(checkpoint, scratch.name)
        walk(torch.load(scratch.name), "")
    return found


def once(tmp_path_factory: pytest.TempPathFactory, name: str, make: Callable[[Path], T]) -> T:
    """`make(folder)`, made by the first worker that asks for it: the others wait, and get a copy."""
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    folder, made = root / name, root / f"{name}.pickle"
    with open(f"{made}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not made.exists():
            folder.mkdir()
            made.write_bytes(pickle.dumps(make(folder)))
    return pickle.loads(made.read_bytes())


# ---- real processes --------------------------------------------------------------------------------------------------

SERVER = """
import gc
gc.disable()  # what is imported stays, in every fork
import contextlib, io, json, os, sys, time
import torch
import llm_finetune, llm_pretrain, timm_finetune, tokenize_data
import qtrain.train.assembly.assemble, qtrain.train.assembly.prepare, qtrain.train.assembly.text
import qtrain.train.eval.exact_match, qtrain.train.eval.hellaswag, qtrain.train.eval.language
import qtrain.train.eval.lm_eval, qtrain.train.eval.vision
import huggingface_hub.file_download, huggingface_hub.serialization, tokenizers, torch._dynamo  # else within a run
from qtrain.core.hardware import device
from qtrain.core.config import versions
from qtrain.core.process import run_script
from qtrain.train.settings.listing import listing
from qtrain.train.loop import Training

torch.set_num_threads(1)
device.measured_peaks = lambda _: {"fp32": 0.1, "bf16": 0.1, "int8": 0.1}  # half a second in every process
MAINS = {m.__name__: m.main for m in (llm_finetune, llm_pretrain, timm_finetune, tokenize_data)}
listing()  # imports what the registries name
versions()
for main in MAINS.values():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        main(["--help"])  # what every process would import and read for its flags


def child(job):
    os.dup2(os.open(job["output"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644), 1)
    os.dup2(os.open(job["errors"], os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o644), 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.chdir(job["cwd"])
    os.environ.update(job["environment"])
    sys.argv = [job["script"] + ".py", *job["argv"]]
    exec(job["patch"], globals())
    if job["hang_at"] is not None:
        step = Training._step
        def hang(self, *arguments):
            step(self, *arguments)
            if self.run.state.step == job["hang_at"]:
                time.sleep(300)
        Training._step = hang
    try:
        run_script(MAINS[job["script"]])
        return 0
    except SystemExit as stop:
        return stop.code or 0
    except BaseException:
        import traceback
        traceback.print_exc()
        return 70


gc.freeze()
gc.enable()
print("ready", flush=True)
for line in sys.stdin:
    job = json.loads(line)
    if "wait" in job:
        _, status = os.waitpid(job["wait"], 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
        continue
    if "preload" in job:
        exec(job["preload"], globals())
        print("done", flush=True)
        continue
    pid = os.fork()
    if pid == 0:
        code = child(job)
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
    print(pid, flush=True)
os._exit(0)  # a second sooner than in order
"""


@dataclass
class Process:
    """A running script."""

    server: "Server"
    pid: int
    output: Path
    errors: Path

    def wait(self) -> Outcome:
        """To be called once. A process that a signal ended has the negative number of it for a code."""
        code = int(self.server.ask({"wait": self.pid}))
        self.server.running.discard(self.pid)
        return Outcome(code, self.output.read_text(), self.errors.read_text())

    @property
    def ended(self) -> bool:
        """Whether it is over and not waited for yet."""
        return Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

    def until(self, condition: Callable[[], Any]) -> None:
        """Wait until `condition` holds; a process that complains fails the test at once."""

        def holds() -> Any:
            assert not (said := self.errors.read_text()), said
            return condition()

        wait_until(holds)

    def kill(self, number: int) -> Outcome:
        os.kill(self.pid, number)
        return self.wait()


class Server:
    """Starts scripts in processes of their own, in a folder: forks of `parent`. The calls do not wait."""

    def __init__(self, folder: Path, parent: subprocess.Popen):
        self._folder, self._parent, self._jobs = folder, parent, 0
        self.running: set[int] = set()

    def ask(self, job: dict[str, Any]) -> str:
        print(json.dumps(job), file=self._parent.stdin, flush=True)
        return self._parent.stdout.readline()

    def start(
        self, script: str, argv: list[str], hang_at: int | None = None, patch: str = "", **environment: str
    ) -> Process:
        """Start `script` with `argv`. With `hang_at` it does not go on after that step, so that it can be killed.

        patch: Python code that runs before the script's."""
        self._jobs += 1
        output, errors = (self._folder / f"{self._jobs}.{kind}" for kind in ("out", "err"))
        for path in (output, errors):
            path.touch()
        job = {"script": script, "argv": argv, "cwd": str(self._folder), "hang_at": hang_at, "patch": patch}
        job["environment"] = environment
        pid = int(self.ask({**job, "output": str(output), "errors": str(errors)}))
        self.running.add(pid)
        return Process(self, pid, output, errors)

    def run(self, script: str, argv: list[str]) -> Outcome:
        return self.start(script, argv).wait()

    def run_ranks(
        self,
        world: int,
        script: str,
        argv: list[str],
        patches: Mapping[int, str] = MappingProxyType({}),
        of_rank: Mapping[int, list[str]] = MappingProxyType({}),
    ) -> list[Outcome]:
        """The script as `world` ranks, as a launcher starts them: when one has failed, the others are killed.

        By rank: patches: Python code that runs before the script's; of_rank: arguments that only it gets."""
        ranks = [
            self.start(script, [*argv, *of_rank.get(rank, [])], patch=patches.get(rank, ""), **variables)
            for rank, variables in enumerate(environment(world))
        ]
        wait_until(lambda: any(rank.ended for rank in ranks), 120)
        first = next(rank for rank in ranks if rank.ended)
        outcomes = {id(first): first.wait()}
        if outcomes[id(first)].code:
            with contextlib.suppress(AssertionError):
                wait_until(lambda: all(rank.ended for rank in ranks if rank is not first), 0.2)
            for rank in ranks:
                if rank is not first and not rank.ended:
                    os.kill(rank.pid, signal.SIGKILL)
        return [outcomes.get(id(rank)) or rank.wait() for rank in ranks]

    def stop(self) -> None:
        for pid in self.running:  # a test that failed did not wait for them
            os.kill(pid, signal.SIGKILL)
            self.ask({"wait": pid})


def _start_parent(**environment: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment}
    environment.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # as `run_script` does before torch is imported
    pipe = subprocess.PIPE
    parent = subprocess.Popen([sys.executable, "-c", SERVER], stdin=pipe, stdout=pipe, text=True, env=environment)
    assert parent.stdout.readline() == "ready\n"
    return parent


def _end_parent(parent: subprocess.Popen) -> None:
    parent.stdin.close()
    parent.wait(timeout=30)
    parent.stdout.close()


@functools.cache
def _shared_parent() -> subprocess.Popen:
    """One for all tests of this process: its start takes seconds."""
    parent = _start_parent()
    atexit.register(_end_parent, parent)
    return parent


@contextlib.contextmanager
def serving(folder: Path, preload: str = "", **environment: str) -> Iterator[Server]:
    """preload: imports that the scripts are to find done. With an environment, a parent of their own is started."""
    parent = _start_parent(**environment) if environment else _shared_parent()
    server = Server(folder, parent)
    if preload:
        server.ask({"preload": preload})
    try:
        yield server
    finally:
        server.stop()
        if environment:
            _end_parent(parent)


def wait_until(condition: Callable[[], Any], seconds: float = 60) -> None:
    """Look again and again until `condition` holds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "this did not come about in time"
        time.sleep(0.002)
