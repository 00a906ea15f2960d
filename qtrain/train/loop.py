"""The training loop of all scripts: steps, evaluations, checkpoints and stop signals."""

import contextlib
import logging
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from qtrain.comm.ranks import all_gather, from_rank_0, note_step, rank
from qtrain.comm.wire import sent
from qtrain.core.config import as_dict
from qtrain.core.errors import TrainingStopped, first_line
from qtrain.core.gpu_sensors import GpuSensors
from qtrain.core.hardware import keep_freed_memory
from qtrain.core.process import STARTED, peak_resident_bytes
from qtrain.data.batch import TensorBatch
from qtrain.data.stream import SKIPPED
from qtrain.optim import LRSchedule
from qtrain.parallel.sharding.data_parallel import Gradients
from qtrain.parallel.sharding.shards import local_tensors
from qtrain.quant.scheme_map import spec_text
from qtrain.train.health.monitor import HealthMonitor
from qtrain.train.log.device_metrics import device_metrics, joules_of_all
from qtrain.train.log.failures import first_nonfinite_tensor, is_out_of_memory, nonfinite
from qtrain.train.log.metrics import MetricsLog, Throughput, read_metrics
from qtrain.train.log.profile import StepProfiler
from qtrain.train.log.report.write import try_write_report
from qtrain.train.log.start_clock import StartClock, seconds_since_start
from qtrain.train.log.status import StatusLine
from qtrain.train.log.trackers import Trackers, open_trackers
from qtrain.train.plan.linears import describe_low_bits
from qtrain.train.plan.out_of_memory import out_of_memory
from qtrain.train.plan.phases import phase_at
from qtrain.train.plan.plan import Plan
from qtrain.train.settings.settings import TrainSettings
from qtrain.train.signals import TIME_UP, StopSignals
from qtrain.train.spikes import (
    MAX_REWINDS,
    MAX_SKIPS_IN_ROW,
    WINDOW,
    Spike,
    SpikeGuard,
    drop_gradients,
    newest_checkpoint,
    stopped,
)
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import resume_command
from qtrain.train.step.cuda_graphs import WARM_UP, StepGraphs
from qtrain.train.step.forward import Forward
from qtrain.train.step.in_backward import OptimizerInBackward
from qtrain.train.step.step import (
    ExpertBalance,
    TeacherLoss,
    apply_gradients,
    compute_gradients,
    eval_weights,
    set_lr,
)

log = logging.getLogger("qtrain")

T = TypeVar("T")

SAVE_ENDED = 1000
"""Sentinel above all signal numbers: in a step's all-reduce of stop signals it says that a checkpoint written in the
background is on disk, or could not be written. All ranks then finish it after the same step."""

Evaluation = Callable[[], dict[str, Any]]
"""Evaluates the model in its current state. Returns metrics by name, `eval_loss` among them if there is one."""


