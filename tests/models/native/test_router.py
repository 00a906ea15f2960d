"""Routers select, weigh and balance as their definitions say."""

import copy
import dataclasses

import pytest
import torch

from qtrain.kernels.grouped.token_permutation import tokens_per_expert
from qtrain.models import RECOMPUTE_SETS
from qtrain.models.config.moe import MoEConfig
from qtrain.models.native.expert_load import ExpertLoad
from qtrain.models.native.router import Router, balance_loss, z_loss
from tests.models.families import batch, drawn, source_of

SOFTMAX = MoEConfig(experts=8, per_token=3, width=4)
SIGMOID = dataclasses.replace(SOFTMAX, scores="sigmoid", groups=4, groups_per_token=2, normalize=True, scaling=2.5)


def router_of(mixture: MoEConfig, hidden: int = 16, dtype: torch.dtype = torch.float32) -> Router:
    router = Router(mixture, hidden).to(dtype)
    with torch.no_grad():
        router.weight.normal_(generator=torch.Generator().manual_seed(0))
    return router


def hidden_states(tokens: int = 40, hidden: int = 16, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(1)).to(dtype)


def test_weights_are_the_softmax_of_the_best_and_sum_to_one_if_normalized():
    x = hidden_states()
    router = router_of(SOFTMAX)
    routing = router(x)
    expected = (x.double() @ router.weight.double().t()).softmax(-1)
    values, order = expected.topk(3)
    assert torch.equal(routing.experts, order)
    assert torch.allclose(routing.weights.double(), values, rtol=1e-5)
    router.moe = dataclasses.replace(SOFTMAX, normalize=True, scaling=1.5)
    assert torch.allclose(router(x).weights.sum(-1), torch.full((40,), 1.5))


def test_logits_are_fp32_whatever_the_models_dtype():
    """bf16 logits, of 8 bits, would differ by far more."""
    router, x = router_of(SIGMOID, dtype=torch.bfloat16), hidden_states(dtype=torch.bfloat16)
    assert router.weight.dtype == torch.bfloat16 and router.bias.dtype == torch.float32
    routing = router(x)
    exact = x.double() @ router.weight.double().t()
    assert routing.logits.dtype == routing.weights.dtype == torch.float32
    assert (routing.logits - exact).abs().max() < 1e-5 * exact.abs().max()


