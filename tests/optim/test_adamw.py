"""The AdamW family: fp32 is torch's, every format stays near it, states move between formats, bad ones are refused."""

import copy
import io

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.optim import OPTIMIZERS, ParameterShape

FAMILY = ["adamw", "adamw_bf16_sr", "adamw_8bit", "adamw_fp8", "adamw_4bit"]
SHAPES = [(64, 128), (96, 64), (5, 33), (64,)]


def parameters(dtype=torch.float32, device="cpu", seed=0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(s, generator=generator).to(dtype).to(device)) for s in SHAPES]


def build(name: str, params, lr=0.01, seed=0, **options) -> torch.optim.Optimizer:
    spec = OPTIMIZERS.make(name, {"small": 1000, **options} if name in FAMILY else options, "--optim")
    groups = [{"params": params[:2], "weight_decay": 0.1}, {"params": params[2:], "weight_decay": 0.0}]
    return spec.build(groups, lr, seed=seed)


def train(optimizer, params, steps: range) -> None:
    """Steps with gradients that depend on the step alone, of many magnitudes."""
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in params:
            size = torch.linspace(-3, 0, p.numel()).view(p.shape)
            p.grad = (torch.randn(p.shape, generator=generator) * 10**size).to(p.dtype).to(p.device)
        optimizer.step()


def same(one, other) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# ---- the numbers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("scale", [None, 0.25])
def test_fp32_is_torchs_adamw_over_200_steps(device, scale):
    ours, theirs = parameters(device=device), parameters(device=device)
    a = build("adamw", ours, betas=[0.9, 0.99])
    groups = [{"params": theirs[:2], "weight_decay": 0.1}, {"params": theirs[2:], "weight_decay": 0.0}]
    b = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.99), eps=1e-8)
    for step in range(200):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(ours, theirs, strict=True):
            grad = torch.randn(p.shape, generator=generator).to(device) * (1 + step % 5)
            p.grad, q.grad = grad.clone(), grad * (scale or 1)
        a.grad_scale = None if scale is None else torch.tensor(scale, device=device)
        a.step()
        b.step()
        for group, other in zip(a.param_groups, b.param_groups, strict=True):
            group["lr"] = other["lr"] = 0.01 * (1 - step / 200)
    for p, q in zip(ours, theirs, strict=True):
        assert float((p - q).detach().norm() / q.detach().norm()) < 1e-6


@pytest.mark.parametrize(
    ("name", "allowed"), [("adamw_bf16_sr", 0.01), ("adamw_8bit", 0.03), ("adamw_fp8", 0.08), ("adamw_4bit", 0.35)]
)
@pytest.mark.parametrize("beta2", [0.95, 0.999])
def test_low_bit_states_stay_near_fp32(name, allowed, beta2):
    """25 steps with the same gradients, as a share of the way that fp32 went."""
    start, exact, found = (parameters() for _ in range(3))
    for optimizer_name, params in (("adamw", exact), (name, found)):
        train(build(optimizer_name, params, betas=[0.9, beta2]), params, range(25))
    for p, q, s in list(zip(exact, found, start, strict=True))[:2]:
        error = float((p - q).detach().norm() / (p - s).detach().norm())
        assert 0 < error < allowed


def test_a_master_copy_makes_bf16_weights_the_rounded_fp32_ones():
    exact, found = parameters(), parameters(torch.bfloat16)
    with torch.no_grad():
        for p, q in zip(exact, found, strict=True):
            p.copy_(q.float())
    a, b = build("adamw", exact), build("adamw", found, master="fp32", m="fp32", v="fp32")
    for step in range(30):
        generator = torch.Generator().manual_seed(step)
        for p, q in zip(exact, found, strict=True):
            q.grad = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = q.grad.float()
        a.step()
        b.step()
    for p, q in zip(exact, found, strict=True):
        torch.testing.assert_close(b.state[q]["master"], p.detach(), rtol=1e-5, atol=1e-6)
        assert torch.equal(q.detach(), b.state[q]["master"].bfloat16())


