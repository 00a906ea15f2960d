"""Health of a run: takes samples, writes RUN/health.jsonl, warns once of each fault, and moves linears if asked to.

A fault counts from the second sample in a row on (under delayed scaling the fourth): by then other schemes have been
compared on the linear, so that the warning can name one. One that ruins a product counts at once, after a second look
at the same sample with the comparison: every step until the next sample would be harmed. With a fallback a linear then
moves, and one that is at fault in the scheme that it was moved to goes on in bf16; collapsed routers get a
load-balancing loss. What has been warned of, for how many samples a linear has been at fault, and what was done, is
read from the lines of health.jsonl when a run resumes: there is no other state. Rank 0 decides, and samples alone where
no other rank is needed for it (`ranks.py`); who runs in which scheme is agreed on by all ranks and part of every
checkpoint.
"""

import gc
import logging
import math
import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qtrain.comm.ranks import from_rank_0, rank
from qtrain.core.errors import TrainingStopped
from qtrain.core.maybe_none import MaybeNone
from qtrain.data.batch import TensorBatch
from qtrain.quant.scheme_map import Spec, scheme_of
from qtrain.train.health.judged import BALANCE, Judged, judge_linear, judge_router
from qtrain.train.health.ranks import SampleFailed, SampleRanks, why_failed
from qtrain.train.health.sample import Row, Sampler
from qtrain.train.log.failures import is_out_of_memory
from qtrain.train.log.metrics import MetricsLog, read_metrics
from qtrain.train.state.run import Run
from qtrain.train.step.forward import Forward

log = logging.getLogger("qtrain")

SAID = 8
"""Warnings of one sample in the log; health.jsonl has all."""
INTERVAL, SHARE = 200, 0.01
"""Steps between samples, or a multiple that keeps them below this share of the time, where --health names none."""


@dataclass
class _Fault:
    """A linear or a router that is at fault."""

    since: int
    samples: int = 0


