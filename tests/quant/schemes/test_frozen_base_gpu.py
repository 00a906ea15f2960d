"""On a GPU: frozen bases in low bits against fp64, in eager, compiled, and recorded as a CUDA graph."""

import pytest
import torch
from torch import nn

from qtrain.quant import quantize_linears
from qtrain.quant.schemes.frozen_base import BASES, base_scheme
from tests.cases import matrix

pytestmark = pytest.mark.gpu
ERROR = {"nf4": 0.004, "int8": 0.02, "fp8": 0.05}
"""Of bf16, and of activations in 8 bits; the weight's own rounding is in the reference too."""


PRODUCTS = [*((base, "bf16") for base in BASES), *(("nf4", p) for p in ("int8", "fp8_rowwise", "fp8_tensorwise"))]


@pytest.mark.parametrize(("base", "products"), PRODUCTS)
@pytest.mark.parametrize("how", ["eager", "compiled", "recorded"])
def test_both_products_of_a_frozen_linear(base, products, how):
    torch._dynamo.reset()
    m, k, n = 272, 512, 384
    model = nn.Sequential(nn.Linear(k, n, dtype=torch.bfloat16)).cuda().requires_grad_(False)
    quantize_linears(model, base_scheme(base, products), seed=0)
    weight, bias = model[0].weight.dequantize().double(), model[0].bias.double()
    run = torch.compile(model, fullgraph=True) if how == "compiled" else model
    x = matrix(m, k, 0, dtype=torch.bfloat16).cuda().requires_grad_()
    dy = matrix(m, n, 1, dtype=torch.bfloat16).cuda()

    def step() -> torch.Tensor:
        x.grad = None
        y = run(x)
        y.backward(dy)
        return y.detach()

    y = step()
    if how == "recorded":
        with torch.cuda.stream(torch.cuda.Stream()):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = step()
        graph.replay()
    truth = x.detach().double() @ weight.t() + bias
    error = ERROR[base] if products == "bf16" else ERROR["int8" if products == "int8" else "fp8"]
    assert (y.double() - truth).norm() < error * truth.norm()
    truth = dy.double() @ weight
    assert (x.grad.double() - truth).norm() < error * truth.norm()
    assert model[0].weight.grad is None
