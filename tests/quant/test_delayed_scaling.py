"""Delayed scaling: whose absmax a step is scaled by, what leaves it alone, and that a resumed run goes on exactly."""

import copy

import pytest
import torch
from torch import Tensor, nn

from qtrain.kernels.cross_entropy import cross_entropy
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.quant import SCHEMES, QuantizedModel, quantize_linears
from qtrain.quant.execute import OperandRequest, quantize_operands
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.tensor_roles import DelayedScale
from qtrain.tensors.softmax_gradient import softmax_gradient
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.restore import restore
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import RunFolder
from qtrain.train.state.state_dict import TrainState
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import matrix
from tests.quant.emulation import fake_quantize
from tests.system import TINY
from tests.train.step.test_step import masked_batch

READING = ("e4m3", "tensorwise")


def scheme(**options):
    return SCHEMES.make("fp8_tensorwise", options, "--quantize")


def swapped(**options) -> tuple[nn.Module, QuantizedModel]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    return model, quantize_linears(model, scheme(**options), seed=3)


def run(model: nn.Module, x: Tensor, dy: Tensor) -> list[Tensor]:
    """y, dx, dw of one micro-batch."""
    leaf = x.clone().requires_grad_()
    model.zero_grad()
    y = model(leaf)
    y.backward(dy)
    return [y.detach(), leaf.grad, model[0].weight.grad.clone()]


X, DY = matrix(32, 64, 0), matrix(32, 48, 1) * 1e-6


def test_the_first_step_is_that_of_dynamic_scaling():
    """Nothing is known yet, so that a tensor is scaled by itself: gradients of 1e-6 do not vanish below e4m3."""
    (dynamic, _), (delayed, _) = swapped(), swapped(scaling="delayed")
    assert all(map(torch.equal, run(dynamic, X, DY), run(delayed, X, DY)))


@pytest.mark.parametrize("options", [{}, {"grad_format": "e5m2"}, {"power_of_two": True}])
def test_a_later_step_is_scaled_by_the_largest_of_the_steps_before(options):
    model, quantized = swapped(scaling="delayed", history=2, **options)
    x_max, dy_max = X.abs().max().item(), DY.abs().max().item()
    largest = {"e4m3": 448.0, "e5m2": 57344.0}
    grad_format = options.get("grad_format", "e4m3")
    for factor, in_force in [(1, None), (4, 1), (0.5, 4), (1, 4), (1, 1)]:  # of two steps; the 4 drops out
        y, dx, dw = run(model, X * factor, DY * factor)
        if in_force is not None:
            x_scale = torch.tensor(x_max * in_force) * (1 / 448)
            dy_scale = torch.tensor(dy_max * in_force) * (1 / largest[grad_format])
            if "power_of_two" in options:
                x_scale, dy_scale = (torch.exp2(torch.log2(s).ceil()) for s in (x_scale, dy_scale))
            w = fake_quantize(model[0].weight.detach(), READING, "power_of_two" in options)
            x = fake_quantize(X * factor, READING, scale=x_scale)  # saturates where the step has grown
            dy = fake_quantize(DY * factor, (grad_format, "tensorwise"), scale=dy_scale)
            for found, true in ((y, x @ w.t()), (dx, dy @ w), (dw, dy.t() @ x)):
                assert (found.double() - true).norm() < 1e-4 * true.norm()
        quantized.refresh()


def test_micro_batches_of_a_step_read_one_scale_and_the_largest_is_remembered():
    model, quantized = swapped(scaling="delayed")
    run(model, X, DY)
    quantized.refresh()
    first = run(model, X, DY)
    run(model, X * 8, DY)
    assert all(map(torch.equal, first, run(model, X, DY)))
    quantized.refresh()
    assert quantized.amax.history[0, :, :3].tolist() == [
        pytest.approx([X.abs().max().item() * 8, X.abs().max().item(), 0]),
        pytest.approx([DY.abs().max().item(), DY.abs().max().item(), 0]),
    ]


def test_evaluation_and_a_refresh_without_a_step_change_nothing():
    model, quantized = swapped(scaling="delayed")
    model.eval()
    model(X * 100)  # before the first step, too
    quantized.refresh()
    assert not quantized.amax.history.any()
    model.train()
    run(model, X, DY)
    quantized.refresh()
    before = copy.deepcopy(quantized.amax.history)
    model.eval()
    with torch.no_grad():
        model(X * 100)
    model.train()
    quantized.refresh()
    assert torch.equal(quantized.amax.history, before)


def test_a_bad_value_neither_hides_nor_stays():
    """A scale that is given would let an Inf saturate; and one bad step must not spoil the scales of the next ones."""
    model, quantized = swapped(scaling="delayed")
    run(model, X, DY)
    quantized.refresh()
    good = run(model, X, DY)
    for bad in (float("inf"), float("nan")):
        spoiled = X.clone()
        spoiled[3, 5] = bad
        assert all(not t.isfinite().all() for t in run(model, spoiled, DY)[::2])
        quantized.refresh()
        assert all(map(torch.equal, good, run(model, X, DY)))


def test_each_gemm_in_bf16_and_each_rounding_of_its_own():
    """What one GEMM reads goes through a single quantizer; what is rounded for one of two, through one for both."""
    for options in ({"grad_weight": "bf16"}, {"output": "bf16"}, {"stochastic_rounding": ["grad_weight"]}):
        model, quantized = swapped(scaling="delayed", **options)
        dynamic, _ = swapped(**options)
        run(model, X, DY)
        quantized.refresh()
        assert all(map(torch.equal, run(dynamic, X, DY), run(model, X, DY)))


