"""What holds for every name in the registry: it learns, resumes bit for bit, clips."""

import copy
import io
import json

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.optim import OPTIMIZERS
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.state.state_dict import finish_optimizer, optimizer_tensors, prepare_optimizer
from tests.cases import sampled
from tests.optim.problems import Small, drive, make, train

RATES = {"sgd": 0.3, "lion": 0.01, "muon": 0.05, "galore_adamw": 0.1, "q_galore_adamw": 0.1, "apollo_mini": 0.03}
OPTIONS = {
    "galore_adamw": {"rank": 3, "update_proj_gap": 7, "scale": 1.0},
    "q_galore_adamw": {"rank": 3, "update_proj_gap": 3, "scale": 1.0, "queue_size": 2, "cos_threshold": 0.1},
    "apollo_mini": {"update_proj_gap": 7},
}
NAMES = OPTIMIZERS.names()
every = pytest.mark.parametrize("name", NAMES)


def build(name: str, model: torch.nn.Module, **more):
    return make(name, model, RATES.get(name, 0.03), 0.01, seed=5, **{**OPTIONS.get(name, {}), **more})


def weights(model: torch.nn.Module) -> list[torch.Tensor]:
    return [p.dequantize() if isinstance(p, StoredWeight) else p.detach().clone() for p in model.parameters()]


def stored(seed: int = 0) -> Small:
    """A bf16 model whose hidden matrices are stored as INT8."""
    model = Small(torch.bfloat16, seed)
    for layer in model.layers:
        for linear in (layer.fused, layer.square, layer.down):
            linear.weight = torch.nn.Parameter(StoredWeight.from_value(linear.weight.detach(), "int8"))
    return model


MODELS = {"fp32": Small, "bf16": lambda: Small(torch.bfloat16), "int8": stored}


@every
@pytest.mark.parametrize("kind", [pytest.param("fp32", marks=pytest.mark.sweep), "int8"])
def test_learns(name, kind):
    model = MODELS[kind]()
    optimizer = build(name, model)
    before, after = train(model, optimizer, 40)
    if optimizer.averages_weights:
        optimizer.eval()
        after = min(after, train(model, torch.optim.SGD(model.parameters(), lr=0.0), 0)[1])
    assert after < 0.75 * before, f"{before:.3f} -> {after:.3f}"


@every
@pytest.mark.parametrize("kind", sampled([*MODELS], lambda kind: kind == "bf16"))
def test_resumes_bit_for_bit(name, kind):
    """Saved and loaded as a checkpoint is: plain tensors, and JSON for the rest."""
    whole = MODELS[kind]()
    drive(whole, build(name, whole), range(12))

    half = MODELS[kind]()
    optimizer = build(name, half)
    drive(half, optimizer, range(5))
    tensors, meta = optimizer_tensors(optimizer, half)
    meta = json.loads(json.dumps(meta))

    model = MODELS[kind]()
    for p, q in zip(model.parameters(), half.parameters(), strict=True):
        with torch.no_grad():
            p.copy_(q)
    resumed = build(name, model)
    empty = prepare_optimizer(resumed, model, meta)
    assert {n: s.keys() for n, s in empty.items()} == {n: s.keys() for n, s in tensors.items()}
    for parameter, states in tensors.items():
        for key, value in states.items():
            assert empty[parameter][key].dtype == value.dtype
            empty[parameter][key].copy_(value)
    assert finish_optimizer(resumed, model) == []
    drive(model, resumed, range(5, 12))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(whole), strict=True))


@every
def test_state_dict_is_tensors_and_loads_exactly(name):
    whole = Small(torch.bfloat16)
    drive(whole, build(name, whole), range(9))

    half = Small(torch.bfloat16)
    optimizer = build(name, half)
    drive(half, optimizer, range(4))
    file = io.BytesIO()
    torch.save({"model": half.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    model = Small(torch.bfloat16, seed=1)
    resumed = build(name, model)
    model.load_state_dict(saved["model"])
    resumed.load_state_dict(saved["optimizer"])
    drive(model, resumed, range(4, 9))
    assert all(torch.equal(a, b) for a, b in zip(weights(model), weights(whole), strict=True))


@every
def test_grad_scale_is_a_scaling_of_the_gradients(name):
    results = []
    for scaled in (False, True):
        model = Small()
        optimizer = build(name, model)
        for step in range(4):
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
                if not scaled:
                    p.grad *= 0.25
            if scaled:
                optimizer.grad_scale = torch.tensor(0.25)
            optimizer.step()
        results.append(weights(model))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@every
def test_a_scale_of_nan_changes_nothing_where_an_optimizer_says_so(name):
    model = Small()
    optimizer = build(name, model)
    drive(model, optimizer, range(2))
    before, states = weights(model), copy.deepcopy(optimizer.state_dict())
    if not optimizer.skips_nan_scale:
        assert name not in ("adamw", "adamw_8bit", "lion", "sgd")
        return
    for p in model.parameters():
        p.grad = torch.full_like(p, torch.nan)
    optimizer.grad_scale = torch.tensor(torch.nan)
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, weights(model), strict=True))
    assert str(optimizer.state_dict()) == str(states)


