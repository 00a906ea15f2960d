"""Settings of memory that `--fit auto` chooses: the fastest that fits; what the user has given stays."""

import dataclasses
import itertools
from pathlib import Path

import pytest
import torch

import llm_pretrain
from qtrain.core.errors import UserError
from qtrain.core.hardware.device import datasheet_hardware
from qtrain.optim import OPTIMIZERS
from qtrain.train.assembly import prepare as assembly
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import fit_memory, prepare
from qtrain.train.plan.checked_settings import CheckedSettings, check_settings
from qtrain.train.plan.fit import RECOMPUTED, candidates
from qtrain.train.plan.plan import GIB, Plan
from qtrain.train.settings.machine import planned_hardware
from qtrain.train.settings.settings import LanguageSettings, batch_geometry
from tests.data.corpora import write_jsonl
from tests.system import call, flags

FP8 = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "quantize_lm_head": True}
OF_7B = {"model": "qwen2.5-7b", "seq_len": 1024, "batch_size": 512, "compile": True, "gpu": "h100", "dry_run": True}
LAYERS = ("weights", "gradients")


def fitted(**changes) -> tuple[CheckedSettings, LanguageArchitecture]:
    settings = LanguageSettings(**{**OF_7B, **FP8, "fit": "auto", **changes})
    checked = check_settings(settings, "llm_pretrain")
    architecture = LanguageArchitecture.of(settings, checked.mesh)
    return fit_memory(checked, architecture), architecture


def plan_of(checked: CheckedSettings, architecture: LanguageArchitecture) -> Plan:
    return prepare(checked, architecture, ()).plan


def test_the_choice_is_the_fastest_of_those_that_fit():
    checked, architecture = fitted()
    chosen = plan_of(checked, architecture)
    assert chosen.fits and chosen.host_bytes > 0
    asked = dataclasses.replace(checked, settings=LanguageSettings(**OF_7B, **FP8, n_steps=checked.settings.n_steps))
    hardware = planned_hardware(asked.settings, asked.device)
    linears = prepare(asked, architecture, ()).linears
    grid = itertools.product(
        ({"micro_batch_size": n} for n in (1, 2, 4, 8, 16, 32)),
        ({"optim_kwargs": {"offload": offload}} for offload in (False, True)),
        ({"recompute": kinds} for kinds in RECOMPUTED),
        ({"loss_chunks": chunks} for chunks in (1, 2, 4, 16)),
    )
    others = []
    for first, *more in grid:
        changed = dataclasses.replace(
            asked, settings=dataclasses.replace(asked.settings, **first | more[0] | more[1] | more[2])
        )
        changed = dataclasses.replace(changed, geometry=batch_geometry(changed.settings))
        if more[0]["optim_kwargs"]["offload"]:
            changed = dataclasses.replace(changed, optimizer=OPTIMIZERS.make("adamw", {"offload": True}, ""))
        others.append(architecture.plan(changed, linears, hardware, None))
    assert any(other.fits for other in others) and any(not other.fits for other in others)
    assert all(other.step_seconds >= chosen.step_seconds for other in others if other.fits)


def test_its_flags_give_the_same_run_without_it():
    checked, architecture = fitted(memory_limit=60)
    (line,) = [note for note in checked.notes if note.startswith("fit ")]
    changed = {
        name: getattr(checked.settings, name) for name in ("micro_batch_size", "loss_chunks", "recompute", "offload")
    }
    assert f"--micro_batch_size {changed['micro_batch_size']}" in line
    by_hand, _ = fitted(fit="off", memory_limit=60, **changed)
    assert plan_of(by_hand, architecture).memory == plan_of(checked, architecture).memory
    assert plan_of(checked, architecture).memory_taken <= 60 * GIB


GIVEN = {
    "micro-batch": {"micro_batch_size": 2},
    "accumulation": {"gradient_accumulation": 256},
    "chunks": {"loss_chunks": 8},
    "recomputation": {"recompute": ("norm", "qkv")},
    "recomputation by name": {"activation_checkpointing": "full"},
    "states on the device": {"optim": "adamw_8bit", "optim_kwargs": {"offload": False}},
    "states in host memory": {"optim": "adamw_8bit", "offload": ("v",)},
    "layouts of codes": {"weight_codes": "one"},
    "chunks of MLPs": {"mlp_chunks": 4, "recompute": ("block",)},
}