class Training:
    """A run with its data, evaluation, metrics and trackers; `fit` trains it, once."""

    def __init__(
        self,
        run: Run,
        plan: Plan,
        schedule: LRSchedule,
        forward: Forward,
        batches: Iterator[tuple[TensorBatch, dict]],
        evaluation: Evaluation,
        graphs: StepGraphs | None,
        start: StartClock,
    ):
        self.graphs, self.start = graphs, start
        self.run, self.plan, self.schedule = run, plan, schedule
        self.forward, self.batches, self.evaluation = forward, batches, evaluation
        settings, state = run.settings, run.state
        if run.device.type == "cpu":
            keep_freed_memory()
        self.balance = ExpertBalance(run.model, run.parallel.mesh, getattr(settings, "router_bias_rate", 0.0))
        self.teacher_loss = TeacherLoss(run.model, run.parallel.mesh)
        self.in_backward: OptimizerInBackward | None = None
        if settings.optimizer_in_backward:
            assert graphs is None, "hooks do not run in the replay of a captured backward pass"
            self.in_backward = OptimizerInBackward(run.optimizer, run.parallel)
        self.first_step = state.step
        resumed = run.folder.resumed_from is not None
        # Only rank 0 has a log to truncate: the others' is the null device.
        self.metrics = MetricsLog(self._metrics_path, state.step if resumed and rank() == 0 else None)
        self.spikes = SpikeGuard(settings, self._past_records() if settings.on_spike != "off" else ())
        self._rewound = False
        # A stop signal skips an evaluation that is due: the resumed run makes up for it.
        self._evaluated = from_rank_0(
            lambda: any(r["step"] == state.step and "loss" not in r for r in read_metrics(self.metrics.path))
        )
        self.health = HealthMonitor(run, forward, self._health_path, state.step if resumed else None)
        self.trackers = self._open_trackers()
        # Steps that compile, autotune and capture graphs do not count into the speed.
        self.sensors = GpuSensors(run.device)
        self._skip_steps = 2 if graphs is None else WARM_UP + 2
        self.throughput = Throughput(run.device, self._skip_steps, self.sensors.joules)
        self._save_ended = False
        # Where one scheme is for all linears, the map is no news.
        self._told = run.quantized.assignments - bool(settings.quantize_overrides)

    @property
    def _metrics_path(self) -> Path:
        """Rank 0 writes the metrics of all."""
        return self.run.folder.path / "metrics.jsonl" if rank() == 0 else Path(os.devnull)

    def _past_records(self) -> list[dict[str, Any]]:
        """Of the last steps of a resumed run, which later ones are compared with: the same on all ranks."""
        return from_rank_0(lambda: read_metrics(self.metrics.path)[-2 * WINDOW :])

    @property
    def _health_path(self) -> Path:
        return self.run.folder.path / "health.jsonl"

    def _open_trackers(self) -> Trackers:
        run, settings = self.run, self.run.settings
        config, where, names = as_dict(settings), run.folder.path, settings.trackers if rank() == 0 else ()
        return open_trackers(names, config, where, settings.project, settings.run_name, run.state.step)

    def fit(self) -> int | None:
        """Train to the last step, or to where --early_stopping ends the run. Returns None; or the exit code, where a
        signal or --max_hours stopped it earlier. Raises TrainingStopped if training fails."""
        run, settings = self.run, self.run.settings
        note_step(run.state.step)
        try:
            with contextlib.ExitStack() as stack:
                step, checkpoint = lambda: run.state.step + 1, lambda: run.checkpoints.latest()
                stack.enter_context(explain_out_of_memory(self.plan, settings, run.device, step, checkpoint))
                deadline = STARTED + 3600 * (math.inf if settings.max_hours is None else settings.max_hours)
                stop = StopSignals(collective=run.parallel.mesh.world > 1, deadline=deadline)
                stack.enter_context(stop)
                status = stack.enter_context(StatusLine(settings.steps, log, unit=self.plan.unit.per_second))
                profiler = stack.enter_context(self._profiler())
                self.start.mark("run folder")
                # Before the first step, or the evaluation that a stop signal has skipped.
                if self._evaluation_due() and not self._evaluated:
                    self._evaluate()
                    if run.state.step and (settings.keep_best or settings.early_stopping):
                        self._save(wait=True)  # the checkpoint that it resumes from does not count this evaluation
                self.start.mark("evaluation")
                sent.clear()  # the build and the evaluation are no part of a step
                while not self._ended and not stop.requested:
                    self._step(status, stop)
                    profiler.step()
                    if not self._rewound and (not stop.requested or self._ended):
                        self._between_steps()
                if not self._ended:
                    self._save(wait=True)
                self._recover_folder()
        finally:
            if self.graphs is not None:
                self.graphs.release()
            # Also when training fails: a checkpoint that is under way is still worth its disk space.
            self._settle_save()
            self.metrics.close()
            self.health.close()
            self.trackers.close()
        log.info("%s", describe_low_bits(run.quantized.choices, self.plan.linear_rows))
        if self._ended:
            return None
        if not settings.keep_ckpts:
            log.warning("stopped at step %d; nothing is saved (--keep_ckpts 0)", run.state.step)
        else:
            why = f" after --max_hours {settings.max_hours:g}" if stop.requested == TIME_UP else ""
            command = resume_command(run.folder, run.script)
            log.info("stopped at step %d%s; resume with:\n  %s", run.state.step, why, command)
        return stop.exit_code

    def _profiler(self) -> StepProfiler:
        per_device = self.plan.tokens_per_step / self.plan.geometry.devices
        floor = {kind: 1000 * per_device * seconds for kind, seconds in self.plan.seconds.items()}
        path, enabled = self.run.folder.path, self.run.settings.profile
        return StepProfiler(path, log, enabled=enabled, rank=rank(), floor=floor)

    def record_final(self, evaluation: Evaluation) -> None:
        """After `fit`: evaluate the trained weights once more, and record the results."""
        run = self.run
        with eval_weights(run.optimizer, run.quantized, run.ema, run.parallel):
            found = evaluation()
        self.record_results(found)

    def record_results(self, results: Mapping[str, float]) -> None:
        """After `fit`: add results of the finished model to the log, metrics.jsonl, the trackers and the report."""
        self.metrics, self.trackers = MetricsLog(self._metrics_path), self._open_trackers()
        try:
            self._record({"step": self.run.state.step, **results})
        finally:
            self.metrics.close()
            self.trackers.close()
        for name, value in results.items():
            log.info("%s %.4f", name, value)
        if rank() == 0:
            try_write_report(self.run.folder.path, quiet=True)

    def _step(self, status: StatusLine, stop: StopSignals) -> None:
        run, settings, state = self.run, self.run.settings, self.run.state
        self._enter_phase()
        batches, positions = zip(*self._next_batches(), strict=True)
        self.health.before_step(batches, state.step + 1)
        lr = settings.lr * self.schedule.factor(state.step, settings.steps)
        # The backward pass below updates the weights itself.
        if self.in_backward is not None:
            set_lr(run.optimizer, lr)
        self.throughput.clock.begin()
        self.teacher_loss.begin_step()  # after the health sample, which the teacher sees too
        gradients = compute_gradients(
            run.model,
            self.forward,
            run.quantized,
            list(batches),
            state.step,
            self.graphs,
            self.in_backward,
            parallel=run.parallel,
            stop_signal=SAVE_ENDED if run.background.ended else stop.number,
            clock=self.throughput.clock,
        )
        # Agreed on by all ranks in this step's reduction: whoever saw it first, all act after the same step.
        self._save_ended = gradients.stop_signal == SAVE_ENDED
        if not self._save_ended:
            stop.agree(gradients.stop_signal)
        # Before the update, so that no weight has seen it; in backward it is too late, which the message says.
        spike = self.spikes.check(state.step + 1, gradients)
        if spike is None and not gradients.finite:
            raise self._nonfinite(gradients)
        self._rewound = spike is not None and self._answer(spike, gradients, positions[-1])
        if self._rewound:
            return
        if spike is None:
            apply_gradients(
                run.optimizer,
                run.quantized,
                gradients,
                lr=lr,
                clip_grad_norm=settings.clip_grad_norm,
                graphs=self.graphs,
                in_backward=self.in_backward,
                parallel=run.parallel,
            )
        self.throughput.clock.mark("optimizer")
        self.balance.end_step()
        state.step += 1
        note_step(state.step)
        state.tokens += gradients.tokens
        # Where the stream stands after this step: a resumed run begins there.
        state.data = positions[-1]
        if run.ema is not None and spike is None:
            run.ema.update(state.step)
        self.throughput.step(gradients.tokens)
        self._tell_start()
        if state.step == self.first_step + 1 and sent:
            log.info("wire    %s", self._wire_line())
        if spike is not None or state.step % settings.log_interval == 0 or state.step == settings.n_steps:
            self._log_step(status, gradients, lr)

    def _enter_phase(self) -> None:
        """Change to the schemes that --quantize_schedule has from the next step on."""
        run, phases = self.run, self.plan.phases
        if not phases or (number := phase_at(phases, run.state.step)) == run.state.phase:
            return
        run.parallel.reassign(run.model, phases[number].schemes)
        run.state.phase = number
        # The first steps in other schemes compile and are recorded anew.
        self.throughput.skip(self._skip_steps)

    def _answer(self, spike: Spike, gradients: Gradients, position: dict[str, Any]) -> bool:
        """What --on_spike does before the update. position: in the data, after the batch. Returns whether the run has
        returned to a checkpoint; else the batch is skipped. Raises TrainingStopped."""
        run, guard, updated = self.run, self.spikes, self.in_backward is not None
        step = run.state.step + 1
        self.balance.discard_step()
        if guard.action == "rewind":
            self._finish_save()
            if path := newest_checkpoint(run):
                run.state.data = position
                with self.throughput.pause():
                    line = guard.rewind(run, spike, path)
                if line is None:
                    why = f"{MAX_REWINDS} returns to that checkpoint have not helped"
                    raise stopped(step, spike, path, why=why, updated=updated)
                log.warning("%s", line)
                self._log_again()
                return True
            if updated:
                raise stopped(step, spike, None, updated=True)
        if guard.action != "stop" and (line := guard.skip(run, spike)):
            log.warning("%s", line)
            return False
        if not gradients.finite:
            raise self._nonfinite(gradients)
        if not updated:
            drop_gradients(run)
            self._save(wait=True)
        why = "" if guard.action == "stop" else f"{MAX_SKIPS_IN_ROW} batches in a row have been skipped"
        raise stopped(step, spike, newest_checkpoint(run), why=why, updated=updated)

    def _log_again(self) -> None:
        """After a return to a checkpoint: the steps that follow are logged in place of those that had been."""
        self.metrics.close()
        self.metrics = MetricsLog(self._metrics_path, self.run.state.step if rank() == 0 else None)
        self.trackers.close()
        self.trackers = self._open_trackers()
        self.health.close()
        self.health = HealthMonitor(self.run, self.forward, self._health_path, self.run.state.step)
        note_step(self.run.state.step)

    def _tell_start(self) -> None:
        """After the first step: where the time until then went. After the last one that compiles or records: when."""
        done = self.run.state.step - self.first_step
        if done == 1 and self.start.end():
            log.info("start   %s", self.start.describe())
        elif done == self._skip_steps and self.run.settings.compile:
            log.info("start   full speed after %.1f s, %d steps", seconds_since_start(), done)

    @staticmethod
    def _wire_line() -> str:
        """What this process has sent in the first step."""
        return "a step sends " + ", ".join(f"{n / 2**20:,.2f} MiB of {kind}" for kind, n in sent.items()) + " a process"

    def _next_batches(self) -> list[tuple[TensorBatch, dict]]:
        try:
            with self.throughput.waiting():
                return [next(self.batches) for _ in range(self.plan.geometry.gradient_accumulation)]
        except Exception:
            # A file that cannot be read must not lose the steps since the last checkpoint. With several ranks, those
            # whose data were readable would not take part in saving.
            if self.run.state.step > self.first_step and self.plan.geometry.devices == 1:
                self._save(wait=True)
            raise

    def _log_step(self, status: StatusLine, gradients: Gradients, lr: float) -> None:
        # Before the device is waited for: it still runs the update.
        gpu = self.sensors.read()
        state, rate, memory = self.run.state, self.throughput.read(), peak_memory(self.run.device)
        record = {
            "step": state.step,
            "loss": gradients.loss,
            "grad_norm": gradients.norm_value,
            "lr": lr,
            **self.teacher_loss.metrics(),
            **self.balance.metrics(),
            **self._changed_map(),
            **self.start.metrics(),
            **self.spikes.record(),
            self.plan.unit.many: state.tokens,
            "data": state.data,
            "mem": memory,
            "time": round(time.time(), 3),
        }
        unit = self.plan.unit
        speed: dict[str, float | None] = {unit.rate: None, "sol": None, "mfu": None, "data_wait": None}
        if rate is not None:
            reached = self.plan.at(state.phase).efficiency(rate.tok_s)
            speed = {unit.rate: rate.tok_s, **reached, "data_wait": rate.data_wait}
            if self.run.device.type == "cuda" and self.run.parallel.mesh.world > 1:
                rate = replace(rate, joules_token=joules_of_all(rate.joules_token, self.run.device))
        device = device_metrics(self.sensors, gpu, rate, unit)
        self._record(record | speed | device)
        status.update(
            state.step,
            loss=gradients.loss,
            grad_norm=gradients.norm_value,
            tok_s=speed[unit.rate],
            sol=speed["sol"],
            memory=memory,
            power=device.get("gpu", {}).get("power"),
            step_s=rate.step_s if rate else None,
        )

    def _changed_map(self) -> dict[str, Any]:
        """How many linears run in which scheme: at first, and whenever some have been reassigned."""
        quantized = self.run.quantized
        if self._told == quantized.assignments:
            return {}
        self._told = quantized.assignments
        return {"schemes": dict(Counter(map(spec_text, quantized.schemes.values())))}

    def _between_steps(self) -> None:
        """Evaluate and save if due. Metrics of a step are written before its checkpoint."""
        if self.run.parallel.mesh.world == 1:  # with several ranks, at the next save: they must agree
            self._recover_folder()
        settings, step = self.run.settings, self.run.state.step
        if self._save_ended:
            self._finish_save()
        if self._evaluation_due():
            self._evaluate()
        best = settings.keep_best and self.run.state.best_step == step
        if self._ended or best or (settings.ckpt_interval and step % settings.ckpt_interval == 0):
            self._save(wait=self._ended)

    @property
    def _ended(self) -> bool:
        """Whether no step is left: the last one is done, or --early_stopping ends the run."""
        state, patience = self.run.state, self.run.settings.early_stopping
        return state.step == self.run.settings.n_steps or bool(patience and state.evals_since_best >= patience)

    def _evaluation_due(self) -> bool:
        step, interval = self.run.state.step, self.run.settings.eval_interval
        return step in (0, self.run.settings.n_steps) or bool(interval and step % interval == 0)

    def _save(self, *, wait: bool) -> None:
        """Save a checkpoint. Without `wait`, and with --async_checkpoint, training goes on while it is written."""
        self._finish_save()
        if not self.run.settings.keep_ckpts or self._recover_folder():
            return
        with self.throughput.pause():
            if self.run.settings.async_checkpoint and not wait:
                self.run.begin_save()
                return
            path = self._unless_gone(self.run.save)
        if path is not None:
            log.info("step %d: checkpoint %s", self.run.state.step, path)

    def _finish_save(self) -> None:
        """Wait for the checkpoint that is being written, if there is one, and log it."""
        if not self.run.background.under_way:
            return
        with self.throughput.pause():
            written = self._unless_gone(self.run.background.finish)
        if written is not None:
            log.info("%s", written.describe(self.run.state.step))

    def _unless_gone(self, write: Callable[[], T]) -> T | None:
        """What `write` returns; None where it fails as the run folder is gone, and the run goes on in a new one."""
        try:
            return write()
        except TrainingStopped:
            if not self._recover_folder():
                raise
            return None

    def _settle_save(self) -> None:
        """As training fails: wait for the checkpoint that is being written. A failure of it is no more than a line."""
        if self.run.background.under_way:
            try:
                log.info("%s", self.run.background.finish().describe(self.run.state.step))
            except Exception as error:
                log.warning("%s", first_line(error))

    def _recover_folder(self) -> bool:
        """If the run folder is gone, continue in a new one, with the metrics so far and a checkpoint; else False."""
        if not self.run.recover_folder():
            return False
        if self.run.background.under_way:  # to the folder that is gone
            with contextlib.suppress(TrainingStopped):
                self.run.background.finish()
        if rank() == 0:
            # The lines so far are still readable through the open file.
            self.metrics.move(self._metrics_path)
            self.health.move(self._health_path)
        self.trackers.close()
        self.trackers = self._open_trackers()
        self._save(wait=True)
        return True

    def _evaluate(self) -> None:
        run, state = self.run, self.run.state
        # The weights that are exported: averages, where the optimizer or --ema_decay keeps them.
        with self.throughput.pause(), eval_weights(run.optimizer, run.quantized, run.ema, run.parallel):
            found = self.evaluation()
        if not found:
            return
        self._compare(found.get("eval_loss"))
        self._record({"step": state.step, self.plan.unit.many: state.tokens, **found})
        shown = {key: value for key, value in found.items() if isinstance(value, float)}
        if shown:
            log.info("step %d: %s", state.step, ", ".join(f"{key} {value:.4f}" for key, value in shown.items()))
        for prompt, continuation in found.get("samples", ()):
            log.info("step %d: sample: %s [>] %s", state.step, prompt, continuation)
        if self._ended and state.step < run.settings.steps:
            since = f"{state.evals_since_best} evaluations without a lower loss than {state.best_eval_loss:.4f}"
            log.info("step %d: --early_stopping: %s, of step %d", state.step, since, state.best_step)

    def _compare(self, loss: float | None) -> None:
        """Compare an evaluation's loss with the lowest so far: in the state, so that a resumed run goes on."""
        state, settings = self.run.state, self.run.settings
        if settings.keep_best or settings.early_stopping:  # on GPUs of several kinds a rank's last bits may differ
            loss = from_rank_0(lambda: loss)
        if loss is None:
            return
        if state.best_eval_loss is None or loss < state.best_eval_loss:
            state.best_eval_loss, state.best_step, state.evals_since_best = loss, state.step, 0
        else:
            state.evals_since_best += 1

    def _record(self, record: dict[str, Any]) -> None:
        self.metrics.write(record)
        self.trackers.log(record, record["step"])

    def _nonfinite(self, gradients: Gradients) -> TrainingStopped:
        what, value = ("gradient norm", gradients.norm_value)
        if not math.isfinite(gradients.loss):
            what, value = "loss", gradients.loss
        updated = self.in_backward is not None
        tensor = self._first_nonfinite() if self.in_backward is None else self.in_backward.first_nonfinite()
        self._settle_save()
        step, last_good = self.run.state.step + 1, self.run.checkpoints.latest()
        return nonfinite(step, what, value, tensor, last_good, updated=updated)

    def _first_nonfinite(self) -> str | None:
        """The first non-finite tensor of any rank."""
        run = self.run
        names = ((name, run.parallel.master(p)) for name, p in run.model.named_parameters() if not p.requires_grad)
        frozen = ((name, tensor) for name, master in names for tensor in local_tensors(master))
        masters = ((sharded.name, sharded.master) for sharded in run.parallel.parameters)
        found = all_gather(first_nonfinite_tensor([*frozen, *masters]))
        return next((tensor for tensor in found if tensor), None)


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


@contextlib.contextmanager
def explain_out_of_memory(
    plan: Plan,
    settings: TrainSettings,
    device: torch.device,
    step: Callable[[], int] = lambda: 0,
    checkpoint: Callable[[], Path | None] = lambda: None,
) -> Iterator[None]:
    """Turn an out-of-memory error inside into TrainingStopped: the plan, the peak, and which flags to change.

    step: the step that is running. checkpoint: the newest, from which --fit auto goes on."""
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(step(), plan, settings, peak_memory(device), checkpoint()) from None


def peak_memory(device: torch.device) -> int:
    """Peak bytes of this process so far: allocated tensors on a GPU, resident memory on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return peak_resident_bytes()
