"""What a checkpoint holds: a resumed run equals an uninterrupted one, in one process and in several."""

import json
import os
import random
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from qtrain.optim import Optimizer, adapted
from qtrain.train.state.checkpoint import Checkpoints, read_meta
from qtrain.train.state.state_dict import model_tensors, optimizer_tensors, prepare_optimizer, rng_state, set_rng_state
from tests.train.small_run import Net, adamw, assert_same, load, save, seed_all, train


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kwargs", [{"fused": True}, {"fused": False}, {"foreach": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("saved_at", [0, 3])
def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path, dtype, kwargs, saved_at):
    """Bit for bit: weights, buffers, losses, learning rate; also when saved before the optimizer's first step."""
    whole = Net(0).to(dtype)
    optimizer = adamw(whole, **kwargs)
    seed_all(1)
    train(whole, optimizer, saved_at)
    path = save(tmp_path, saved_at, whole, optimizer)
    losses = train(whole, optimizer, 4)

    resumed = Net(5).to(dtype)
    resumed_optimizer = adamw(resumed, **kwargs)
    seed_all(99)
    load(path, resumed, resumed_optimizer)
    assert train(resumed, resumed_optimizer, 4) == losses
    assert_same(whole, resumed)
    for one, other in zip(optimizer.param_groups, resumed_optimizer.param_groups, strict=True):
        assert {k: v for k, v in one.items() if k != "params"} == {k: v for k, v in other.items() if k != "params"}


def test_saving_changes_nothing(tmp_path):
    """Not even before the first step, where torch's own helper takes a step to create the state."""
    plain, saving = Net(0), Net(0)
    runs = []
    for model in (plain, saving):
        optimizer = adamw(model, fused=True)
        seed_all(1)
        for step in range(3):
            if model is saving:
                save(tmp_path, step, model, optimizer)
            runs.append(train(model, optimizer, 1))
    assert runs[:3] == runs[3:]
    assert_same(plain, saving)


def test_a_tied_weight_is_saved_once_and_stays_tied(tmp_path):
    model = Net(0)
    assert set(model_tensors(model)) == {"embed.weight", "inner.weight", "inner.bias", "mean"} | {
        "unused.weight",
        "unused.bias",
    }
    optimizer = adamw(model)
    path = save(tmp_path, 0, model, optimizer)
    other = Net(1)
    load(path, other, adamw(other))
    assert other.head.weight is other.embed.weight and torch.equal(other.head.weight, model.embed.weight)


def test_a_compiled_or_checkpointed_model_has_the_names_of_the_plain_one():
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model, wrapped = Net(0), Net(0)
    wrapped.inner = checkpoint_wrapper(torch.compile(wrapped.inner))
    assert list(model_tensors(wrapped)) == list(model_tensors(model))
    optimizer = adamw(wrapped)
    assert optimizer_tensors(optimizer, wrapped)[1] == optimizer_tensors(adamw(model), model)[1]


class LowBit(Optimizer):
    """States of every kind that low-bit optimizers have: codes, scales per block, fp32 beside bf16, plain numbers."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1, "seed": 7})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["steps"], state["decay"] = 0, 0.1
                    state["codes"] = torch.zeros(p.shape, dtype=torch.uint8)
                    state["scales"] = torch.ones(-(-p.numel() // 8), dtype=torch.float32)
                    state["average"] = torch.zeros(p.shape, dtype=torch.float32)
                state["steps"] += 1
                state["average"].lerp_(p.grad.float(), state["decay"] / state["steps"])
                state["scales"] *= 1.01
                state["codes"] += 3
                p.sub_(group["lr"] * state["average"] * state["scales"].mean() * (1 + state["codes"] / 255))


def test_low_bit_states_keep_their_shapes_and_dtypes(tmp_path):
    """torch's load_state_dict would cast the fp32 states of bf16 weights to bf16."""
    whole = Net(0).bfloat16()
    optimizer = LowBit(whole.parameters())
    seed_all(1)
    train(whole, optimizer, 3)
    path = save(tmp_path, 3, whole, optimizer)
    losses = train(whole, optimizer, 3)
    resumed = Net(1).bfloat16()
    other = LowBit(resumed.parameters())
    load(path, resumed, other)
    assert train(resumed, other, 3) == losses
    assert_same(whole, resumed)
    state = other.state[resumed.inner.weight]
    assert {k: getattr(v, "dtype", type(v)) for k, v in state.items()} == {
        "steps": int,
        "decay": float,
        "codes": torch.uint8,
        "scales": torch.float32,
        "average": torch.float32,
    }


