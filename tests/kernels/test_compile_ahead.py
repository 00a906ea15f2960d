"""What a custom op will launch is compiled in other processes when it is traced; its launch then finds it."""

import contextlib
import os
import queue
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

pytest.importorskip("triton")

from qtrain.core.hardware import capabilities
from qtrain.kernels import autotune, compile_ahead, compiler
from qtrain.kernels.arrivals import arrival_counters
from qtrain.kernels.compile_together import launches_are_left_out
from qtrain.kernels.compiler import triton
from qtrain.kernels.elementwise import launch_add_in_order
from qtrain.kernels.gemm import persistent, scaled_mm
from qtrain.kernels.quantize import operators, rowwise
from qtrain.kernels.quantize.dual_bf16x2 import _dual_kernel
from qtrain.kernels.quantize.nf4 import nf4_table
from qtrain.quant import SCHEMES, quantize_linears
from tests.interpreter import run_compiled
from tests.models.families import batch, drawn, source_of

MODULE = "tests.kernels.test_compile_ahead"


def as_on_a_gpu() -> None:
    from triton.runtime import driver

    from tests.kernels.compile_kernels import _Driver

    driver.set_active(_Driver(90))  # it launches nothing
    capabilities.compute_capability = lambda device: (9, 0)
    persistent.sm_count = lambda device: 132


def operations() -> None:
    x = torch.empty(256, 1024, dtype=torch.bfloat16, device="cuda")
    operators.quantize(x, "e4m3", "rowwise")
    operators.quantize_dual(x, "e4m3", "1x128", "1x128")


def found_by(call: Callable[[], object]) -> list[compile_ahead.Job]:
    """What the operations of `call` would launch, on fake tensors."""
    jobs: list[compile_ahead.Job] = []
    compiler.on_trace = lambda function, arguments: jobs.extend(compile_ahead.jobs_of(function, arguments))
    with FakeTensorMode():
        call()
    compiler.on_trace = None
    return jobs


def test_without_a_gpu():
    run_compiled(MODULE, "launches", "without_an_op", "candidates", "keys", "calls")


@pytest.mark.parametrize("made", [nf4_table, arrival_counters])
def test_what_is_kept_for_a_device_is_no_fake_tensor(made):
    made.cache_clear()
    with FakeTensorMode():
        assert not isinstance(made(torch.device("cpu")), FakeTensor)


@pytest.mark.parametrize("options", [{}, {"scaling": "delayed"}], ids=["", "delayed"])
@pytest.mark.parametrize("chunks", [1, 2])
def test_a_traced_loss_runs_the_operators_of_a_real_one_and_changes_nothing(options, chunks, monkeypatch):
    """All but those of the layers, which run before it."""
    called: list[str] = []
    results = []
    for trace in (False, True):
        model = drawn(source_of("llama2", hidden_size=64, intermediate_size=128, num_hidden_layers=1))
        model.to(torch.bfloat16)
        scheme = SCHEMES.make("fp8_tensorwise", options, "-")
        quantize_linears(model, scheme, seed=0, head=model.lm_head, quantize_head=True)
        (ids, labels), model.loss_chunks = batch(), chunks
        monkeypatch.setattr(compiler, "on_trace", lambda function, arguments: called.append(function.__name__))
        if trace:
            compile_ahead.trace(partial(model.trace_loss, labels.numel()))
        monkeypatch.setattr(compiler, "on_trace", None)
        loss = model(ids, labels).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    statistics = ["record_amax"] if options else []
    quantizers = ["quantize_dual_delayed", "quantize_softmax_grad_delayed"] if options else ["quantize_dual"] * 2
    of_a_chunk = [*quantizers, "cross_entropy_statistics" if options else "cross_entropy", *["scaled_mm"] * 3]
    assert sorted(called) == sorted(chunks * [*of_a_chunk, *2 * statistics])


@pytest.mark.sweep
def test_a_compiled_layer_computes_the_same():
    run_compiled(MODULE, "compiled_layers")


@pytest.mark.sweep
def test_launches_find_what_other_processes_have_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    run_compiled(MODULE, "processes")


def launches() -> None:
    """Those of the op's own function, and nothing is written to what is traced."""
    jobs = found_by(operations)
    assert [job.kernel.__name__ for job in jobs] == ["_rowwise_bf16x2_kernel", "_dual_kernel"]
    assert jobs[0].target == ("cuda", 90, 32) and jobs[0].signature["x_ptr"] == "*i32"
    assert found_by(lambda: operators.quantize(torch.empty(256, 1024), "e4m3", "rowwise")) == []  # on a CPU


def without_an_op() -> None:
    """Found too, and not launched, which `_Driver` would not survive; nor the ops' beside it."""
    compiler.on_trace = ahead = object.__new__(compile_ahead.Ahead)
    ahead._seen, ahead._messages = set(), queue.SimpleQueue()

    def call() -> None:
        launch_add_in_order(torch.empty(4096, device="cuda"), torch.empty(2, 4096, device="cuda"), "out")
        operations()
        launch_add_in_order(torch.empty(4096, device="cuda"), torch.empty(3, 4096, device="cuda"), "out")

    compile_ahead.trace(call)
    compiler.on_trace = None
    assert ahead._messages.qsize() == 4


