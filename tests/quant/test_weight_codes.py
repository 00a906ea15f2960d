"""One layout of a weight's codes in place of two (`--weight_codes one`): the same bits, half the memory."""

from pathlib import Path

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import llm_pretrain
from qtrain.kernels.quantize.nf4 import quantize_nf4
from qtrain.kernels.quantize.operators import quantize
from qtrain.models import Decoder, Lora, add_lora, apply_recompute
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.gemm_table import multiply
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.quant.weight_codes import WeightCodes, in_one_layout
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor
from tests.cases import sampled
from tests.data.corpora import write_jsonl
from tests.models.cost.test_memory import kept_bytes
from tests.models.families import batch, drawn, source_of
from tests.system import call, flags, losses, only_run, write_model

IN_ONE = {
    "fp8_tensorwise": {},
    "delayed": {"scaling": "delayed"},
    "fp8_blockwise": {},
    "int8_blockwise": {},
    "switchback": {},
    "int8_weight": {"activations": "int8"},
    "bitnet": {"backward": "int8"},
    "binary": {"backward": "int8"},
}
"""Schemes of which one layout follows from the other, with their options."""


def scheme_of(name: str, kwargs: dict):
    return SCHEMES.make("fp8_tensorwise" if name == "delayed" else name, kwargs, "-")


def model_of(scheme, one: bool, lora: Lora | None = None) -> tuple[Decoder, object]:
    model = drawn(source_of("llama2", hidden_size=64, intermediate_size=128, num_hidden_layers=2), dtype=torch.bfloat16)
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head, one_weight_layout=one)
    if lora is not None:
        add_lora(model, lora, seed=0)
        for p in model.parameters():
            if p.requires_grad:
                torch.nn.init.normal_(p, std=0.1, generator=torch.Generator().manual_seed(len(p)))
    return model, quantized


def results(model: Decoder) -> list[torch.Tensor]:
    model.zero_grad()
    loss = model(*batch()).loss
    loss.backward()
    return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def code_bytes(model: Decoder) -> int:
    buffers = [b for m in model.modules() if isinstance(m, WeightCodes) for b in m.buffers()]
    return sum(b.nbytes for b in buffers if b.dtype.itemsize == 1)


@pytest.mark.parametrize("gpu", [False, True], ids=["", "fused"])
@pytest.mark.parametrize("name", IN_ONE)
def test_losses_and_gradients_are_those_of_two_layouts(name, gpu, monkeypatch):
    """Also after the weights have changed."""
    monkeypatch.setattr("qtrain.models.native.mlp.runs_kernels", lambda x: gpu)
    found, held = [], []
    for one in (False, True):
        model, quantized = model_of(scheme_of(name, IN_ONE[name]), one)
        results(model)
        with torch.no_grad():
            model.layers[0].attn.qkv.weight.mul_(1.5) if name != "int8_weight" else None
        quantized.refresh()
        found.append(results(model))
        held.append(code_bytes(model))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert held[0] == 2 * held[1]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["fp8_tensorwise", "delayed", "fp8_blockwise", "int8_blockwise", "switchback"])
def test_codes_are_refreshed_in_their_own_memory(name):
    linear = torch.nn.Linear(2048, 4096, bias=False, dtype=torch.bfloat16, device="cuda")
    model = torch.nn.Sequential(linear)
    quantized = quantize_linears(model, scheme_of(name, IN_ONE[name]), seed=0, one_weight_layout=True)
    with torch.no_grad():
        model[0].weight.mul_(1.5)
    weight = model[0].weight.clone()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantized.refresh()
    assert torch.cuda.max_memory_allocated() - before < weight.numel() / 8
    codes = model[0].weight_codes.operands().rows
    expected = quantize(weight, codes.format.fmt, codes.format.granularity)
    assert torch.equal(codes.codes.view(torch.int8), expected[0].view(torch.int8))
    assert torch.equal(codes.scale, expected[1])


@pytest.mark.parametrize("base", ["int8", "fp8"])
def test_of_a_frozen_base_too(base):
    found = [results(model_of(base_scheme(base, "bf16"), one, Lora(r=2))[0]) for one in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_schemes_without_a_second_layout_that_follows_from_the_first_stay_as_they_are():
    """Under scales of rows, or with stochastic rounding of weights, or one layout as it is."""
    for name in SCHEMES.names():
        schemes = [SCHEMES.make(name, {}, "-")] if name not in ("auto", "bf16") else []
        for scheme in schemes:
            changed = in_one_layout(scheme) is not scheme
            assert changed == (name in IN_ONE and not IN_ONE[name]), name
    assert in_one_layout(base_scheme("nf4", "bf16")) == base_scheme("nf4", "bf16")
    rounded = SCHEMES.make("int8_blockwise", {"stochastic_rounding": True}, "-")
    assert in_one_layout(rounded) is rounded


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "kinds"),
    sampled(
        [(name, kinds) for name in ("fp8_tensorwise", "fp8 base") for kinds in ([], ["norm", "swiglu"], ["block"])],
        lambda name, kinds: kinds != [],
    ),
)
def test_a_compiler_does_not_keep_the_other_layout(name, kinds):
    """It is made when dy exists, and not in forward."""
    found = []
    for one in (False, True):
        torch._dynamo.reset()
        scheme = base_scheme("fp8", "bf16") if name == "fp8 base" else scheme_of(name, {})
        model, _ = model_of(scheme, one, Lora(r=2) if name == "fp8 base" else None)
        apply_recompute(model, kinds)
        model.layers[0].compile(fullgraph=True, backend="aot_eager_decomp_partition")
        found.append(kept_bytes(model, 2, 16))
    assert found[1] == pytest.approx(found[0], rel=0.01)


@pytest.mark.parametrize(
    ("w", "operator"),
    [
        (OperandFormat("e4m3", "rowwise", sum_dim=0), "transpose_rowwise"),
        (OperandFormat("e4m3", "tensorwise", sum_dim=0), "transpose_8bit"),
        (OperandFormat("nf4", "1x64"), "nf4_to_8bit"),
    ],
)
def test_the_other_layout_depends_on_dy(w, operator):
    """As a compiler sees it: what depends on nothing but weights it may make in forward and keep."""
    dy = quantize(torch.randn(32, 64), "e4m3", "rowwise")
    value = torch.randn(64, 128)
    codes = quantize_nf4(value) if w.fmt == "nf4" else quantize(value, "e4m3", w.granularity)

    def grad_input(dy_codes, dy_scale, w_codes, w_scale):
        left = QuantizedTensor(dy_codes, dy_scale, OperandFormat("e4m3", "rowwise"))
        return multiply("grad_input", left, QuantizedTensor(w_codes, w_scale, w), torch.float32)

    graph = make_fx(grad_input)(*dy, *codes).graph
    dy_codes = next(iter(graph.nodes))
    (node,) = (node for node in graph.nodes if str(node.target) == f"qtrain.{operator}.default")
    assert dy_codes in node.all_input_nodes


def test_a_run_has_the_losses_of_two_layouts(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    data = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    settings = {"model": "tiny.json", "train_ds": data, "seq_len": 32, "n_steps": 3, "device": "cpu", "export": False}
    settings |= {"quantize": "fp8_tensorwise", "quantize_lm_head": True, "ckpt_interval": 0}
    found = []
    for codes in ("both", "one"):
        done = call(llm_pretrain.main, flags(**settings, weight_codes=codes, runs_dir=codes))
        assert done.code == 0, done.err
        found.append(losses(only_run(Path(codes))))
    assert found[0] == found[1]
