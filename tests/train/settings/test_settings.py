"""Batch sizes that multiply, and the device and dtype that --device and --dtype name."""

import dataclasses

import pytest
import torch

from qtrain.core.checks import check_fields
from qtrain.core.errors import UserError
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.machine import choose_device, choose_dtype
from qtrain.train.settings.settings import LanguageSettings, TrainSettings, batch_geometry


def geometry(batch: int, micro: int, accumulation: int, world: int = 1) -> tuple[int, int, int]:
    settings = LanguageSettings(batch_size=batch, micro_batch_size=micro, gradient_accumulation=accumulation)
    return dataclasses.astuple(batch_geometry(settings, world))[:3]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ((8, 0, 0), (8, 1, 1)),
        ((8, 2, 0), (2, 4, 1)),
        ((8, 0, 2), (4, 2, 1)),
        ((8, 4, 2), (4, 2, 1)),
        ((1, 0, 0), (1, 1, 1)),
        ((64, 0, 0, 8), (8, 1, 8)),
        ((64, 2, 0, 8), (2, 4, 8)),
        ((64, 0, 8, 8), (1, 8, 8)),
    ],
)
def test_zeros_are_filled_in(given, expected):
    assert geometry(*given) == expected
    micro, accumulation, world = expected
    assert micro * accumulation * world == given[0]


@pytest.mark.parametrize("given", [(8, 3, 0), (8, 0, 3), (8, 2, 2), (8, 16, 0), (2, 0, 4), (64, 16, 0, 8), (8, 3, 3)])
def test_sizes_that_do_not_multiply_are_refused_with_all_of_them(given):
    with pytest.raises(UserError, match=r"^--batch_size: \d+ is not micro_batch_size x ") as error:
        geometry(*given)
    assert f"({given[1] or 'auto'} x {given[2] or 'auto'} x {given[3] if len(given) > 3 else 1})" in str(error.value)


def test_a_batch_that_devices_cannot_share_is_refused():
    with pytest.raises(UserError, match="--batch_size: 10 sequences cannot be shared equally by 8 devices"):
        geometry(10, 0, 0, 8)


def test_deterministic_micro_batches_do_not_depend_on_the_number_of_devices():
    """The sum over a micro-batch depends on its size: losses are to be equal to the last bit."""
    for batch, expected in ((64, 8), (12, 3), (5, 5), (8, 1)):
        settings = LanguageSettings(batch_size=batch, deterministic=True)
        worlds = [world for world in (1, 2, 4, 8) if batch % world == 0]
        assert {batch_geometry(settings, world).micro_batch_size for world in worlds} == {expected}
    with pytest.raises(UserError, match=r"micro-batches are of 3 by default .* divide the 4 of each of 3 devices"):
        batch_geometry(LanguageSettings(batch_size=12, deterministic=True), 3)


def test_the_defaults_pass_their_own_checks():
    defaults = LanguageSettings()
    values = {f.name: getattr(defaults, f.name) for f in dataclasses.fields(defaults)}
    assert check_fields(LanguageSettings, values, "default") == values


def test_dtypes():
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert [choose_dtype("auto", d) for d in (cpu, cuda)] == [torch.float32, torch.bfloat16]
    assert [choose_dtype("bf16", cpu), choose_dtype("fp32", cuda)] == [torch.bfloat16, torch.float32]


def test_devices(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match="--device: cuda was asked for, but torch sees no GPU"):
        choose_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert choose_device("auto") == choose_device("cuda") == torch.device("cuda", 0)
    assert choose_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x"}, "RANK: 'x' is not the number of a process"),
        ({"LOCAL_RANK": "-1"}, "LOCAL_RANK: '-1' is not the number"),
        ({"WORLD_SIZE": "2", "RANK": "5"}, "RANK: 5 is not below WORLD_SIZE, 2"),
        ({"WORLD_SIZE": "2"}, "RANK: it is not set, but WORLD_SIZE is 2"),
    ],
)
def test_a_rank_that_no_process_can_have_is_refused_at_once(environment, message, monkeypatch):
    """The other processes would wait for it."""
    for name in ("WORLD_SIZE", "RANK", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=f"^{message}"):
        check_settings(TrainSettings(device="cpu"), "llm_pretrain")
