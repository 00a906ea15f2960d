"""A training step recorded as CUDA graphs: one call replays what Python would launch kernel by kernel.

A step of a 0.5B model launches thousands of kernels; with quantization around every GEMM, launching them takes Python
as long as the GPU takes to run them. Shapes, addresses and order are the same in every step. So after a few ordinary
steps, which compile and autotune, three graphs are captured: forward and backward of a step's first micro-batch, which
writes the gradients; of a further one, which adds to them; and the refresh of all weights' codes, with what ranks send
each other for it. What changes from step to step is read from tensors: tokens, labels, document ids (the attention mask
is computed inside the graph), the count of trained tokens, the Philox keys of stochastic rounding.

A replay gives the same bits as the ordinary step. A graph reserves as much memory as the ordinary step takes, and holes
between its tensors, which the allocator cannot give back during a capture. Where that is more than there is, steps run
without: their micro-batches are then so large that a GPU is busy while Python launches the next kernels.
"""

import gc
import logging
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from qtrain.core.errors import first_line
from qtrain.core.maybe_none import MaybeNone
from qtrain.data.batch import TensorBatch
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import QuantizedModel
from qtrain.train.log.failures import is_out_of_memory
from qtrain.train.settings.machine import records_steps
from qtrain.train.state.run import Run
from qtrain.train.step.forward import Forward

log = logging.getLogger("qtrain")

Result = TypeVar("Result")

WARM_UP = 3
"""Ordinary runs before a graph is captured: compiling, autotuning and lazy initialization must not be part of it. None
is captured in the first step, whose micro-batches may be more: the optimizer's states come after them, and the peak of
allocated memory, which replays do not change, would leave them out."""


def step_graphs(run: Run, forward: Forward, *, recordable: bool = True) -> "StepGraphs | None":
    """The graphs of a run; None where --cuda_graphs does not apply.

    recordable: whether all micro-batches have one shape, and the model launches the same kernels for each.
    """
    settings = run.settings
    recordable = recordable and records_steps(settings)
    # Rounded gradients of fully sharded layers are sent within the graph, with keys that the host makes.
    recordable = recordable and not (run.parallel.reshards and settings.gradient_wire != "exact")
    if not recordable or run.device.type != "cuda":
        return None
    return StepGraphs(forward, run.quantized, run.parallel)


def forward_backward(forward: Forward, batch: TensorBatch, trained: Tensor, parallel: DataParallel) -> Tensor:
    """Forward and backward of one micro-batch. Returns the summed negative log-likelihood, detached.

    trained: count of the step's trained tokens, an fp32 scalar on the device."""
    sums = forward(batch)
    (sums.loss / trained).backward()
    parallel.end_backward()
    return sums.nll