class HealthMonitor:
    """The health of a run. path: of health.jsonl; resumed_step: lines of later steps are removed; None: a new run."""

    def __init__(self, run: Run, forward: Forward, path: Path, resumed_step: int | None = None):
        self._run, self._quantized, self._path = run, run.quantized, path
        given, self._fallback = run.settings.health, run.settings.health_fallback
        self._interval = INTERVAL if given is None else given
        # With a fallback all ranks meet at each sample: the interval is fixed.
        self._stretches = given is None and not self._fallback
        self._steps: deque[float] = deque(maxlen=32)
        """Seconds of the latest steps without a sample."""
        self._before: float | None = None
        self._first = True
        """Whether this process has taken no sample yet."""
        self._ranks = SampleRanks(run.model, run.quantized, run.parallel)
        self._sampler: Sampler | MaybeNone = Sampler(run.model, run.quantized, forward, self._ranks)
        self._faults: dict[str, _Fault] = {}
        self._warned: set[tuple[str, str]] = set()
        """(linear or router, cause)"""
        self._moved: dict[str, str] = {}
        """Linears, and the scheme that each was moved to."""
        self._routers = bool(self._sampler.routers)
        self._balance = 0.0
        """Weight of the load-balancing loss because of collapsed routers; of rank 0."""
        self._log: MetricsLog | None = None
        if not self._sampler.has_work:
            self._interval = 0
        if self._interval and (count := sum(bool(c.kernel and c.scheme) for c in self._quantized.choices)):
            log.info("health      samples measure linears, not the %d convolutions in low bits", count)
        # What is sampled after a checkpoint is sampled again.
        if rank() == 0 and resumed_step is not None and path.is_file():
            self._log = MetricsLog(path, resumed_step)
            self._replay(read_metrics(path))
        if self._fallback and self._interval:
            self._agree_on_balance()

    def before_step(self, batches: Sequence[TensorBatch], step: int) -> None:
        """Take a sample if it is due before `step`, whose micro-batches are `batches`; all ranks call it."""
        if not self._interval:
            return
        now, before = time.perf_counter(), self._before
        if before is not None:
            self._steps.append(now - before)
        self._before = now
        # With a fallback before the first update too: a fault that is there from the start must not train.
        if step % self._interval and not (self._fallback and step == 1):
            return
        together = self._ranks.together
        moves = self._sample(batches, step) if self._sampler is not None and (together or rank() == 0) else {}
        if self._fallback:
            if moves := from_rank_0(lambda: moves):
                schemes = {name: scheme_of(spec, "--health_fallback") for name, spec in moves.items()}
                self._run.parallel.reassign(self._run.model, schemes)
            self._agree_on_balance()
        # The first sample compiles its kernels, which no later one does: it does not tell what a sample costs.
        first, self._first = self._first, False
        if self._stretches and not first and self._steps and self._sampler is not None and (together or rank() == 0):
            times = time.perf_counter() - now, statistics.median(self._steps)
            self._stretch(*self._ranks.agree(lambda: times))
        # The time of the sample is no part of the next step's.
        self._before = time.perf_counter()

    def _agree_on_balance(self) -> None:
        """Train all ranks' routers with the load-balancing loss that rank 0 has decided on."""
        if not self._routers or not (weight := from_rank_0(lambda: self._balance)):
            return
        losses: Any = self._run.model.router_losses
        if losses.balance < weight:
            losses.balance = weight
            self._quantized.assignments += 1  # recorded steps have the loss of before

    def _stretch(self, sample: float, step: float) -> None:
        """Have as many steps between samples as keep their time below SHARE. Both in seconds."""
        interval = INTERVAL * max(1, math.ceil(sample / (SHARE * step * INTERVAL)))
        if interval != self._interval:
            log.info("health      a sample takes %.1f steps: the next ones are %d steps apart", sample / step, interval)
            self._interval = interval

    def move(self, path: Path) -> None:
        """Continue in the new file `path`, which begins with the lines so far."""
        self._path = path
        if self._log is not None:
            self._log.move(path)

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    # ---- a sample ----------------------------------------------------------------------------------------------------

    def _sample(self, batches: Sequence[TensorBatch], step: int) -> dict[str, Spec]:
        """Write a sample and warn. Returns the linears to move, with their schemes; rank 0 does."""
        # As the step counts them, if other ranks have as many.
        trained = max(1, sum(batch.n_trained for batch in batches)) * self._run.parallel.mesh.readers
        try:
            number = step // self._interval
            rows = self._sampler.sample(batches[0], trained, number, self._faults.keys())
            judgements = self._judge(rows)
            # No other scheme was compared where nothing was suspected.
            severe = {name for name, judged in judgements.items() if judged.severe and judged.remedy is None}
            if severe := self._ranks.agree(lambda: severe):
                rows = self._sampler.sample(batches[0], trained, number, {*self._faults, *severe})
                judgements = self._judge(rows)
        except Exception as error:  # training goes on without: it needs no sample
            why = str(error) if isinstance(error, SampleFailed) else why_failed(error)
            if self._ranks.together and not isinstance(error, SampleFailed):
                # Other ranks are within the passes: only a process that has ended is missed there.
                if is_out_of_memory(error):
                    raise TrainingStopped(f"step {step}: a health sample {why}; --health 0 takes none.") from None
                raise
            del error  # its frames hold the sample's tensors
            log.warning("health      off from step %d on: a sample %s", step, why)
            self._sampler = None
            gc.collect()
            if self._run.device.type == "cuda":
                # Gives cached blocks back: training may need the memory in other sizes.
                torch.cuda.empty_cache()
            return {}
        return self._report(rows, judgements, step) if rank() == 0 else {}

    def _report(self, rows: Sequence[Row], judgements: dict[str, Judged], step: int) -> dict[str, Spec]:
        if self._log is None:
            self._log = MetricsLog(self._path)
        moves: dict[str, Spec] = {}
        warnings: list[dict[str, Any]] = []
        for row in rows:
            name = row["linear"]
            judged = judgements[name]
            causes = list(judged.causes)
            self._log.write({"step": step, **_compact(row), **({"over": causes} if causes else {})})
            # One good sample ends the row: a fault counts in consecutive samples.
            if not causes:
                self._faults.pop(name, None)
                continue
            fault = self._faults.setdefault(name, _Fault(step))
            fault.samples += 1
            new = [cause for cause in causes if (name, cause) not in self._warned]
            # A delayed scale follows a tensor that grows in so many steps, the first and the present one among them.
            if (fault.samples < judged.samples and not judged.severe) or step - fault.since + 1 < judged.steps:
                continue
            if judged.remedy is not None and self._fallback and (fault.samples >= self._fallback or judged.severe):
                moves[name] = judged.remedy
                text = f"step {step:,}: {judged.text(new or causes, fault.since)}; moved to {judged.remedy}"
                warnings.append({"warning": text, "linear": name, "moved_to": judged.remedy})
            elif judged.balances and self._fallback and fault.samples >= self._fallback and not self._balance:
                text = f"step {step:,}: {judged.text(causes, fault.since)}; --router_balance_loss is now {BALANCE}"
                warnings.append({"warning": text, "linear": name, "causes": causes, "balance_loss": BALANCE})
            elif new:
                text = f"{judged.text(new, fault.since)}; {judged.advice(new)}"
                warnings.append({"warning": text, "linear": name, "causes": new})
        for warning in warnings:
            self._log.write({"step": step, **warning})
            self._remember(warning)
        _say([warning["warning"] for warning in warnings])
        return moves

    def _judge(self, rows: Sequence[Row]) -> dict[str, Judged]:
        """Of each linear and router of a sample."""
        choices = {choice.name: choice for choice in self._quantized.choices}
        linears, routers = self._quantized.by_name(), self._sampler.routers
        model: Any = self._run.model
        balance = model.router_losses.balance if routers else 0.0
        return {
            (name := row["linear"]): judge_router(row, routers[name], balance)
            if "experts" in row
            else judge_linear(row, choices[name], linears[name], self._moved.get(name))
            for row in rows
        }

    # ---- what has been said ------------------------------------------------------------------------------------------

    def _replay(self, lines: Sequence[dict[str, Any]]) -> None:
        """Take up the faults and warnings of an earlier process from its lines."""
        for line in filter(_is_ours, lines):
            if "warning" in line:
                self._remember(line)
            elif line.get("over"):
                self._faults.setdefault(line["linear"], _Fault(line["step"])).samples += 1
            else:
                self._faults.pop(line["linear"], None)

    def _remember(self, warning: dict[str, Any]) -> None:
        name: str = warning["linear"]
        self._warned |= {(name, cause) for cause in warning.get("causes", ())}
        self._balance = warning.get("balance_loss", self._balance)
        if "moved_to" in warning:  # in another scheme, it begins anew
            self._moved[name] = warning["moved_to"]
            self._faults.pop(name, None)
            self._warned = {pair for pair in self._warned if pair[0] != name}


def _is_ours(line: dict[str, Any]) -> bool:
    """Whether a line has what `_report` writes: someone may have edited the file."""
    causes, balance = line.get("causes", []), line.get("balance_loss", 0.0)
    texts = [line.get("linear"), *causes] if isinstance(causes, list) else [None]
    return all(isinstance(text, str) for text in texts) and isinstance(balance, int | float)


def _compact(row: Row) -> Row:
    """A row as the file has it: of other schemes the errors."""
    if "what_if" not in row:
        return row
    errors = {
        scheme: {name: of if name == "products" else of["error"] for name, of in errors.items()}
        for scheme, errors in row["what_if"].items()
    }
    return {**row, "what_if": errors}


def _say(lines: Sequence[str]) -> None:
    for line in lines[:SAID]:
        log.warning("health      %s", line)
    if more := lines[SAID:]:
        log.warning("health      %d more such lines are in health.jsonl", len(more))