def test_a_token_stays_within_its_best_groups():
    router, x = router_of(SIGMOID), hidden_states()
    groups = router(x).experts // 2
    assert all(len(set(row)) <= 2 for row in groups.tolist())
    free = dataclasses.replace(SIGMOID, groups=1, groups_per_token=1)
    router.moe = free
    assert any(len(set(row)) == 3 for row in (router(x).experts // 2).tolist())
    # V3 adds a group's two best, V2 takes its best: here group 0 wins by the sum, group 1 by the best.
    scores = torch.tensor([[0.5, 0.5, 0.6, 0.1, 0.0, 0.0, 0.0, 0.0]])
    one = {"per_token": 1, "groups": 4, "groups_per_token": 1}
    router.moe = dataclasses.replace(SIGMOID, **one)
    assert router.select(scores).tolist() == [[0]]
    router = router_of(dataclasses.replace(SOFTMAX, **one))
    assert router.select(scores).tolist() == [[2]]


def test_the_bias_selects_but_does_not_weigh():
    router, x = router_of(dataclasses.replace(SIGMOID, groups=1, groups_per_token=1, normalize=False)), hidden_states()
    router.bias[5] = 10.0
    routing = router(x)
    assert (routing.experts[:, 0] == 5).all()
    scores = 2.5 * routing.logits.sigmoid().gather(1, routing.experts)
    assert torch.allclose(routing.weights, scores)


@pytest.mark.parametrize("mixture", [SOFTMAX, SIGMOID], ids=["softmax", "sigmoid"])
def test_gradients_of_weights_and_losses_are_autograds(mixture):
    """Against plain operations in fp64, with the experts given."""
    router, x = router_of(mixture), hidden_states().requires_grad_()
    direction = torch.randn(40, 3, generator=torch.Generator().manual_seed(2))
    routing = router(x)
    load = tokens_per_expert(routing.experts, 8)
    (routing.weights * direction).sum().add(balance_loss(routing, load)).add(z_loss(routing.logits)).backward()

    wide, weight = x.detach().double().requires_grad_(), router.weight.detach().double().requires_grad_()
    logits = wide @ weight.t()
    scores = logits.softmax(-1) if mixture.scores == "softmax" else logits.sigmoid()
    chosen = scores.gather(1, routing.experts)
    if mixture.normalize:
        chosen = chosen / chosen.sum(-1, keepdim=True)
    of_expert = (scores / scores.sum(-1, keepdim=True)).mean(0)
    balance = 8 * sum((routing.experts == e).sum() / 40 * of_expert[e] for e in range(8))
    z = logits.exp().sum(-1).log().square().mean()
    ((mixture.scaling * chosen * direction).sum() + balance + z).backward()
    for ours, exact in ((x.grad, wide.grad), (router.weight.grad, weight.grad)):
        assert (ours - exact).abs().max() <= 1e-5 * exact.abs().max()


def test_the_balance_loss_is_transformers():
    from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

    routing = router_of(SOFTMAX)(hidden_states())
    ours = balance_loss(routing, tokens_per_expert(routing.experts, 8))
    assert ours.item() == pytest.approx(load_balancing_loss_func((routing.logits,), 8, 3).item(), rel=1e-6)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_the_routers_losses_reach_the_gradient_and_not_the_log(recompute, monkeypatch):
    """The loss grows by the trained tokens times the weighted means over the layers; nll stays; recomputing counts
    nothing twice."""
    ids, labels = batch()
    trained = int((labels != -100).sum())
    model = drawn(source_of("qwen3_moe"))
    model.set_recompute(RECOMPUTE_SETS[recompute])
    with monkeypatch.context() as patch:
        for of_router in ("balance_loss", "z_loss"):  # with weights of 0 they are not computed
            patch.setattr(f"qtrain.models.native.router.{of_router}", None)
        plain = model(ids, labels)
        plain.loss.backward()
    before = [p.grad.clone() for p in model.parameters()]
    loads = model.expert_load.step.clone()
    assert loads.sum(dim=1).tolist() == [ids.numel() * 2] * 3
    model.zero_grad()
    model.router_losses.balance, model.router_losses.z = 0.5, 0.25
    sums = model(ids, labels)
    sums.loss.backward()
    assert torch.equal(model.expert_load.step, 2 * loads)
    assert torch.equal(sums.nll, plain.nll) and not sums.nll.requires_grad

    reference = copy.deepcopy(model)  # the same losses, from the layers' own outputs
    reference.zero_grad()
    kept = []
    for layer in reference.layers:
        layer.register_forward_hook(lambda _, args, out: kept.append(out[2]))
    reference.router_losses.balance = reference.router_losses.z = 1e-30  # they are computed, and lost in the sum
    loss = reference(ids, labels).loss + trained * (torch.stack(kept) * torch.tensor([0.5, 0.25])).sum(1).mean()
    loss.backward()
    assert sums.loss.item() == pytest.approx(loss.item(), rel=1e-6)
    assert sums.loss.item() > plain.loss.item() + 1
    for p, q in zip(model.parameters(), reference.parameters(), strict=True):
        assert (p.grad - q.grad).abs().max() <= 1e-5 * q.grad.abs().max()
    changed = [not torch.equal(p.grad, old) for p, old in zip(model.parameters(), before, strict=True)]
    assert sum(changed) > len(changed) // 2


def test_biases_move_against_the_load():
    load = ExpertLoad(2, 4)
    biases = [torch.zeros(4), torch.zeros(4)]
    load.count([torch.tensor([5, 1, 2, 0]), torch.tensor([2, 2, 2, 2])])
    load.count([torch.tensor([5, 1, 2, 0]), torch.tensor([2, 2, 2, 2])])
    load.end_step(biases, 0.01)
    assert biases[0].tolist() == pytest.approx([-0.01, 0.01, 0.0, 0.01]) and not biases[1].any()
    load.count([torch.tensor([0, 0, 0, 8]), torch.tensor([2, 2, 2, 2])])
    load.end_step(biases, 0.0)
    assert biases[0].tolist() == pytest.approx([-0.01, 0.01, 0.0, 0.01])
    found = load.read()()
    assert found["expert_load"] == pytest.approx(10 / 6) and 0.5 < found["expert_entropy"] < 1
    assert load.read()() == {}


def test_steps_of_the_bias_alone_balance_a_router():
    """A router that prefers some experts sends them no more than the others after some steps."""
    mixture = dataclasses.replace(SIGMOID, groups=1, groups_per_token=1)
    router, x = router_of(mixture), hidden_states(512) + 0.5
    with torch.no_grad():
        router.weight[:2] += 0.2
    counter, seen = ExpertLoad(1, 8), []
    for _ in range(150):
        counter.count([tokens_per_expert(router(x).experts, 8)])
        counter.end_step([router.bias], 0.005)
        seen.append(counter.read()()["expert_load"])
    assert seen[0] > 1.4 and max(seen[-10:]) < 1.1


@pytest.mark.usefixtures("compiler")
def test_a_compiled_router_is_one_graph_with_the_same_result():
    torch._dynamo.reset()
    router, x = router_of(SIGMOID), hidden_states()
    compiled = torch.compile(router, fullgraph=True)
    plain, found = router(x), compiled(x)
    assert torch.equal(plain.experts, found.experts) and torch.allclose(plain.weights, found.weights, rtol=1e-5)
    found.weights.sum().backward()
    assert router.weight.grad is not None
