"""A limit on the time that Python code from a file, such as a chat template, may take."""

import contextlib
import ctypes
import functools
import threading
import time
from collections.abc import Iterator

TICK = 0.25


class TimeIsUp(BaseException):
    """Raised in the thread that runs for too long; no Exception, so that the code cannot handle it."""


class _Watch:
    """A thread that counts ticks for each thread with a limit. Ticks, not the clock: a stopped process counts none."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._left: dict[int, int] = {}
        threading.Thread(target=self._run, name="time limit", daemon=True).start()

    def _run(self) -> None:
        while True:
            time.sleep(TICK)
            with self._lock:
                for thread in list(self._left):
                    self._left[thread] -= 1
                    if self._left[thread] < 0:
                        del self._left[thread]
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(TimeIsUp))

    @contextlib.contextmanager
    def limit(self, seconds: float) -> Iterator[None]:
        thread = threading.get_ident()
        with self._lock:
            self._left[thread] = round(seconds / TICK)
        try:
            yield
        finally:
            with self._lock:
                self._left.pop(thread, None)


@functools.cache
def _watch() -> _Watch:
    return _Watch()


def time_limit(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Raises TimeIsUp from the `with` block once its Python code has run for some `seconds`."""
    return _watch().limit(seconds)
