"""On two ranks the weights and states are those of one rank, bit for bit, and a checkpoint of one is one of the other.

Processes of gloo may abort at their exit, after all their work: what counts is the files that they leave."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from tests.system import ROOT

WORK = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from qtrain.optim import OPTIMIZERS
from qtrain.train.state.checkpoint import Checkpoints, read_meta
from qtrain.train.state.state_dict import finish_optimizer, model_tensors, optimizer_tensors, prepare_optimizer

folder, rank, world, port = Path(sys.argv[1]), *map(int, sys.argv[2:5])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(128, 97), nn.Linear(97, 64)).bfloat16()
fully_shard(model, mesh=init_device_mesh("cpu", (world,)))

def build():
    spec = OPTIMIZERS.make("adamw_8bit", {"small": 1000}, "--optim")
    return spec.build([{"params": list(model.parameters())}], 0.01, seed=1)

def train(optimizer, steps):
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            grad = torch.randn(p.shape, generator=generator).bfloat16()
            p.grad = distribute_tensor(grad, p.device_mesh, p.placements)
        optimizer.step()

optimizer = build()
train(optimizer, range(3))
tensors, meta = optimizer_tensors(optimizer, model)
Checkpoints(folder / f"of{world}", 1).save(3, {"model": model_tensors(model), "optim": tensors}, {"optim": meta})
other = folder / "of1" / "00000003"  # of one rank, also on two
optimizer = build()
tensors = prepare_optimizer(optimizer, model, read_meta(other)["optim"])
Checkpoints.load(other, {"model": model_tensors(model), "optim": tensors})
assert finish_optimizer(optimizer, model) == []
train(optimizer, range(3, 6))
tensors, _ = optimizer_tensors(optimizer, model)
found = {name: p.full_tensor() for name, p in model.named_parameters()}
found |= {f"{n}.{k}": v.full_tensor() for n, states in tensors.items() for k, v in states.items() if v.ndim}
if rank == 0:
    torch.save(found, folder / f"{world}.pt")
dist.barrier()
"""


def test_two_ranks_are_one(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for world in (1, 2):
        port = 20_000 + os.getpid() % 20_000 + world
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", WORK, str(tmp_path), str(rank), str(world), str(port)],
                env=environment,
                stderr=subprocess.PIPE,
                text=True,
            )
            for rank in range(world)
        ]
        errors = [process.communicate(timeout=120)[1] for process in processes]
        assert (Path(tmp_path) / f"{world}.pt").exists(), errors
    one, two = (torch.load(tmp_path / f"{world}.pt") for world in (1, 2))
    assert one.keys() == two.keys() and any("int8" in name for name in one)
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)
