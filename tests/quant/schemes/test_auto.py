"""The measured choice: what is timed, what is taken, and that a choice made before is kept."""

import time

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.quant import SCHEMES, LowBitLinear, describe_choices, quantize_linears
from qtrain.quant.schemes import auto
from qtrain.quant.schemes.auto import choose_per_shape, linear_shapes, scheme_per_shape
from tests.cases import matrix

CPU = torch.device("cpu")


def choose(shapes, **options):
    """(the map, shape -> name, the table)."""
    scheme = SCHEMES.make("auto", options, "--quantize_kwargs")
    like = {"accumulation": 2, "dtype": torch.float32, "device": CPU}
    chosen, lines = choose_per_shape(scheme, shapes, tokens=32, **like)
    return scheme_per_shape(scheme, shapes, chosen), chosen, lines


@pytest.fixture
def timed(monkeypatch):
    """Times by hand, as (scheme, shape) -> seconds; what is not in the table fails."""
    table: dict[tuple[str, tuple[int, int]], float] = {}
    monkeypatch.setattr(auto, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(auto, "time_linear", lambda scheme, shape, *_: table[SCHEMES.name_of(scheme), shape])
    return table


def model_of() -> nn.Module:
    return nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32), nn.Linear(32, 64), nn.Linear(64, 8))


def test_each_shape_takes_its_fastest(timed):
    timed |= {("bf16", (32, 64)): 3e-3, ("int8", (32, 64)): 1e-3, ("switchback", (32, 64)): 2e-3}
    timed |= {("bf16", (64, 32)): 1e-3, ("int8", (64, 32)): 2e-3, ("switchback", (64, 32)): 2e-3}
    model = model_of()
    shapes = linear_shapes(model, lambda name, linear: linear is model[3])
    assert shapes == {(32, 64): ["0", "2"], (64, 32): ["1"]}
    assert linear_shapes(model, min_size=9) == shapes
    scheme, chosen, lines = choose(shapes, candidates=["bf16", "int8", "switchback"])
    assert chosen == {"32 -> 64": "int8", "64 -> 32": "bf16"}
    table = "\n".join(lines)
    assert "2 x 32 -> 64     3.000     1.000     2.000  int8" in table and "bf16, int8, switchback" in table
    assert [SCHEMES.name_of(part) for part in scheme.parts()] == ["auto", "int8", "int8", "bf16"]
    quantized = quantize_linears(model, scheme, seed=0, head=model[3])
    assert [type(m) is LowBitLinear for m in model] == [True, False, True, False]
    reasons = [choice.reason for choice in quantized.choices]
    assert reasons[1] == "the fastest in high precision" and "output head" in reasons[3]


def test_linears_of_different_schemes_train_together(timed):
    model = model_of()
    timed |= {(name, shape): 1 + (name == "switchback") for name in ("int8", "switchback") for shape in [(32, 64)]}
    timed |= {(name, shape): 1 + (name == "int8") for name in ("int8", "switchback") for shape in [(64, 32), (64, 8)]}
    scheme, *_ = choose(linear_shapes(model), candidates=["int8", "switchback"])
    quantized = quantize_linears(model, scheme, seed=0)
    assert "quantized, switchback" in "\n".join(describe_choices(quantized.choices))
    model(matrix(4, 32, 0)).sum().backward()
    with torch.no_grad():
        model[1].weight -= model[1].weight.grad
    with pytest.raises(AssertionError, match="stale"):
        quantized.assert_fresh()
    quantized.refresh()
    quantized.assert_fresh()


def test_a_choice_made_before_is_not_timed_again(timed):
    timed["int8", (64, 32)] = 1e-3
    shapes = {(32, 64): ["a"], (64, 32): ["b"]}
    scheme, chosen, lines = choose(shapes, candidates=["int8"], chosen={"32 -> 64": "switchback"})
    assert SCHEMES.name_of(scheme.at("a").scheme) == "switchback"
    assert chosen == {"32 -> 64": "switchback", "64 -> 32": "int8"}
    assert "chosen earlier  switchback" in "\n".join(lines)


def test_the_device_is_warm_before_the_first_timing(monkeypatch):
    """Once, and not where nothing is timed."""
    calls: list[str] = []
    monkeypatch.setattr(auto, "warm_up", lambda dtype, device: calls.append("warm up"))
    monkeypatch.setattr(auto, "time_linear", lambda scheme, *_: calls.append(SCHEMES.name_of(scheme)) or 1.0)
    choose({(32, 64): ["a"], (64, 32): ["a"]}, candidates=["bf16", "int8"])
    assert calls == ["warm up", "bf16", "int8", "bf16", "int8"]
    calls.clear()
    choose({(32, 64): ["a"]}, candidates=["int8"], chosen={"32 -> 64": "int8"})
    assert calls == []


def test_warming_up_takes_its_time(monkeypatch):
    monkeypatch.setattr(auto, "WARM_UP_SECONDS", 0.05)
    started = time.perf_counter()
    auto.warm_up(torch.float32, CPU)
    assert 0.05 <= time.perf_counter() - started < 5


def test_real_times_on_this_machine():
    scheme, _, lines = choose({(32, 64): ["a"]}, candidates=["bf16", "int8", "fp8_rowwise"])
    shown = lines[1].split()
    assert shown[-1] in ("bf16", "int8", "fp8_rowwise") and all(float(ms) > 0 for ms in shown[5:-1])
    assert SCHEMES.name_of(scheme.at("a").scheme) == shown[-1]


@pytest.mark.parametrize(
    ("candidates", "says"),
    [
        ([], "the list is empty"),
        (["int9"], "unknown scheme 'int9'"),
        (["bf16", "int8_weight"], "'int8_weight' cannot be chosen by speed"),
        (["bitnet"], "'bitnet' cannot be chosen by speed"),
        (["auto"], "'auto' cannot be chosen by speed"),
    ],
)
def test_candidates_are_checked(candidates, says):
    with pytest.raises(UserError, match=r"--quantize_kwargs\.candidates") as error:
        choose({(32, 64): ["a"]}, candidates=candidates)
    assert says in str(error.value)
