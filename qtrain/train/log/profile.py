"""`--profile`: a trace of a few steps for Perfetto or chrome://tracing, and a table of the slowest operators."""

import logging
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, schedule


class StepProfiler:
    """Records `steps` steps after `skip` steps and one of warm-up; does nothing unless `enabled`.

        with StepProfiler(run_dir, logger, enabled=settings.profile) as profiler:
            for ...:
                train_step()
                profiler.step()

    The trace is written to `<run_dir>/profile/trace_rank<rank>.json.gz`, the table into the log.
    """

    def __init__(
        self, run_dir: Path, logger: logging.Logger, enabled: bool, skip: int = 3, steps: int = 3, rank: int = 0
    ):
        self._logger = logger
        self._trace = Path(run_dir) / "profile" / f"trace_rank{rank}.json.gz"
        # skip: steps that compile; one more warms the profiler up.
        self._remaining = self._needed = skip + 1 + steps if enabled else 0
        self._profiler = None
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
        if self._remaining:
            self._stop()
            if kind is None and not self._trace.exists():
                self._logger.warning("--profile: the run ended before the trace; it needs %d steps.", self._needed)

    def step(self) -> None:
        """A training step has ended."""
        if self._remaining:
            self._profiler.step()
            self._remaining -= 1
            if not self._remaining:
                self._stop()

    def _stop(self) -> None:
        self._remaining = 0
        self._profiler.stop()
        self._profiler = None

    def _write(self, recorded: profile) -> None:
        self._trace.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(self._trace))
        by = "self_device_time_total" if torch.cuda.is_available() else "self_cpu_time_total"
        table = recorded.key_averages().table(sort_by=by, row_limit=20, max_name_column_width=60)
        self._logger.info("trace written to %s\n%s", self._trace, table)
