"""A replayed step gives the same bits as an ordinary one; a step that cannot be captured runs without graphs."""

import warnings
from collections.abc import Callable
from functools import partial

import pytest
import torch

from qtrain.data.batch import Batch
from qtrain.models import RECOMPUTE_SETS, ModelSource, ResidualOffload, apply_recompute, build_model, compile_layers
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.optim import offload as optim_offload
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding import host_gradients
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.quant import SCHEMES, quantize_linears, reassign
from qtrain.train.settings.settings import OFFLOAD_NAMES
from qtrain.train.step import cuda_graphs
from qtrain.train.step.cuda_graphs import WARM_UP, StepGraphs
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients, share_amax
from tests.system import TINY

STEPS = WARM_UP + 4


@pytest.fixture(autouse=True)
def nothing_compiled():
    """Each scheme recompiles the same code, and dynamo limits the variants of a function."""
    torch.compiler.reset()


WIDE = {**TINY, "vocab_size": 272, "hidden_size": 256, "intermediate_size": 512}


def batches(step: int, count: int, rows: int = 4, length: int = 64, documents: bool = False) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, WIDE["vocab_size"], (count, rows, length + 1), generator=generator)
    tokens[:, 0, 5:20] = -100  # a count of trained tokens that differs from that of all
    ids = (torch.rand(count, rows, length, generator=generator) < 0.03).cumsum(2) if documents else [None] * count
    return [Batch(t[:, :-1].clamp(min=0), t[:, 1:], i) for t, i in zip(tokens, ids, strict=True)]


def train(
    scheme: str,
    options: dict,
    accumulation: int,
    graphed: bool,
    odd_step: int | None = None,
    compiled=True,
    changed_step: int | None = None,
    quantize_head: bool = False,
    recompute: str = "none",
    keep_8bit: tuple[str, ...] = (),
    offload: tuple[str, ...] = (),
    layers: int = WIDE["num_hidden_layers"],
    master: str = "none",
    tied: bool = True,
    reassigned: dict[str, str] | None = None,
    between: Callable[[StepGraphs], None] | None = None,
    **kind,
):
    """(losses, norms, weights) of a few steps. changed_step: in which a weight is doubled and gets no gradient.
    reassigned: other schemes of linears from step WARM_UP + 2 on.
    between: runs in the middle of twice as many steps, with room made for it.
    quantize_head: the output head too; its loss is computed in three chunks. offload: names of --offload."""
    device, config = torch.device("cuda"), {**WIDE, "num_hidden_layers": layers, "tie_word_embeddings": tied}
    source, moved = ModelSource("tiny", config, "--model"), "gradients" in offload  # weights then are, too
    model = build_model(source, seed=1, device=device, dtype=torch.bfloat16, lazy=moved)
    apply_recompute(model, RECOMPUTE_SETS[recompute], keep_8bit)
    if "residuals" in offload:
        model.residual_offload = ResidualOffload(layers)
    made = SCHEMES.make(scheme, options, "--quantize")
    head = {"head": model.lm_head, "quantize_head": quantize_head}
    quantized = quantize_linears(model, made, seed=0, realize=not moved, **head)
    model.loss_chunks = 3 if quantize_head else 0
    if compiled:
        compile_layers(model)
    spec = OPTIMIZERS.make("adamw", {"master": master}, "--optim").with_offload(offload)
    groups, units = parameter_groups(model, 0.1), decoder_units(model) if moved else ()
    parallel = DataParallel(model, quantized, Mesh(), units=units, host_gradients=moved)
    for group in groups:
        group["params"] = [parallel.master(p) for p in group["params"]]
    optimizer = spec.build(groups, 1e-3)
    optimizer.place(parallel.placements)
    quantized.track_versions(optimizer)
    share_amax(optimizer, quantized, parallel)
    forward, same = language_forward(model, None), {"parallel": parallel}
    graphs = StepGraphs(forward, quantized, parallel) if graphed else None
    seen = []
    for step in range(2 * STEPS if reassigned or between else STEPS):
        if between is not None and graphs is not None and step == STEPS:
            graphs.make_room_for(partial(between, graphs))
        if reassigned is not None and step == WARM_UP + 2:
            assert graphs is None or graphs._micro_steps
            reassign(model, quantized, {name: SCHEMES.make(to, {}, "-") for name, to in reassigned.items()})
        rows = 2 if step == odd_step else 4
        read = batches(step, accumulation, rows, **kind)
        prepared = None if step == changed_step else optimizer
        found = compute_gradients(model, forward, quantized, read, step, graphs, optimizer=prepared, **same)
        seen.append((found.loss, found.norm))
        if step == changed_step:
            with torch.no_grad():
                quantized.linears[0].weight.mul_(2)
            quantized.linears[0].weight.grad = None
        apply_gradients(optimizer, quantized, found, lr=1e-3, clip_grad_norm=1.0, graphs=graphs, **same)
    torch.cuda.synchronize()
    return seen, [parallel.master(p).detach().to(device, copy=True) for p in model.parameters()], graphs


