"""The pass over Inductor's graph: which products it replaces, and what compiled code computes with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from qtrain.kernels.gemm.compiled_mm import replace_products

LARGE = (4096, 1024, 1024)


def traced(device: str, dtype: torch.dtype, bias: str, sizes: tuple[int, int, int] = LARGE) -> torch.fx.Graph:
    """x [M, K] · w [N, K]ᵀ, with a bias of N or of M x N numbers."""
    m, n, k = sizes
    with FakeTensorMode():
        shapes = {"x": (m, k), "w": (n, k), "b": {"row": (n,), "matrix": (m, n), "": ()}[bias]}
        x, w, b = (torch.empty(shape, device=device, dtype=dtype) for shape in shapes.values())
        function = (lambda x, w, b: torch.addmm(b, x, w.t())) if bias else (lambda x, w, b: torch.mm(x, w.t()))
        return make_fx(function)(x, w, b).graph


def names(graph: torch.fx.Graph) -> set[str]:
    return {str(node.target) for node in graph.nodes if node.op == "call_function"}


@pytest.mark.parametrize("bias", ["", "row"])
def test_a_large_product_is_replaced(bias):
    graph = traced("cuda", torch.bfloat16, bias)
    replace_products(graph)
    graph.lint()
    assert "qtrain.bf16_mm.default" in names(graph) and not {"aten.mm.default", "aten.addmm.default"} & names(graph)
    (product,) = graph.find_nodes(op="call_function", target=torch.ops.qtrain.bf16_mm.default)
    assert product.meta["val"].shape == LARGE[:2] and len(product.args) == (3 if bias else 2)


@pytest.mark.parametrize(
    "given",
    [
        ("cpu", torch.bfloat16, ""), ("cuda", torch.float32, ""), ("cuda", torch.bfloat16, "matrix"),
        ("cuda", torch.bfloat16, "", (256, 256, 256)),
    ],
)  # fmt: skip
def test_others_stay(given):
    graph = traced(*given)
    before = names(graph)
    replace_products(graph)
    assert names(graph) == before


COMPILED = """
import torch
from torch import nn
from torch._inductor import config
from qtrain.kernels.gemm import bf16_mm, compiled_mm

device = "{device}"
compiled_mm.algorithm_names = lambda: ["cublas 0"]
compiled_mm._is_chosen = (lambda *operands: True) if device == "cpu" else compiled_mm._is_chosen
compiled_mm.choose_compiled_products()
seen = []
replace = compiled_mm.replace_products
compiled_mm.replace_products = lambda graph: (replace(graph), seen.extend(str(n.target) for n in graph.nodes))
torch.manual_seed(0)
width = 64 if device == "cpu" else 1024
layer = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width, bias=False))
layer = layer.to(device, torch.bfloat16)
x = torch.randn(4, width, width, device=device, dtype=torch.bfloat16)
results = []
for module in (layer, torch.compile(layer, fullgraph=True)):
    layer.zero_grad()
    y = module(x)
    (y.float() ** 2).mean().backward()
    results.append([y, *(p.grad for p in layer.parameters())])
for plain, compiled in zip(*results, strict=True):
    assert (plain - compiled).norm() <= 2**-6 * plain.norm(), (plain - compiled).norm() / plain.norm()
products = [name for name in seen if "bf16_mm" in name]
assert len(products) == 5 and not any("aten.mm" in name or "aten.addmm" in name for name in seen), seen
config.post_grad_custom_post_pass = theirs = object()
compiled_mm.choose_compiled_products.cache_clear()
compiled_mm.choose_compiled_products()
assert config.post_grad_custom_post_pass is theirs
print("done")
"""


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_compiled_layers(device, tmp_path):
    """Forward and both gradients of two linears, in a process of its own: the pass stays for the process's life."""
    script = tmp_path / "compiled.py"
    script.write_text(COMPILED.replace("{device}", device))
    # Code from torch's cache would not pass through the pass again.
    root = str(Path(__file__).parents[3])
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PYTHONPATH": root}
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0 and "done" in done.stdout, done.stderr[-3000:]
