"""Compiles what several launches need at once: Triton holds no lock while it compiles, and ptxas is a process."""

import contextlib
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from qtrain.kernels.compiler import triton

MOST_THREADS = 16


def compile_together(calls: Iterable[Callable[[], object]]) -> None:
    """Compile, in threads, every Triton kernel that `calls` launch.

    The calls run, but their launches are left out: what they return means nothing. A kernel that does not compile
    fails when it is launched.
    """
    ranks = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    threads = max(1, min(MOST_THREADS, (os.cpu_count() or 1) // ranks))
    with ThreadPoolExecutor(threads) as pool, triton.AsyncCompileMode(pool, ignore_errors=True), without_launches():
        for call in calls:
            with contextlib.suppress(Exception):  # the call itself fails again
                call()


_left_out = False


def launches_are_left_out() -> bool:
    """Whether `without_launches` is in force."""
    return _left_out


@contextlib.contextmanager
def without_launches() -> Iterator[None]:
    """Inside, what this thread launches is compiled and not run."""
    global _left_out
    function, here = triton.runtime.jit.JITFunction, threading.get_ident()
    launcher = function.__getitem__

    def compiler(kernel: Any, grid: object) -> Callable[..., object]:
        if threading.get_ident() != here:
            return launcher(kernel, grid)
        return partial(kernel.run, grid=grid, warmup=True)

    function.__getitem__, before, _left_out = compiler, _left_out, True
    try:
        yield
    finally:
        function.__getitem__, _left_out = launcher, before