@pytest.mark.gpu
def test_the_update_is_launched_without_a_wait(monkeypatch):
    """The host reads loss and norm by an event, which this mode does not count; no other call of a step waits."""
    waits: list[int] = []
    compute = compute_gradients

    def counted(*arguments, **named):
        waits.append(len(seen))
        return compute(*arguments, **named)

    monkeypatch.setitem(globals(), "compute_gradients", counted)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            train("fp8_tensorwise", {"scaling": "delayed"}, 2, graphed=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert waits[-1] == waits[-2], [str(w.message)[:80] for w in seen[waits[-2] :]]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme,options",
    [
        ("bf16", {}),
        ("int8", {}),
        ("int8", {"stochastic_rounding": True}),
        ("int8", {"granularity": "tensorwise"}),
        ("fp8_tensorwise", {}),
        ("fp8_tensorwise", {"scaling": "delayed"}),
        ("fp8_rowwise", {}),
        ("fp8_blockwise", {}),
        ("int8_blockwise", {}),
        ("int8_weight", {}),
        ("bitnet", {}),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 3])
def test_same_bits_as_the_ordinary_step(scheme, options, accumulation):
    ordinary, weights, _ = train(scheme, options, accumulation, graphed=False)
    replayed, weights_replayed, graphs = train(scheme, options, accumulation, graphed=True)
    assert replayed == ordinary
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))
    assert len(graphs._micro_steps) == min(accumulation, 2), "nothing was recorded: this compares a step with itself"


@pytest.mark.gpu
@pytest.mark.parametrize("accumulation", [1, 3])
def test_graphs_are_recorded_again_once_linears_are_reassigned(accumulation):
    """To high precision, from it, and under delayed scaling: with the bits of ordinary steps."""
    other = {"layers.0.attn.qkv": "bf16", "layers.1.mlp.down_proj": "int8", "lm_head": "fp8_rowwise"}
    delayed = ("fp8_tensorwise", {"scaling": "delayed"}, accumulation)
    ordinary, weights, _ = train(*delayed, graphed=False, reassigned=other)
    replayed, weights_replayed, graphs = train(*delayed, graphed=True, reassigned=other)
    assert replayed == ordinary
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))
    assert len(graphs._micro_steps) == min(accumulation, 2) and graphs._refresh is not None


