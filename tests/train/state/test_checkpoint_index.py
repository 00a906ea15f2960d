"""Checkpoints are refused with a message when damaged, and harmless when hostile."""

import io
import json
import os
import pickle
import random
import shutil
import zlib
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING, Metadata

from qtrain.core.errors import UserError
from qtrain.optim import adapted
from qtrain.train.state.checkpoint import Checkpoints, read_meta
from qtrain.train.state.state_dict import model_tensors, prepare_optimizer
from tests.train.small_run import Net, adamw, load, save, seed_all, train

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
    """Rewrite COMPLETE with the sizes and checksums of the current files."""
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
    "marker of another step": (
        lambda p: (p / "COMPLETE").write_text((p / "COMPLETE").read_text().replace('"step": 2', '"step": 6')),
        "COMPLETE file is damaged: it says step 6",
    ),
    "marker of an infinite step": (
        lambda p: (p / "COMPLETE").write_text('{"step": 1e999, "saved_at": 1, "files": {}}'),
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


def test_a_truncated_index_is_refused(copy):
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
        ({"inner__bias": None}, "has 1 tensors that this run lacks, first model.inner.bias"),
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
        prepare_optimizer(adapted(torch.optim.AdamW)(model.parameters()), model, read_meta(good)["optim"])
    model.inner.bias.requires_grad_(False)
    groups = [
        {"params": [p for p in model.parameters() if p.ndim >= 2]},
        {"params": [model.unused.bias]},
    ]
    with pytest.raises(UserError, match=r"inner\.bias is trained in only one"):
        prepare_optimizer(adapted(torch.optim.AdamW)(groups), model, read_meta(good)["optim"])


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


class Lookup:
    """Unpickled, an attribute of what `of` is."""

    def __init__(self, of: object, name: str):
        self.of, self.name = of, name

    def __reduce__(self):
        return getattr, (self.of, self.name)

    def __call__(self):
        raise AssertionError("pickle asks whether it can be called")


class Call:
    """Unpickled, what a function gives."""

    def __init__(self, function: Lookup, argument: str):
        self.function, self.argument = function, argument

    def __reduce__(self):
        return self.function, (self.argument,)


def index_that_looks_up_attributes(path: Path, proof: Path) -> None:
    """From a class that an index may name to `os.system`, which the class's module has imported."""
    names = Lookup(Lookup(Metadata, "__init__"), "__globals__")
    command = Call(Lookup(Call(Lookup(names, "get"), "os"), "system"), f"touch {proof}")
    (path / ".metadata").write_bytes(pickle.dumps(command))


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
    [
        index_with_bomb,
        index_that_calls_builtins,
        index_that_looks_up_attributes,
        entry_that_is_no_tensor,
        shard_that_is_no_tensor,
        file_outside,
    ],
)
@pytest.mark.filterwarnings("ignore::UserWarning")
def test_a_hostile_checkpoint_is_refused_and_runs_nothing(copy, tmp_path, attack):
    proof = tmp_path / "ran"
    attack(copy, proof)
    remark(copy)
    with pytest.raises(UserError, match="--resume") as raised:
        load_new(copy)
    assert not proof.exists(), raised.value


@pytest.mark.parametrize("attack", [index_with_bomb, index_that_looks_up_attributes])
def test_the_attacks_are_real(copy, tmp_path, attack):
    """Otherwise the test above would prove nothing: read with plain pickle, the index runs its command."""
    proof = tmp_path / "ran"
    attack(copy, proof)
    pickle.loads((copy / ".metadata").read_bytes())
    assert proof.exists()


def test_an_index_of_python_3_11_2_is_read(copy, monkeypatch):
    """It pickles a member of an Enum by its name, as a lookup of an attribute."""
    index = pickle.loads((copy / ".metadata").read_bytes())
    by_name = lambda member, protocol: (getattr, (type(member), member.name))  # noqa: E731
    monkeypatch.setattr(_MEM_FORMAT_ENCODING, "__reduce_ex__", by_name)
    (copy / ".metadata").write_bytes(pickle.dumps(index))
    assert b"getattr" in (copy / ".metadata").read_bytes()
    remark(copy)
    load_new(copy)


def test_unknown_dtypes_in_meta_are_not_looked_up_as_code(copy):
    meta = json.loads((copy / "meta.json").read_text())
    meta["optim"]["states"]["inner.weight"]["exp_avg"]["dtype"] = "load"
    (copy / "meta.json").write_text(json.dumps(meta))
    remark(copy)
    with pytest.raises(UserError, match="optimizer entry"):
        load_new(copy)
