"""Recomputation and compilation change speed and memory, not results."""

from collections import Counter

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.models import RECOMPUTE_KINDS, RECOMPUTE_SETS, apply_recompute, compile_layers, execution
from qtrain.models.native.attention import SequenceInfo
from qtrain.quant import SCHEMES, quantize_linears
from tests.cases import sampled
from tests.models.families import DOC_IDS, batch, drawn, source_of

KINDS = (
    [], *([kind] for kind in RECOMPUTE_KINDS), ["norm", "swiglu"], ["norm", "qkv"], ["qkv", "attention"],
    ["norm", "swiglu", "qkv", "attention", "ffn"],
)  # fmt: skip


def gradients(model, doc_ids=None) -> dict[str, torch.Tensor]:
    ids, labels = batch()
    model.zero_grad()
    model(ids, labels, doc_ids).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("doc_ids", [None, DOC_IDS], ids=["causal", "documents"])
@pytest.mark.parametrize("name", ["llama2", "qwen3"])
def test_gradients_are_the_same_bit_for_bit_whatever_is_recomputed(name, doc_ids):
    model = drawn(source_of(name))
    expected = gradients(model, doc_ids)
    for kinds in KINDS:
        apply_recompute(model, kinds)
        found = gradients(model, doc_ids)
        assert all(torch.equal(found[name], expected[name]) for name in expected), kinds


@pytest.mark.parametrize(
    ("name", "kinds"),
    sampled(
        [(n, k) for n in ("bitnet", "qwen3_moe", "deepseek_v3") for k in KINDS[1:]],
        lambda name, kinds: kinds != (["norm", "qkv"] if name == "deepseek_v3" else ["ffn"]),
    ),
    ids=str,
)
def test_gradients_are_the_same_bit_for_bit_in_other_layers(name, kinds):
    """BitNet's norms, a mixture of experts, latent attention and shared experts."""
    model = drawn(source_of(name, num_hidden_layers=2))
    expected = gradients(model)
    apply_recompute(model, kinds)
    found = gradients(model)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def in_scheme(scheme: str, dtype: torch.dtype = torch.float32, device: str = "cpu", factor: float = 1, **shape: int):
    """Layers with a bias, which some products add by themselves. factor: of their weights."""
    model = drawn(source_of("qwen2", **shape), dtype=dtype).to(device)
    for p in model.layers.parameters():
        p.data *= factor if p.ndim == 2 else 1
    quantize_linears(model, SCHEMES.get(scheme, "--quantize")(), seed=0, head=model.lm_head)
    return model


@pytest.mark.parametrize("scheme", [name for name in SCHEMES.names() if name != "auto"])
def test_gradients_are_the_same_bit_for_bit_in_every_scheme(scheme):
    model = in_scheme(scheme)
    expected = gradients(model)
    for kinds in (["norm", "swiglu"], ["qkv", "attention"]):
        apply_recompute(model, kinds)
        found = gradients(model)
        assert all(torch.equal(found[name], expected[name]) for name in expected), kinds