@pytest.mark.gpu
@pytest.mark.parametrize("unjoined", [False, True], ids=["joined", "unjoined"])
@pytest.mark.parametrize("captures", [1, 2])
def test_a_capture_that_runs_out_of_memory_is_given_up(captures, unjoined, monkeypatch, caplog):
    """In the middle of the first or second one of a step, with or without work on another stream: steps go on with the
    same bits, on the same stream, and the capture's memory is free."""
    ordinary, weights, _ = train("fp8_tensorwise", {}, 3, graphed=False)
    begun = 0
    whole = cuda_graphs.forward_backward

    def forward_backward(*args):
        nonlocal begun
        nll = whole(*args)
        if torch.cuda.is_current_stream_capturing():
            begun += 1
            if begun == captures:
                torch.empty(2**29, dtype=torch.uint8, device="cuda")  # freed in the capture's pool
                if unjoined:
                    side.wait_stream(torch.cuda.current_stream())
                    with torch.cuda.stream(side):
                        nll.clone()
                torch.empty(2**46, dtype=torch.uint8, device="cuda")
        return nll

    side, stream = torch.cuda.Stream(), torch.cuda.current_stream()

    monkeypatch.setattr(cuda_graphs, "forward_backward", forward_backward)
    replayed, weights_replayed, graphs = train("fp8_tensorwise", {}, 3, graphed=True)
    assert replayed == ordinary and begun == captures and not graphs._micro_steps
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))
    assert "runs without (there is not enough memory for both)" in caplog.text
    assert torch.cuda.current_stream() == stream
    assert torch.cuda.memory_reserved() < 2**29, "the allocator keeps the memory of the capture"


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bf16", "fp8_rowwise", "fp8_blockwise"])
def test_same_bits_with_gate_up_in_8_bits(scheme):
    kept = {"recompute": "selective", "keep_8bit": ("gate_up",)}
    ordinary, weights, _ = train(scheme, {}, 1, graphed=False, **kept)
    replayed, weights_replayed, _ = train(scheme, {}, 1, graphed=True, **kept)
    assert replayed == ordinary
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme,options", [("int8", {"stochastic_rounding": True}), ("fp8_tensorwise", {"scaling": "delayed"})]
)
def test_same_bits_with_a_quantized_head(scheme, options):
    """Its loss runs backward within the recorded forward pass."""
    ordinary, weights, _ = train(scheme, options, 2, graphed=False, quantize_head=True)
    replayed, weights_replayed, graphs = train(scheme, options, 2, graphed=True, quantize_head=True)
    assert replayed == ordinary and len(graphs._micro_steps) == 2
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensorwise"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("offload", [("residuals",), ("m", "v", "master", "residuals")], ids=",".join)
def test_what_is_in_host_memory_changes_no_bits(scheme, recompute, offload):
    """Of steps that are compiled, or recorded too, with copies on a stream of their own."""
    deep = {"recompute": recompute, "layers": 6, "master": "fp32"}
    ordinary, weights, _ = train(scheme, {}, 2, graphed=False, **deep)
    for graphed in (False, True):
        moved, weights_moved, graphs = train(scheme, {}, 2, graphed=graphed, offload=offload, **deep)
        assert moved == ordinary
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_moved, strict=True))
    assert len(graphs._micro_steps) == 2


@pytest.mark.gpu
@pytest.mark.parametrize(
    "scheme,options",
    [
        ("bf16", {}),
        ("int8", {"stochastic_rounding": True}),
        ("fp8_tensorwise", {"scaling": "delayed"}),
        ("fp8_blockwise", {}),
    ],
)
@pytest.mark.parametrize("accumulation", [1, 3])
@pytest.mark.parametrize("offload", [("weights", "gradients"), tuple(OFFLOAD_NAMES)], ids=",".join)
def test_weights_and_gradients_in_host_memory_change_no_bits(scheme, options, accumulation, offload, monkeypatch):
    """Those of an embedding and a quantized head of their own too; in several pieces and buckets, on four streams."""
    monkeypatch.setattr(host_gradients, "PIECE_BYTES", 100_000)
    monkeypatch.setattr(optim_offload, "BUCKET_BYTES", 400_000)
    deep = {"recompute": "full", "layers": 6, "tied": False, "quantize_head": True}
    deep |= {"master": "fp32"} if "master" in offload else {}
    ordinary, weights, _ = train(scheme, options, accumulation, graphed=False, **deep)
    for graphed in (False, True):
        moved, weights_moved, graphs = train(scheme, options, accumulation, graphed=graphed, offload=offload, **deep)
        assert moved == ordinary
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_moved, strict=True))
    assert len(graphs._micro_steps) == min(accumulation, 2)


