"""Layers' inputs in host memory: losses and gradients are those without, bit for bit, and the device holds two."""

import dataclasses

import pytest
import torch

from qtrain.models import RECOMPUTE_SETS, Decoder, Lora, ResidualOffload, add_lora, apply_recompute, compile_layers
from qtrain.models.cost.memory import estimate_memory
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.native import residual_offload
from tests.cases import sampled
from tests.models.families import FAMILIES, MIXTURES, batch, drawn, source_of
from tests.peak_bytes import PeakBytes

DEEP = {"num_hidden_layers": 5}


def results(model: Decoder, shapes=((2, 24), (2, 24), (1, 9))) -> list[torch.Tensor]:
    """Losses of micro-batches, the last one smaller, and the sums of their gradients."""
    found = []
    for seed, (rows, length) in enumerate(shapes):
        ids, labels = batch(rows=rows, length=length, seed=seed)
        sums = model(ids, labels)
        sums.loss.backward()
        found += [sums.loss.detach(), sums.nll.detach()]
    return found + [p.grad for p in model.parameters() if p.requires_grad]


def pair(name: str, mode: str, **options) -> list[Decoder]:
    """The same model without and with its residuals in host memory."""
    models = [drawn(source_of(name, **DEEP), **options) for _ in range(2)]
    for model in models:
        apply_recompute(model, RECOMPUTE_SETS[mode])
    models[1].residual_offload = ResidualOffload(len(models[1].layers))
    return models


def assert_same(models: list[Decoder]) -> None:
    one, other = map(results, models)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    offload = models[1].residual_offload
    assert not offload._kept and len(offload._host) == len(models[1].layers) - 1


CASES = [(name, mode) for name in (*FAMILIES, *MIXTURES) for mode in ("none", "selective", "full")]
SAMPLE = {("llama3", "none"), ("qwen2", "selective"), ("qwen3", "full"), ("qwen2_moe", "full"), ("deepseek_v3", "none")}


@pytest.mark.parametrize(("name", "mode"), sampled(CASES, lambda *case: case not in SAMPLE))
def test_losses_and_gradients_are_those_without(name, mode):
    models = pair(name, mode)
    for model in models:  # their gradients reach layers beside the stream
        model.router_losses.balance = model.router_losses.z = 0.1
    assert_same(models)


@pytest.mark.parametrize("mode", ["none", "full"])
def test_of_adapters_too(mode):
    """The first layer's input has no gradient, and is kept all the same."""
    models = pair("qwen3", mode, dtype=torch.bfloat16)
    for model in models:
        add_lora(model, Lora(r=2, base="nf4"), seed=0)
    assert_same(models)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("mode", ["none", "full"])
def test_compiled_layers_keep_theirs_in_host_memory(mode):
    torch._dynamo.reset()
    models = pair("qwen2", mode, dtype=torch.bfloat16)
    for model in models:
        compile_layers(model)
    assert_same(models)


def test_the_device_holds_two_of_them(monkeypatch):
    """While a layer runs forward its own and the last one's; in backward its own and the next one's."""
    model = pair("qwen3", "full")[1]
    ids, labels = batch()
    held = []

    def count(*_: object) -> None:
        kept = model.residual_offload._kept.values()
        held.append(sum(residual.on_device for residual in kept))

    for layer in model.layers:
        layer.register_forward_hook(count)
    fetch = residual_offload.ResidualOffload._bring_back
    monkeypatch.setattr(residual_offload.ResidualOffload, "_bring_back", lambda *args: (fetch(*args), count()))
    loss = model(ids, labels).loss
    assert held == [0, 1, 1, 1, 1]  # and the input of the layer that runs
    count()
    assert held.pop() == 0
    held.clear()
    loss.backward()
    assert held == [1] * 4


@pytest.mark.parametrize("mode", ["none", "full"])
def test_activations_are_fewer_by_what_the_plan_says(mode):
    """After the forward pass; and the host has as many. In fp32: of bf16 a CPU's norms keep an fp32 copy."""
    held, planned = [], []
    for model in pair("qwen2", mode):
        ids, labels = batch(length=64)
        results(model, [(2, 64)])  # gradients and host buffers are there
        on_host = [] if model.residual_offload is None else model.residual_offload._host.values()
        with PeakBytes([*model.parameters(), *(p.grad for p in model.parameters()), *on_host]) as counted:
            sums = model(ids, labels)
        held.append(sum(storage.nbytes() for ref, _ in counted._live.values() if (storage := ref()) is not None))
        step = StepShape(2, 64, 4, recompute=RECOMPUTE_SETS[mode], compiled=False)
        step = dataclasses.replace(step, residuals_on_host=model.residual_offload is not None)
        planned.append(estimate_memory(model.config, step))
        sums.loss.backward()
    moved = 2 * 64 * model.config.hidden_size * 4 * 4
    assert held[0] - held[1] == moved == planned[0].activations - planned[1].activations
    assert planned[0].host == {} and planned[1].host == {"residuals": moved}
    assert model.residual_offload.host_bytes == moved
    assert planned[1].backward - planned[0].backward in (0, moved // 4)  # the next one, on its way


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_gpus_peak_falls_by_what_the_plan_says(compiled):
    shape = {"hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "head_dim": 128}
    shape |= {"num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 8192}
    taken, planned = [], []
    for moved in (False, True):
        torch._dynamo.reset()
        model = drawn(source_of("qwen3", **shape), device=torch.device("cuda"), dtype=torch.bfloat16)
        apply_recompute(model, RECOMPUTE_SETS["full"])
        if compiled:
            compile_layers(model)
        if moved:
            model.residual_offload = ResidualOffload(12)
        ids, labels = (t.cuda() for t in batch(rows=1, length=8192))
        for _ in range(3):
            before = torch.cuda.memory_allocated()  # of the last one with gradients and all that is made once
            torch.cuda.reset_peak_memory_stats()
            model(ids, labels).loss.backward()
            torch.cuda.synchronize()
        taken.append(torch.cuda.max_memory_allocated() - before)
        full = RECOMPUTE_SETS["full"]
        step = StepShape(1, 8192, recompute=full, compiled=compiled, accumulates=True, residuals_on_host=moved)
        planned.append(estimate_memory(model.config, step))
    assert all(buffer.is_pinned() for buffer in model.residual_offload._host.values())
    assert model.residual_offload.host_bytes == planned[1].host["residuals"] == 11 * 8192 * 1024 * 2
    assert planned[0].peak - planned[1].peak == 10 * 8192 * 1024 * 2
    assert taken[0] - taken[1] == pytest.approx(planned[0].peak - planned[1].peak, rel=0.05)


def test_no_gradient_no_copy():
    model = pair("qwen3", "full")[1]
    with torch.no_grad():
        model(*batch())
    assert model.residual_offload.host_bytes == 0


def test_a_pass_that_was_broken_off_leaves_nothing():
    models = pair("qwen3", "full")
    models[1](*batch())  # without backward
    assert_same(models)


def test_backward_of_an_earlier_pass_is_refused():
    model = pair("qwen3", "none")[1]
    first, second = (model(*batch(seed=seed)).loss for seed in (0, 1))
    with pytest.raises(RuntimeError, match="not the last one"):
        first.backward()
    second.backward()
