"""One optimizer step in two halves, gradients and update; and the weights that are evaluated and exported."""

import contextlib
from collections.abc import Callable, Iterator

import torch.distributed as dist
from torch import Tensor, nn

from qtrain.comm.ranks import rank
from qtrain.core.hardware.host_copy import HostCopy
from qtrain.core.maybe_none import MaybeNone
from qtrain.data.batch import Batch
from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.models import Decoder
from qtrain.optim import Optimizer
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.checkpoint_layout import gather_whole_model, holds_exported_part
from qtrain.parallel.sharding.data_parallel import DataParallel, Gradients
from qtrain.quant import LowBitLinear, QuantizedModel
from qtrain.train.log.step_clock import StepClock
from qtrain.train.state.ema import Ema
from qtrain.train.state.run import Run
from qtrain.train.step.cuda_graphs import StepGraphs, forward_backward
from qtrain.train.step.forward import Forward
from qtrain.train.step.in_backward import OptimizerInBackward


def compute_gradients(
    model: nn.Module,
    forward: Forward,
    quantized: QuantizedModel,
    batches: list[Batch],
    step: int,
    graphs: StepGraphs | None = None,
    in_backward: OptimizerInBackward | None = None,
    *,
    parallel: DataParallel | None = None,
    stop_signal: int = 0,
    clock: StepClock | None = None,
    optimizer: Optimizer | None = None,
) -> Gradients:
    """Forward and backward over the micro-batches of one step, launched kernel by kernel or replayed from `graphs`.

    Every micro-batch's loss is divided by the trained tokens of the whole step, so the gradient does not depend on how
    the step is split, nor over how many ranks. With `in_backward` there is one micro-batch, and the weights are updated
    on return. parallel: None: one rank. stop_signal: the number of a signal that this rank has received, 0: none.
    clock: begun; it is given the marks `forward_backward` and, of several ranks, `communication`.
    optimizer: prepares the step that follows, while the device still computes.
    """
    # Codes of the weights are made once per step, after the update: stale ones would train on old weights.
    quantized.assert_fresh()
    parallel = parallel or DataParallel(model, quantized, Mesh())
    parallel.begin_step(step, len(batches))
    # Summed over ranks before the first backward pass: each micro-batch's loss is divided by it.
    trained = parallel.count_trained(sum(batch.n_trained for batch in batches))
    nll = []
    if in_backward is not None:
        in_backward.begin()
    for index, batch in enumerate(batches):
        parallel.begin_micro_batch(index)
        if graphs is None:
            nll.append(forward_backward(forward, batch, trained, parallel))
        else:  # a replay writes its result to the same memory again
            accumulate = index > 0 and parallel.adds_in_backward
            nll.append(graphs.micro_step(batch, trained, accumulate=accumulate).clone())
        if clock is not None and index == len(batches) - 1:
            clock.mark("forward_backward")
        parallel.end_micro_batch(index, recorded=graphs is not None and graphs.replayed)
    if clock is not None and parallel.mesh.dp_size > 1:
        clock.mark("communication")
    squares = in_backward.finish() if in_backward is not None else None
    if optimizer is not None and in_backward is None:
        optimizer.prepare_step()
    return parallel.sums(nll, trained, sum(batch.size for batch in batches), stop_signal, squares)


def apply_gradients(
    optimizer: Optimizer,
    quantized: QuantizedModel,
    gradients: Gradients,
    *,
    lr: float,
    clip_grad_norm: float,
    graphs: StepGraphs | None = None,
    in_backward: OptimizerInBackward | None = None,
    parallel: DataParallel | None = None,
) -> None:
    """Clip (0: do not), update the weights with learning rate `lr`, free the gradients, and refresh all weights' codes.
    With `in_backward` only the refresh is left to do.

    Where the update itself leaves out gradients that are not finite (`updates_unread`), all of this is launched before
    the host has seen that they are; it waits for that at the end. Gradients that are not finite are then kept.
    """
    unread = updates_unread(optimizer, in_backward)
    if in_backward is None:
        _update_weights(optimizer, gradients, lr, clip_grad_norm, unread)
    # A recorded refresh includes what ranks gather for it.
    recorded = graphs.refresh if graphs else None
    if parallel is not None:
        parallel.refresh(recorded)
    else:
        (recorded or quantized.refresh)()
    # The synchronization of a step: the device is at the update meanwhile.
    if unread and gradients.finite:
        optimizer.zero_grad(set_to_none=True)


def updates_unread(optimizer: Optimizer, in_backward: OptimizerInBackward | None) -> bool:
    """Whether the device itself sees to it that a gradient that is not finite reaches no weight."""
    return in_backward is None and optimizer.skips_nan_scale


