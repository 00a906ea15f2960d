"""The training loop of all scripts: steps, evaluations, checkpoints and stop signals."""

import contextlib
import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from qtrain.comm.ranks import all_gather, from_rank_0, note_step, rank
from qtrain.comm.wire import sent
from qtrain.core.errors import TrainingStopped
from qtrain.core.hardware.memory import keep_freed_memory
from qtrain.core.process import STARTED
from qtrain.data.batch import TensorBatch
from qtrain.optim import LRSchedule
from qtrain.parallel.sharding.data_parallel import Gradients
from qtrain.parallel.sharding.shards import local_tensors
from qtrain.train.health.monitor import HealthMonitor
from qtrain.train.log.failures import first_nonfinite_tensor, nonfinite
from qtrain.train.log.profile import StepProfiler
from qtrain.train.log.start_clock import StartClock
from qtrain.train.log.status import StatusLine
from qtrain.train.plan.linears import describe_low_bits
from qtrain.train.plan.out_of_memory import explain_out_of_memory
from qtrain.train.plan.phases import phase_at
from qtrain.train.plan.plan import Plan
from qtrain.train.records import Records
from qtrain.train.saves import Saves
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
    updates_unread,
)

log = logging.getLogger("qtrain")

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
        resumed = run.folder.resumed_from is not None
        self.records = Records(run, plan, start, unmeasured=2 if graphs is None else WARM_UP + 2)
        self.saves = Saves(run, self.records.throughput, self._move)
        self.spikes = SpikeGuard(settings, self.records.past(2 * WINDOW) if settings.on_spike != "off" else ())
        self._rewound = False
        # A stop signal skips an evaluation that is due: the resumed run makes up for it.
        self._evaluated = self.records.has_evaluation()
        self.health = HealthMonitor(run, forward, self._health_path, state.step if resumed else None)
        self._save_ended = False

    @property
    def _health_path(self) -> Path:
        return self.run.folder.path / "health.jsonl"

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
                        self.saves.save(wait=True)  # the checkpoint that it resumes from does not count this evaluation
                self.start.mark("evaluation")
                sent.clear()  # the build and the evaluation are no part of a step
                while not self._ended and not stop.requested:
                    self._step(status, stop)
                    profiler.step()
                    if not self._rewound and (not stop.requested or self._ended):
                        self._between_steps()
                if not self._ended:
                    self.saves.save(wait=True)
                self.saves.recover_folder()
        finally:
            if self.graphs is not None:
                self.graphs.release()
            # Also when training fails: a checkpoint that is under way is still worth its disk space.
            self.saves.settle()
            self.records.close()
            self.health.close()
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
        floor |= {kind: 1000 * seconds for kind, seconds in self.plan.memory_seconds.items()}
        path, enabled = self.run.folder.path, self.run.settings.profile
        return StepProfiler(path, log, enabled=enabled, rank=rank(), floor=floor)

    def record_final(self, evaluation: Evaluation) -> None:
        """After `fit`: evaluate the trained weights once more, and record the results."""
        run = self.run
        with eval_weights(run.optimizer, run.quantized, run.ema, run.parallel):
            found = evaluation()
        self.records.add_results(found)

    def _step(self, status: StatusLine, stop: StopSignals) -> None:
        run, settings, state = self.run, self.run.settings, self.run.state
        self._enter_phase()
        batches, positions = zip(*self._next_batches(), strict=True)
        self.health.before_step(batches, state.step + 1)
        lr = settings.lr * self.schedule.factor(state.step, settings.steps)
        # The backward pass below updates the weights itself.
        if self.in_backward is not None:
            set_lr(run.optimizer, lr)
        self.records.throughput.clock.begin()
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
            clock=self.records.throughput.clock,
            optimizer=run.optimizer,
        )
        # Before the update, so that no weight has seen it; in backward it is too late, which the message says.
        spike = self.spikes.check(state.step + 1, gradients)
        logged = spike is not None or self._logs(state.step + 1)
        more: list[Callable[[], dict[str, float]]] = []
        if spike is None and (updates_unread(run.optimizer, self.in_backward) or gradients.finite):
            self.balance.end_step()
            if logged:  # sent before the update, behind which they would wait
                more = [self.teacher_loss.metrics(), self.balance.metrics()]
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
        # Agreed on by all ranks in this step's reduction: whoever saw it first, all act after the same step.
        self._save_ended = gradients.stop_signal == SAVE_ENDED
        if not self._save_ended:
            stop.agree(gradients.stop_signal)
        if spike is None and not gradients.finite:
            raise self._nonfinite(gradients)
        self._rewound = spike is not None and self._answer(spike, gradients, positions[-1])
        if self._rewound:
            return
        if spike is not None:
            more = [self.teacher_loss.metrics(), self.balance.metrics()]
        self.records.throughput.clock.mark("optimizer")
        state.step += 1
        note_step(state.step)
        state.tokens += gradients.tokens
        # Where the stream stands after this step: a resumed run begins there.
        state.data = positions[-1]
        if run.ema is not None and spike is None:
            run.ema.update(state.step)
        self.records.throughput.step(gradients.tokens)
        self.records.tell_start()
        if logged:
            found = {key: value for read in more for key, value in read().items()}
            self.records.step(status, gradients, lr, found | self.spikes.record())

    def _logs(self, step: int) -> bool:
        """Whether metrics are recorded after this step."""
        settings = self.run.settings
        return step % settings.log_interval == 0 or step == settings.n_steps

    def _enter_phase(self) -> None:
        """Change to the schemes that --quantize_schedule has from the next step on."""
        run, phases = self.run, self.plan.phases
        if not phases or (number := phase_at(phases, run.state.step)) == run.state.phase:
            return
        run.parallel.reassign(run.model, phases[number].schemes)
        run.state.phase = number
        self.records.schemes_changed()

    def _answer(self, spike: Spike, gradients: Gradients, position: dict[str, Any]) -> bool:
        """What --on_spike does before the update. position: in the data, after the batch. Returns whether the run has
        returned to a checkpoint; else the batch is skipped. Raises TrainingStopped."""
        run, guard, updated = self.run, self.spikes, self.in_backward is not None
        step = run.state.step + 1
        self.balance.discard_step()
        if guard.action == "rewind":
            self.saves.finish()
            if path := newest_checkpoint(run):
                run.state.data = position
                with self.records.throughput.pause():
                    line = guard.rewind(run, spike, path)
                if line is None:
                    why = f"{MAX_REWINDS} returns to that checkpoint have not helped"
                    raise stopped(step, spike, path, why=why, updated=updated)
                log.warning("%s", line)
                self._return_to_step()
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
            self.saves.save(wait=True)
        why = "" if guard.action == "stop" else f"{MAX_SKIPS_IN_ROW} batches in a row have been skipped"
        raise stopped(step, spike, newest_checkpoint(run), why=why, updated=updated)

    def _return_to_step(self) -> None:
        """After a return to a checkpoint: the steps that follow are logged in place of those that had been."""
        self.records.return_to_step()
        self.health.close()
        self.health = HealthMonitor(self.run, self.forward, self._health_path, self.run.state.step)
        note_step(self.run.state.step)

    def _move(self) -> None:
        """The run continues in another folder."""
        self.records.move()
        if rank() == 0:
            self.health.move(self._health_path)

    def _next_batches(self) -> list[tuple[TensorBatch, dict]]:
        try:
            with self.records.throughput.waiting():
                return [next(self.batches) for _ in range(self.plan.geometry.gradient_accumulation)]
        except Exception:
            # A file that cannot be read must not lose the steps since the last checkpoint. With several ranks, those
            # whose data were readable would not take part in saving.
            if self.run.state.step > self.records.first_step and self.plan.geometry.devices == 1:
                self.saves.save(wait=True)
            raise

    def _between_steps(self) -> None:
        """Evaluate and save if due. Metrics of a step are written before its checkpoint."""
        if self.run.parallel.mesh.world == 1:  # with several ranks, at the next save: they must agree
            self.saves.recover_folder()
        settings, step = self.run.settings, self.run.state.step
        if self._save_ended:
            self.saves.finish()
        if self._evaluation_due():
            self._evaluate()
        best = settings.keep_best and self.run.state.best_step == step
        if self._ended or best or (settings.ckpt_interval and step % settings.ckpt_interval == 0):
            self.saves.save(wait=self._ended)

    @property
    def _ended(self) -> bool:
        """Whether no step is left: the last one is done, or --early_stopping ends the run."""
        state, patience = self.run.state, self.run.settings.early_stopping
        return state.step == self.run.settings.n_steps or bool(patience and state.evals_since_best >= patience)

    def _evaluation_due(self) -> bool:
        step, interval = self.run.state.step, self.run.settings.eval_interval
        return step in (0, self.run.settings.n_steps) or bool(interval and step % interval == 0)

    def _evaluate(self) -> None:
        run, state = self.run, self.run.state
        # The weights that are exported: averages, where the optimizer or --ema_decay keeps them.
        with self.records.throughput.pause(), eval_weights(run.optimizer, run.quantized, run.ema, run.parallel):
            found = self.evaluation() if self.graphs is None else self.graphs.make_room_for(self.evaluation)
        if not found:
            return
        self._compare(found.get("eval_loss"))
        self.records.write({"step": state.step, self.plan.unit.many: state.tokens, **found})
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

    def _nonfinite(self, gradients: Gradients) -> TrainingStopped:
        what, value = ("gradient norm", gradients.norm)
        if not math.isfinite(gradients.loss):
            what, value = "loss", gradients.loss
        updated = self.in_backward is not None
        tensor = self._first_nonfinite() if self.in_backward is None else self.in_backward.first_nonfinite()
        self.saves.settle()
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
