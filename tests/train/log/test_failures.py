"""The stops of a run: which tensor is named first, and which flags are advised in which order."""

import dataclasses
from pathlib import Path

import pytest
import torch
from torch import nn

from qtrain.core.errors import Restart, TrainingStopped, UserError
from qtrain.core.hardware import Hardware
from qtrain.train.log.failures import (
    first_nonfinite_tensor,
    is_out_of_memory,
    memory_advice,
    nonfinite,
    out_of_memory,
)
from qtrain.train.plan.plan import Plan
from qtrain.train.settings.settings import LanguageSettings, batch_geometry


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model(torch.randn(3, 4)).sum().backward()
    return model


def test_a_finite_model_has_no_nonfinite_tensor():
    assert first_nonfinite_tensor(small_model().named_parameters()) is None


def test_the_first_nonfinite_gradient_in_model_order_is_named_with_its_counts():
    model = small_model()
    model[2].bias.grad[0] = float("inf")
    model[1].weight.grad[2:5] = float("nan")
    assert (
        first_nonfinite_tensor(model.named_parameters()) == "the gradient of 1.weight (3 NaN and 0 Inf among 8 values)"
    )


def test_a_nonfinite_weight_is_named_before_the_gradients_that_it_makes_nonfinite():
    model = small_model()
    with torch.no_grad():
        model[1].weight[1] = -float("inf")
    model[0].weight.grad[0, 0] = float("nan")
    assert first_nonfinite_tensor(model.named_parameters()) == "the weight of 1.weight (0 NaN and 1 Inf among 8 values)"


def test_fp8_tensors_are_checked_too():
    model = nn.Linear(4, 4)
    codes = torch.zeros(4, 4)
    codes[0, 0] = float("nan")
    model.weight = nn.Parameter(codes.to(torch.float8_e4m3fn), requires_grad=False)
    assert "weight of weight (1 NaN" in first_nonfinite_tensor(model.named_parameters())


def test_the_message_of_a_non_finite_loss_has_step_tensor_and_checkpoint(tmp_path):
    stop = nonfinite(7, "loss", float("nan"), "the weight of w (1 NaN and 0 Inf among 2 values)", tmp_path / "00000004")
    assert isinstance(stop, TrainingStopped) and not isinstance(stop, UserError) and stop.exit_code == 1
    for part in ("step 7", "loss is nan", "the weight of w", f"--resume {tmp_path / '00000004'}"):
        assert part in str(stop)
    assert "No checkpoint yet" in str(nonfinite(7, "loss", float("inf"), None, None))


def test_advice_comes_in_order_and_keeps_the_batch():
    settings = {
        "micro_batch_size": 12,
        "gradient_accumulation": 2,
        "activation_checkpointing": "none",
        "loss_chunks": 1,
        "optim": "adamw",
        "seq_len": 1024,
    }
    advice = memory_advice(settings, ["adamw", "adamw8bit", "lion8bit"])
    flags = [line.split(" (")[0] for line in advice]
    assert flags == [
        "--micro_batch_size 6 --gradient_accumulation 4",
        "--activation_checkpointing selective",
        "--activation_checkpointing full",
        "--loss_chunks 4",
        "--optim adamw8bit",
        "--seq_len 512",
    ]


@pytest.mark.parametrize("micro", [2, 3, 9, 15, 16])
def test_an_advised_micro_batch_divides_the_present_one(micro):
    line = memory_advice({"micro_batch_size": micro, "gradient_accumulation": 5})[0]
    smaller, accumulation = int(line.split()[1]), int(line.split()[3])
    assert smaller < micro and smaller * accumulation == micro * 5


def test_settings_at_their_limit_are_not_advised():
    at_limit = {
        "micro_batch_size": 1,
        "activation_checkpointing": "full",
        "loss_chunks": 64,
        "optim": "adamw8bit",
        "seq_len": 128,
    }
    assert memory_advice(at_limit, ["adamw8bit"]) == []
    assert memory_advice({**at_limit, "optim": "adamw", "optim_kwargs": {"offload": True}}, ["adamw8bit"]) == []
    settings = dataclasses.replace(
        LanguageSettings(seq_len=128, activation_checkpointing="full", loss_chunks=64, optim="adamw_8bit"), batch_size=1
    )
    assert "smaller --model" in str(out_of_memory(1, plan_with(settings), settings, 2**30, None, ["adamw8bit"]))


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
    assert text.index("1. --micro_batch_size 2") < text.index("4. --loss_chunks 8")


def test_the_memory_message_names_the_fastest_setting_that_takes_less():
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
    nothing = dataclasses.replace(plan, within=lambda limit: None)
    assert not isinstance(out_of_memory(3, nothing, automatic, 5 * 2**30), Restart)


def test_out_of_memory_errors_are_recognized_and_others_are_not():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_out_of_memory(raised.value)
    assert not is_out_of_memory(ValueError("out of memory"))
