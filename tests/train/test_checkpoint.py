"""Checkpoints: exact, whole whenever the process dies, refused with a message when damaged, harmless when hostile."""

import io
import json
import os
import pickle
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from qtrain.errors import TrainingStopped, UserError
from qtrain.train.checkpoint import Checkpoints, read_meta, resolve_resume
from qtrain.train.tensors import model_tensors, optimizer_tensors, prepare_optimizer, rng_state, set_rng_state

# ---- a small real run -----------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Embedding, dropout (so that generators matter), a buffer, and a head tied to the embedding."""

    def __init__(self, seed: int, width: int = 16):
        super().__init__()
        torch.manual_seed(seed)
        self.embed = nn.Embedding(32, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 32, bias=False)
        self.head.weight = self.embed.weight
        self.unused = nn.Linear(2, 2)
        self.register_buffer("mean", torch.zeros(width))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = torch.relu(self.inner(nn.functional.dropout(self.embed(ids), 0.2)))
        with torch.no_grad():
            self.mean.lerp_(hidden.mean(0), 0.1)
        return self.head(hidden)


def adamw(model: nn.Module, **kwargs) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), **kwargs)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[float]:
    """Steps on data drawn from all three generators, so that a wrong one shows; returns the losses."""
    losses = []
    for _ in range(steps):
        ids = torch.randint(32, (8,))
        targets = torch.tensor([random.randrange(32) for _ in range(4)] + np.random.randint(32, size=4).tolist())
        loss = nn.functional.cross_entropy(model(ids).float(), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.97
        losses.append(loss.item())
    return losses


def save(folder: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int = 2) -> Path:
    tensors, described = optimizer_tensors(optimizer, model)
    state = {"model": model_tensors(model), "optim": tensors, "rng": rng_state()}
    return Checkpoints(folder, keep).save(step, state, {"step": step, "optim": described})


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict:
    meta = read_meta(path)
    optim = prepare_optimizer(optimizer, model, meta["optim"])
    state = {"model": model_tensors(model), "optim": optim, "rng": rng_state()}
    assert Checkpoints.load(path, state) == meta
    set_rng_state(state["rng"])
    return meta


def seed_all(seed: int) -> None:
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def assert_same(a: nn.Module, b: nn.Module) -> None:
    for (name, one), other in zip(a.state_dict().items(), b.state_dict().values(), strict=True):
        assert torch.equal(one, other), name


# ---- exactness ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kwargs", [{"fused": True}, {"fused": False}, {"foreach": True}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("saved_at", [0, 3])
def test_resuming_equals_never_having_stopped(tmp_path, dtype, kwargs, saved_at):
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
    """Not even before the first step, where torch's own helper takes a step to have a state to save."""
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


class LowBit(torch.optim.Optimizer):
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


def test_all_generators_come_back():
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
def test_the_cuda_generator_comes_back():
    state = rng_state()
    first = torch.rand(4, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)


def test_meta_keeps_numbers_exactly(tmp_path):
    meta = {"loss": 0.1 + 0.2, "best": float("inf"), "data": {"file": 3, "offset": 2**53 + 1}, "name": "ü"}
    path = Checkpoints(tmp_path, 1).save(1, {"x": torch.zeros(2)}, meta)
    assert read_meta(path) == meta


# ---- which checkpoint is kept, and which is chosen ------------------------------------------------------------------


def tiny(step: int) -> dict[str, torch.Tensor]:
    return {"x": torch.full((64,), float(step))}


def test_the_newest_are_kept_and_the_oldest_removed(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in (1, 5, 9, 10):
        assert checkpoints.save(step, tiny(step), {}) == tmp_path / f"{step:08d}"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["00000009", "00000010"]
    assert checkpoints.latest() == tmp_path / "00000010"


def test_the_one_just_written_is_kept_though_later_steps_exist(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(40, tiny(40), {})
    checkpoints.save(20, tiny(20), {})
    assert (tmp_path / "00000020").is_dir()


def test_going_back_discards_later_steps(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=5)
    for step in (10, 20, 30):
        checkpoints.save(step, tiny(step), {})
    checkpoints.discard_after(10)
    assert [p.name for p in tmp_path.iterdir()] == ["00000010"]


def test_a_step_saved_again_is_replaced(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(3, tiny(1), {"n": 1})
    path = checkpoints.save(3, tiny(2), {"n": 2})
    into = tiny(0)
    assert Checkpoints.load(path, into) == {"n": 2} and into["x"][0] == 2
    assert [p.name for p in tmp_path.iterdir()] == ["00000003"]


def test_a_kill_between_the_two_renames_of_a_replacement_loses_nothing(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    path = checkpoints.save(3, tiny(1), {})
    path.rename(tmp_path / ".old-00000003-1")
    assert checkpoints.latest() == tmp_path / ".old-00000003-1"
    checkpoints.save(3, tiny(2), {})
    assert [p.name for p in tmp_path.iterdir()] == ["00000003"]


def test_the_newest_complete_one_is_chosen_not_the_newest_name(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=9)
    assert checkpoints.latest() is None
    for step in (1, 2, 3, 4, 5):
        checkpoints.save(step, tiny(step), {})
    (tmp_path / "00000005" / "COMPLETE").unlink()
    (tmp_path / "00000004" / "__0_0.distcp").unlink()
    with (tmp_path / "00000003" / "__0_0.distcp").open("r+b") as file:
        file.truncate(100)
    (tmp_path / "00000099").mkdir()
    (tmp_path / "00000098").write_text("not a folder")
    assert checkpoints.latest() == tmp_path / "00000002"


def test_what_dead_processes_left_is_cleaned_and_what_live_ones_write_is_not(tmp_path):
    dead = subprocess.Popen([sys.executable, "-c", ""])
    dead.wait()
    (tmp_path / f".tmp-7-{dead.pid}").mkdir(parents=True)
    (tmp_path / f".tmp-7-{os.getppid()}").mkdir()
    Checkpoints(tmp_path, keep=1).save(8, tiny(8), {})
    assert {p.name for p in tmp_path.iterdir()} == {"00000008", f".tmp-7-{os.getppid()}"}


def test_a_full_disk_stops_with_a_message_and_leaves_the_last_one(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep=1)
    first = checkpoints.save(1, tiny(1), {})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, hard))
    try:
        with pytest.raises(TrainingStopped) as raised:
            checkpoints.save(2, {"x": torch.zeros(1_000_000)}, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step 2" in str(raised.value) and str(first) in str(raised.value) and "File too large" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["00000001"]
    assert checkpoints.latest() == first


def test_every_file_is_on_disk_before_the_checkpoint_gets_its_name(tmp_path, monkeypatch):
    """What a kill cannot show and a power cut would: fsync of all files, then of the folder, then the rename."""
    events = []

    def fsync(descriptor, real=os.fsync):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real(descriptor)

    def rename(source, target, real=os.rename):
        events.append(f"rename to {Path(target).name}")
        real(source, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "rename", rename)
    path = Checkpoints(tmp_path / "c", 1).save(1, tiny(1), {})
    named = events.index("rename to 00000001")
    synced = {event for event in events[:named] if not event.startswith("rename")}
    assert synced == {p.name for p in path.iterdir()} | {f".tmp-1-{os.getpid()}"}
    assert events[named - 2 : named] == ["COMPLETE", f".tmp-1-{os.getpid()}"] and events[named + 1] == "c"


# ---- kill -9 --------------------------------------------------------------------------------------------------------

SAVER = """
import os, random, sys
from pathlib import Path
import torch
from qtrain.train.checkpoint import Checkpoints
torch.set_num_threads(1)
print("ready", flush=True)
for line in sys.stdin:  # a fork per line: one start of Python and torch for all the kills
    child = os.fork()
    if child == 0:
        checkpoints = Checkpoints(Path(sys.argv[1]), keep=2)
        last = checkpoints.latest()
        step, parts = 0, 8
        if last is not None:
            state = {"part": {str(n): torch.zeros(20_000) for n in range(parts)}}
            step = checkpoints.load(last, state)["step"]
            assert all((t == step).all() for t in state["part"].values())
        print(f"pid {os.getpid()}", flush=True)
        while True:
            step += 1
            state = {"part": {str(n): torch.full((20_000,), float(step)) for n in range(parts)}}
            checkpoints.save(step, state, {"step": step})
            os.write(1, f"saved {step}\\n".encode())
    os.waitpid(child, 0)
    print("dead", flush=True)
"""


def test_kill_nine_at_any_moment_leaves_a_complete_checkpoint(tmp_path):
    """25 kills of a process that does nothing but save. What it reported as saved is never lost."""
    saver = subprocess.Popen(
        [sys.executable, "-c", SAVER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert saver.stdout.readline() == "ready\n"
    checkpoints, chance, saved, caught, one_save = Checkpoints(tmp_path, keep=2), random.Random(0), 0, 0, 0.05
    for kill in range(25):
        print("go", file=saver.stdin, flush=True)
        pid = int(saver.stdout.readline().split()[1])
        for _ in range(2 if kill == 0 else chance.randrange(4)):  # up to three whole saves, then part of another
            begin = time.monotonic()
            saved = int(saver.stdout.readline().split()[1])
            one_save = time.monotonic() - begin
        time.sleep(chance.uniform(0, one_save))
        os.kill(pid, signal.SIGKILL)
        while (line := saver.stdout.readline().split())[0] == "saved":
            saved = int(line[1])
        assert line == ["dead"]
        caught += any(p.name.startswith(".tmp") for p in tmp_path.iterdir())
        state = {"part": {str(n): torch.zeros(20_000) for n in range(8)}}
        step = Checkpoints.load(checkpoints.latest(), state)["step"]
        assert step >= saved
        assert all(torch.equal(t, torch.full((20_000,), float(step))) for t in state["part"].values())
    saver.stdin.close()
    saver.wait(timeout=30)
    assert caught >= 5, f"only {caught} kills came inside a save: too few to mean anything"
    assert len(list(tmp_path.iterdir())) <= 2 + 1 + 1  # two kept, one the last save left over, one not pruned yet


# ---- damage ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def good(tmp_path_factory) -> Path:
    model = Net(0)
    optimizer = adamw(model)
    seed_all(0)
    train(model, optimizer, 2)
    return save(tmp_path_factory.mktemp("good"), 2, model, optimizer)


@pytest.fixture
def copy(good, tmp_path) -> Path:
    shutil.copytree(good, tmp_path / "00000002")
    return tmp_path / "00000002"


def remark(path: Path) -> None:
    """Write COMPLETE anew, so that sizes and checksums vouch for the files as they are now."""
    marker = json.loads((path / "COMPLETE").read_text())
    files = [p for p in path.iterdir() if p.name != "COMPLETE"]
    marker["files"] = {p.name: (p.stat().st_size, zlib.crc32(p.read_bytes())) for p in files}
    (path / "COMPLETE").write_text(json.dumps(marker))


def load_new(path: Path) -> None:
    model = Net(1)
    load(path, model, adamw(model))


def flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 0x40
    path.write_bytes(data)


DAMAGE = {
    "no folder": (lambda p: shutil.rmtree(p), "no such folder"),
    "no marker": (lambda p: (p / "COMPLETE").unlink(), "no COMPLETE"),
    "torn marker": (lambda p: (p / "COMPLETE").write_bytes((p / "COMPLETE").read_bytes()[:40]), "COMPLETE file is dam"),
    "odd marker": (lambda p: (p / "COMPLETE").write_text("[1]"), "COMPLETE file is damaged"),
    "marker of nothing": (
        lambda p: (p / "COMPLETE").write_text('{"step": 1, "saved_at": 0, "files": {}}'),
        "COMPLETE file is damaged",
    ),
    "missing shard": (lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "short shard": (lambda p: os.truncate(p / "__0_0.distcp", 1000), "has 1,000 of"),
    "empty shard": (lambda p: os.truncate(p / "__0_0.distcp", 0), "has 0 of"),
    "flipped bit in a shard": (lambda p: flip(p / "__0_0.distcp", 2000), "__0_0.distcp is damaged"),
    "flipped bit in meta": (lambda p: flip(p / "meta.json", 20), "meta.json is damaged"),
    "flipped bit in the index": (lambda p: flip(p / ".metadata", 500), ".metadata is damaged"),
    "missing meta": (lambda p: (p / "meta.json").unlink(), "meta.json is missing"),
    "missing index": (lambda p: (p / ".metadata").unlink(), ".metadata is missing"),
    "meta that is a list": (lambda p: ((p / "meta.json").write_text("[]"), remark(p)), "meta.json is damaged"),
    "meta without optimizer": (lambda p: ((p / "meta.json").write_text('{"optim": {}}'), remark(p)), "optimizer entry"),
    "cut index, vouched for": (lambda p: (os.truncate(p / ".metadata", 700), remark(p)), ".metadata is not a"),
    "cut shard, vouched for": (lambda p: (os.truncate(p / "__0_0.distcp", 5000), remark(p)), "cannot be loaded"),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_a_damaged_checkpoint_is_refused_by_name(copy, case):
    damage, expected = DAMAGE[case]
    damage(copy)
    with pytest.raises(UserError) as raised:
        load_new(copy)
    message = str(raised.value)
    assert message.startswith("--resume: ") and expected in message and "\n" not in message
    if "optimizer entry" not in message:
        assert str(copy) in message


def test_an_index_cut_anywhere_is_refused(copy):
    whole = (copy / ".metadata").read_bytes()
    for length in random.Random(0).sample(range(len(whole)), 40):
        (copy / ".metadata").write_bytes(whole[:length])
        remark(copy)
        with pytest.raises(UserError, match=r"\.metadata"):
            load_new(copy)


def wanted(**changes: torch.Tensor | None) -> dict:
    model = Net(0)
    tensors = model_tensors(model) | {k.replace("__", "."): v for k, v in changes.items()}
    return {"model": {k: v for k, v in tensors.items() if v is not None}}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"more": torch.zeros(1)}, "lacks 1 of this run's tensors, first model.more"),
        ({"inner__bias": None}, "has 1 tensors that this run has not, first model.inner.bias"),
        ({"inner__bias": torch.zeros(17)}, "model.inner.bias has shape [16] in it and [17] in this run"),
        ({"inner__bias": torch.zeros(1, 16)}, "has shape [16] in it and [1, 16]"),
        ({"inner__bias": torch.zeros(16).bfloat16()}, "torch.float32 in it and torch.bfloat16 in this run"),
    ],
)
def test_another_models_checkpoint_is_refused_and_nothing_filled(tmp_path, changes, expected):
    path = Checkpoints(tmp_path, 1).save(1, {"model": {k: v + 1 for k, v in model_tensors(Net(0)).items()}}, {})
    into = wanted(**changes)
    before = {k: v.detach().clone() for k, v in into["model"].items()}
    with pytest.raises(UserError) as raised:
        Checkpoints.load(path, into)
    assert expected in str(raised.value) and str(path) in str(raised.value) and "settings" in str(raised.value)
    assert all(torch.equal(before[k], v) for k, v in into["model"].items())


def test_an_optimizer_over_other_parameters_is_refused(good):
    model = Net(1)
    with pytest.raises(UserError, match=r"--resume: .* grouped differently"):
        prepare_optimizer(torch.optim.AdamW(model.parameters()), model, read_meta(good)["optim"])
    model.inner.bias.requires_grad_(False)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [model.unused.bias]},
    ]
    with pytest.raises(UserError, match=r"inner\.bias is trained in only one"):
        prepare_optimizer(torch.optim.AdamW(groups), model, read_meta(good)["optim"])


# ---- hostility ------------------------------------------------------------------------------------------------------


class Bomb:
    """Unpickled, it runs a command."""

    def __init__(self, proof: Path):
        self.proof = proof

    def __reduce__(self):
        return os.system, (f"touch {self.proof}",)


def index_with_bomb(path: Path, proof: Path) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    index.planner_data = Bomb(proof)
    (path / ".metadata").write_bytes(pickle.dumps(index))


def index_that_calls_builtins(path: Path, proof: Path) -> None:
    code = f"open({str(proof)!r}, 'w')".encode()
    data = b"\x80\x02cbuiltins\nexec\n(X" + len(code).to_bytes(4, "little") + code + b"tR."
    (path / ".metadata").write_bytes(data)


def entry_that_is_no_tensor(path: Path, proof: Path) -> None:
    """DCP loads such entries by torch.load(weights_only=False)."""
    for name in (".metadata", "__0_0.distcp"):
        (path / name).unlink()
    dcp.save({"model.inner.bias": Bomb(proof)}, checkpoint_id=path)
    proof.unlink(missing_ok=True)


def shard_that_is_no_tensor(path: Path, proof: Path) -> None:
    buffer = io.BytesIO()
    torch.save(Bomb(proof), buffer)
    (path / "__0_0.distcp").write_bytes(buffer.getvalue())
    index = pickle.loads((path / ".metadata").read_bytes())
    for stored in index.storage_data.values():
        stored.offset, stored.length = 0, len(buffer.getvalue())
    (path / ".metadata").write_bytes(pickle.dumps(index))


def file_outside(path: Path, proof: Path) -> None:
    index = pickle.loads((path / ".metadata").read_bytes())
    for stored in index.storage_data.values():
        stored.relative_path = "../00000002/__0_0.distcp"
    (path / ".metadata").write_bytes(pickle.dumps(index))


@pytest.mark.parametrize(
    "attack",
    [index_with_bomb, index_that_calls_builtins, entry_that_is_no_tensor, shard_that_is_no_tensor, file_outside],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(copy, tmp_path, attack):
    proof = tmp_path / "ran"
    attack(copy, proof)
    remark(copy)
    with pytest.raises(UserError, match="--resume") as raised:
        load_new(copy)
    assert not proof.exists(), raised.value


def test_the_attacks_are_real(copy, tmp_path):
    """Else the test above would prove nothing: read by plain pickle, the index runs its command."""
    proof = tmp_path / "ran"
    index_with_bomb(copy, proof)
    pickle.loads((copy / ".metadata").read_bytes())
    assert proof.exists()


def test_unknown_dtypes_in_meta_are_not_looked_up_as_code(copy):
    meta = json.loads((copy / "meta.json").read_text())
    meta["optim"]["states"]["inner.weight"]["exp_avg"]["dtype"] = "load"
    (copy / "meta.json").write_text(json.dumps(meta))
    remark(copy)
    with pytest.raises(UserError, match="optimizer entry"):
        load_new(copy)


# ---- --resume -------------------------------------------------------------------------------------------------------


def make_run(root: Path, name: str, steps: list[int]) -> Path:
    for step in steps:
        Checkpoints(root / name / "checkpoints", keep=9).save(step, tiny(step), {})
    return root / name


def test_auto_takes_what_was_saved_last_by_a_run_of_the_name(tmp_path):
    make_run(tmp_path, "20250102-000000_small", [30])
    newest = make_run(tmp_path, "20250101-000000_small", [10, 20])  # saved later, though named earlier
    other = make_run(tmp_path, "20250103-000000_very_small", [40])
    (tmp_path / "20250104-000000_small").mkdir()
    (tmp_path / "notes.txt").write_text("")
    assert resolve_resume("auto", tmp_path, "small") == newest / "checkpoints" / "00000020"
    assert resolve_resume("auto", tmp_path, "very_small") == other / "checkpoints" / "00000040"
    assert resolve_resume("auto", tmp_path) == other / "checkpoints" / "00000040"


def test_auto_without_a_checkpoint_says_so_and_starts_anew(tmp_path, capsys):
    assert resolve_resume("auto", tmp_path / "none") is None
    make_run(tmp_path, "t_small", [1])
    assert resolve_resume("auto", tmp_path, "large") is None
    assert "no complete checkpoint of a run named 'large'" in capsys.readouterr().out


def test_a_path_may_be_a_run_its_checkpoints_or_one_of_them(tmp_path):
    run = make_run(tmp_path, "t_small", [10, 20])
    newest = run / "checkpoints" / "00000020"
    for given in (run, run / "checkpoints", newest):
        assert resolve_resume(str(given), tmp_path) == newest
    older = run / "checkpoints" / "00000010"
    assert resolve_resume(str(older), tmp_path) == older
    (newest / "COMPLETE").unlink()
    assert resolve_resume(str(run), tmp_path) == older


def test_a_path_without_a_complete_checkpoint_is_refused_with_a_way_out(tmp_path):
    run = make_run(tmp_path, "t_small", [10, 20])
    newest = run / "checkpoints" / "00000020"
    (newest / "COMPLETE").unlink()
    with pytest.raises(UserError, match=r"00000020 .*no COMPLETE.*beside it is .*00000010"):
        resolve_resume(str(newest), tmp_path)
    with pytest.raises(UserError, match="no such folder"):
        resolve_resume(str(run / "nowhere"), tmp_path)
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match="no complete checkpoint in it"):
        resolve_resume(str(tmp_path / "empty"), tmp_path)


# ---- many processes -------------------------------------------------------------------------------------------------

RANKS = """
import json, os, sys
from pathlib import Path
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from qtrain.errors import UserError
from qtrain.train.tensors import *
from qtrain.train.checkpoint import *
from qtrain.train.checkpoint import Checkpoints
rank, folder = int(sys.argv[1]), Path(sys.argv[2])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)

def build(seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 7), nn.Linear(7, 5))  # 7 and 5 rows: uneven shards
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

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
    optim = prepare_optimizer(torch.optim.AdamW(model.parameters()), model, read_meta(path)["optim"])
    state = {"model": model_tensors(model), "optim": optim, "rng": rng_state(), "plain": torch.zeros(3)}
    Checkpoints.load(path, state)
    for name, tensor in model_tensors(model).items():
        assert tensor.tolist() == results[0]["model"][name], name
    assert optim["0.weight"]["exp_avg"].shape == (7, 6) and optim["0.weight"]["exp_avg"].abs().min() > 0