@pytest.mark.usefixtures("compiler")
def test_compiled_layers_remember_the_same():
    """History is written in forward and in backward; compiled, both are side effects of the graphs."""
    torch._dynamo.reset()
    histories = []
    for compiled in (False, True):
        model = build_model(ModelSource("tiny", TINY, "--model"), seed=0)
        quantized = quantize_linears(model, scheme(scaling="delayed"), seed=3)
        if compiled:
            for layer in model.layers:
                layer.compile(fullgraph=True)
        forward = language_forward(model, None)
        with torch._dynamo.config.patch(error_on_recompile=True):
            for step in range(3):
                compute_gradients(model, forward, quantized, [masked_batch(seed=step)], step)
                quantized.refresh()
        histories.append(quantized.amax.history)
    assert histories[0][..., :3].all() and not histories[0][..., 3:].any()
    assert torch.allclose(*histories, rtol=1e-3)


def test_a_resumed_run_goes_on_bit_for_bit(tmp_path):
    def new_run(checkpoint=None) -> Run:
        model = build_model(ModelSource("tiny", TINY, "--model"), seed=0)
        quantized = quantize_linears(model, scheme(scaling="delayed", stochastic_rounding=True, history=4), seed=3)
        optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(parameter_groups(model, 0.1), 0.01, seed=0)
        quantized.track_versions(optimizer)
        folder = RunFolder(tmp_path, checkpoint)
        settings = LanguageSettings(n_steps=10)
        return Run(settings, "script", folder, torch.device("cpu"), model, quantized, optimizer, TrainState())

    def train(run: Run, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            batches = [masked_batch(seed=run.state.step), masked_batch(seed=run.state.step + 50)]
            forward = language_forward(run.model, None)
            gradients = compute_gradients(run.model, forward, run.quantized, batches, run.state.step)
            apply_gradients(run.optimizer, run.quantized, gradients, lr=0.01, clip_grad_norm=1.0)
            run.state.step += 1
            losses.append(gradients.loss)
        return losses

    whole = new_run()
    train(whole, 3)
    resumed = new_run(whole.save())
    restore(resumed)
    assert torch.equal(resumed.quantized.amax.history, whole.quantized.amax.history)
    assert train(resumed, 4) == train(whole, 4)
    assert torch.equal(resumed.quantized.amax.history, whole.quantized.amax.history)


def test_a_gradient_of_logits_is_quantized_from_its_values_once_they_are_in_memory():
    """The logits are overwritten then. In bf16 the codes are those of rounded values."""
    logits, labels = matrix(32, 48, 2).bfloat16(), torch.arange(32) % 7
    expected = logits.clone()
    cross_entropy(expected, labels, 0.0, True)
    request = OperandRequest(scheme(scaling="delayed"), "dy", delayed=DelayedScale(torch.tensor([0.001]), None))
    _, gradient = softmax_gradient(logits, labels, 0.0)
    assert torch.equal(gradient + 0, expected)
    for found, true in zip(quantize_operands(gradient, request), quantize_operands(expected, request), strict=True):
        assert torch.equal(found.codes.float(), true.codes.float())


@pytest.mark.parametrize("tied", [True, False])
def test_a_model_learns_the_same_without_the_gradient_of_its_logits_in_memory(tied):
    """Two micro-batches a step, two chunks each, z-loss, masked labels; in fp32 both ways have the same codes."""

    def train(in_memory: bool) -> list[Tensor]:
        model = build_model(ModelSource("tiny", {**TINY, "tie_word_embeddings": tied}, "--model"), seed=0)
        model.loss_chunks, model.z_loss = 2, 1e-3
        quantized = quantize_linears(model, scheme(scaling="delayed"), seed=3, head=model.lm_head, quantize_head=True)
        assert isinstance(model.lm_head, LowBitLinear)
        if in_memory:
            model.lm_head.reads_softmax_gradient = lambda *_: False
        optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(parameter_groups(model, 0.1), 0.01, seed=0)
        quantized.track_versions(optimizer)
        forward, losses = language_forward(model, None), []
        for step in range(4):
            batches = [masked_batch(seed=step), masked_batch(seed=step + 50)]
            gradients = compute_gradients(model, forward, quantized, batches, step)
            apply_gradients(optimizer, quantized, gradients, lr=0.01, clip_grad_norm=1.0)
            losses.append(gradients.loss)
        return [torch.tensor(losses), quantized.amax.history[..., :4], model.lm_head.weight.detach()]

    for one, other in zip(train(False), train(True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_recorded_steps_remember_the_same():
    """Forward, backward and refresh replayed as CUDA graphs: history and results of ordinary steps, bit for bit."""
    x, dy = X.cuda().bfloat16(), DY.cuda().bfloat16()
    results = []
    for recorded in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 48, bias=False, device="cuda", dtype=torch.bfloat16))
        quantized = quantize_linears(model, scheme(scaling="delayed", history=4), seed=3)
        factor = torch.ones((), device="cuda", dtype=torch.bfloat16)

        def step(model=model, quantized=quantized, factor=factor) -> Tensor:
            y = model(x * factor)
            y.backward(dy * factor)
            quantized.refresh()
            return y.detach()

        step()
        if recorded:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                y = step()
        seen = []
        for number in (1, 8, 2, 1, 1, 1):
            factor.fill_(number)
            if recorded:
                graph.replay()
                seen.append(y.clone())
            else:
                seen.append(step())
        results.append([*seen, quantized.amax.history])
    assert all(map(torch.equal, *results))