def _update_weights(optimizer: Optimizer, gradients: Gradients, lr: float, clip_grad_norm: float, unread: bool) -> None:
    if unread:
        optimizer.scale_gradients(gradients.update_scale(clip_grad_norm))
    elif clip_grad_norm and gradients.norm > clip_grad_norm:
        optimizer.clip_gradients(gradients.norm, clip_grad_norm)
    set_lr(optimizer, lr)
    optimizer.step()
    if not unread:
        optimizer.zero_grad(set_to_none=True)


def set_lr(optimizer: Optimizer, lr: float) -> None:
    """Set the learning rate of the next step."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(lr)
        else:
            group["lr"] = lr


@contextlib.contextmanager
def eval_weights(
    optimizer: Optimizer, quantized: QuantizedModel, ema: Ema | None = None, parallel: DataParallel | None = None
) -> Iterator[None]:
    """Inside, the model has the weights that it is evaluated and exported with: those that train, but for schedule-free
    optimizers and with `ema`, which average them. On exit the training weights are back, bit for bit."""
    if ema is None and not optimizer.averages_weights:
        yield
        return
    try:
        with ema.in_place() if ema is not None else _averaged(optimizer, parallel):
            # Not `refresh`: delayed scaling must not count a step.
            quantized.refresh_weights()
            yield
    finally:
        quantized.refresh_weights()


@contextlib.contextmanager
def export_weights(
    run: Run, merge: Callable[[], None] | None = None, *, gathers: bool = True
) -> Iterator[nn.Module | MaybeNone]:
    """Inside, the model has the weights that it is exported with, all of them in full. Yields the model on the rank
    that writes, where ranks have parts of it the whole one, or with gathers=False None; None on the others. merge:
    called on that rank, and on those whose parts it gathers, before it does, to merge adapters."""
    with eval_weights(run.optimizer, run.quantized, run.ema, run.parallel):
        run.parallel.restore_full_weights()
        mesh = run.parallel.mesh
        writes = rank() == 0
        if merge is not None and (writes or holds_exported_part(mesh)):
            merge()
        if mesh.model_group is not None:
            assert isinstance(run.model, Decoder)
            yield gather_whole_model(run.model, mesh) if gathers else None
        else:
            yield run.model if writes else None


@contextlib.contextmanager
def _averaged(optimizer: Optimizer, parallel: DataParallel | None) -> Iterator[None]:
    """Inside, the model has a schedule-free optimizer's average."""
    optimizer.eval()
    if parallel:
        parallel.gather()
    try:
        yield
    finally:
        optimizer.train()
        if parallel:
            parallel.gather()


def share_amax(optimizer: Optimizer, quantized: QuantizedModel, parallel: DataParallel) -> None:
    """From now on tensorwise scales of weights come from the absmax that the optimizer's step leaves, where it can."""

    def record(linear: LowBitLinear) -> WeightAmax | None:
        # That of a rank's rows is of use where ranks reduce it, which they do for codes.
        master = parallel.master(linear.weight)
        return optimizer.record_amax(master) if master is linear.weight or linear.codes_only else None

    quantized.use_optimizer_amax(record)


class TeacherLoss:
    """The divergence from the teacher of --distill in a step of all ranks; nothing without one."""

    def __init__(self, model: nn.Module, mesh: Mesh):
        self._distillation = model.distillation if isinstance(model, Decoder) else None
        self._mesh = mesh

    def begin_step(self) -> None:
        """Before the first micro-batch."""
        if self._distillation is not None:
            self._distillation.begin_step()

    def metrics(self) -> Callable[[], dict[str, float]]:
        """kl: the mean over the step's trained tokens, on its way to the host. To be called on all ranks."""
        if self._distillation is None:
            return dict
        sums = self._distillation.sums.clone()
        if self._mesh.dp_size > 1:
            dist.all_reduce(sums, group=self._mesh.dp_group)
        on_host = HostCopy(sums)

        def read() -> dict[str, float]:
            total, tokens = on_host.read().tolist()
            return {"kl": total / max(tokens, 1.0)}

        return read


class ExpertBalance:
    """The experts' load in the steps of all ranks; nothing without a mixture. bias_rate: `--router_bias_rate`."""

    def __init__(self, model: nn.Module, mesh: Mesh, bias_rate: float):
        self._model = model if isinstance(model, Decoder) and model.expert_load is not None else None
        self._mesh, self._bias_rate = mesh, bias_rate

    def end_step(self) -> None:
        """Once the gradients of a step that is applied are there; the same on all ranks."""
        if self._model is None:
            return
        if self._mesh.dp_size > 1:
            # A rank counts the routes of its own tokens; biases must change alike on all.
            dist.all_reduce(self._model.expert_load.step, group=self._mesh.dp_group)
        self._model.end_step(self._bias_rate)

    def discard_step(self) -> None:
        """Forget the routes of a step that is not applied."""
        if self._model is not None:
            self._model.expert_load.step.zero_()

    def metrics(self) -> Callable[[], dict[str, float]]:
        """The load since the last call (`ExpertLoad.read`), on its way to the host."""
        return dict if self._model is None else self._model.expert_load.read()