def test_all_generators_are_restored():
    seed_all(3)
    random.gauss(0, 1), np.random.normal()  # each keeps a second draw in store
    state = rng_state()

    def draw():
        return [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand(), torch.rand(3).tolist()]

    first = draw()
    assert draw() != first
    set_rng_state(state)
    assert draw() == first


@pytest.mark.gpu
def test_the_cuda_generator_is_restored():
    state = rng_state()
    first = torch.rand(4, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)


def test_meta_keeps_numbers_exactly(tmp_path):
    meta = {"loss": 0.1 + 0.2, "best": float("inf"), "data": {"file": 3, "offset": 2**53 + 1}, "name": "ü"}
    path = Checkpoints(tmp_path, 1).save(1, {"x": torch.zeros(2)}, meta)
    assert read_meta(path) == meta


# ---- many processes -------------------------------------------------------------------------------------------------

RANKS = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from qtrain.core.errors import UserError
from qtrain.optim import adapted
from qtrain.train.state.state_dict import *
from qtrain.train.state.checkpoint import *
from qtrain.train.state.checkpoint import Checkpoints
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))  # 7 and 5 rows: uneven shards
    fully_shard(model)
    return model, adapted(torch.optim.AdamW)(model.parameters(), lr=1e-2)

def step(model, optimizer):
    x = torch.rand(4, 6)  # each rank its own generator
    loss = model(x).square().mean()
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    return loss.item()

def save(number, model, optimizer):
    tensors, described = optimizer_tensors(optimizer, model)
    state = {"model": model_tensors(model), "optim": tensors, "rng": rng_state(), "plain": torch.arange(3.0)}
    return Checkpoints(folder / "checkpoints", 1).save(number, state, {"optim": described})

def load(path, model, optimizer):
    optim = prepare_optimizer(optimizer, model, read_meta(path)["optim"])
    state = {"model": model_tensors(model), "optim": optim, "rng": rng_state(), "plain": torch.zeros(3)}
    Checkpoints.load(path, state)
    set_rng_state(state["rng"])
    return state["plain"].tolist()

model, optimizer = build(0)
torch.manual_seed(100 + rank)
for _ in range(3): step(model, optimizer)
path = save(3, model, optimizer)
expected = [step(model, optimizer) for _ in range(3)]

model, optimizer = build(1)
plain = load(path, model, optimizer)
result = {"expected": expected, "resumed": [step(model, optimizer) for _ in range(3)], "plain": plain}
full = {n: t.full_tensor().tolist() for n, t in model_tensors(model).items()}
state = optimizer.state[model[0].weight]
result["steps"] = state["step"].item()
save(6, model, optimizer)
dist.barrier()
if rank == 0:
    shard = next((folder / "checkpoints" / "00000006").glob("__1_*"))
    data = bytearray(shard.read_bytes()); data[len(data) // 2] ^= 1; shard.write_bytes(data)
dist.barrier()
try:
    load(folder / "checkpoints" / "00000006", *build(1))
    result["damaged"] = "loaded"
except UserError as error:
    result["damaged"] = str(error)
if rank == 0: data[len(data) // 2] ^= 1; shard.write_bytes(data)
result["model"] = full
(folder / f"result{rank}.json").write_text(json.dumps(result))
dist.barrier()
os._exit(0)
"""


@pytest.mark.sweep
def test_two_processes_save_their_shards_and_one_process_loads_them(tmp_path):
    """FSDP2 over gloo: exact on two ranks with a generator each; the same files then fill an unsharded model."""
    on_cpu = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    ranks = [subprocess.Popen([sys.executable, "-c", RANKS, str(rank), str(tmp_path)], env=on_cpu) for rank in range(2)]
    try:
        for process in ranks:
            process.wait(timeout=120)
    finally:
        for process in ranks:
            process.kill()
    results = [json.loads((tmp_path / f"result{rank}.json").read_text()) for rank in range(2)]
    for result in results:
        assert result["resumed"] == result["expected"] and result["plain"] == [0, 1, 2] and result["steps"] == 6
        assert result["damaged"].startswith("--resume: ") and "checksum" in result["damaged"]
    assert results[0]["expected"] != results[1]["expected"], "each rank has its own generator"
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["00000006"]

    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))
    path = tmp_path / "checkpoints" / "00000006"
    optim = prepare_optimizer(adapted(torch.optim.AdamW)(model.parameters()), model, read_meta(path)["optim"])
    state = {"model": model_tensors(model), "optim": optim, "rng": rng_state(), "plain": torch.zeros(3)}
    Checkpoints.load(path, state)
    for name, tensor in model_tensors(model).items():
        assert tensor.tolist() == results[0]["model"][name], name
    assert optim["0.weight"]["exp_avg"].shape == (7, 6) and optim["0.weight"]["exp_avg"].abs().min() > 0
