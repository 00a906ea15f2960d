"""The optimizer in the backward pass of several processes: their ordinary step bit for bit, in one order on all."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.mesh_equality import CONFIG, UNTIED, differences, random_micro_batch, train
from qtrain.comm.ranks import all_gather, rank
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding import gradient_buckets, weights
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.shards import local_tensors
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.step.forward import language_forward
from qtrain.train.step.in_backward import OptimizerInBackward, model_partitions
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import sampled
from tests.worlds import run_ranks

CASES = [
    ("fp8_tensorwise", "adamw_8bit", "1x2", False),
    ("int8_weight", "muon", "1x2", False),
    ("bf16", "adamw_schedule_free", "2x1", False),
    ("int8", "q_galore_adamw", "2x2", False),
    ("fp8_tensorwise", "adamw_8bit", "1x2", True),
    ("int4_weight", "muon", "2x2", True),
]


def _both_ways(scheme: str, optimizer: str, mesh: str, full_shard: bool) -> list[dict[str, Any]]:
    gradient_buckets.ALONE_BYTES = weights.ALONE_BYTES = 1 << 14
    made = make_mesh(*map(int, mesh.split("x")), "cpu")
    config = UNTIED if full_shard else CONFIG
    run = partial(train, scheme, optimizer, made, torch.device("cpu"), 3, False, made.dp_size, full_shard, config)
    return [run(clip_grad_norm=0.0, optimizer_in_backward=chosen) for chosen in (False, True)]


@pytest.mark.parametrize(
    ("scheme", "optimizer", "mesh", "full_shard"),
    sampled(CASES, lambda _, optimizer, mesh, full_shard: mesh == "2x1" or (mesh == "2x2" and full_shard)),
)
def test_it_is_the_ordinary_step_of_the_same_mesh(scheme, optimizer, mesh, full_shard):
    for ordinary, within in run_ranks(
        math.prod(map(int, mesh.split("x"))), _both_ways, scheme, optimizer, mesh, full_shard
    ):
        assert differences(ordinary, within) == ""


class Trainee:
    """A small model on two ranks, whose last layer has a parameter that only the loss of rank 1 reads."""

    def __init__(self, *, in_backward: bool):
        mesh = make_mesh(1, 2, "cpu")
        self.model = build_model(
            ModelSource("small", dict(CONFIG), "--model"), device="cpu", dtype=torch.bfloat16, seed=1
        )
        self.model.layers[1].extra = torch.nn.Parameter(torch.ones(64))
        self.quantized = quantize_linears(self.model, SCHEMES.make("int8", {}, "--quantize"), seed=0, head=None)
        partitions = model_partitions(self.model) if in_backward else None
        self.parallel = DataParallel(self.model, self.quantized, mesh, partitions=partitions)
        groups = parameter_groups(self.model, 0.1)
        for group in groups:
            group["params"] = [self.parallel.master(p) for p in group["params"]]
        self.optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(groups, 1e-3, seed=3)
        self.optimizer.place(self.parallel.placements)
        self.quantized.track_versions(self.optimizer)
        self.in_backward = OptimizerInBackward(self.optimizer, self.parallel) if in_backward else None

    def forward(self, batch):
        sums = language_forward(self.model, None)(batch)
        extra = self.model.layers[1].extra
        return sums._replace(loss=sums.loss + extra.sum()) if rank() == 1 else sums

    def step(self, number: int):
        found = compute_gradients(
            self.model,
            self.forward,
            self.quantized,
            [random_micro_batch(number, rank())],
            number,
            in_backward=self.in_backward,
            parallel=self.parallel,
        )
        if not found.finite:
            return found
        apply_gradients(
            self.optimizer,
            self.quantized,
            found,
            lr=1e-3,
            clip_grad_norm=0,
            in_backward=self.in_backward,
            parallel=self.parallel,
        )
        return found

    def masters(self) -> list[Tensor]:
        """What this rank has of the weights."""
        return [tensor for sharded in self.parallel.parameters for tensor in local_tensors(sharded.master)]


def _with_a_parameter_of_one_rank() -> list[Any]:
    ordinary, within = Trainee(in_backward=False), Trainee(in_backward=True)
    updates, step_partition = [], within.optimizer.step_partition

    def watched(index: int) -> None:
        updates.append((index, len(within.in_backward._completed)))
        step_partition(index)

    within.optimizer.step_partition = watched
    norms = [[way.step(number).norm for number in range(3)] for way in (ordinary, within)]
    same = [torch.equal(a, b) for a, b in zip(ordinary.masters(), within.masters(), strict=True)]
    return [norms, same, updates]


def test_ranks_whose_gradients_arrive_otherwise_update_in_one_order():
    """Rank 1 has gradients that rank 0 lacks: in the first step it is waited for, then it comes last."""
    one, other = run_ranks(2, _with_a_parameter_of_one_rank)
    for norms, same, _ in (one, other):
        assert norms[0] == norms[1] and len(set(norms[0])) == 3 and all(same)
    order = [index for index, _ in one[2]]
    assert order == [index for index, _ in other[2]]
    per_step = len(order) // 3
    first, second = order[:per_step], order[per_step : 2 * per_step]
    assert sorted(first) == sorted(second) and second[-1] == 1 and first[-1] != 1 and second == order[2 * per_step :]
    # Only the partition that rank 0 cannot complete waits for the end of its backward pass.
    assert [completed for _, completed in one[2][per_step:]] == [*range(1, per_step), per_step - 1] * 2


def _spoiled() -> list[Any]:
    trainee = Trainee(in_backward=True)
    trainee.step(0)
    if rank() == 1:
        trainee.model.layers[0].mlp_norm.weight.register_hook(lambda gradient: gradient * float("nan"))
    found = trainee.step(1)
    return [
        found.finite,
        found.norm,
        trainee.in_backward.first_nonfinite(),
        all_gather(trainee.in_backward._order),
    ]


def test_a_nonfinite_gradient_of_one_rank_stops_all():
    for finite, norm, named, orders in run_ranks(2, _spoiled):
        assert not finite and math.isnan(norm) and named == "the gradient of layers.0 (norm nan)"
        assert orders[0] == orders[1]
