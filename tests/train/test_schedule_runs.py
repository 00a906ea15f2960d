"""Runs with --quantize_schedule are, before and after a change, those of the schemes alone, bit for bit; stopped
anywhere, they go on so."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_finetune
import llm_pretrain
import timm_finetune
from qtrain.commands import export
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl, write_questions
from tests.data.images.pictures import write_folder
from tests.processes import PRETRAIN, write_pretraining
from tests.system import call, contents, flags, losses, only_run, serving, write_model
from tests.test_mixture_runs import WIDE
from tests.train.test_override_runs import prepared

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
SETTINGS = {
    "model": "tiny.json",
    "train_ds": TEXT,
    "seq_len": 16,
    "batch_size": 4,
    "n_steps": 8,
    "lr": 1e-2,
    "ckpt_interval": 2,
    "eval_interval": 0,
    "keep_ckpts": 9,
    "export": False,
    "device": "cpu",
}
CHANGE = 4
"""Steps before the second scheme."""


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"), max_position_embeddings=512)
    write_jsonl(Path("jsonl"))
    write_questions(Path("questions.jsonl"))
    return tmp_path


def run(runs: str, **settings) -> Path:
    done = call(llm_pretrain.main, flags(**{**SETTINGS, **settings, "runs_dir": runs}))
    assert done.code == 0, done.err
    return only_run(Path(runs))


def steps(folder: Path) -> list[tuple]:
    return [line for line in losses(folder) if line[1] is not None]


def equal(one: Path, other: Path) -> bool:
    a, b = contents(one), contents(other)
    return a.keys() == b.keys() and all(torch.equal(torch.as_tensor(a[n]), torch.as_tensor(b[n])) for n in a)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("bf16", {"scheme": "int8", "stochastic_rounding": True}),
        ("int8", "bf16"),
        ("fp8_rowwise", "fp8_blockwise"),
        ("nvfp4", {"scheme": "nvfp4", "output": "bf16"}),
        ("bf16", "qat"),
    ],
    ids=["to_int8", "to_bf16", "rowwise_to_blockwise", "nvfp4_finish", "to_qat"],
)
def test_each_part_is_that_of_its_scheme_alone(first, second):
    """The second part: a run of the second scheme that goes on from the last checkpoint of the first."""

    def alone(spec) -> dict:
        name, options = (spec, {}) if isinstance(spec, str) else (spec["scheme"], {**spec})
        return {"quantize": name, "quantize_kwargs": {k: v for k, v in options.items() if k != "scheme"}}

    scheduled = run("scheduled", quantize_schedule=json.dumps([[0, first], [0.5, second]]))
    whole = run("first", **alone(first))
    assert steps(scheduled)[:CHANGE] == steps(whole)[:CHANGE]
    assert steps(scheduled)[CHANGE:] != steps(whole)[CHANGE:]
    rest = run("rest", **alone(second), resume=str(whole / "checkpoints" / f"{CHANGE:08d}"))
    assert steps(scheduled) == steps(rest), "whose log begins with that of the first"


@pytest.mark.parametrize("at", [2, CHANGE, 6])
def test_a_run_that_resumes_before_at_and_after_the_change_is_the_same(at):
    schedule = json.dumps([[0, "bf16"], [CHANGE, "bitnet"], [6, "int8"]])
    whole = run("whole", quantize_schedule=schedule)
    rest = run("rest", quantize_schedule=schedule, resume=str(whole / "checkpoints" / f"{at:08d}"))
    assert steps(whole) == steps(rest)
    assert equal(whole / "checkpoints" / "00000008", rest / "checkpoints" / "00000008")


def test_what_is_exported_after_a_finish_in_qat_are_the_codes_of_training():
    """Of a run that resumes before the change, and of a resumed one after it; afterwards by the command."""
    schedule = json.dumps([[0, "bf16"], [CHANGE, "qat"]])
    settings = {"quantize_schedule": schedule, "export": True, "export_format": ["hf", "ct_int4_g32"]}
    whole = run("whole", **settings)
    for at in (2, 6):
        rest = run(f"from{at}", **settings, resume=str(whole / "checkpoints" / f"{at:08d}"))
        assert steps(whole) == steps(rest)
        assert equal(whole / "checkpoints" / "00000008", rest / "checkpoints" / "00000008")
        for part in ("hf", "ct_int4_g32"):
            files = [(folder / part / "model.safetensors").read_bytes() for folder in (whole, rest)]
            assert files[0] == files[1]
        assert "ct_int4_g32: all 14 matrices hold the codes that training" in (rest / "train.log").read_text()
    done = call(export.main, [str(whole), "--format", "ct_int4_g32", "--output", "again"])
    assert done.code == 0 and "all 14 matrices hold the codes" in done.out, done.err


def test_the_log_and_the_plan_tell_the_schemes():
    argv = {**SETTINGS, "quantize_schedule": json.dumps([[0, "bf16"], [CHANGE, "int8"]]), "runs_dir": "runs"}
    done = call(llm_pretrain.main, flags(**argv))
    assert "schemes bf16 from step 1, int8 from step 5" in done.out and "bf16 > int8" in done.out
    told = {r["step"]: r["schemes"] for r in read_metrics(only_run(Path("runs")) / "metrics.jsonl") if "schemes" in r}
    assert told[CHANGE + 1].keys() == {"int8", "bf16"} and "low bits in 8 of 9 linears" in done.out


def test_another_schedule_for_a_resumed_run_is_in_force():
    whole = run("whole", quantize_schedule=json.dumps([[0, "bf16"], [CHANGE, "int8"]]))
    at = str(whole / "checkpoints" / "00000006")
    other = run("other", quantize_schedule=json.dumps([[0, "bf16"], [2, "fp8_rowwise"]]), resume=at)
    alone = run("alone", quantize="fp8_rowwise", resume=at)
    assert steps(other) == steps(alone) != steps(whole)


def test_the_plan_is_of_the_phase_that_takes_most_memory():
    schedule = ((0, "bf16"), (0.25, "int8"))
    plan = prepared(quantize="bf16", quantize_schedule=schedule).plan
    alone = [prepared(quantize=name).plan for name in ("bf16", "int8")]
    assert plan.memory_taken == max(p.memory_taken for p in alone)
    assert [phase.first_step for phase in plan.phases] == [0, 2]
    mean = [0.2 * a.seconds["blocks"] + 0.8 * b.seconds["blocks"] for a, b in [alone]]
    assert plan.seconds["blocks"] == pytest.approx(mean[0])
    # What its time was measured on is said of the longest phase.
    gpu = {"gpu": "h200", "dry_run": True, "compile": True, "device": "auto"}
    plan = prepared(quantize="bf16", quantize_schedule=schedule, **gpu).plan
    assert plan.sol_source == prepared(quantize="int8", **gpu).plan.sol_source != ""


def test_each_scheme_is_checked_as_that_of_the_run():
    data = ["--train_ds", json.dumps(TEXT), "--model", "tiny.json", "--n_steps", "10", "--dry_run"]
    schedule = ["--quantize_schedule", '[[0,"bf16"],[0.5,"fp8_rowwise"]]']
    done = call(llm_pretrain.main, [*data, *schedule, "--gpu", "a100"])
    assert done.code == 2 and "has no FP8 arithmetic, which fp8_rowwise needs" in done.err
    done = call(llm_pretrain.main, [*data, *schedule, "--quantize", "int8"])
    assert done.code == 2 and "both say which scheme linears run in" in done.err
    done = call(llm_pretrain.main, [*data, *schedule, "--quantize_min_size", "999"])
    assert done.code == 2 and "quantizes none of the model's 9 linears" in done.err


def test_adapters_and_images_change_schemes():
    shared = {"n_steps": 4, "batch_size": 2, "device": "cpu", "quantize_schedule": '[[0,"bf16"],[2,"int8"]]'}
    data = {"type": "instruct", "dataset": "questions.jsonl", "template": "gsm8k", "tokenizer": "byte"}
    chat = {"model": "tiny.json", "pretrained": False, "train_ds": data, "seq_len": 64, "export": False}
    done = call(llm_finetune.main, flags(**shared, **chat, lora={"r": 4}))
    assert done.code == 0 and "scheme      int8" in done.out, done.err
    done = call(llm_finetune.main, flags(**shared, **chat, lora={"base": "nf4"}))
    assert done.code == 2 and '"base":"dense"' in done.err
    write_folder(Path("images"))
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 2, "num_heads": 2}
    images = {"model": "vit_tiny_patch16_224", "model_kwargs": shape, "pretrained": False}
    data = {"type": "image_folder", "path": "images"}
    done = call(timm_finetune.main, flags(**shared, **images, train_ds=data))
    assert done.code == 0 and "scheme      int8" in done.out, done.err


SCHEDULE = [[0, {"scheme": "fp8_tensorwise", "scaling": "delayed"}], [2, "bf16"], [3, "int8"]]
RANKS: dict[str, dict[str, Any]] = {
    "full_shard": {"dp_shard": 2, "reshard_after_forward": "always", "model": "untied.json"},
    "zero2": {"dp_shard": 2, "optim": "muon"},
    "replicas": {"dp_replicate": 2},
    "ep": {"dp_shard": 2, "ep": 2, "reshard_after_forward": "always", "model": "mixture.json"},
    "tp": {"tp": 2, "model": "untied.json"},
}
"""Of two ranks, by what they share."""


@pytest.mark.parametrize("mode", RANKS)
def test_ranks_change_as_one_process_and_resume_across_the_change(tmp_path_factory, mode):
    folder = tmp_path_factory.mktemp("processes")
    write_pretraining(folder)
    write_model(folder / "untied.json", tie_word_embeddings=False, num_key_value_heads=2, max_position_embeddings=512)
    write_model(folder / "mixture.json", **WIDE)
    shared = {**PRETRAIN, "quantize_schedule": json.dumps(SCHEDULE), "export": False, "eval_interval": 0, **RANKS[mode]}
    of_one = dict.fromkeys(["dp_shard", "dp_replicate", "tp", "ep"], 1) | {"reshard_after_forward": "never"}

    def run(ranks: int, name: str, **settings) -> Path:
        done = server.run_ranks(ranks, "llm_pretrain", flags(**{**shared, **settings, "runs_dir": folder / name}))
        assert {outcome.code for outcome in done} == {0}, "\n".join(outcome.err for outcome in done)
        return only_run(folder / name)

    with serving(folder) as server:
        one, two = run(1, "one", **of_one), run(2, "two")
        again = run(2, "again", resume=str(two / "checkpoints" / "00000002"))
    assert (two / "train.log").read_text().count("scheme      ") == 2, "from the third and the fourth step on"
    assert steps(again) == steps(two)
    if mode == "tp":  # whose sums are in another order
        expected = pytest.approx([row[1] for row in steps(one)], rel=2e-3)
        assert [row[1] for row in steps(two)] == expected
    else:
        assert steps(two) == steps(one)
