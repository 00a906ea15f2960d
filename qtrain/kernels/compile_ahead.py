"""Compiles kernels in other processes while torch.compile still traces the model and generates code.

torch.compile calls the fake of a custom op when it traces it, with tensors of the very shapes and dtypes that the op
will get, long before it first runs. The op's own function is run then too, on such tensors and with its launches left
out: what it would launch, all candidates of a choice that is not known included, is compiled by worker processes into
Triton's cache. The first launch finds it there; one that is not ready yet is compiled where it is launched.
"""

import contextlib
import importlib
import io
import os
import pickle
import pkgutil
import queue
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from qtrain.kernels import compiler
from qtrain.kernels.compile_together import MOST_THREADS, without_launches
from qtrain.kernels.compiler import triton

LEAST_CORES = 4
"""For each local rank: with fewer, workers would take them from what they are to help."""
OWN = ("qtrain.kernels.", "qtrain.tensors.")
"""Where operators may run without their launches; those of `comm` would talk to other processes."""
IDLE_SECONDS = 120
"""After which a worker ends: all that is traced at once has come by then."""


class Job(NamedTuple):
    """A kernel, specialized on its arguments as a launch does: what `triton.compile` takes."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    target: tuple[str, int, int]

    def compile(self) -> None:
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource

        source = GluonASTSource if self.kernel.is_gluon() else ASTSource
        specialized = source(self.kernel, self.signature, self.constants, self.attributes)
        compiled = triton.compile(specialized, target=GPUTarget(*self.target), options=self.options)
        with contextlib.suppress(Exception):  # up to triton 3.6 gcc compiles a launcher for each list of types
            triton.runtime.driver.active.launcher_cls(compiled.src, compiled.metadata)


# ---- the training process --------------------------------------------------------------------------------------------


def start() -> None:
    """Have kernels compiled ahead from now on, if this process is the first on its machine and has cores to spare."""
    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    first = os.environ.get("LOCAL_RANK", "0") == "0" and compiler.on_trace is None
    if first and cores >= LEAST_CORES and sys.platform == "linux":  # where `select` takes pipes
        compiler.on_trace = Ahead(min(MOST_THREADS, cores))


def trace(call: Callable[[], object]) -> None:
    """Have compiled what `call` would launch. It runs on fake tensors, which stand for those of its modules too:
    nothing is computed, no tensor changes."""
    if compiler.on_trace is None:
        return
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    with fake, recorded_launches() as found, contextlib.suppress(Exception):  # the call itself fails again
        call()
    if isinstance(compiler.on_trace, Ahead):
        compiler.on_trace.send(found)  # what it launches itself; its custom ops' are sent when they are traced


class Ahead:
    """Sends what custom ops would launch to `workers` processes."""

    def __init__(self, workers: int):
        root = str(Path(__file__).parents[2])
        paths = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(workers)],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
            env={**os.environ, "PYTHONPATH": paths},
        )  # fmt: skip
        self._seen: set[object] = set()
        self._messages: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        # A thread: the pipe is full before the process has imported what it needs.
        threading.Thread(target=self._write, daemon=True).start()

    def __call__(self, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
        """Have compiled what `function` launches with arguments like these, fake tensors among them."""
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        if not any(t.is_cuda for t in tensors) or not all(map(_is_static, arguments)):
            return
        if not function.__module__.startswith(OWN):
            return
        call = (function.__qualname__, tuple(_described(argument) for argument in arguments))
        if call in self._seen:
            return
        self._seen.add(call)
        self.send(jobs_of(function, arguments))

    def send(self, jobs: list[Job]) -> None:
        for job in jobs:
            message = io.BytesIO()
            with contextlib.suppress(pickle.PicklingError, TypeError, AttributeError):  # it is compiled when it runs
                _Pickler(message).dump(job)
                self._messages.put(message.getvalue())

    def _write(self) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(OSError):  # the process has ended: nothing has come for long
            while message := self._messages.get():
                pipe.write(len(message).to_bytes(8, "little") + message)
                pipe.flush()


def jobs_of(function: Callable[..., object], arguments: tuple[object, ...]) -> list[Job]:
    """What `function` would launch, without what this process has compiled before."""
    with recorded_launches() as found, torch.no_grad(), contextlib.suppress(Exception):  # the op itself fails again
        function(*(_like(argument) if isinstance(argument, Tensor) else argument for argument in arguments))
    return found


@contextlib.contextmanager
def recorded_launches() -> Iterator[list[Job]]:
    """Inside, this thread launches and compiles nothing; the list gets what it would compile. May be nested."""
    found: list[Job] = []
    jit, here = triton.runtime.jit.JITFunction, threading.get_ident()
    compiles = jit._do_compile

    def record(kernel, key, signature, device, constants, options, attributes, warmup):
        if threading.get_ident() != here:  # a launch of another thread
            return compiles(kernel, key, signature, device, constants, options, attributes, warmup)
        target = kernel.device_caches[device][2]
        target_key = target.backend, target.arch, target.warp_size
        found.append(Job(kernel, signature, constants, attributes, dict(options.__dict__), target_key))
        return None

    address = FakeTensor.data_ptr
    jit._do_compile, FakeTensor.data_ptr = record, _offset  # all that is asked of an address: what it is a multiple of
    try:
        with without_launches():
            yield found
    finally:
        jit._do_compile, FakeTensor.data_ptr = compiles, address


def _offset(self: FakeTensor) -> int:
    """`data_ptr` of a tensor without memory: bytes from the start of its storage."""
    return int(self.storage_offset()) * self.element_size()


def _is_static(argument: object) -> bool:
    sizes = (*argument.shape, *argument.stride()) if isinstance(argument, Tensor) else (argument,)
    return not any(isinstance(size, torch.SymInt | torch.SymFloat | torch.SymBool) for size in sizes)


def _described(argument: object) -> object:
    if isinstance(argument, Tensor):
        return tuple(argument.shape), argument.stride(), argument.storage_offset(), argument.dtype
    return argument if isinstance(argument, int | float | str | None) else repr(argument)


def _like(t: Tensor) -> Tensor:
    """A fake tensor that an op may write to, which the one that is traced must not see."""
    size = t.storage_offset() + sum((n - 1) * stride for n, stride in zip(t.shape, t.stride(), strict=True)) + 1
    return t.new_empty(max(size, 0)).as_strided(t.shape, t.stride(), t.storage_offset())


class _Pickler(pickle.Pickler):
    """Pickles kernels by their names."""

    def reducer_override(self, value: object) -> Any:
        if isinstance(value, triton.runtime.jit.JITFunction):
            return _kernel_named, (value.__module__, value.__name__)
        return NotImplemented


def _kernel_named(module: str, name: str) -> Any:
    return getattr(importlib.import_module(module), name)


# ---- the workers -----------------------------------------------------------------------------------------------------


def work(workers: int) -> None:
    """Compile the jobs that come in, until the pipe is closed or nothing has come for long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the training process's, which closes the pipe
    os.nice(5)
    for module in pkgutil.walk_packages([str(Path(__file__).parent)], "qtrain.kernels."):
        with contextlib.suppress(ImportError):
            importlib.import_module(module.name)
    with contextlib.suppress(Exception):  # made once, not by each worker
        _ = triton.runtime.driver.active
    pool = ProcessPoolExecutor(workers, mp_context=get_context("fork"))  # with all of this imported
    for job in _incoming():
        pool.submit(_compile, job)
    pool.shutdown(cancel_futures=True)


def _compile(job: bytes) -> None:
    pickle.loads(job).compile()  # a process of this program has written it


def _incoming() -> Iterator[bytes]:
    while select.select([sys.stdin], [], [], IDLE_SECONDS)[0] and (size := _read(8)):
        yield _read(int.from_bytes(size, "little"))


def _read(size: int) -> bytes:
    data = b""
    while len(data) < size and (more := os.read(sys.stdin.fileno(), size - len(data))):
        data += more
    return data


if __name__ == "__main__":
    work(int(sys.argv[1]))