def test_small_steps_of_bf16_weights_are_not_lost_by_default():
    """A rate of a hundredth of the weights' last bit: to nearest nothing moves, stochastically it does on average."""
    moved = {}
    for sr in (True, False):
        weight = torch.nn.Parameter(torch.ones(64, 256, dtype=torch.bfloat16))
        options = {} if sr else {"sr": False}
        spec = OPTIMIZERS.make("adamw", options, "--optim")
        optimizer = spec.build([{"params": [weight], "weight_decay": 0.0}], 2**-15, seed=1)
        for _ in range(40):
            weight.grad = torch.ones_like(weight)
            optimizer.step()
        moved[sr] = 1 - weight.detach().double().mean().item()
    assert moved[False] == 0
    assert moved[True] == pytest.approx(40 * 2**-15, rel=0.05)


def test_small_tensors_and_vectors_keep_fp32_states():
    params = parameters()
    optimizer = build("adamw_8bit", params, small=6500)
    train(optimizer, params, range(1))
    kinds = [set(optimizer.state[p]) - {"step"} for p in params]
    assert kinds[0] == {f"{s}_128.{part}" for s in ("exp_avg.int8", "exp_avg_sq.uint8") for part in ("codes", "scale")}
    assert kinds[1:] == [{"exp_avg", "exp_avg_sq"}] * 3


@pytest.mark.parametrize(
    ("name", "options", "weight_bytes", "planned"),
    [
        ("adamw", {}, 2, 4),
        ("adamw", {}, 4, 8),
        ("adamw_8bit", {}, 4, 2.03),
        ("adamw_fp8", {}, 4, 2.06),
        ("adamw_4bit", {}, 4, 1.06),
        ("adamw_8bit", {"master": "fp32"}, 2, 6.03),
    ],
)
def test_bytes_of_state_per_parameter(name, options, weight_bytes, planned):
    found = OPTIMIZERS.make(name, options, "").state_bytes([ParameterShape((64, 1024))], weight_bytes)
    assert found / 2**16 == pytest.approx(planned, abs=0.01)


def test_torchs_schedulers_drive_it():
    params, others = parameters(), parameters()
    for found, constant in ((params, False), (others, True)):
        optimizer = build("adamw_8bit", found)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step else 1.0)
        train(optimizer, found, range(1))
        before = [p.detach().clone() for p in found]
        schedule.step()
        if constant:
            optimizer.param_groups[0]["lr"] = torch.tensor(0.01)
        train(optimizer, found, range(1, 2))
        assert same(before[:2], found[:2]) is not constant


def test_a_rate_that_is_a_tensor_is_read_every_step():
    moved = []
    for tensor in (False, True):
        params = parameters()
        optimizer = build("adamw_8bit", params)
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(0.01, dtype=torch.float64) if tensor else 0.01
        train(optimizer, params, range(2))
        for group in optimizer.param_groups:
            if tensor:
                group["lr"].fill_(0.003)
            else:
                group["lr"] = 0.003
        train(optimizer, params, range(2, 4))
        moved.append([p.detach() for p in params])
    assert same(*moved)


# ---- states that move ------------------------------------------------------------------------------------------------


def saved(optimizer) -> dict:
    """The state dict after a trip through a file that runs no code."""
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILY)
def test_loaded_states_go_on_bit_for_bit(name, dtype):
    whole = parameters(dtype)
    optimizer = build(name, whole, seed=3)
    train(optimizer, whole, range(3))
    state, weights = saved(optimizer), copy.deepcopy(whole)
    train(optimizer, whole, range(3, 6))
    resumed = build(name, weights, lr=1.0, seed=3)
    resumed.load_state_dict(state)
    train(resumed, weights, range(3, 6))
    assert same(whole, weights)


