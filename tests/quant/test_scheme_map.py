"""The map of schemes: which rule decides, what is refused, and that a mixed model is the one assembled by hand."""

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.models import ModelSource, build_model
from qtrain.quant import SCHEMES, LowBitLinear, choose_linears, describe_choices, quantize_linears
from qtrain.quant.scheme_map import scheme_of, spec_of, spec_text, with_overrides
from qtrain.quant.schemes.fp8_rowwise import Fp8Rowwise
from qtrain.quant.schemes.int8 import Int8
from tests.models.families import batch
from tests.system import TINY

INT8 = SCHEMES.make("int8", {}, "--quantize")
BF16 = SCHEMES.make("bf16", {}, "--quantize")
CPU = torch.device("cpu")
DELAYED = {"scheme": "fp8_tensorwise", "scaling": "delayed", "history": 4}


def tiny(seed: int = 0, **changes) -> nn.Module:
    return build_model(ModelSource("tiny", {**TINY, **changes}, "--model"), seed=seed)


def mixed(overrides: dict, default=INT8, **changes):
    """(a model, its quantized linears) under these overrides."""
    model = tiny(**changes)
    return model, quantize_linears(model, with_overrides(overrides, default), seed=3, head=model.lm_head)


def losses(model: nn.Module, quantized, steps: int = 4) -> list[float]:
    """Of steps of SGD, each with two micro-batches."""
    found, (ids, labels) = [], batch()
    for step in range(steps):
        for micro in range(2):
            quantized.set_step(2 * step + micro)
            loss = model(ids, labels).loss / labels.numel()
            loss.backward()
            found.append(loss.item())
        with torch.no_grad():
            for p in model.parameters():
                if p.grad is not None:
                    p -= 0.05 * p.grad
        model.zero_grad()
        quantized.refresh()
    return found


# ---- which rule decides ----------------------------------------------------------------------------------------------


def decisions(overrides: dict, default=INT8, **options) -> dict[str, str]:
    model = tiny()
    scheme = with_overrides(overrides, default)
    choices = choose_linears(model, scheme, device=CPU, head=model.lm_head, **options)
    return {choice.name: spec_text(choice.spec) for choice in choices}


def test_the_last_glob_that_matches_wins():
    found = decisions({"*.down_proj": "fp8_rowwise", "layers.0.*": "bf16", "layers.0.attn.qkv": "mxfp8"})
    assert found == {
        "layers.0.attn.qkv": "mxfp8",
        "layers.0.attn.o_proj": "bf16",
        "layers.0.mlp.gate_up": "bf16",
        "layers.0.mlp.down_proj": "bf16",
        "layers.1.attn.qkv": "int8",
        "layers.1.attn.o_proj": "int8",
        "layers.1.mlp.gate_up": "int8",
        "layers.1.mlp.down_proj": "fp8_rowwise",
        "lm_head": "bf16",
    }


def test_a_glob_may_be_what_the_plan_lists():
    """Without the numbers of layers."""
    found = decisions({"layers.mlp.*": "bf16"})
    assert [name for name, scheme in found.items() if scheme == "int8"] == [
        f"layers.{i}.attn.{own}" for i in (0, 1) for own in ("qkv", "o_proj")
    ]


def test_what_is_named_is_taken_whatever_flags_leave_out():
    found = decisions({"lm_head": "int8", "layers.1.mlp.down_proj": "int8"}, min_size=1000)
    assert {name for name, scheme in found.items() if scheme == "int8"} == {"lm_head", "layers.1.mlp.down_proj"}


def test_high_precision_with_overrides_quantizes_those_alone():
    found = decisions({"*.qkv": {"scheme": "int8", "stochastic_rounding": True}}, BF16)
    assert {scheme for name, scheme in found.items() if name.endswith("qkv")} == {'int8 {"stochastic_rounding":true}'}
    assert {scheme for name, scheme in found.items() if not name.endswith("qkv")} == {"bf16"}


@pytest.mark.parametrize("name", [name for name in SCHEMES.names() if name != "auto"])
def test_a_scheme_is_what_its_entry_says(name):
    scheme = SCHEMES.make(name, {}, "--quantize")
    assert spec_of(scheme) == name and scheme_of(name, "-") == scheme
    options = {"power_of_two": True} if name.startswith("fp8") else {}
    if options and not scheme.power_of_two:
        spec = spec_of(SCHEMES.make(name, options, "--quantize"))
        assert spec == {"scheme": name, **options} and scheme_of(spec, "-").power_of_two


def test_equal_entries_are_one_scheme():
    """So that layers of equal schemes look alike to a compiler."""
    scheme = with_overrides({"a": "int8", "b": {"scheme": "int8"}, "c": DELAYED, "d": dict(DELAYED)}, INT8)
    (_, a), (_, b), (_, c), (_, d) = scheme.rules
    assert a is b is INT8 and c is d


