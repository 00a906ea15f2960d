"""`reassign`: afterwards the model is the one that would have been built with the new map."""

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.models import Lora, ModelSource, add_lora, build_model, compile_layers
from qtrain.models.adapters.lora import LoraLinear
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.quant import SCHEMES, LowBitLinear, attachments, quantize_linears, reassign
from qtrain.quant.scheme_map import scheme_of, with_overrides
from qtrain.train.step.step import eval_weights
from tests.models.families import batch
from tests.quant.test_experts import gradients, module, routing
from tests.quant.test_scheme_map import DELAYED, INT8, losses, mixed, tiny
from tests.system import TINY

DRAWN = {"scheme": "int8", "stochastic_rounding": True}
SWITCH = {"layers.0.attn.qkv": "bf16", "layers.1.mlp.gate_up": "fp8_rowwise", "lm_head": DRAWN}


def schemes(specs: dict) -> dict:
    return {name: scheme_of(spec, "-") for name, spec in specs.items()}


@pytest.mark.parametrize("before", [{"*.o_proj": DRAWN}, {"*": "bf16", "*.o_proj": DRAWN}], ids=["int8", "bf16"])
def test_training_goes_on_as_if_the_model_had_been_built_with_the_map(before):
    """Bit for bit, from the same weights and micro-step: random bits too, which follow from the numbers of linears."""
    model, quantized = mixed(before)
    losses(model, quantized, 2)
    reassign(model, quantized, schemes(SWITCH))
    again, built = mixed({**before, **SWITCH})
    again.load_state_dict(model.state_dict())
    built.set_step(quantized.step)
    built.refresh()
    assert built.schemes == quantized.schemes
    assert built.keys[:, 2].tolist() == quantized.keys[:, 2].tolist()
    for (name, one), (other_name, other) in zip(model.named_modules(), again.named_modules(), strict=True):
        assert name == other_name and type(one) is type(other)
        if isinstance(one, LowBitLinear):
            assert one.scheme == other.scheme and torch.equal(one.key, other.key)
            assert all(map(torch.equal, one.weight_codes.buffers(), other.weight_codes.buffers()))
    assert losses(model, quantized) == losses(again, built)


def test_there_and_back_is_where_it_was():
    model, quantized = mixed({})
    parameters, former = dict(model.named_parameters()), quantized.schemes
    reassign(model, quantized, schemes(SWITCH))
    assert quantized.assignments == 1 and quantized.schemes != former
    reassign(model, quantized, schemes(SWITCH))  # nothing to do
    assert quantized.assignments == 1
    reassign(model, quantized, schemes({name: former[name] for name in SWITCH}))
    assert quantized.assignments == 2 and quantized.schemes == former
    assert all(p is parameters[name] for name, p in model.named_parameters())
    assert losses(model, quantized) == losses(*mixed({}))


def test_a_history_goes_with_its_linear():
    """Kept where a linear stays under delayed scaling, as far as it remembers; fresh where it was not."""
    both = {"*.qkv": DELAYED, "*.o_proj": DELAYED}
    model, quantized = mixed(both)
    losses(model, quantized, 3)
    rows = {name: row.clone() for name, row in quantized.amax_rows().items()}
    scales = model.layers[1].attn.qkv.x_scale.clone()
    assert scales > 0 and all((row[:, :3] > 0).all() for row in rows.values())
    short = {**DELAYED, "history": 2}
    change = {"layers.0.attn.qkv": "int8", "layers.0.attn.o_proj": short, "layers.0.mlp.down_proj": DELAYED}
    reassign(model, quantized, schemes(change))
    now = quantized.amax_rows()
    assert set(now) == set(rows) - {"layers.0.attn.qkv"} | {"layers.0.mlp.down_proj"}
    assert torch.equal(now["layers.1.attn.qkv"], rows["layers.1.attn.qkv"])
    assert torch.equal(now["layers.0.attn.o_proj"][:, :2], rows["layers.0.attn.o_proj"][:, :2])
    assert not now["layers.0.attn.o_proj"][:, 2:].any() and not now["layers.0.mlp.down_proj"].any()
    assert torch.equal(model.layers[1].attn.qkv.x_scale, scales)
    assert model.layers[0].attn.o_proj.x_scale > 0 and model.layers[0].mlp.down_proj.x_scale == 0
    losses(model, quantized, 1)
    assert (quantized.amax_rows()["layers.0.mlp.down_proj"][:, 0] > 0).all()