@pytest.mark.gpu
def test_what_runs_between_steps_may_take_the_memory_of_the_graphs(caplog):
    """An evaluation without enough memory beside them runs again without them; the steps after it are recorded anew."""
    caplog.set_level("INFO", logger="qtrain")
    reserved = []

    def evaluate(graphs: StepGraphs) -> None:
        reserved.append(torch.cuda.memory_reserved())
        if graphs.recorded:
            raise torch.OutOfMemoryError

    ordinary, weights, _ = train("fp8_rowwise", {}, 3, graphed=False, between=evaluate)
    replayed, weights_replayed, graphs = train("fp8_rowwise", {}, 3, graphed=True, between=evaluate)
    assert replayed == ordinary and graphs.recorded
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))
    (before, after), text = reserved, caplog.text
    assert after < before - 2**20 and text.count("recorded again") == 1

    def broken() -> None:
        raise ValueError("not for want of memory")

    with pytest.raises(ValueError, match="not for want"):
        graphs.make_room_for(broken)
    assert graphs.recorded


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", ["bf16", "fp8_tensorwise"])
def test_the_mask_of_packed_documents_is_part_of_the_graph(scheme):
    packed = {"length": 256, "documents": True}
    ordinary, weights, _ = train(scheme, {}, 1, graphed=False, **packed)
    replayed, weights_replayed, graphs = train(scheme, {}, 1, graphed=True, **packed)
    assert replayed == ordinary and len(graphs._micro_steps) == 1
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))
    without, _, _ = train(scheme, {}, 1, graphed=False, length=256)
    assert without != ordinary, "the documents made no difference: this test shows nothing"


@pytest.mark.gpu
def test_a_replay_never_takes_the_absmax_of_a_former_weight():
    """A weight that is changed, and gets no gradient, in a step after the capture: its absmax is computed anew."""
    ordinary, weights, _ = train("fp8_tensorwise", {}, 1, graphed=False, changed_step=STEPS - 3)
    replayed, weights_replayed, graphs = train("fp8_tensorwise", {}, 1, graphed=True, changed_step=STEPS - 3)
    assert graphs._recorded_amax and replayed == ordinary
    assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))


@pytest.mark.gpu
def test_a_batch_of_another_shape_runs_without_a_graph():
    for odd_step in (0, STEPS - 2):
        ordinary, weights, _ = train("int8", {}, 2, graphed=False, odd_step=odd_step, compiled=False)
        replayed, weights_replayed, _ = train("int8", {}, 2, graphed=True, odd_step=odd_step, compiled=False)
        assert replayed == ordinary
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_replayed, strict=True))


@pytest.mark.gpu
def test_a_step_that_cannot_be_captured_runs_without_graphs(caplog):
    class Waiting(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            float(x.sum())  # waits for the GPU: not allowed while recording
            return x.clone()

        @staticmethod
        def backward(ctx, dy):
            return dy

    model = build_model(ModelSource("tiny", WIDE, "--model"), seed=1, device=torch.device("cuda"), dtype=torch.bfloat16)
    quantized = quantize_linears(model, SCHEMES.make("bf16", {}, "--quantize"), seed=0)
    inner = language_forward(model, None)

    def forward(batch):
        sums = inner(batch)
        return sums._replace(loss=Waiting.apply(sums.loss))

    parallel = DataParallel(model, quantized, Mesh())
    graphs = StepGraphs(forward, quantized, parallel)
    losses = []
    for _ in range(WARM_UP + 3):
        model.zero_grad(set_to_none=True)
        losses.append(compute_gradients(model, forward, quantized, batches(0, 1), 0, graphs, parallel=parallel).loss)
        graphs.refresh()
    assert len(set(losses)) == 1
    assert "cannot be captured" in caplog.text
    assert len(torch.rand(64, device="cuda").unique()) > 1, "dropout draws on after a recording that failed"