@pytest.mark.parametrize("source", FAMILY)
@pytest.mark.parametrize("target", FAMILY)
def test_states_convert_between_any_two_formats(source, target):
    """What is loaded is the saved value, rounded to the new format; and training goes on from there."""
    params = parameters()
    optimizer = build(source, params)
    train(optimizer, params, range(20))
    other = build(target, params)
    other.load_state_dict(saved(optimizer))
    before, start = copy.deepcopy(params), copy.deepcopy(params)
    train(optimizer, params, range(20, 25))
    after = [p.detach().clone() for p in params]
    with torch.no_grad():
        for p, q in zip(params, before, strict=True):
            p.copy_(q)
    train(other, params, range(20, 25))
    params = [p.detach() for p in params]
    errors = [float((p - q).norm() / (q - s).norm()) for p, q, s in zip(params, after, start, strict=True)]
    assert max(errors[:2]) < (0.5 if "4bit" in source + target else 0.1)
    assert {float(state["step"]) for state in other.state.values()} == {25}


def test_torchs_own_adamw_state_is_one_of_the_family():
    params = parameters()
    theirs = torch.optim.AdamW(params, lr=0.01, betas=(0.9, 0.95), fused=True)
    train(theirs, params, range(3))
    state = saved(theirs)
    ours = OPTIMIZERS.make("adamw_8bit", {"small": 1000}, "").build([{"params": params}], 0.01)
    ours.load_state_dict(state)
    assert ours.state[params[0]]["step"] == 3 and "exp_avg.int8_128.codes" in ours.state[params[0]]


HOSTILE = {
    "NaN in a scale": lambda s: s["exp_avg.int8_128.scale"].fill_(torch.nan),
    "a negative scale": lambda s: s["exp_avg_sq.uint8_128.scale"].neg_(),
    "Inf in a small state": lambda s: s["exp_avg"].fill_(torch.inf),
    "a negative second moment": lambda s: s["exp_avg_sq"].sub_(1),
    "a negative step": lambda s: s["step"].fill_(-1),
    "a NaN step": lambda s: s["step"].fill_(torch.nan),
    "wrong dtype": lambda s: s.update({"exp_avg.int8_128.codes": s["exp_avg.int8_128.codes"].float()}),
    "wrong shape": lambda s: s.update({"exp_avg.int8_128.codes": s["exp_avg.int8_128.codes"][:3]}),
    "truncated": lambda s: s.pop("exp_avg.int8_128.scale"),
    "a format that is none": lambda s: s.update({"exp_avg.int7_128.codes": s.pop("exp_avg.int8_128.codes")}),
    "two formats": lambda s: s.update({"exp_avg.fp8_128.codes": s["exp_avg.int8_128.codes"].clone()}),
    "unsigned for signed": lambda s: [
        s.update({f"exp_avg.uint8_128.{part}": s.pop(f"exp_avg.int8_128.{part}")}) for part in ("codes", "scale")
    ],
    "no tensor": lambda s: s.update({"step": "__import__('os')"}),
    "another optimizer's": lambda s: (s.clear(), s.update({"momentum_buffer": torch.zeros(64, 128)})),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_state_is_refused_with_one_message_and_nothing_changes(case):
    params = parameters()
    optimizer = build("adamw_8bit", params)
    train(optimizer, params, range(2))
    state = copy.deepcopy(optimizer.state_dict())
    number = 2 if "small" in case or "second" in case else 0
    HOSTILE[case](state["state"][number])
    weights, before = copy.deepcopy(params), copy.deepcopy(optimizer.state_dict())
    with pytest.raises(UserError, match="--resume: ") as raised:
        optimizer.load_state_dict(state)
    assert "\n" not in str(raised.value)
    after = optimizer.state_dict()
    assert same(weights, params) and all(
        torch.equal(after["state"][i][key].view(torch.uint8), value.view(torch.uint8))
        for i, kept in before["state"].items()
        for key, value in kept.items()
        if value.ndim
    )


def test_other_groups_are_refused():
    params = parameters()
    state = build("adamw_8bit", params).state_dict()
    with pytest.raises(UserError, match="groups its parameters differently"):
        OPTIMIZERS.make("adamw_8bit", {}, "").build([{"params": params}], 0.01).load_state_dict(state)


def test_weights_of_another_kind_are_refused():
    with pytest.raises(UserError, match="weights are fp32 or bf16"):
        build("adamw", [nn.Parameter(torch.zeros(2, 2, dtype=torch.float16))] * 1)