def test_the_optimizer_goes_on():
    """Its parameters are the model's own, it counts their versions, and leaves their absmax for new scales."""
    model, quantized = mixed({"*": "bf16", "*.qkv": "fp8_tensorwise"})
    optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(parameter_groups(model, 0.1), 0.01)
    quantized.track_versions(optimizer)
    asked = []
    quantized.use_optimizer_amax(lambda linear: asked.append(linear))
    reassign(model, quantized, schemes({"layers.0.mlp.gate_up": "fp8_tensorwise", "layers.0.attn.qkv": "bf16"}))
    assert asked[-1] is model.layers[0].mlp.gate_up
    ids, labels = batch()
    for _ in range(2):
        model(ids, labels).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(AssertionError, match="stale codes"):
            quantized.assert_fresh()
        quantized.refresh()
        quantized.assert_fresh()
    with eval_weights(optimizer, quantized):
        assert model(ids, labels).loss > 0


def test_within_adapters():
    model = tiny()
    quantized = quantize_linears(model, INT8, seed=3, head=model.lm_head)
    add_lora(model, Lora(r=2), seed=0)
    adapted = model.layers[0].attn.qkv
    reassign(model, quantized, schemes({"layers.0.attn.qkv": "bf16", "layers.1.attn.qkv": "fp8_rowwise"}))
    assert model.layers[0].attn.qkv is adapted and isinstance(adapted, LoraLinear) and type(adapted.base) is nn.Linear
    assert model.layers[1].attn.qkv.base.scheme == SCHEMES.make("fp8_rowwise", {}, "-")
    found = losses(model, quantized)
    assert found[-1] < found[0]


def test_of_experts():
    def built(overrides: dict):
        m = module()
        return m, quantize_linears(m, with_overrides(overrides, INT8), seed=0)

    x, dout = torch.randn(2, 300, 128)
    experts, weights = routing(300, "empty")
    m, quantized = built({})
    reassign(m, quantized, schemes({"gate_up": "fp8_rowwise", "down_proj": "bf16"}))
    again, _ = built({"gate_up": "fp8_rowwise", "down_proj": "bf16"})
    one, other = (gradients(model, model, x, experts, weights, dout) for model in (m, again))
    assert all(map(torch.equal, one, other))


def test_a_compiled_model_follows():
    """The compiler notices that modules are others; layers of several schemes compile each on their own."""
    torch._dynamo.reset()
    model, quantized = mixed({"layers.0.*": "bf16"})
    eager, expected = mixed({"layers.0.*": "bf16"})
    compile_layers(model)
    change = schemes({"layers.0.attn.qkv": "int8", "layers.1.mlp.down_proj": "bf16"})
    for linears in ({}, change):
        reassign(model, quantized, linears)
        reassign(eager, expected, linears)
        found = losses(model, quantized, 2)
        assert torch.tensor(found).allclose(torch.tensor(losses(eager, expected, 2)), rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"layers.0.attn.qk": "bf16"}, "unknown linear 'layers.0.attn.qk'. Did you mean 'layers.0.attn.qkv'?"),
        ({"layers.0.attn.qkv": "int8_weight"}, "weights stored in low bits are parameters of another kind"),
        ({"layers.0.attn.qkv": "bitnet"}, 'lacks its norms; give it "sub_norm":false'),
        ({"lm_head": {"scheme": "bitnet", "sub_norm": False}}, "another module shares its weight"),
    ],
)
def test_what_cannot_be_is_refused_and_nothing_changes(change, says):
    model, quantized = mixed({})
    former, modules = quantized.schemes, list(model.modules())
    with pytest.raises(UserError) as error:
        reassign(model, quantized, schemes({"layers.1.attn.qkv": "bf16", **change}))
    assert str(error.value).startswith("reassign: ") and says in str(error.value)
    assert quantized.schemes == former and list(model.modules()) == modules


def test_a_weight_that_is_not_in_memory_is_refused():
    model = build_model(ModelSource("tiny", TINY, "--model"))
    quantized = quantize_linears(model, INT8, seed=3)
    quantized.linear("layers.0.attn.qkv").keep_codes_only()
    reassign(model, quantized, schemes({"layers.0.attn.qkv": "int8", "layers.1.attn.qkv": "bf16"}))
    with pytest.raises(UserError, match=r"its weight is not in memory; call DataParallel\.reassign"):
        reassign(model, quantized, schemes({"layers.0.attn.qkv": "bf16"}))


# ---- what users attach to linears ------------------------------------------------------------------------------------


