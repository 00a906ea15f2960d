"""`--profile`: a trace of a few steps for Perfetto or chrome://tracing, a table of kernels by kind, and one of the
slowest operators."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from qtrain.train.log.kernel_table import kernel_table, kernels_of


class StepProfiler:
    """Records `steps` steps after `skip` steps and one of warm-up; does nothing unless `enabled`.

        with StepProfiler(run_dir, logger, enabled=settings.profile) as profiler:
            for ...:
                train_step()
                profiler.step()

    The trace is written to `<run_dir>/profile/trace_rank<rank>.json.gz`, the table of kernels beside it as
    `kernels_rank<rank>.txt` and in a line of the log, that of operators into the log. floor: milliseconds of a step at
    dense peaks, by the plan's kinds of work.
    """

    def __init__(
        self,
        run_dir: Path,
        logger: logging.Logger,
        enabled: bool,
        skip: int = 3,
        steps: int = 3,
        rank: int = 0,
        floor: Mapping[str, float] | None = None,
    ):
        self._logger, self._floor = logger, floor or {}
        self._trace = Path(run_dir) / "profile" / f"trace_rank{rank}.json.gz"
        self._kernels = self._trace.with_name(f"kernels_rank{rank}.txt")
        # skip: steps that compile; one more warms the profiler up.
        self._before, self._needed = skip + 1, skip + 1 + steps
        self._done = 0
        self._profiler: Any = None
        if enabled:
            self._profiler = profile(
                activities=[ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available(),
                schedule=schedule(wait=skip, warmup=1, active=steps, repeat=1),
                on_trace_ready=self._write,
            )

    def __enter__(self) -> "StepProfiler":
        if self._profiler:
            self._profiler.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._profiler:
            self._stop()
            if kind is None and not self._trace.exists():
                self._logger.warning("--profile: the run ended before the trace; it needs %d steps.", self._needed)

    def step(self) -> None:
        """A training step has ended."""
        if self._profiler:
            self._done += 1
            self._profiler.step()
            if self._done == self._needed:
                self._stop()

    def _stop(self) -> None:
        self._profiler.stop()
        self._profiler = None

    def _write(self, recorded: profile) -> None:
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._trace))
        on_gpu = torch.cuda.is_available()
        steps = max(self._done - self._before, 1)  # fewer of a run that ends while it is recorded
        kernels = kernel_table(kernels_of(recorded.events() or (), on_gpu), steps, self._floor)
        self._kernels.write_text(kernels.text(), encoding="utf-8")
        self._logger.info("kernels     %s (%s)", kernels.short(), self._kernels)
        by = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=60)
        self._logger.info("trace written to %s\n%s", self._trace, table)