@pytest.mark.parametrize("case", GIVEN)
def test_what_is_given_stays(case):
    checked, _ = fitted(**GIVEN[case])
    for name, value in GIVEN[case].items():
        assert getattr(checked.settings, name) == value


@pytest.mark.parametrize(
    ("limit", "changes", "expected"),
    [
        (56, {}, {"mlp_chunks": 4, "weight_codes": "both"}),
        (52, {}, {"mlp_chunks": 4, "weight_codes": "one"}),
        (56, {"quantize": "int8", "quantize_kwargs": None}, {"mlp_chunks": 8, "weight_codes": "both"}),
    ],
    ids=str,
)
def test_long_sequences_in_little_memory(limit, changes, expected):
    """Chunks of MLPs where layers are recomputed in full, then one layout of codes, where a scheme can have it."""
    checked, _ = fitted(seq_len=131072, batch_size=1, memory_limit=limit, **changes)
    assert {name: getattr(checked.settings, name) for name in expected} == expected


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (
            {"optim_kwargs": {"master": "fp32"}},
            [(), ("m",), ("m", "v"), ("m", "v", "master"), ("m", "v", "master", *LAYERS)],
        ),
        ({"optim": "lion"}, [(), ("m",), ("m", *LAYERS)]),
        ({"optim": "lion", "deterministic": True}, [(), ("m",)]),
        ({"optim": "muon"}, [()]),
        ({"offload": ("m",)}, [("m",)]),
        ({"optim_kwargs": {"offload": False}}, [()]),
    ],
    ids=str,
)
def test_what_it_may_keep_in_host_memory(changes, expected):
    """States one after the other, then layers and their gradients; layers' inputs where recomputation keeps nothing
    else, and the user does not say."""
    checked, architecture = fitted(fit="off", batch_size=4, **changes)
    linears = prepare(checked, architecture, ()).linears
    hardware = planned_hardware(checked.settings, checked.device)
    found = list(candidates(checked, lambda c: architecture.plan(c, linears, hardware, None)))
    assert {tuple(name for name in c.plan.host if name != "residuals") for c in found} == set(expected)
    free = changes.keys().isdisjoint({"offload"}) and "offload" not in (changes.get("optim_kwargs") or {})
    for recomputed in RECOMPUTED:
        of_kinds = [c for c in found if c.checked.settings.recompute == recomputed]
        assert {"residuals" in c.plan.host for c in of_kinds} <= {False, free and recomputed == ("block",)}
    assert any("residuals" in c.plan.host for c in found) == free
    assert all("--offload '[" in c.command() for c in found if c.plan.host and free)


def test_four_ranks_of_24_gib_train_14b_with_sums_of_gradients_on_the_host():
    """Each holds a quarter of the masters; weights stay with the ranks."""
    cards = {"model": "qwen2.5-14b", "gpu": "4090", "world_size": 4, "gpus_per_node": 4, "batch_size": 64}
    checked, architecture = fitted(**cards, recompute=("norm", "ffn"), micro_batch_size=1)
    assert checked.offload >= {"m", "v", "gradients"} and checked.settings.reshard_after_forward == "always"
    plan = plan_of(checked, architecture)
    assert plan.memory_taken < 23.5 * GIB
    without = dataclasses.replace(checked.settings, offload=("m", "v"), fit="off")
    assert plan_of(check_settings(without, "llm_pretrain"), architecture).memory_taken > 23.5 * GIB


def test_a_deterministic_run_keeps_its_micro_batch():
    """The bits of a sum over a micro-batch depend on its size, which must not depend on the GPU's."""
    checked, _ = fitted(deterministic=True, batch_size=8)
    assert checked.geometry.micro_batch_size == 1 and checked.settings.micro_batch_size == 0


def test_nothing_that_fits_is_refused_with_the_least_that_there_is():
    with pytest.raises(UserError, match=r"--fit: nothing fits into 4.0 GiB \(--memory_limit 4\); the least that .*GiB"):
        fitted(memory_limit=4)


