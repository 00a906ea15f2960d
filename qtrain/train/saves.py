"""The checkpoints of a run while it trains: written at once or in the background, and in a new folder where the run's
own has been deleted or moved away."""

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from qtrain.core.errors import TrainingStopped, first_line
from qtrain.train.log.metrics import Throughput
from qtrain.train.state.background_save import Written
from qtrain.train.state.run import Run

log = logging.getLogger("qtrain")

T = TypeVar("T")


class Saves:
    """moved: called once the run continues in another folder."""

    def __init__(self, run: Run, throughput: Throughput, moved: Callable[[], None]):
        self._run, self._throughput, self._moved = run, throughput, moved

    def save(self, *, wait: bool) -> None:
        """Save a checkpoint. Without `wait`, and with --async_checkpoint, training goes on while it is written."""
        self.finish()
        if not self._run.settings.keep_ckpts or self.recover_folder():
            return
        with self._throughput.pause():
            if self._run.settings.async_checkpoint and not wait:
                self._run.begin_save()
                return
            path: Path | None = self._unless_gone(self._run.save)
        if path is not None:
            log.info("step %d: checkpoint %s", self._run.state.step, path)

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and log it."""
        if not self._run.background.under_way:
            return
        with self._throughput.pause():
            written: Written | None = self._unless_gone(self._run.background.finish)
        if written is not None:
            log.info("%s", written.describe(self._run.state.step))

    def _unless_gone(self, write: Callable[[], T]) -> T | None:
        """What `write` returns; None where it fails as the run folder is gone, and the run goes on in a new one."""
        try:
            return write()
        except TrainingStopped:
            if not self.recover_folder():
                raise
            return None

    def settle(self) -> None:
        """As training fails: wait for the checkpoint that is being written. A failure of it is no more than a line."""
        if self._run.background.under_way:
            try:
                log.info("%s", self._run.background.finish().describe(self._run.state.step))
            except Exception as error:
                log.warning("%s", first_line(error))

    def recover_folder(self) -> bool:
        """If the run folder is gone, continue in a new one, with the metrics so far and a checkpoint; else False."""
        if not self._run.recover_folder():
            return False
        if self._run.background.under_way:  # to the folder that is gone
            with contextlib.suppress(TrainingStopped):
                self._run.background.finish()
        self._moved()
        self.save(wait=True)
        return True
