"""A training step recorded as CUDA graphs: what Python would launch kernel by kernel, one call replays.

A step of a 0.5B model is some thousands of kernels, and with quantization around every product Python takes as long to
launch them as the GPU to run them. Shapes, addresses and order are the same at every step, so after a few ordinary
steps (which compile and tune) the work is recorded once: forward and backward of a step's first micro-batch, which
makes the gradients; those of a further one, which adds to them; and the renewal of all weights' codes. What changes
from step to step is read from tensors: tokens, labels, documents (the mask is made of them within the recording), the
count of trained tokens, the keys of stochastic rounding.

A recording gives the same bits as the ordinary step. Its memory is laid out as the ordinary step's and stays reserved.
"""

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from qtrain.data import TensorBatch
from qtrain.quant import QuantizedModel
from qtrain.train.language import Forward
from qtrain.train.state.run import Run

log = logging.getLogger("qtrain")

WARM_UP = 3
"""Ordinary runs of each kind before it is recorded: compiling, tuning and lazy set-up must not be part of it."""


def step_graphs(run: Run, forward: Forward, *, recordable: bool = True) -> "StepGraphs | None":
    """Recordings for a run; None where --cuda_graphs does not apply.

    recordable: whether micro-batches are of one shape, and the model does the same for all of them.
    """
    settings = run.settings
    recordable = recordable and settings.compile and settings.cuda_graphs and not settings.optimizer_in_backward
    return StepGraphs(run.model, forward, run.quantized) if recordable and run.device.type == "cuda" else None


def backward_of(forward: Forward, batch: TensorBatch, trained: Tensor) -> Tensor:
    """Forward and backward of one micro-batch; the summed negative log-likelihood, detached. trained: fp32 scalar."""
    sums = forward(batch)
    (sums.loss / trained).backward()
    return sums.nll


class StepGraphs:
    """Recordings for one model, one shape of micro-batch and one set of trained parameters."""

    def __init__(self, model: nn.Module, forward: Forward, quantized: QuantizedModel):
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._forward, self._quantized = forward, quantized
        self._device = self._parameters[0].device
        self._pool = torch.cuda.graph_pool_handle()
        self._batch: TensorBatch | None = None  # what the recordings read
        self._trained = torch.ones((), device=self._device)
        self._gradients: list[Tensor | None] = []  # where the recordings write
        self._micro_steps: dict[bool, tuple[torch.cuda.CUDAGraph, Tensor]] = {}  # by: does it add to gradients
        self._refresh: torch.cuda.CUDAGraph | None = None
        self._runs: dict[object, int] = {}
        self._refused = False

    def micro_step(self, batch: TensorBatch, trained: Tensor, accumulate: bool) -> Tensor:
        """`backward_of`, replayed where it can be. accumulate: gradients of this step are there already."""
        if not self._fits(batch, accumulate):
            return backward_of(self._forward, batch, trained)
        for mine, given in zip(self._batch.tensors(), batch.tensors(), strict=True):
            mine.copy_(given, non_blocking=True)
        self._trained.copy_(trained)
        if accumulate not in self._micro_steps:
            before = [p.grad for p in self._parameters]
            recorded = self._record(lambda: backward_of(self._forward, self._batch, self._trained))
            if recorded is None:
                for p, gradient in zip(self._parameters, before, strict=True):
                    p.grad = gradient
                return backward_of(self._forward, batch, trained)
            self._micro_steps[accumulate] = recorded
            if not accumulate:
                self._gradients = [p.grad for p in self._parameters]
        graph, nll = self._micro_steps[accumulate]
        graph.replay()
        for p, gradient in zip(self._parameters, self._gradients, strict=True):
            p.grad = gradient
        return nll

    def _fits(self, batch: TensorBatch, accumulate: bool) -> bool:
        """Whether this micro-batch goes through a recording; the first ones, and odd shapes, do not."""
        if self._batch is None:
            self._batch = batch.each(lambda t: torch.empty_like(t, device=self._device))
        shapes = [t.shape for t in batch.tensors()]
        if self._refused or shapes != [t.shape for t in self._batch.tensors()] or not self._warm(accumulate):
            return False
        if not accumulate:
            return True
        # Adding needs the gradients to lie where the recordings have them.
        where = [p.grad for p in self._parameters]
        return bool(self._gradients) and all(a is b for a, b in zip(where, self._gradients, strict=True))

    def refresh(self) -> None:
        """`QuantizedModel.refresh`, replayed where it can be."""
        if self._refused or not self._quantized.changes or not self._warm("refresh"):
            self._quantized.refresh()
            return
        if self._refresh is None:
            recorded = self._record(self._quantized.refresh)
            if recorded is None:
                self._quantized.refresh()
                return
            self._refresh = recorded[0]
        self._refresh.replay()
        self._quantized.mark_fresh()

    def _warm(self, kind: object) -> bool:
        self._runs[kind] = self._runs.get(kind, 0) + 1
        return self._runs[kind] > WARM_UP

    def _record(self, run: Callable[[], object]) -> tuple[torch.cuda.CUDAGraph, object] | None:
        """Record what `run` launches, without running it; None, for good, where something in it cannot be recorded."""
        graph = torch.cuda.CUDAGraph()
        try:
            # thread_local: the thread that prepares batches may go on calling CUDA.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                result = run()
        except torch.cuda.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self._refused = True
            # The generator still believes that it is being recorded, and would draw nothing outside of it.
            generator = torch.cuda.default_generators[self._device.index]
            generator.graphsafe_set_state(generator.clone_state())
            reason = str(error).strip().splitlines()[0]
            log.warning("the step is not recorded as a CUDA graph and goes on as before (%s)", reason)
            return None
        return graph, result
