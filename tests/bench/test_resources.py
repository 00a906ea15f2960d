"""The table of what fits: every cell is a plan that fits, and cards without FP8 are planned in INT8."""

import os

import pytest

from qtrain.bench import resources
from qtrain.bench.resources import METHODS, ResourceSettings, _cell, planned, resource_table
from qtrain.core.errors import UserError

MODEL = "smollm2-135m"


def test_every_cell_is_what_fits_or_a_dash():
    table = resource_table(ResourceSettings(models=MODEL, cards="4090"))
    small = [cells["4090, 24 GiB"] for cells in table.rows.values()]
    assert len(small) == len(METHODS) and all(0 < cell.details["gib"] < 23.5 for cell in small)
    plan, settings = planned("qwen2.5-14b", "full, FP8", "4090", 1024)
    large, inputs = _cell((plan, settings)), plan.host["residuals"]
    # Weights, gradients and states of 2 bytes each, and the inputs of all layers but one.
    assert inputs == settings.micro_batch_size * 1024 * 5120 * 2 * 47
    assert large.details["host_gib"] == pytest.approx((4 * 2 * 14.77e9 + inputs) / 2**30, rel=0.01)
    assert f" o r w, {large.details['gib']:.1f} + {large.details['host_gib']:.1f}, " in large.text
    assert _cell(None).text == "-"


@pytest.mark.parametrize(("card", "scheme"), [("3090", "int8"), ("4090", "fp8_tensorwise")])
def test_a_card_without_fp8_is_planned_in_int8(card, scheme):
    plan, settings = planned(MODEL, "full, FP8", card, 1024)
    assert settings.quantize == scheme and plan.emulated == ()
    assert planned(MODEL, "LoRA, fp8 base", card, 1024)[0].emulated == ()


def test_an_unknown_card_or_model_is_refused():
    with pytest.raises(UserError, match=r"--cards: unknown GPU '4091'\. Did you mean '4090'"):
        resource_table(ResourceSettings(models=MODEL, cards="4091"))
    with pytest.raises(UserError, match=r"--models: unknown model 'smollm2-136m'\. Did you mean 'smollm2-135m'"):
        resource_table(ResourceSettings(models="smollm2-136m", cards="4090"))


def test_several_processes_plan_the_same(monkeypatch):
    settings = ResourceSettings(models=MODEL, cards="h100")
    alone = resource_table(settings)
    monkeypatch.setattr(resources, "FEWEST_CELLS", 2)
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    assert resource_table(settings).rows == alone.rows
