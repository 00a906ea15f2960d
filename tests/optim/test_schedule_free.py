"""Schedule-free AdamW against the recurrences of its paper, and what its two sets of weights do."""

import pytest
import torch

from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.step.step import eval_weights
from tests.optim.problems import Small, assert_weights, drive, follow, make

LR, DECAY, B1, B2, EPS = 0.02, 0.1, 0.9, 0.999, 1e-8


def rates(step: int) -> float:
    return LR * min(step / 10, 1.0)


def paper(r: float, averages: dict):
    """Algorithm 1, in x, y and z; `averages` receives every x."""

    def rule(name, y, g, state, step):
        decay = DECAY if y.ndim == 2 else 0.0
        x, z = state.get("x", y), state.get("z", y)
        v = state["v"] = B2 * state.get("v", 0) + (1 - B2) * g * g
        rate = rates(step) * (1 - B2**step) ** 0.5
        state["most"] = max(state.get("most", 0.0), rate)
        weight = step**r * state["most"] ** 2
        state["sum"] = state.get("sum", 0.0) + weight
        c = weight / state["sum"]
        z = z - rate * (g / (v.sqrt() + EPS) + decay * y)
        x = (1 - c) * x + c * z
        state["x"], state["z"] = x, z
        averages[name] = x
        return B1 * x + (1 - B1) * z

    return rule


@pytest.mark.parametrize("r", [0.0, 1.5])
def test_is_its_paper(r):
    model, averages = Small(), {}
    optimizer = make("adamw_schedule_free", model, LR, DECAY, betas=[B1, B2], r=r)
    expected = follow(model, paper(r, averages), range(60))
    for step in range(60):
        for group in optimizer.param_groups:
            group["lr"] = rates(step + 1)
        drive(model, optimizer, range(step, step + 1))
    assert_weights(model, expected, 2e-5)
    optimizer.eval()
    assert_weights(model, averages, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_judging_leaves_every_bit(dtype):
    runs = []
    for judged in (False, True):
        model = Small(dtype)
        optimizer = make("adamw_schedule_free", model, LR, DECAY)
        quantized = quantize_linears(model, SCHEMES.make("bf16", {}, "--quantize"), seed=0, head=model.lm_head)
        for step in range(6):
            if judged:
                before = [p.clone() for p in model.parameters()]
                with eval_weights(optimizer, quantized):
                    changed = [not torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)]
                assert all(changed) == any(changed) == (step > 1)  # after one step the average is what was averaged
            drive(model, optimizer, range(step, step + 1))
        runs.append([p.clone() for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


def test_bf16_weights_follow_fp32_ones_thanks_to_stochastic_rounding():
    """At a rate whose steps are below what bf16 resolves."""
    errors = {}
    for sr in (True, False):
        exact, model = Small(), Small(torch.bfloat16)
        for m in (exact, model):
            optimizer = make("adamw_schedule_free", m, 1e-4, 0.0, betas=[0.9, 0.95], sr=sr)
            for _ in range(100):
                for p in m.parameters():
                    p.grad = torch.ones_like(p)
                optimizer.step()
        differences = [(p.float() - q).mean() for p, q in zip(model.parameters(), exact.parameters(), strict=True)]
        errors[sr] = torch.stack(differences).abs().max().item()
    assert errors[True] < 0.3 * errors[False]
