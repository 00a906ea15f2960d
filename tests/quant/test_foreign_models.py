"""Models that are not ours: transformers' and timm's, eager and compiled."""

import pytest
import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from transformers.models.llama.modeling_llama import LlamaConfig, LlamaMLP

from qtrain.models import ModelSource, build_model
from qtrain.quant import SCHEMES, LowBitLinear, quantize_linears

SCHEMES_TRIED = ["int8", "bitnet", "int8_weight"]
NEOX = {"model_type": "gpt_neox", "vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


@pytest.mark.parametrize("name", SCHEMES_TRIED)
def test_a_model_of_transformers(name):
    """Linears with biases, in an architecture that the native decoder does not cover; the head is left."""
    torch._dynamo.reset()
    source = ModelSource("neox", {**NEOX, "num_attention_heads": 4}, "--model")
    model = build_model(source, impl="hf")
    ids = torch.randint(0, 97, (2, 9))
    plain = model(ids).detach()
    quantized = quantize_linears(model, SCHEMES.make(name, {}, "--quantize"), seed=0, head=model.lm_head)
    taken = [choice for choice in quantized.choices if choice.reason is None]
    assert len(taken) == 8 and quantized.choices[-1].reason.startswith("output head")
    logits = model(ids)
    assert relative(logits.detach(), plain) < (0.05 if name != "bitnet" else 2)
    model(ids[:, :-1], ids[:, 1:]).loss.backward()
    gradient = model.model.gpt_neox.layers[0].mlp.dense_h_to_4h.weight.grad
    assert gradient.abs().sum() > 0
    if name == "int8":
        for layer in model.layers:
            layer.compile(backend="aot_eager")
        assert relative(model(ids).detach(), logits.detach()) < 1e-5


@pytest.mark.parametrize("name", SCHEMES_TRIED)
def test_a_vision_transformer_of_timm(name):
    """qkv, proj, fc1 and fc2, with their biases; the classifier is left, small linears on request."""
    timm = pytest.importorskip("timm")
    torch._dynamo.reset()
    torch.manual_seed(0)
    options = {"img_size": 32, "patch_size": 8, "embed_dim": 48, "depth": 2, "num_heads": 3, "num_classes": 10}
    model = timm.models.VisionTransformer(**options)
    nn.init.normal_(model.head.weight)
    images = torch.randn(2, 3, 32, 32)
    plain = model(images).detach()
    scheme = SCHEMES.make(name, {}, "--quantize")
    quantized = quantize_linears(model, scheme, seed=0, head=model.get_classifier(), min_size=48)
    kinds = {type(model.get_submodule(f"blocks.1.{n}")) for n in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert kinds == {LowBitLinear} and len(quantized.linears) == 8
    logits = model(images)
    assert relative(logits.detach(), plain) < (0.05 if name != "bitnet" else 2)
    logits.sum().backward()
    assert model.blocks[0].mlp.fc1.bias.grad.abs().sum() > 0
    if name == "int8":
        compiled = torch.compile(model.blocks[0], fullgraph=True, backend="aot_eager")
        tokens = torch.randn(2, 17, 48)
        assert relative(compiled(tokens).detach(), model.blocks[0](tokens).detach()) < 1e-5


def test_a_linear_of_two_names_is_swapped_under_both():
    linear = nn.Linear(8, 8)
    model = nn.ModuleDict({"a": linear, "b": nn.Sequential(linear)})
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, "--quantize"), seed=0)
    assert model["a"] is model["b"][0] is quantized.linears[0] and len(quantized.choices) == 1


@pytest.mark.parametrize("rounding", [None, True, False])
def test_linears_that_read_one_input_share_its_quantization(rounding):
    """Compiled, gate and up of a transformers MLP: x is quantized once, stochastic or not, and the results stay."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    model = LlamaMLP(LlamaConfig(hidden_size=64, intermediate_size=96))
    quantized = quantize_linears(
        model, SCHEMES.make("int8", {"stochastic_rounding": rounding}, "--quantize_kwargs"), seed=5
    )
    assert model.gate_proj.key is model.up_proj.key and model.down_proj.key is not model.up_proj.key
    quantized.set_step(3)
    graphs = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    backend = aot_autograd(
        fw_compiler=keep,
        bw_compiler=keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    x, dy = torch.randn(2, 16, 64), torch.randn(2, 16, 64)
    results = []
    for run in (model, torch.compile(model, backend=backend, fullgraph=True)):
        leaf = x.clone().requires_grad_()
        model.zero_grad()
        y = run(leaf)
        y.backward(dy)
        results.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))
    quantizers = [n for n in graphs[0].graph.nodes if n.target == torch.ops.qtrain.quantize_dual.default]
    assert len(quantizers) == 2  # of gate's and up's input, and of down's
