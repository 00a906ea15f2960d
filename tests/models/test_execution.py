"""Recomputation and compilation change speed and memory, not results."""

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.models import RECOMPUTE_SETS, apply_recompute, compile_layers, execution
from qtrain.models.native.attention import SequenceInfo
from tests.models.families import DOC_IDS, batch, drawn, source_of


def gradients(model, doc_ids=None) -> dict[str, torch.Tensor]:
    ids, labels = batch()
    model.zero_grad()
    model(ids, labels, doc_ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("doc_ids", [None, DOC_IDS], ids=["causal", "documents"])
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_gradients_are_the_same_bit_for_bit_in_every_mode(name, doc_ids):
    model = drawn(source_of(name))
    expected = gradients(model, doc_ids)
    for mode, kinds in RECOMPUTE_SETS.items():
        apply_recompute(model, kinds)
        found = gradients(model, doc_ids)
        assert all(torch.equal(found[name], expected[name]) for name in expected), mode


def test_each_mode_computes_again_what_it_says():
    """Matrix products of one layer's backward: recomputation repeats them in mode `full` only."""
    model = drawn(source_of("llama2"))
    x = torch.randn(2, 24, 32, requires_grad=True)
    cos = sin = torch.ones(24, 1, 4)
    info = SequenceInfo(2, 24, cos, sin)
    calls = {}
    for mode, kinds in RECOMPUTE_SETS.items():
        apply_recompute(model, kinds)
        products = 0

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None):
                nonlocal products
                products += op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
                return op(*args, **(kwargs or {}))

        out = model.layers[0](x, info)
        with Count():
            out.sum().backward()
        calls[mode] = products
    # Backward has two products a linear; full makes forward's four again but for the last, which nothing reads.
    assert calls == {"none": 8, "selective": 8, "full": 11}


def test_selective_is_sound_for_a_custom_autograd_function():
    """A linear of its own forward and backward, as low-bit ones are: nothing of it is kept by name, all made again."""

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            codes = (x * 16).round()
            ctx.save_for_backward(codes, weight)
            return (codes.double() @ weight.t().double()).float() / 16

        @staticmethod
        def backward(ctx, grad):
            codes, weight = ctx.saved_tensors
            return grad @ weight, grad.flatten(0, -2).t() @ codes.flatten(0, -2) / 16

    class RoundedLinear(torch.nn.Linear):
        def forward(self, x):
            return Rounded.apply(x, self.weight)

    def swapped():
        model = drawn(source_of("llama2"))
        for layer in model.layers:
            for owner, name in ((layer.attn, "qkv"), (layer.attn, "o_proj"), (layer.mlp, "gate_up")):
                old = getattr(owner, name)
                new = RoundedLinear(old.in_features, old.out_features, bias=False)
                new.weight = old.weight
                setattr(owner, name, new)
        return model

    model = swapped()
    expected = gradients(model)
    for mode, kinds in RECOMPUTE_SETS.items():
        apply_recompute(model, kinds)
        found = gradients(model)
        assert all(torch.equal(found[name], expected[name]) for name in expected), mode


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("mode", [pytest.param("none", marks=pytest.mark.sweep), "selective"])
def test_compiled_layers_give_the_same_loss_and_gradients(mode):
    """One compilation serves all layers."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = drawn(source_of("qwen2"))
    expected = gradients(model)
    apply_recompute(model, RECOMPUTE_SETS[mode])
    compile_layers(model)
    found = gradients(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    for name in expected:
        assert (found[name] - expected[name]).abs().max() <= 1e-4 * expected[name].abs().max(), name
    assert list(expected) == [name for name, _ in model.named_parameters()]


def test_unknown_kind():
    with pytest.raises(UserError, match=r"--recompute: unknown kind 'atention'. Did you mean 'attention'"):
        apply_recompute(drawn(source_of("llama2")), ["norm", "atention"])


def test_compiled_code_is_cached_apart_for_each_state_of_the_kernels(monkeypatch):
    """Code that torch has cached calls custom ops by name, with the arguments that they had when it was compiled."""
    monkeypatch.setattr(torch.compiler.config, "cache_key_tag", "mine")
    monkeypatch.setattr(execution, "kernels_checksum", lambda: 0xABC)
    for _ in range(2):
        execution.tag_compile_caches()
        assert torch.compiler.config.cache_key_tag == "mine qtrain 00000abc"