def compiled_layers() -> None:
    """What torch.compile traces, forward and backward; the step computes the same as without."""
    operators._kernel_takes = lambda *_: launches_are_left_out()
    jobs: list[compile_ahead.Job] = []
    compiler.on_trace, results = None, []
    for _ in range(2):
        torch._dynamo.reset()
        model = drawn(source_of("llama2", hidden_size=64, intermediate_size=128, num_hidden_layers=1))
        model.to(torch.bfloat16)
        quantize_linears(model, SCHEMES.make("fp8_tensorwise", {"scaling": "delayed"}, "-"), seed=0)
        model.layers[0].compile(fullgraph=True, backend="aot_eager_decomp_partition")
        loss = model(*batch()).loss
        loss.backward()
        results.append([loss.detach(), *(p.grad for p in model.parameters())])
        compiler.on_trace = lambda function, arguments: jobs.extend(compile_ahead.jobs_of(function, arguments))
    compiler.on_trace = None
    assert {job.kernel.__name__ for job in jobs} > {"_dual_kernel"} and len(jobs) > 10
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def calls() -> None:
    """Which calls are looked at: once for arguments alike, on a GPU, of static sizes, and of no other package."""
    seen: list[str] = []
    compile_ahead.jobs_of = lambda function, arguments: seen.append(function.__module__) or []
    ahead = object.__new__(compile_ahead.Ahead)
    ahead._seen = set()
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        x, on_cpu = torch.empty(8, 16, device="cuda"), torch.empty(8, 16)
        symbolic = mode.shape_env.create_unbacked_symint()
        for module in ("qtrain.comm.rank_group", "qtrain.kernels.quantize.operators"):
            launches.__module__ = module
            for arguments in ((x, "e4m3"), (x, "e4m3"), (x, "int8"), (on_cpu, "e4m3"), (x, symbolic), ("e4m3",)):
                ahead(launches, arguments)
    assert seen == ["qtrain.kernels.quantize.operators"] * 2


def keys() -> None:
    """A kernel has one key in the cache, whichever was launched before."""
    key = _dual_kernel.cache_key
    kernels = [o for o in vars(rowwise).values() if isinstance(o, triton.runtime.jit.JITFunction)]
    seen, waiting = set(), [_dual_kernel, *kernels]
    while waiting:  # as in a process that has launched nothing
        kernel = waiting.pop()
        if id(kernel) not in seen:
            seen.add(id(kernel))
            kernel.hash, kernel.used_global_vals = None, {}
            waiting += [o for o in kernel.__globals__.values() if isinstance(o, triton.runtime.jit.JITFunction)]
    for kernel in kernels:
        _ = kernel.cache_key
    assert _dual_kernel.cache_key == key


def candidates() -> None:
    """All that the autotuner will time; those of a known choice are not."""
    a = partial(torch.empty, 256, 256, dtype=torch.float8_e4m3fn, device="cuda")
    names = list(scaled_mm.TILINGS)[:3]

    def run(name: str) -> None:
        scale, out = torch.empty(1, device="cuda"), torch.empty(256, 256, dtype=torch.bfloat16, device="cuda")
        scaled_mm.launch_scaled_mm(a(), a(), scale, scale, out, scaled_mm.TILINGS[name])

    def op() -> None:
        autotune.choose("test", (256,), names, run)

    with FakeTensorMode():
        assert len(compile_ahead.jobs_of(op, ())) == 3
        autotune._choices()["test 256 " + f"{autotune.zlib.crc32(' '.join(names).encode()):08x}"] = names[1]
        assert compile_ahead.jobs_of(op, ()) == []  # the op runs its choice itself


def processes() -> None:
    hits: list[bool] = []
    triton.knobs.compilation.listener = lambda cache_hit, **_: hits.append(cache_hit)
    compiler.on_trace = compile_ahead.Ahead(2)
    with FakeTensorMode():
        operations()
    cache, began = Path(os.environ["TRITON_CACHE_DIR"]), time.monotonic()
    while len([*cache.glob("*/__grp__*")]) < 2 and time.monotonic() - began < 60:
        time.sleep(0.1)
    compiler.on_trace, operators._kernel_takes = None, lambda *_: True
    for operator, granularities in ((operators.quantize, ["rowwise"]), (operators.quantize_dual, ["1x128"] * 2)):
        with contextlib.suppress(AttributeError):  # of `_Driver`, which cannot load it
            operator(torch.zeros(256, 1024, dtype=torch.bfloat16), "e4m3", *granularities)
    assert hits == [True, True]


if __name__ == "__main__":
    import sys

    as_on_a_gpu()
    for name in sys.argv[1:]:
        globals()[name]()