def test_the_list_says_who_runs_in_which_scheme():
    _, quantized = mixed({"layers.1.mlp.*": "bf16", "*.o_proj": "fp8_rowwise"}, num_hidden_layers=4)
    lines = [line.strip() for line in describe_choices(quantized.choices)]
    assert "4 x layers.attn.o_proj 32 -> 32: quantized, fp8_rowwise" in lines
    assert "1 x layers.mlp.gate_up 32 -> 128 (1): left, --quantize_overrides leaves it" in lines
    assert "3 x layers.mlp.gate_up 32 -> 128 (0, 2-3): quantized, int8" in lines


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ({"*": "int9"}, "unknown scheme 'int9'. Did you mean 'int8'?"),
        ({"*": 3}, "3 is not allowed; give a scheme"),
        ({"*": None}, "None is not allowed"),
        ({"*": {}}, 'the key "scheme" is missing'),
        ({"*": {"scheme": 5}}, 'the key "scheme" is 5'),
        ({"*": {"scheme": "int8", "outptu": "bf16"}}, "unknown key 'outptu'. Did you mean 'output'?"),
        ({"*": "auto"}, "'auto' chooses schemes for the whole model"),
        ({"*": "bitnet"}, 'give it "sub_norm":false'),
        ({"*": {"scheme": "switchback", "output": "bf16", "grad_input": "bf16"}}, "all three GEMMs are in bf16"),
        ({"*": {"scheme": "fp8_tensorwise", "history": 3}}, "(*).history: 3 is not allowed with dynamic scaling"),
    ],
)
def test_bad_entries_are_refused(overrides, says):
    with pytest.raises(UserError) as error:
        with_overrides(overrides, INT8)
    assert str(error.value).startswith("--quantize_overrides (*)") and says in str(error.value)


# ---- what it computes ------------------------------------------------------------------------------------------------


def test_a_mixed_model_is_the_one_assembled_by_hand():
    """Losses bit for bit, with bits of stochastic rounding that follow from the number of the linear."""
    drawn = {"scheme": "int8", "stochastic_rounding": True}
    model, quantized = mixed({"*.down_proj": "fp8_rowwise", "layers.1.attn.*": drawn, "layers.0.mlp.gate_up": "bf16"})
    by_hand, number = tiny(), 0
    schemes = {"down_proj": Fp8Rowwise()}
    keys = torch.zeros(8, 3, dtype=torch.int64)
    for layer in range(2):
        for name in ("attn.qkv", "attn.o_proj", "mlp.gate_up", "mlp.down_proj"):
            if (layer, name) == (0, "mlp.gate_up"):
                continue
            own = Int8(stochastic_rounding=True) if layer == 1 and name.startswith("attn") else Int8()
            own = schemes.get(name.split(".")[1], own)
            keys[number] = torch.tensor([3, 0, number])
            linear = by_hand.get_submodule(f"layers.{layer}.{name}")
            by_hand.set_submodule(f"layers.{layer}.{name}", LowBitLinear(linear, own, keys[number]))
            number += 1
    assert [c.name for c in quantized.choices if c.reason is None] == [
        n for n, m in by_hand.named_modules() if isinstance(m, LowBitLinear)
    ]

    class ByHand:
        @staticmethod
        def set_step(step: int) -> None:
            keys[:, 1] = step

        @staticmethod
        def refresh() -> None:
            for module in by_hand.modules():
                if isinstance(module, LowBitLinear):
                    module.refresh()

    assert losses(model, quantized) == losses(by_hand, ByHand())


def test_two_schemes_under_delayed_scaling():
    """Each linear as in a model that has its scheme alone: formats, lengths of the history and rounding of scales."""
    other = {**DELAYED, "history": 2, "grad_format": "e5m2", "power_of_two": True}
    x, dy = torch.randn(8, 64), torch.randn(8, 32)

    def chain(overrides: dict):
        torch.manual_seed(0)
        model = nn.ModuleDict({"a": nn.Linear(64, 32, bias=False), "b": nn.Linear(64, 32, bias=False)})
        return model, quantize_linears(model, with_overrides(overrides, BF16), seed=3)

    def steps(model, quantized, name):
        found = []
        for factor in (1.0, 8.0, 0.5, 0.25, 0.25, 2.0):
            leaf = (x * factor).requires_grad_()
            y = model[name](leaf)
            y.backward(dy * factor)
            found += [y.detach(), leaf.grad]
            quantized.refresh()
        return found

    _, quantized = chain({"a": DELAYED, "b": other})
    assert quantized.amax.history.shape == (2, 2, 4)
    for name, spec in (("a", DELAYED), ("b", other)):
        alone = chain({name: spec})
        assert alone[1].amax.history.shape == (1, 2, spec["history"])
        own = chain({"a": DELAYED, "b": other})
        assert all(map(torch.equal, steps(*own, name), steps(*alone, name)))