def test_a_plan_that_does_not_fit_names_flags_that_do():
    checked, architecture = fitted(fit="off", micro_batch_size=32)
    plan = plan_of(checked, architecture)
    assert not plan.fits
    (advice,) = plan.advice
    words = advice.partition(" takes ")[0].split()
    assert words[words.index("--micro_batch_size") + 1] in ("1", "2", "4", "8", "16")
    assert float(advice.split()[-2]) < 79.1
    assert f"warning: this does not fit; {advice}" in "\n".join(plan.lines())


def test_a_plan_with_much_free_memory_says_what_is_faster():
    checked, architecture = fitted(fit="off", model="qwen2.5-0.5b", batch_size=64, activation_checkpointing="full")
    (advice,) = plan_of(checked, architecture).advice
    assert "GiB are free: by the plan --activation_checkpointing none" in advice and "% faster" in advice
    best, architecture = fitted(model="qwen2.5-0.5b", batch_size=64)
    assert plan_of(best, architecture).advice == ()


def on_a_host(monkeypatch, pinnable: float, gpus: int = 1) -> None:
    """The planned GPUs are in a machine of whose memory so many GiB may be pinned."""

    def hardware(*arguments):
        return dataclasses.replace(planned_hardware(*arguments), pinnable=round(pinnable * GIB), gpus=gpus)

    monkeypatch.setattr(assembly, "planned_hardware", hardware)


def test_what_the_host_cannot_pin_does_not_fit(monkeypatch):
    on_a_host(monkeypatch, 30)
    assert {*plan_of(*fitted()).host} == {"m", "v"}  # 28.4 GiB
    on_a_host(monkeypatch, 20)
    least = plan_of(*fitted())
    assert least.fits and 0 < least.host_bytes <= 20 * GIB  # one of both, or residuals
    with pytest.raises(UserError, match=r"GiB and 5\d\.\d GiB of pinned host memory, of which 20\.0 may be pinned"):
        fitted(memory_limit=24)


def test_processes_share_what_the_host_can_pin(monkeypatch):
    given = {"fit": "off", "micro_batch_size": 4, "offload": ("m", "v")}
    on_a_host(monkeypatch, 30, gpus=4)  # the run is one process
    plan = plan_of(*fitted(**given))
    assert plan.fits and " of 30.0 GiB of pinned host memory: " in "\n".join(plan.lines())
    four = dataclasses.replace(plan, geometry=dataclasses.replace(plan.geometry, world=4))
    assert four.host_limit == 7.5 * GIB and not four.fits
    on_a_host(monkeypatch, 20)
    plan = plan_of(*fitted(**given))
    assert not plan.fits and "warning: this does not fit; --" in "\n".join(plan.lines())


def test_a_limit_is_the_memory_of_the_plan_and_at_most_the_devices():
    settings = LanguageSettings(gpu="h100", dry_run=True, memory_limit=24)
    assert planned_hardware(settings, None).memory_bytes == 24 * GIB
    with pytest.raises(UserError, match=r"--memory_limit: 100 GiB are more than the 79\.1 of H100"):
        planned_hardware(dataclasses.replace(settings, memory_limit=100), None)


def test_memory_limit_holds_where_the_system_does_not_tell_its_memory(monkeypatch):
    monkeypatch.setattr("qtrain.core.hardware.device.host_memory", lambda: None)  # as on Windows
    limited = planned_hardware(LanguageSettings(device="cpu", memory_limit=2), torch.device("cpu"))
    assert limited.memory_bytes == 2 * GIB


@pytest.mark.parametrize("name", ["3090", "4090", "5090", "l40s", "pro-6000", "a100", "h100", "h200", "b200", "gb200"])
def test_cards_that_people_have_are_known(name):
    card = datasheet_hardware(name)
    assert card.memory_taken(0) > 0.5 * GIB and 2e10 < card.host_bandwidth < 5e11 and card.memory_bandwidth > 5e11


def test_the_script_prints_what_was_chosen(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("jsonl"))
    data = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    chosen = {"model": "qwen2.5-1.5b", "gpu": "4090", "quantize": "int8", "batch_size": 32, "seq_len": 512}
    done = call(llm_pretrain.main, flags(**chosen, train_ds=data, dry_run=True, compile=True, fit="auto"))
    assert done.code == 0, done.err
    (line,) = [line for line in done.out.splitlines() if line.startswith("fit ")]
    assert " the fastest of " in line and " of 23.5 GiB, most at " in done.out and "does not fit" not in done.out
