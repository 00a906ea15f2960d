"""What a training run says of itself: metrics.jsonl, the trackers, the status line and the report; its speed, and what
the GPU does."""

import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from qtrain.comm.ranks import from_rank_0, rank
from qtrain.comm.wire import sent
from qtrain.core.config import as_dict
from qtrain.core.gpu_sensors import GpuSensors
from qtrain.core.hardware.memory import peak_memory
from qtrain.data.stream import SKIPPED
from qtrain.parallel.sharding.data_parallel import Gradients
from qtrain.quant.scheme_map import spec_text
from qtrain.train.log.device_metrics import device_metrics, joules_of_all
from qtrain.train.log.metrics import MetricsLog, Throughput, read_metrics
from qtrain.train.log.report.write import try_write_report
from qtrain.train.log.start_clock import StartClock, seconds_since_start
from qtrain.train.log.status import StatusLine
from qtrain.train.log.trackers import Trackers, open_trackers
from qtrain.train.plan.plan import Plan
from qtrain.train.state.run import Run

log = logging.getLogger("qtrain")


class Records:
    """The records of a run; rank 0 writes those of all. unmeasured: steps that do not count into the speed, at the
    start and after a change of schemes: they compile, autotune and capture graphs."""

    def __init__(self, run: Run, plan: Plan, start: StartClock, unmeasured: int):
        self._run, self._plan, self._start, self._unmeasured = run, plan, start, unmeasured
        self.first_step = run.state.step
        """The step that this process began at: that of the checkpoint it resumed from, or 0."""
        # Steps after the checkpoint that the run resumes from are logged again. Other ranks have the null device.
        resumed = run.folder.resumed_from is not None and rank() == 0
        self._metrics = MetricsLog(self._path, run.state.step if resumed else None)
        self._trackers = self._open_trackers()
        self._sensors = GpuSensors(run.device)
        self.throughput = Throughput(run.device, unmeasured, self._sensors.joules)
        # Where one scheme is for all linears, the map is no news.
        self._told_map = run.quantized.assignments - bool(run.settings.quantize_overrides)

    @property
    def _path(self) -> Path:
        return self._run.folder.path / "metrics.jsonl" if rank() == 0 else Path(os.devnull)

    def _open_trackers(self) -> Trackers:
        run, settings = self._run, self._run.settings
        config, where, names = as_dict(settings), run.folder.path, settings.trackers if rank() == 0 else ()
        return open_trackers(names, config, where, settings.project, settings.run_name, run.state.step)

    def past(self, count: int) -> list[dict[str, Any]]:
        """The last records of a resumed run: the same on all ranks."""
        return from_rank_0(lambda: read_metrics(self._metrics.path)[-count:])

    def has_evaluation(self) -> bool:
        """Whether the present step has been evaluated."""
        step = self._run.state.step
        return from_rank_0(lambda: any(r["step"] == step and "loss" not in r for r in read_metrics(self._metrics.path)))

    def write(self, record: dict[str, Any]) -> None:
        self._metrics.write(record)
        self._trackers.log(record, record["step"])

    def step(self, status: StatusLine, gradients: Gradients, lr: float, more: Mapping[str, Any]) -> None:
        """Record a step that has been issued, and show it."""
        # Before the device is waited for: it still runs the update.
        gpu = self._sensors.read()
        run, unit = self._run, self._plan.unit
        state, rate, memory = run.state, self.throughput.read(), peak_memory(run.device)
        record = {
            "step": state.step,
            "loss": gradients.loss,
            "grad_norm": gradients.norm,
            "lr": lr,
            **more,
            **self._changed_map(),
            **self._start.metrics(),
            unit.many: state.tokens,
            "data": state.data,
            "mem": memory,
            "time": round(time.time(), 3),
        }
        speed: dict[str, float | None] = {unit.rate: None, "sol": None, "mfu": None, "data_wait": None}
        if rate is not None:
            reached = self._plan.at(state.phase).efficiency(rate.tok_s)
            speed = {unit.rate: rate.tok_s, **reached, "data_wait": rate.data_wait}
            if run.device.type == "cuda" and run.parallel.mesh.world > 1:
                rate = replace(rate, joules_token=joules_of_all(rate.joules_token, run.device))
        device = device_metrics(self._sensors, gpu, rate, unit)
        self.write(record | speed | device)
        status.update(
            state.step,
            loss=gradients.loss,
            grad_norm=gradients.norm,
            tok_s=speed[unit.rate],
            sol=speed["sol"],
            memory=memory,
            power=device.get("gpu", {}).get("power"),
            step_s=rate.step_s if rate else None,
        )

    def _changed_map(self) -> dict[str, Any]:
        """How many linears run in which scheme: at first, and whenever some have been reassigned."""
        quantized = self._run.quantized
        if self._told_map == quantized.assignments:
            return {}
        self._told_map = quantized.assignments
        return {"schemes": dict(Counter(map(spec_text, quantized.schemes.values())))}

    def tell_start(self) -> None:
        """After a step: of the first one where the time until then went, and what it sent to other processes; of the
        last one that compiles or records when it was over."""
        done = self._run.state.step - self.first_step
        if done == 1:
            if self._start.end():
                log.info("start   %s", self._start.describe())
            if sent:
                parts = ", ".join(f"{size / 2**20:,.2f} MiB of {kind}" for kind, size in sent.items())
                log.info("wire    a step sends %s a process", parts)
        elif done == self._unmeasured and self._run.settings.compile:
            log.info("start   full speed after %.1f s, %d steps", seconds_since_start(), done)

    def schemes_changed(self) -> None:
        """The next steps compile and are recorded anew."""
        self.throughput.skip(self._unmeasured)

    def return_to_step(self) -> None:
        """The run is back at an earlier step: those that follow are logged in place of those that had been."""
        self._metrics.close()
        self._metrics = MetricsLog(self._path, self._run.state.step if rank() == 0 else None)
        self._reopen_trackers()

    def move(self) -> None:
        """Continue in the run's new folder, with the records so far."""
        if rank() == 0:
            # The lines so far are still readable through the open file.
            self._metrics.move(self._path)
        self._reopen_trackers()

    def _reopen_trackers(self) -> None:
        self._trackers.close()
        self._trackers = self._open_trackers()

    def close(self) -> None:
        self._metrics.close()
        self._trackers.close()

    def add_results(self, results: Mapping[str, float]) -> None:
        """After training: add results of the finished model to the log, metrics.jsonl, the trackers and the report."""
        self._metrics, self._trackers = MetricsLog(self._path), self._open_trackers()
        try:
            self.write({"step": self._run.state.step, **results})
        finally:
            self.close()
        for name, value in results.items():
            log.info("%s %.4f", name, value)
        if rank() == 0:
            try_write_report(self._run.folder.path, quiet=True)


def log_results(run: Run) -> None:
    """Write report.html; log where it and the last checkpoint are. Rank 0 does."""
    if rank() != 0:
        return
    try_write_report(run.folder.path)
    if skipped := _skipped_records(run.state.data):
        log.info("skipped     %s bad records of the training data", f"{skipped:,}")
    if run.settings.keep_ckpts:
        log.info("checkpoint  %s", run.checkpoints.latest())
    if run.settings.keep_best:  # which no checkpoint has if it was before the first step, or in a run before this
        best = run.folder.checkpoints / f"{run.state.best_step or 0:08d}"
        where = best if best.is_dir() else f"of step {run.state.best_step}, without a checkpoint in this run"
        log.info("best        %s: evaluation loss %.4f", where, run.state.best_eval_loss)


def _skipped_records(position: Mapping[str, Any] | None) -> int:
    """The bad records that the stream at `position`, or the streams of a mix, passed over."""
    position = position or {}
    return position.get(SKIPPED, 0) + sum(map(_skipped_records, position.get("datasets", ())))
