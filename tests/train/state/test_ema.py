"""The moving average of the weights: its values, its use in evaluation, and that it changes nothing else."""

import pytest
import torch
from torch import nn

from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import SCHEMES, QuantizedModel, quantize_linears
from qtrain.train.state.ema import Ema
from qtrain.train.state.state_dict import model_tensors
from qtrain.train.step.step import eval_weights


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))


def average(net: nn.Module, quantized: QuantizedModel, decay: float) -> Ema:
    return Ema(net, decay, DataParallel(net, quantized, Mesh()))


def test_the_average_follows_its_formula_and_covers_buffers():
    net = model()
    ema = average(net, quantize_linears(net, SCHEMES.make("bf16", {}, "--quantize"), seed=0), 0.9)
    expected = {name: t.clone() for name, t in net.state_dict().items() if t.is_floating_point()}
    assert "1.running_mean" in expected
    for step in range(1, 30):
        with torch.no_grad():
            for p in net.parameters():
                p.add_(0.1)
            net(torch.randn(5, 8))
        decay = min(0.9, (1 + step) / (10 + step))
        for name, tensor in net.state_dict().items():
            if name in expected:
                expected[name] = decay * expected[name] + (1 - decay) * tensor
        ema.update(step)
    assert ema.tensors().keys() == expected.keys()
    assert all(torch.allclose(ema.tensors()[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize("scheme", ["bf16", "int8", "int8_weight"])
def test_it_replaces_the_weights_and_restores_every_bit(scheme):
    net = model()
    quantized = quantize_linears(net, SCHEMES.make(scheme, {}, "--quantize"), seed=0)
    optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(parameter_groups(net, 0.0), 0.1, seed=0)
    quantized.track_versions(optimizer)
    ema, images = average(net, quantized, 0.5), torch.randn(6, 8)
    for step in range(1, 4):
        net(images).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        quantized.refresh()
        ema.update(step)
    before, net = {k: t.detach().clone() for k, t in model_tensors(net).items()}, net.eval()
    live = net(images).detach()
    with eval_weights(optimizer, quantized, ema):
        quantized.assert_fresh()
        averaged = net(images).detach()
        assert not torch.equal(averaged, live)
        plain = model().eval()
        plain.load_state_dict({**plain.state_dict(), **ema.tensors()})
        assert float(((plain(images) - averaged).norm() / averaged.norm()).detach()) < (
            1e-6 if scheme == "bf16" else 0.05
        )
    with pytest.raises(KeyboardInterrupt), eval_weights(optimizer, quantized, ema):  # left in haste
        raise KeyboardInterrupt
    quantized.assert_fresh()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model_tensors(net).items())
    assert torch.equal(net(images), live)