@pytest.mark.gpu
@pytest.mark.parametrize("kinds", [[], ["norm", "swiglu"]], ids=str)
@pytest.mark.parametrize("scheme", ["int4", "int8", "fp8_rowwise", "fp8_blockwise"])
def test_compiled_layers_have_the_gradients_of_eager_ones(scheme, kinds):
    """Each parameter's is about as large: a change in place of a result that a region keeps drops the gradient of all
    that came before. Codes on the other side of a rounding threshold change them too: in INT4 of small weights, by 1.22
    at most when the embedding's values moved by 0.4% (eight draws), but by 1.85 of the weights as they are drawn."""
    torch._dynamo.reset()
    shape = {"hidden_size": 256, "intermediate_size": 640, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = in_scheme(scheme, torch.bfloat16, "cuda", factor=0.25, **shape)
    ids, labels = (t.cuda() for t in batch())

    def norms_of_a_step() -> dict[str, float]:
        model.zero_grad()
        model(ids, labels).loss.backward()
        return {name: p.grad.float().norm().item() for name, p in model.named_parameters()}

    expected = norms_of_a_step()
    apply_recompute(model, kinds)
    compile_layers(model)
    for name, norm in norms_of_a_step().items():
        assert 0.6 < norm / expected[name] < 1.6, name


@pytest.mark.parametrize("low_bit", [False, True])
def test_each_kind_computes_again_what_it_says(low_bit):
    """Matrix products, and attention, of one layer's backward: it has two products a linear of its own."""
    model = drawn(source_of("llama2"))
    if low_bit:
        quantize_linears(model, SCHEMES.get("fp8_rowwise", "-")(), seed=0, head=model.lm_head)
    x = torch.randn(2, 24, 32, requires_grad=True)
    cos = sin = torch.ones(24, 1, 4)
    info = SequenceInfo(2, 24, cos, sin)
    aten, qtrain = torch.ops.aten, torch.ops.qtrain
    counted = {op: "products" for op in (aten.mm.default, aten.addmm.default, qtrain.scaled_mm.default)}
    counted[aten._scaled_dot_product_flash_attention_for_cpu.default] = "attention"
    calls = {}
    for kinds in KINDS:
        apply_recompute(model, kinds)
        found = Counter()

        class Count(torch.utils._python_dispatch.TorchDispatchMode):
            def __torch_dispatch__(self, op, types, args=(), kwargs=None, found=found):
                found[counted.get(op)] += 1
                return op(*args, **(kwargs or {}))

        out = model.layers[0](x, info)
        with Count():
            out.sum().backward()
        calls[" ".join(kinds)] = found["products"] - 8, found["attention"]
    # Of down nothing reads the product: a plain linear keeps its input before it multiplies, a low-bit one after that.
    last = int(low_bit)
    assert calls == {
        "": (0, 0),
        "norm": (0, 0),
        "swiglu": (0, 0),
        "qkv": (1, 0),
        "attention": (0, 1),
        "ffn": (1 + last, 0),
        "block": (3 + last, 1),
        "norm swiglu": (0, 0),
        "norm qkv": (1, 0),
        "qkv attention": (1, 1),
        "norm swiglu qkv attention ffn": (2 + last, 1),
    }


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
    for kinds in KINDS:
        apply_recompute(model, kinds)
        found = gradients(model)
        assert all(torch.equal(found[name], expected[name]) for name in expected), kinds


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


def relative(found, expected):
    return max(float((found[n] - expected[n]).norm() / expected[n].norm()) for n in expected if n != "lm_head.weight")


@pytest.mark.parametrize("name", ["qwen2", "qwen3_moe", "bitnet"])
def test_gate_up_in_8_bits_rounds_gradients_alone(name):
    """Of a mixture, and of an MLP with a norm before its output projection too. bitnet: its norms raise the error."""
    model = drawn(source_of(name))
    expected, ids = gradients(model), torch.arange(12).view(1, 12)
    loss = model(ids, ids).loss
    for kinds in ([], ["swiglu"], ["qkv", "attention"])[:: 2 if name == "bitnet" else 1]:
        apply_recompute(model, kinds, ["gate_up"])
        assert torch.equal(model(ids, ids).loss, loss)
        found = gradients(model)
        assert list(found) == list(expected) and 1e-4 < relative(found, expected) < 0.08, kinds
    apply_recompute(model, [])
    assert relative(gradients(model), expected) == 0


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("kinds", [pytest.param(["swiglu"], marks=pytest.mark.sweep), ["norm", "swiglu"]], ids=str)
def test_compiled_layers_round_gate_up_alike(kinds):
    torch._dynamo.reset()
    model = drawn(source_of("qwen2"))
    apply_recompute(model, ["swiglu"], ["gate_up"])
    expected = gradients(model)
    apply_recompute(model, kinds, ["gate_up"])
    compile_layers(model)
    assert relative(gradients(model), expected) < 2e-3  # a code that falls on the other side of a step


@pytest.mark.parametrize("family", ["qwen2", "llama-biases-linear-rope"])
def test_training_with_gate_up_in_8_bits_stays_near_training_without(family):
    losses = {}
    for keep_8bit in ((), ("gate_up",)):
        model = drawn(source_of(family))
        apply_recompute(model, ["swiglu"] if keep_8bit else [], keep_8bit)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        generator, losses[keep_8bit] = torch.Generator().manual_seed(0), []
        for _ in range(60):
            start = torch.randint(0, 8, (8, 1), generator=generator)
            ids = (start + 3 * torch.arange(17)) % 29
            optimizer.zero_grad()
            sums = model(ids[:, :-1], ids[:, 1:])
            sums.loss.backward()
            optimizer.step()
            losses[keep_8bit].append(sums.loss.item() / 128)
    exact, kept = losses.values()
    assert exact[0] == kept[0] and exact[-1] < 0.5 * exact[0]
    assert max(abs(a - b) for a, b in zip(exact, kept, strict=True)) < 0.03


def test_unknown_tensor_in_8_bits():
    with pytest.raises(UserError, match=r"--keep_8bit: unknown tensor 'gateup'. Did you mean 'gate_up'"):
        apply_recompute(drawn(source_of("llama2")), [], ["gateup"])


def test_unknown_kind():
    with pytest.raises(UserError, match=r"--recompute: unknown kind 'atention'. Did you mean 'attention'"):
        apply_recompute(drawn(source_of("llama2")), ["norm", "atention"])


def test_compiled_code_is_cached_apart_for_each_state_of_the_kernels(monkeypatch):
    """Code that torch has cached calls custom ops by name, with the arguments that they had when it was compiled."""
    monkeypatch.setattr(execution, "kernels_checksum", lambda: 0xABC)
    # Not by monkeypatch, which leaves the option deleted: torch's options are no attributes of the module's own.
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for _ in range(2):
            execution.prepare_compiling()
            assert torch.compiler.config.cache_key_tag == "mine qtrain 00000abc"