class StepGraphs:
    """The graphs of one model, one shape of micro-batch and one set of trained parameters."""

    def __init__(self, forward: Forward, quantized: QuantizedModel, parallel: DataParallel):
        # Where gradients are reduced, autograd adds to the receivers of `parallel`, not to the model's parameters.
        self._parameters = [sharded.receiver for sharded in parallel.parameters]
        self._forward, self._quantized, self._parallel = forward, quantized, parallel
        self._device = self._parameters[0].device
        self._pool = torch.cuda.graph_pool_handle()
        self._batch: TensorBatch | MaybeNone = None  # static inputs of the graphs
        self._trained = torch.ones((), device=self._device)
        # By `accumulate`: a graph with its loss, and the gradients that it leaves.
        self._micro_steps: dict[bool, tuple[torch.cuda.CUDAGraph, Any]] = {}
        self._gradients: dict[bool, list[Tensor | None]] = {}
        self._refresh: torch.cuda.CUDAGraph | None = None
        self._recorded_amax: frozenset[int] = frozenset()  # what `known_amax` was when it was captured
        self._runs: dict[object, int] = {}
        self._refused = self._updated = False
        self.replayed = False
        """Whether the last micro-batch was: the gradients are in the graphs' memory."""
        self._assignments = quantized.assignments

    @property
    def recorded(self) -> bool:
        """Whether micro-batches are replayed."""
        return bool(self._micro_steps)

    def micro_step(self, batch: TensorBatch, trained: Tensor, accumulate: bool) -> Tensor:
        """`forward_backward`, replayed where possible. accumulate: add to the gradients of this step's earlier ones, or
        within the backward pass to the sums of all ranks."""
        self.replayed = False
        if not self._fits(batch, accumulate):
            return forward_backward(self._forward, batch, trained, self._parallel)
        # A graph reads fixed addresses: this micro-batch goes into its static inputs.
        for static, tensor in zip(self._batch.tensors(), batch.tensors(), strict=True):
            static.copy_(tensor, non_blocking=True)
        self._trained.copy_(trained)
        # Capturing runs nothing: the replay below computes this micro-batch too.
        if accumulate not in self._micro_steps:
            before = [p.grad for p in self._parameters]  # a capture that fails leaves tensors of its pool there
            recorded = self._record(lambda: forward_backward(self._forward, self._batch, self._trained, self._parallel))
            if recorded is None:
                for p, gradient in zip(self._parameters, before, strict=True):
                    p.grad = gradient
                return forward_backward(self._forward, batch, trained, self._parallel)
            self._micro_steps[accumulate] = recorded
            self._gradients[accumulate] = [p.grad for p in self._parameters]
        graph, nll = self._micro_steps[accumulate]
        graph.replay()
        self.replayed = True
        # The optimizer has set them to None; the graph has written to the memory that they had.
        for p, gradient in zip(self._parameters, self._gradients[accumulate], strict=True):
            p.grad = gradient
        return nll

    def _fits(self, batch: TensorBatch, accumulate: bool) -> bool:
        """Whether this micro-batch is replayed; warm-up steps and batches of another shape are not."""
        self._follow_map()
        if self._batch is None:
            self._batch = batch.each(lambda t: torch.empty_like(t, device=self._device))
        shapes = [t.shape for t in batch.tensors()]
        if self._refused or shapes != [t.shape for t in self._batch.tensors()] or not self._warm(accumulate):
            return False
        if not accumulate:
            return True
        # A further micro-batch adds to the gradients that the first one's graph writes.
        if False not in self._gradients:
            return False
        # A graph adds to the static gradients: they must be the parameters' own, where the sums are not of all ranks.
        found = zip(self._parameters, self._gradients[False], strict=True)
        return all(p.grad is None or p.grad is gradient for p, gradient in found)

    def refresh(self) -> None:
        """`requantize`, replayed where possible."""
        self._updated = True
        self._follow_map()
        if self._refused or not self._quantized.needs_refresh or not self._warm("refresh"):
            self._parallel.requantize()
            return
        known = self._quantized.known_amax()
        if self._refresh is None:
            recorded = self._record(self._parallel.requantize)
            if recorded is None:
                self._parallel.requantize()
                return
            self._refresh, self._recorded_amax = recorded[0], known
        if not self._recorded_amax <= known:  # the graph reads an absmax that is not this weight's
            self._parallel.requantize()
            return
        self._refresh.replay()
        self._quantized.mark_fresh()

    def make_room_for(self, run: Callable[[], Result]) -> Result:
        """What `run` returns. If it needs memory that the graphs hold, they are released and it runs again."""
        try:
            return run()
        except Exception as error:
            # Other ranks are within what `run` does together.
            if not self.recorded or self._parallel.mesh.world > 1 or not is_out_of_memory(error):
                raise
        # After the handler: the error's frames hold tensors.
        log.info("memory      evaluation needs what the recorded steps hold; the next steps are recorded again")
        self.release()
        gc.collect()
        torch.cuda.empty_cache()
        return run()

    def release(self) -> None:
        """Free the graphs and their memory; the next steps record new ones. A process group does not end while graphs
        hold its collectives."""
        for graph in [*(graph for graph, _ in self._micro_steps.values()), self._refresh]:
            if graph is not None:
                graph.reset()
        self._micro_steps.clear()
        self._gradients.clear()
        self._refresh = None
        # A pool whose graphs are gone cannot be used again.
        self._pool, self._runs = torch.cuda.graph_pool_handle(), {}

    def _follow_map(self) -> None:
        """Drop what was recorded before linears were reassigned: it reads codes that are gone."""
        if self._assignments == self._quantized.assignments:
            return
        self._assignments = self._quantized.assignments
        self.release()

    def _warm(self, kind: object) -> bool:
        self._runs[kind] = self._runs.get(kind, 0) + 1
        return self._runs[kind] > WARM_UP and self._updated  # not within the first step

    def _record(self, run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any] | None:
        """Capture what `run` launches, without running it. None where that fails; it is not tried again then."""
        # All graphs of a step share a memory pool: they never run at the same time.
        graph = torch.cuda.CUDAGraph()
        stream, failure, ended = torch.cuda.current_stream(), None, True
        try:
            # thread_local: the prefetching thread may call CUDA during the capture.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                try:
                    result = run()
                except RuntimeError as error:  # the end of the capture may fail too, of streams that it finds unjoined
                    failure = error
        except RuntimeError as error:
            failure, ended = failure or error, False
        if failure is None:
            return graph, result
        reason, no_memory = first_line(failure), isinstance(failure, torch.cuda.OutOfMemoryError)
        del graph, failure
        if not ended:
            self._end_capture(stream)
        self._refused = True
        self._parallel.abort_micro_batch()
        # The generator still believes that it is being captured, and would fail outside of a capture.
        generator = torch.cuda.default_generators[self._device.index]
        generator.graphsafe_set_state(generator.clone_state())
        if no_memory:
            reason = "there is not enough memory for both"
            self.release()  # the graph of the first micro-batch, which has reserved as much as the ordinary step needs
            gc.collect()
            torch.cuda.empty_cache()
        log.warning("the step cannot be captured as a CUDA graph and runs without (%s)", reason)
        return None

    def _end_capture(self, stream: torch.cuda.Stream) -> None:
        """What torch leaves undone when CUDA refuses the end of a capture: the stream stays the capture's, and the
        allocator keeps the pool and, as during a capture, frees nothing before it reports that memory ran out."""
        torch.cuda.set_stream(stream)
        torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
        torch._C._cuda_releasePool(self._device.index, self._pool)