@every
def test_seeds_matter_only_where_something_is_random(name):
    """The same seed twice is the same run; stochastic rounding of bf16 weights differs with the seed."""

    def run(seed: int) -> list[torch.Tensor]:
        model = Small(torch.bfloat16)
        drive(model, make(name, model, 1e-3, seed=seed, **OPTIONS.get(name, {})), range(3))
        return weights(model)

    first, again, other = run(1), run(1), run(2)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    if name != "adamw":  # bf16 to nearest
        assert not all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


@pytest.mark.parametrize("name", ["muon", "galore_adamw", "q_galore_adamw", "apollo_mini"])
def test_damaged_states_are_refused(name):
    model = Small()
    optimizer = build(name, model)
    drive(model, optimizer, range(2))
    weight = model.layers[0].square.weight
    key = next(k for k, v in optimizer.state[weight].items() if v.is_floating_point() and k != "cosines")
    saved = optimizer.state_dict()

    fresh = Small()
    good = optimizer.state[weight][key].clone()
    optimizer.state[weight][key].fill_(float("nan"))
    with pytest.raises(UserError, match="NaN"):
        build(name, fresh).load_state_dict(saved)
    for bad in (good.double(), good.flatten()[:1], good.int()):
        optimizer.state[weight][key] = bad
        if bad.shape == good.shape and bad.dtype == good.dtype:
            continue
        with pytest.raises(UserError, match=f"optimizer state {key}"):
            build(name, fresh).load_state_dict(optimizer.state_dict())


def test_a_model_without_hidden_matrices_is_told_so():
    with pytest.raises(UserError, match="no trainable matrix in a hidden layer; use adamw"):
        make("muon", torch.nn.Sequential(torch.nn.Embedding(4, 4)), 0.1)


@pytest.mark.parametrize(
    "name,options,message",
    [
        ("galore_adamw", {"rank": 0}, "at least 1"),
        ("galore_adamw", {"update_proj_gap": 0}, "at least 1"),
        ("galore_adamw", {"state": "int5"}, "one of"),
        ("q_galore_adamw", {"cos_threshold": 1.5}, "from 0 to 1"),
        ("muon", {"adjust": "spectrum"}, "one of 'none', 'spectral', 'match_rms'"),
        ("muon", {"ns_steps": 0}, "from 1 to 20"),
        ("muon", {"rest": "sgd"}, "one of"),
        ("sgd", {"nesterow": True}, "Did you mean 'nesterov'?"),
        ("lion", {"betas": [0.9, 1.0]}, "from 0 to"),
        ("apollo_mini", {"update_proj_gap": 2.5}, "a whole number"),
        ("adamw_schedule_free", {"betas": [0.0, 0.9]}, "out of range"),
    ],
)
def test_bad_options_are_refused(name, options, message):
    with pytest.raises(UserError, match="--optim") as error:
        OPTIMIZERS.make(name, options, "--optim")
    assert message in str(error.value)


@pytest.mark.parametrize("name", ["adamw_8bit", "muon", "adamw_schedule_free"])
def test_a_refused_state_leaves_everything_as_it_was(name):
    model = Small()
    optimizer = build(name, model)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    before = copy.deepcopy(optimizer.state_dict())
    broken = copy.deepcopy(before)
    last = broken["state"][max(broken["state"])]
    key = next(k for k, v in last.items() if v.is_floating_point() and v.dim())
    last[key] = torch.full_like(last[key], float("nan"))
    broken["param_groups"][0]["lr"] = 7.0
    with pytest.raises(UserError, match="--resume"):
        optimizer.load_state_dict(broken)
    after = optimizer.state_dict()
    assert after["param_groups"][0]["lr"] == before["param_groups"][0]["lr"]
    for number, state in before["state"].items():
        assert all(torch.equal(v, after["state"][number][k]) for k, v in state.items())
