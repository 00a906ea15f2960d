"""Who hangs: a thread of every rank tells the others that its process lives, and where its main thread is.

A rank that is stopped, swapped out or stuck looks to the others like a slow one: their collectives wait. So every rank
writes a beat to the launcher's store every few seconds and watches the beats of the next rank. Two things end the run:

    no beat       the process is stopped or hangs as a whole, for SILENT_SECONDS. Compiling, loading or saving for
                  however long does not stop the thread that beats.
    no progress   this rank has waited in one collective for `patience` seconds (--rank_timeout), and the next one is
                  elsewhere.

The first rank to notice says so, for all of them, and ends; the launcher ends the others.
"""

import atexit
import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

BEAT_SECONDS = 2.0
SILENT_SECONDS = 25.0
EXIT_CODE = 1

_PACKAGE = Path(__file__).parents[1]
_COMMUNICATION = [path.replace("/", os.sep) for path in ("torch/distributed/", "qtrain/comm/", "qtrain/parallel/")]
"""Where a main thread is that waits for the others: an NCCL collective is waited for where its result is read."""

log = logging.getLogger("qtrain")


class Heartbeat:
    """Beats in a daemon thread until `stop`. store: a connection of its own. end: ends this process."""

    def __init__(
        self, store: dist.Store, rank: int, world: int, patience: float, end: Callable[[int], None] = os._exit
    ):
        self.step: int | None = None
        """The last finished step; None in the set-up of the run."""
        self._store, self._rank, self._world, self._patience, self._end = store, rank, world, patience, end
        self._main = threading.main_thread().ident
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def stop(self) -> None:
        """This rank is done: nobody waits for its beats any more."""
        atexit.unregister(self.stop)
        self._stopped.set()
        self._thread.join(2 * BEAT_SECONDS)  # a write that hangs must not keep the process

    def _run(self) -> None:
        watched = (self._rank + 1) % self._world  # a ring: every rank is watched by one other
        seen: dict[str, Any] | None = None
        last = silent_since = waiting_since = time.monotonic()
        place, count = None, 0
        try:
            # At once: a process that is stopped before its first beat would pass for one that has not started.
            self._write({"beat": 0, "step": self.step, "at": self._place()[0], "waits": False})
            while not self._stopped.wait(BEAT_SECONDS):
                now, count = time.monotonic(), count + 1
                if now - last > SILENT_SECONDS / 2:  # this process, or the whole machine, was stopped meanwhile
                    silent_since = waiting_since = now
                last = now
                at, waits = self._place()
                if not waits or (at, self.step) != place:  # it moves, or waits for something else
                    place, waiting_since = (at, self.step), now
                self._write({"beat": count, "step": self.step, "at": at, "waits": waits})
                beat = self._read(watched)
                if beat is None or beat != seen:
                    seen, silent_since = beat, now
                if beat is None or beat.get("ended"):  # it has not started, or is done
                    continue
                if now - silent_since > SILENT_SECONDS:
                    return self._report(watched, beat, "does not answer: its process hangs or is stopped")
                if now - waiting_since > self._patience and not beat["waits"]:
                    why = f"has kept the others waiting for {self._patience:,.0f} s (--rank_timeout)"
                    return self._report(watched, beat, f"{why}: it is at {beat['at']}")
            self._write({"ended": True})
        except RuntimeError:  # the store has ended, and the launcher with it
            return

    def _write(self, beat: dict[str, Any]) -> None:
        self._store.set(str(self._rank), json.dumps({**beat, "pid": os.getpid(), "host": socket.gethostname()}))

    def _read(self, rank: int) -> dict[str, Any] | None:
        return json.loads(self._store.get(str(rank))) if self._store.check([str(rank)]) else None

    def _report(self, rank: int, beat: dict[str, Any], why: str) -> None:
        """Say that `rank` hangs, unless another rank has reported one, and end this process."""
        if self._store.compare_set("reported", "", str(self._rank)) != str(self._rank).encode():
            return
        where = "in set-up" if beat["step"] is None else f"last step {beat['step']}"
        who = f"rank {rank} (process {beat['pid']} on {beat['host']}, {where})"
        message = f"{who} {why}. All ranks end; start the run again with --resume auto."
        log.error("%s", message, extra={"file_only": True})
        print(f"error: {message}", file=sys.stderr, flush=True)
        self._end(EXIT_CODE)

    def _place(self) -> tuple[str, bool]:
        """The innermost line of this package that the main thread is at, and whether it waits for other ranks."""
        frame, at, waits = sys._current_frames().get(self._main or 0), "", False
        while frame is not None:
            file = frame.f_code.co_filename
            waits = waits or any(part in file for part in _COMMUNICATION)
            if not at and file.startswith(str(_PACKAGE)):
                at = f"{Path(file).relative_to(_PACKAGE.parent)}:{frame.f_lineno} ({frame.f_code.co_name})"
            frame = frame.f_back
        return at or "Python's own code", waits
