"""On a GPU: linears whose weights are stored or ternary against fp64, compiled too; a measured choice."""

import pytest
import torch
from torch import Tensor, nn

from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.export import exported_weight
from qtrain.quant.schemes.auto import choose_per_shape
from qtrain.tensors.stored_weight import StoredWeight
from tests.cases import matrix

pytestmark = pytest.mark.gpu

CASES = [
    ("int8_weight", {}),
    ("int8_weight", {"activations": "int8"}),
    ("int8_weight", {"activations": "int8_sr"}),
    ("int4_weight", {}),
    ("int4_weight", {"activations": "int8"}),
    ("bitnet", {}),
    ("bitnet", {"backward": "int8"}),
]


def on_gpu(rows: int, columns: int, seed: int) -> Tensor:
    return matrix(rows, columns, seed, dtype=torch.bfloat16).cuda()


def cosine(a: Tensor, b: Tensor) -> float:
    return torch.cosine_similarity(a.double().flatten(), b.double().flatten(), dim=0).item()


@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("compiled", [False, True])
def test_products(name, options, compiled):
    """y, dx and dw against fp64 with the weight as it is exported; the codes are those that the CPU makes."""
    torch._dynamo.reset()
    m, k, n = 272, 512, 384
    model = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16)).cuda()
    reference = nn.Sequential(nn.Linear(k, n, bias=False, dtype=torch.bfloat16))
    reference[0].weight.data.copy_(model[0].weight)
    scheme = SCHEMES.make(name, options, "--quantize")
    quantized = quantize_linears(model, scheme, seed=0)
    quantize_linears(reference, scheme, seed=0)
    differing = (model[0].weight_codes.output_codes.cpu() != reference[0].weight_codes.output_codes).float().mean()
    assert differing == 0 or (name == "bitnet" and differing < 1e-4)  # a mean depends on the order of its sum
    w = exported_weight(model[0]).double()
    if compiled:
        model.compile(fullgraph=True)
    for step in range(2):
        quantized.set_step(step)
        x, dy = on_gpu(m, k, step).requires_grad_(), on_gpu(m, n, step + 5)
        model.zero_grad()
        y = model(x)
        y.backward(dy)
        assert cosine(y, x.double() @ w.t()) > 0.9995
        assert cosine(x.grad, dy.double() @ w) > 0.9995
        assert cosine(model[0].weight.grad, dy.double().t() @ x.detach().double()) > 0.9995


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_storing_is_the_same_as_on_the_cpu(format):
    """Nearest and, under one key, stochastic rounding: every code."""
    value = matrix(272, 520, 0)
    key = torch.tensor([3, 5, 7])
    here = StoredWeight.from_value(value, format)
    there = StoredWeight.from_value(value.cuda(), format)
    assert torch.equal(here.codes, there.codes.cpu()) and torch.equal(here.scale, there.scale.cpu())
    here.store_(value + 0.001, key)
    there.store_(value.cuda() + 0.001, key.cuda())
    assert torch.equal(here.codes, there.codes.cpu())
    assert torch.equal(there.to("cpu").dequantize(), here.dequantize())


def test_the_fastest_of_the_times_that_a_gpu_takes_is_chosen():
    """Which one that is depends on what else the GPU runs."""
    candidates = ["bf16", "int8", "fp8_tensorwise"]
    scheme = SCHEMES.make("auto", {"candidates": candidates}, "--quantize")
    shapes, device = {(4096, 14336): ["a"], (64, 64): ["b"]}, torch.device("cuda", 0)
    chosen, lines = choose_per_shape(scheme, shapes, tokens=8192, accumulation=1, dtype=torch.bfloat16, device=device)
    assert list(chosen) == ["4096 -> 14336", "64 -> 64"]
    for line, name in zip(lines[1:], chosen.values(), strict=True):
        times = [float(word) for word in line.split()[-4:-1]]
        assert min(times) > 0 and candidates[times.index(min(times))] == name, line
