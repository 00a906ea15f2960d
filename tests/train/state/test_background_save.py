"""Checkpoints that are written while training goes on hold the state of their step, and none is lost."""

import errno
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch

import llm_pretrain
from qtrain.parallel.sharding.split_tensor import SplitTensor
from qtrain.tensors.partition import Partition
from qtrain.train.loop import Training
from qtrain.train.state.background_save import BackgroundSave, HostCopy
from qtrain.train.state.checkpoint import Checkpoints
from tests.system import call, contents, only_run
from tests.train.test_loop import argv, here, interrupt, steps  # noqa: F401  (here: a folder with a model and data)

ASYNC = {"async_checkpoint": True, "ckpt_interval": 2, "keep_ckpts": 9}


def slow(patch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let every checkpoint take a while before it is written."""
    save = Checkpoints.save
    patch.setattr(Checkpoints, "save", lambda *args: time.sleep(seconds) or save(*args))


def test_a_copy_is_bit_equal_and_stays_as_it_was():
    originals = {
        "codes": torch.arange(-5, 6, dtype=torch.int8),
        "odd": torch.randn(3, 7).to(torch.bfloat16),
        "fp8": torch.randn(5).to(torch.float8_e4m3fn),
        "scalar": torch.tensor(3.5),
        "none": torch.empty(0, 4),
        "view": torch.randn(6, 4)[1:3],
    }
    host, before = HostCopy(), {name: t.clone() for name, t in originals.items()}
    copied = host.of(originals)
    for tensor in originals.values():
        tensor.fill_(7)
    for name, tensor in before.items():
        assert copied[name].dtype == tensor.dtype and copied[name].shape == tensor.shape
        assert torch.equal(copied[name].float(), tensor.float()), name
    assert host.of(originals)["odd"].data_ptr() == copied["odd"].data_ptr(), "the buffer is used again"


def test_a_copy_of_a_split_tensor_has_copies_of_its_pieces():
    """Rows 2 and 3 and rows 6 and 7 of 8; and a rank that has none."""
    own = torch.arange(8.0).view(4, 2)
    split = SplitTensor.of(own, Partition(0, 8, ((2, 4), (6, 8))))
    nothing = SplitTensor.of(torch.zeros(0, 2), Partition(0, 8, ()))
    copied = HostCopy().of({"split": split, "nothing": nothing, "plain": torch.ones(3)})
    own.zero_()
    assert [offset for offset, _ in copied["split"].pieces] == [(2, 0), (6, 0)]
    assert [piece.tolist() for _, piece in copied["split"].pieces] == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert copied["split"].shape == (8, 2) and copied["nothing"].pieces == []
    assert copied["plain"].tolist() == [1, 1, 1]


def test_the_state_is_that_of_the_save_though_it_changes_while_it_is_written(tmp_path, monkeypatch):
    state, meta = {"model": {"x": torch.ones(1000)}}, {"state": {"step": 3}}
    gate, save = threading.Event(), Checkpoints.save
    monkeypatch.setattr(Checkpoints, "save", lambda *args: gate.wait(30) and save(*args))
    background = BackgroundSave()
    background.begin(Checkpoints(tmp_path / "saved", 2), 3, state, meta)
    state["model"]["x"].mul_(5)
    meta["state"]["step"] = 4
    assert background.under_way and not background.ended and not (tmp_path / "saved").exists()
    gate.set()
    written = background.finish()
    assert written.path == tmp_path / "saved/00000003" and not background.under_way
    into = {"model": {"x": torch.zeros(1000)}}
    assert Checkpoints.load(written.path, into) == {"state": {"step": 3}}
    assert torch.equal(into["model"]["x"], torch.ones(1000))


def test_checkpoints_are_those_of_a_run_that_waits(monkeypatch):
    """Every step saves, each while the next one updates weights, codes and optimizer states in place."""
    settings = {"quantize": "int8", "optim": "adamw_8bit", "n_steps": 4, "keep_ckpts": 9, "ckpt_interval": 1}
    assert call(llm_pretrain.main, argv(**settings, runs_dir="waits")).code == 0
    slow(monkeypatch, 0.2)
    done = call(llm_pretrain.main, argv(**settings, async_checkpoint=True))
    assert done.code == 0, done.err
    assert steps()[2] == [1, 2, 3, 4] and "for which step 2 waited " in done.out
    for step in (1, 2, 3, 4):
        one, other = (contents(only_run(Path(runs)) / f"checkpoints/{step:08d}") for runs in ("waits", "runs"))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one), step


def test_a_full_disk_stops_the_run_at_the_next_step_or_save(monkeypatch):
    finish = Checkpoints._finish

    def full(self, step, *rest):
        if step == 4:
            raise OSError(errno.ENOSPC, "No space left on device")
        finish(self, step, *rest)

    monkeypatch.setattr(Checkpoints, "_finish", full)
    done = call(llm_pretrain.main, argv(**ASYNC, n_steps=40, eval_interval=0))
    assert done.code == 1 and done.err.count("error:") == 1
    assert (
        "error: step 4: the checkpoint" in done.err and "No space left" in done.err and "00000002 is intact" in done.err
    )
    trained, _, saved = steps()
    assert saved == [2] and trained[-1] in (5, 6)


@pytest.mark.parametrize("at_step", [2, 3])
def test_a_signal_waits_for_the_checkpoint_that_is_being_written(monkeypatch, at_step):
    slow(monkeypatch, 0.2)
    interrupt(monkeypatch, "_step", at_step)
    done = call(llm_pretrain.main, argv(**ASYNC, eval_interval=0))
    assert done.code == 128 + signal.SIGTERM, done.err
    assert steps()[2] == sorted({2, at_step})


def test_training_that_fails_keeps_the_checkpoint_that_is_being_written(monkeypatch):
    slow(monkeypatch, 0.2)
    step = Training._step
    monkeypatch.setattr(
        Training, "_step", lambda self, *args: fail() if self.run.state.step == 2 else step(self, *args)
    )

    def fail():
        raise MemoryError

    done = call(llm_pretrain.main, argv(**ASYNC, eval_interval=0))
    assert done.code == 1 and "out of memory" in done.err and steps()[2] == [2]


def test_a_folder_that_disappears_while_it_is_written_to_is_replaced(monkeypatch):
    save = Checkpoints.save

    def vanish(self, step, *rest):
        if step == 4 and self.folder.parent.name.endswith("_run"):
            shutil.rmtree(self.folder.parent)
        return save(self, step, *rest)

    monkeypatch.setattr(Checkpoints, "save", vanish)
    done = call(llm_pretrain.main, argv(**ASYNC, eval_interval=0))
    assert done.code == 0, done.err
    recovered = next(Path("runs/llm_pretrain").glob("*-recovered"))
    assert "this run continues in" in done.out and (recovered / "checkpoints/00000007/COMPLETE").exists()