class Attached:
    """Hooks of every kind on a linear, which count, an attribute, a buffer and a submodule."""

    def __init__(self, linear: nn.Module):
        self.calls = dict.fromkeys(("pre", "forward", "backward", "state", "load"), 0)
        self.handles = [
            linear.register_forward_pre_hook(lambda *_: self.count("pre")),
            linear.register_forward_hook(lambda *_, **__: self.count("forward"), with_kwargs=True, always_call=True),
            linear.register_full_backward_hook(lambda *_: self.count("backward")),
            linear.register_state_dict_post_hook(lambda *_: self.count("state")),
            linear.register_load_state_dict_post_hook(lambda *_: self.count("load")),
        ]
        linear.note, linear.inner = "a user's", nn.Identity()
        linear.register_buffer("kept", torch.ones(3))
        linear.register_buffer("scratch", torch.ones(3), persistent=False)

    def count(self, kind: str) -> None:
        self.calls[kind] += 1

    def check(self, model: nn.Module, name: str) -> None:
        """All are on the linear of this name."""
        linear = model.get_submodule(name)
        before, (ids, labels) = dict(self.calls), batch()
        model(ids, labels).loss.backward()
        state = model.state_dict()
        model.load_state_dict(state)
        assert {kind: n - before[kind] for kind, n in self.calls.items()} == dict.fromkeys(self.calls, 1)
        assert linear.note == "a user's" and isinstance(linear.inner, nn.Identity)
        assert f"{name}.kept" in state and linear.scratch.sum() == 3 and f"{name}.scratch" not in state


def test_hooks_and_attributes_go_with_their_linear():
    """From the build on, through each change of scheme, and their handles still remove them."""
    model, name = tiny(), "layers.1.attn.qkv"
    attached = Attached(model.get_submodule(name))
    quantized = quantize_linears(model, INT8, seed=3, head=model.lm_head)
    attached.check(model, name)
    for spec in ("bf16", DELAYED, "fp8_rowwise", "bf16", "int8"):
        reassign(model, quantized, schemes({name: spec}))
        assert type(model.get_submodule(name)) is (nn.Linear if spec == "bf16" else LowBitLinear)
        attached.check(model, name)
    before = dict(attached.calls)
    for handle in attached.handles:
        handle.remove()
    model(*batch()).loss.backward()
    model.load_state_dict(model.state_dict())
    assert attached.calls == before


def test_a_low_bit_linear_has_the_names_that_are_its_own():
    _, quantized = mixed({"*.qkv": DELAYED})
    for linear in quantized.linears:
        assert not attachments.attached(linear, attachments.LOW_BIT_LINEAR)
    names = {name for linear in quantized.linears for name in (*vars(linear), *linear._buffers, *linear._modules)}
    assert names | {"weight"} | attachments.MODULE == attachments.LOW_BIT_LINEAR | attachments.MODULE


def test_linears_that_cannot_be_swapped_stay_as_they_are_and_say_why():
    model = tiny()
    layer, other = model.layers
    torch.nn.utils.weight_norm(layer.attn.o_proj)
    torch.nn.utils.parametrizations.weight_norm(layer.mlp.gate_up)
    layer.mlp.down_proj.probe = "a user's"
    forward = other.attn.o_proj.forward
    other.attn.o_proj.forward = lambda x: 2 * forward(x)
    expected = model(batch()[0])
    quantized = quantize_linears(model, INT8, seed=3, head=model.lm_head)
    reasons = {choice.name: choice.reason for choice in quantized.choices}
    assert reasons["layers.0.attn.o_proj"] == "its weight is computed from others (weight_g, weight_v)"
    assert reasons["layers.0.mlp.gate_up"] == "a ParametrizedLinear, not a plain linear"
    assert reasons["layers.0.mlp.down_proj"] == "its attribute 'probe' is one that a low-bit linear has for itself"
    assert reasons["layers.1.attn.o_proj"] == "its forward pass is replaced" and len(quantized.linears) == 4
    assert torch.allclose(model(batch()[0]), expected, atol=0.2 * expected.abs().max().item())
    for name in ("layers.0.attn.o_proj", "layers.0.mlp.gate_up", "layers.0.mlp.down_proj", "layers.1.attn.o_proj"):
        with pytest.raises(UserError, match=f"reassign: {name} cannot run in fp8_rowwise: "):
            reassign(model, quantized, schemes({name: "fp8_rowwise"}))


def test_a_low_bit_linear_that_a_user_has_changed_keeps_its_scheme():
    model, quantized = mixed({})
    torch.nn.utils.parametrize.register_parametrization(model.layers[0].attn.qkv, "weight", nn.Identity())
    with pytest.raises(UserError, match=r"layers.0.attn.qkv cannot run in bf16: its weight is parametrized"):
        reassign(model, quantized, schemes({"layers.0.attn.qkv": "bf16"}))
    model.layers[1].attn.qkv.forward = model.layers[1].attn.qkv.forward
    with pytest.raises(UserError, match=r"layers.1.attn.qkv cannot run in bf16: its forward pass is replaced"):
        reassign(model, quantized, schemes({"layers.1.attn.qkv": "bf16"}))
    assert quantized.assignments == 0
