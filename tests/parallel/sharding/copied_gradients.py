"""On each of several GPUs: gradients that are copied into the others' memory have the bits of those that NCCL sends.

python -m torch.distributed.run --nproc_per_node 2 -m tests.parallel.sharding.copied_gradients
"""

import os

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from qtrain.comm import peer_memory
from qtrain.comm.ranks import join_world, leave_world
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding import gradients
from qtrain.parallel.sharding.gradients import GradientReduction
from qtrain.parallel.sharding.shards import shard_parameters

SHAPES = {"norm": (1000,), "square": (1024, 1024), "wide": (130, 4096), "head": (4096, 1024), "one": (1,)}
UNITS = (("norm", "square", "wide"), ("head",), ("one",))
MICRO_BATCHES, STEPS = 3, 4


class Reduced:
    """A model's parameters in three units, whose gradients are reduced on a stream of their own."""

    def __init__(self, world: int):
        self.mesh = make_mesh(1, world, "cuda")
        self.parameters = {
            name: nn.Parameter(torch.zeros(shape, dtype=torch.bfloat16, device="cuda"))
            for name, shape in SHAPES.items()
        }
        self.sharded = shard_parameters(self.parameters.items(), self.mesh, lambda p: False)
        by_name = {s.name: s for s in self.sharded}
        groups = [[by_name[name] for name in unit] for unit in UNITS]
        self.reduction = GradientReduction(groups, every_micro_batch=True)
        self.stream = torch.cuda.Stream()

    def micro_batch(self, values: dict[str, torch.Tensor], first: bool) -> None:
        """Reduce these gradients, those of one rank later than those of the others."""
        for index, unit in enumerate(UNITS):
            if self.mesh.rank == index % self.mesh.dp_size:
                torch.cuda._sleep(2_000_000)  # about a millisecond
            for name in unit:
                self.parameters[name].grad = values[name].clone()
            kept = [self.parameters[name].grad for name in unit]
            self.stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.stream):
                self.reduction.add_group(index, first=first)
            torch.cuda.current_stream().wait_stream(self.stream)
            del kept

    def gradients(self) -> list[torch.Tensor]:
        self.reduction.finish()
        found = [s.master.grad for s in self.sharded if s.master.grad is not None]
        return [(g.to_local() if isinstance(g, DTensor) else g).clone() for g in found]


def values_of(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {
        name: (torch.randn(shape, generator=generator, device="cuda") * 100).bfloat16()
        for name, shape in SHAPES.items()
    }


def reduced(copies: bool, recorded: bool) -> list[list[torch.Tensor]]:
    """The gradients of each step."""
    gradients.peer_exchange = peer_memory.peer_exchange if copies else lambda *_: None
    run, graphs, found = Reduced(torch.distributed.get_world_size()), {}, []
    assert run.reduction.copies_all == copies
    inputs = {name: torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for name, shape in SHAPES.items()}
    for step in range(STEPS):
        for index in range(MICRO_BATCHES):
            for name, value in values_of(1000 * run.mesh.rank + 10 * step + index).items():
                inputs[name].copy_(value)
            first = index == 0
            if not recorded or step == 0:
                run.micro_batch(inputs, first)
                continue
            if first not in graphs:
                graphs[first] = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graphs[first], capture_error_mode="thread_local"):
                    run.micro_batch(inputs, first)
            graphs[first].replay()
        found.append(run.gradients())
    torch.cuda.synchronize()
    for graph in graphs.values():
        graph.reset()
    return found


def main() -> None:
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    join_world(torch.device("cuda", torch.cuda.current_device()))
    expected = reduced(copies=False, recorded=False)
    for inbox in (peer_memory.INBOX_BYTES, 1 << 20):  # then in many pieces
        peer_memory.INBOX_BYTES = inbox
        for recorded in (False, True):
            found = reduced(copies=True, recorded=recorded)
            for step, (own, other) in enumerate(zip(found, expected, strict=True)):
                assert len(own) == len(other) > 0
                assert all(torch.equal(a, b) for a, b in zip(own, other, strict=True)), (inbox, recorded, step)
    leave_world()
    print("equal")


if __name__ == "__main__":
    main()
