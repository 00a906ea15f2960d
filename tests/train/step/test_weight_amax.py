"""Tensorwise scales of weights come from the absmax that the optimizer leaves, and never from a former one."""

import pytest
import torch

from qtrain.kernels.quantize.absmax import absmax
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import SCHEMES, LowBitLinear, QuantizedModel, quantize_linears, quantizers
from qtrain.train.state.ema import Ema
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients, eval_weights, share_amax
from tests.system import TINY
from tests.train.step.test_step import masked_batch


def small_model(scheme: str, options: dict, optim: str) -> tuple[torch.nn.Module, QuantizedModel, object]:
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=0, dtype=torch.bfloat16)
    quantized = quantize_linears(model, SCHEMES.make(scheme, options, "--quantize"), seed=3, head=model.lm_head)
    optimizer = OPTIMIZERS.make(optim, {}, "--optim").build(parameter_groups(model, 0.1), 0.01, seed=7)
    quantized.track_versions(optimizer)
    share_amax(optimizer, quantized, DataParallel(model, quantized, Mesh()))
    return model, quantized, optimizer


def step(model: torch.nn.Module, quantized: QuantizedModel, optimizer, number: int = 0) -> None:
    gradients = compute_gradients(model, language_forward(model, None), quantized, [masked_batch()], number)
    apply_gradients(optimizer, quantized, gradients, lr=0.01, clip_grad_norm=0.5)


def is_right(linear: LowBitLinear) -> bool:
    return torch.equal(linear.known_amax.view(torch.float32), absmax(linear.weight.detach()))


@pytest.mark.parametrize(
    ("scheme", "options"),
    [("fp8_tensorwise", {}), ("int8", {"granularity": "tensorwise"}), ("switchback", {})],
)
def test_a_refresh_is_given_the_absmax_of_the_present_weight(scheme, options, monkeypatch):
    model, quantized, optimizer = small_model(scheme, options, "adamw_8bit")
    given = []
    into = quantizers.quantize_dual_into
    monkeypatch.setattr(quantizers, "quantize_dual_into", lambda *a: given.append((a[1], a[-1])) or into(*a))
    for number in range(2):
        given.clear()
        step(model, quantized, optimizer, number)
        assert len(given) == len(quantized.linears) == len(quantized.known_amax())
        assert all(torch.equal(amax.view(torch.float32), absmax(weight)) for weight, amax in given)

    # Whatever else changes a weight: its absmax is computed, and only its own.
    with torch.no_grad():
        quantized.linears[0].weight.mul_(2)
    given.clear()
    quantized.refresh()
    assert [amax is None for _, amax in given] == [True] + [False] * (len(given) - 1)
    step(model, quantized, optimizer, 2)
    assert all(map(is_right, quantized.linears))


def test_averaged_weights_have_an_absmax_of_their_own():
    model, quantized, optimizer = small_model("fp8_tensorwise", {}, "adamw")
    ema = Ema(model, 0.5, DataParallel(model, quantized, Mesh()))
    step(model, quantized, optimizer)
    with eval_weights(optimizer, quantized, ema):
        assert not quantized.known_amax()
    assert not quantized.known_amax()


def test_nothing_is_known_of_a_weight_that_the_step_left_alone():
    model, quantized, optimizer = small_model("fp8_tensorwise", {}, "adamw")
    step(model, quantized, optimizer)
    compute_gradients(model, language_forward(model, None), quantized, [masked_batch()], 1)
    quantized.linears[0].weight.grad = None
    with torch.no_grad():
        quantized.linears[0].weight.mul_(2)
    optimizer.step()
    assert quantized.known_amax() == frozenset(range(1, len(quantized.linears)))
    assert all(map(is_right, quantized.linears[1:]))


@pytest.mark.parametrize(
    ("scheme", "optim"),
    [("fp8_tensorwise", "muon"), ("fp8_rowwise", "adamw"), ("bitnet", "adamw"), ("int8_weight", "adamw")],
)
def test_where_nothing_leaves_or_reads_it_nothing_is_known(scheme, optim):
    model, quantized, optimizer = small_model(scheme, {}, optim)
    step(model, quantized, optimizer)
    assert not quantized.known_amax()
