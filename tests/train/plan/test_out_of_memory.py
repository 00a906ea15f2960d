"""The message of a run that has no memory left names settings that take less; with --fit auto they are taken."""

import dataclasses
from pathlib import Path

from qtrain.core.errors import Restart
from qtrain.core.hardware.device import Hardware
from qtrain.train.plan.out_of_memory import out_of_memory
from qtrain.train.plan.plan import Plan
from qtrain.train.settings.settings import LanguageSettings, batch_geometry


def plan_with(settings: LanguageSettings, **changes) -> Plan:
    """A plan of 3.5 GiB on a GPU with 8."""
    gpu = Hardware("GPU", {"bf16": 1.0}, 8 * 2**30, measured=True)
    memory = {"weights": 3 * 2**30, "logits": 2**29}
    geometry = batch_geometry(settings)
    return Plan("tiny", "bf16", geometry, 1, 1, gpu, (), memory=memory, **changes)


def test_the_memory_message_has_estimate_peak_and_numbered_flags():
    settings = LanguageSettings(batch_size=4, loss_chunks=2)
    text = str(out_of_memory(3, plan_with(settings), settings, 5 * 2**30))
    assert "3.5 GiB (weights 3.0, logits 0.5)" in text and "5.0 of 8.0 GiB" in text
    assert (
        text.index("1. --micro_batch_size 2")
        < text.index("4. --optimizer_in_backward")
        < text.index("5. --loss_chunks 8")
    )


def test_the_memory_message_names_the_fastest_setting_that_takes_less(monkeypatch):
    settings = LanguageSettings(batch_size=4)
    asked = []
    plan = plan_with(settings, within=lambda limit: asked.append(limit) or "--micro_batch_size 1")
    assert "takes 3.3 GiB by the plan: --micro_batch_size 1\n" in str(out_of_memory(3, plan, settings, 5 * 2**30))
    assert asked == [0.94 * 3.5 * 2**30]
    automatic = dataclasses.replace(settings, fit="auto")
    stop = out_of_memory(3, plan, automatic, 5 * 2**30)
    assert isinstance(stop, Restart) and stop.flags == ("--memory_limit", "3.29")
    stop = out_of_memory(3, plan, automatic, 5 * 2**30, Path("runs/x/checkpoints/00000002"))
    assert stop.flags == ("--memory_limit", "3.29", "--resume", "runs/x/checkpoints/00000002")
    monkeypatch.setenv("WORLD_SIZE", "2")  # of torchrun, which would start the same command again
    assert not isinstance(out_of_memory(3, plan, automatic, 5 * 2**30), Restart)
    monkeypatch.setenv("QTRAIN_RESTART_FILE", "restart.json")  # of --gpus 2
    assert isinstance(out_of_memory(3, plan, automatic, 5 * 2**30), Restart)
    nothing = dataclasses.replace(plan, within=lambda limit: None)
    assert not isinstance(out_of_memory(3, nothing, automatic, 5 * 2**30), Restart)


def test_settings_at_their_limit_leave_a_smaller_model():
    settings = dataclasses.replace(
        LanguageSettings(
            seq_len=128, activation_checkpointing="full", loss_chunks=64, optim="adamw_8bit", deterministic=True
        ),
        batch_size=1,
    )
    assert "smaller --model" in str(out_of_memory(1, plan_with(settings), settings, 2**30))
