"""Shared test set-up: kernels run in Triton's interpreter where there is no GPU, and GPU tests say so."""

import gc
import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads of their own would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")
if not os.environ.get("QTRAIN_FULL_SWEEP"):  # Inductor would try vector extensions, each with a program it compiles
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch

from tests import sampling
from tests.interpreter import quicken_interpreter

if worker := os.environ.get("PYTEST_XDIST_WORKER"):
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = given.split(",") if given else [*map(str, range(torch.cuda.device_count()))]  # does not initialize CUDA
    # Each worker's first GPU is another; it sees all, for tests of several.
    first = int(worker.removeprefix("gw")) % max(len(gpus), 1)
    if gpus:
        os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(gpus[first:] + gpus[:first])

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined
    quicken_interpreter()

from qtrain.core.process import prepare_process

prepare_process()  # before transformers is imported

gc.disable()  # until all tests are imported: what that makes stays


@pytest.fixture(autouse=True)
def _other_tests_are_not_deterministic() -> Iterator[None]:
    """--deterministic changes a state of the process."""
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def _memory_of_a_shared_gpu_is_given_back() -> Iterator[None]:
    """Many workers share one: what a test has left in the allocator's cache would be missing in theirs."""
    yield
    if torch.cuda.is_initialized():
        if torch.cuda.memory_allocated() > 2**28:
            gc.collect()  # a compiled model is a cycle
        torch.cuda.empty_cache()


@pytest.fixture(params=["graphs", pytest.param("inductor", marks=pytest.mark.sweep)])
def compiler(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Tests that compile for the CPU, where the C++ of a decoder layer takes 20 seconds.

    graphs: Inductor's passes and its choice of what is kept for backward, the graphs then run as they are;
    inductor: its code too, in the full sweep.
    """
    if request.param == "graphs":
        from functorch.compile import make_boxed_func  # seconds, which most workers' tests do not need
        from torch._inductor import compile_fx

        def as_it_is(graph: torch.fx.GraphModule, inputs: list[Any], **options: Any) -> Callable[..., Any]:
            return make_boxed_func(graph.forward)

        monkeypatch.setattr(compile_fx, "compile_fx", partial(compile_fx.compile_fx, inner_compile=as_it_is))
        # The cache's key is the graph's: it would hand out the code that Inductor has made of the same graph.
        with torch._functorch.config.patch(enable_autograd_cache=False):
            yield request.param
    else:
        yield request.param


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        skipped, reason = "interpreter", "kernels run for real here"
    else:
        skipped, reason = "gpu", "needs an NVIDIA GPU"
    left = {} if torch.cuda.is_available() else dict(sampling.CASES)
    for item in items:
        function = item.nodeid.split("[")[0]
        # A marker, not a keyword: those hold the names of folders too, of a checkout in one called gpu as well.
        if item.get_closest_marker(skipped):
            item.add_marker(pytest.mark.skip(reason=reason))
        elif not os.environ.get("QTRAIN_FULL_SWEEP") and (item.get_closest_marker("sweep") or left.get(function) == 0):
            item.add_marker(pytest.mark.skip(reason="full sweep: make test-full"))
        elif function in left:
            left[function] -= 1
