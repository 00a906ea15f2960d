"""Collectives of compiled code run in the order of the graph, whatever Inductor would gain by another one."""

import re

import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from qtrain.comm.rank_group import RankGroup, group_gather, group_maximum, group_scatter_sum
from tests.worlds import run_ranks

CALLS = re.compile(r"buf(\d+) = torch\.ops\.qtrain\.(group_\w+)\.default\(")


def late(x, y, name):
    """The first collective is read last, so that Inductor would rather run it last."""
    gathered = group_gather(x, name, 2, "activations")
    for _ in range(3):
        scale = group_maximum(y.abs().amax(dim=0), name, 2)
        y = group_scatter_sum(y * scale, name, 2, "activations")
    return y.sum() + gathered.sum()


def _without_gradients():
    from torch._inductor.utils import run_and_get_code

    name = RankGroup.of(dist.group.WORLD).name
    torch.manual_seed(dist.get_rank())
    x, y = torch.randn(256, 64), torch.rand(16, 64)
    found, (code,) = run_and_get_code(torch.compile(late), x, y, name)
    assert torch.allclose(found, late(x, y, name))
    assert "qtrain" in torch.compiler.config.cache_key_tag  # what was compiled without the order is not used
    return [call for _, call in CALLS.findall(code)]


def test_the_order_without_gradients_is_that_of_the_trace():
    expected = ["group_gather", *["group_maximum", "group_scatter_sum"] * 3]
    assert run_ranks(2, _without_gradients) == [expected] * 2


def _recomputed():
    from torch._inductor.utils import run_and_get_code

    ranks = RankGroup.of(dist.group.WORLD)

    def layer(x, y):
        for _ in range(3):
            y = torch.tanh(y * ranks.all_reduce_max(y.detach().abs().amax(dim=0)))
        return ranks.reduce_scatter(x * y.sum(dim=0))

    x, y = torch.randn(4096, 64, requires_grad=True), torch.randn(4, 64, requires_grad=True)
    run = torch.compile(lambda x, y: checkpoint(layer, x, y, use_reentrant=False))
    _, codes = run_and_get_code(lambda: run(x, y).square().sum().backward())
    return [CALLS.findall(code) for code in codes]


def test_the_order_of_a_backward_pass_that_recomputes():
    """Inductor numbers results in the order of the graph that it is given: first the gradient's own collective."""
    calls, other = run_ranks(2, _recomputed)
    assert calls == other
    numbers = [[int(number) for number, _ in found] for found in calls]
    assert [len(found) for found in numbers] == [4, 4] and numbers == [sorted(found) for found in numbers]
    assert calls[1][0][1] == "group_gather"
