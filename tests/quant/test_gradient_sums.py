"""Gradients of weights that their products add up over micro-batches: autograd's, and read once the step is over."""

import pytest
import torch

from qtrain.models import ModelSource, build_model
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.gradient_sums import LEAST_MICRO_BATCHES, GradientSums
from qtrain.quant.linear import LowBitLinear
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import compute_gradients
from tests.system import TINY
from tests.train.step.test_step import masked_batch, split

SUMMED = {
    "int8": {},
    "fp8_rowwise": {"fast_accum": True},
    "fp8_tensorwise": {"scaling": "delayed", "fast_accum": True},
}
"""Schemes whose `grad_weight` has scales of rows or of the whole tensor, and of FP8 fast accumulation."""


def build(scheme, options, dtype=torch.float32, device="cpu"):
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=1).to(device, dtype)
    return model, quantize_linears(model, SCHEMES.make(scheme, options, "--quantize"), seed=0)


def gradients(model, quantized, parallel, step, micro_batches=4):
    batches = [batch.to(next(model.parameters()).device) for batch in split(masked_batch(step), 8 // micro_batches)]
    found = compute_gradients(model, language_forward(model, None), quantized, batches, step, parallel=parallel)
    taken = {name: p.grad.clone() for name, p in model.named_parameters()}
    for p in model.parameters():
        p.grad = None
    return found, taken


def summed(linear: LowBitLinear) -> bool:
    return linear.gradient_sum is not None


@pytest.mark.parametrize(("scheme", "compiled"), [*((name, False) for name in SUMMED), ("fp8_tensorwise", True)])
def test_gradients_are_those_that_autograd_adds_up(scheme, compiled, monkeypatch):
    """In fp32, where one rounding and two are the same; two steps, whose sums begin at zero."""
    results, added = [], []
    begin = GradientSums.begin_step

    def note(self, micro_batches):
        begin(self, micro_batches)
        added.append(sum(map(summed, quantized.linears)))

    monkeypatch.setattr(GradientSums, "begin_step", note)
    for in_products in (False, True):
        model, quantized = build(scheme, SUMMED[scheme])
        if compiled:
            for layer in model.layers:
                layer.compile()
        sums = GradientSums(quantized, model.lm_head) if in_products else None
        parallel = DataParallel(model, quantized, Mesh(), gradient_sums=sums)
        results.append([gradients(model, quantized, parallel, step) for step in range(2)])
        assert not any(map(summed, quantized.linears))
    assert added == [sum(linear is not model.lm_head for linear in quantized.linears)] * 2 and added[0] > 4
    for (found, plain), (ours, in_place) in zip(*results, strict=True):
        assert (ours.loss, ours.norm) == (found.loss, found.norm)
        assert plain.keys() == in_place.keys() and all(torch.equal(plain[n], in_place[n]) for n in plain)


def test_few_micro_batches_are_left_to_autograd():
    model, quantized = build("int8", {})
    sums = GradientSums(quantized, model.lm_head)
    parallel = DataParallel(model, quantized, Mesh(), gradient_sums=sums)
    parallel.begin_step(0, LEAST_MICRO_BATCHES - 1)
    assert not any(map(summed, quantized.linears))
    parallel.begin_step(0, LEAST_MICRO_BATCHES)
    assert all(linear.weight.grad is linear.gradient_sum for linear in quantized.linears if summed(linear))


@pytest.mark.parametrize(
    ("scheme", "options", "some"),
    [
        ("int8", {}, True),
        ("int8", {"grad_weight": "bf16"}, False),
        ("fp8_blockwise", {}, False),
        ("fp8_rowwise", {}, False),
    ],
)
def test_which_linears(scheme, options, some):
    """Not the head, whose gradient the loss takes, nor frozen ones; none where `grad_weight` reads values or
    blocks, or promotes FP8's sums."""
    model, quantized = build(scheme, options)
    quantized.linears[0].weight.requires_grad_(False)
    sums = GradientSums(quantized, model.lm_head)
    sums.begin_step(LEAST_MICRO_BATCHES)
    expected = [linear for linear in quantized.linears[1:] if linear is not model.lm_head] if some else []
    assert [linear for linear in quantized.linears if summed(linear)] == expected
    sums.end_step()
    assert not any(map(summed, quantized.linears))


@pytest.mark.gpu
@pytest.mark.parametrize(("scheme", "options"), SUMMED.items(), ids=SUMMED)
def test_on_gpu(scheme, options):
    """Compiled; sums in bf16 against those of autograd."""
    results = []
    for in_products in (False, True):
        model, quantized = build(scheme, options, torch.bfloat16, "cuda")
        for layer in model.layers:
            layer.compile()
        sums = GradientSums(quantized, model.lm_head) if in_products else None
        results.append(gradients(model, quantized, DataParallel(model, quantized, Mesh(), gradient_sums=sums), 0)[1])
    for name, plain in results[0].items():
        assert (results[1][name] - plain).norm() <= 2e-2 * plain.norm(), name
