"""`python -m qtrain evaluate`, and the same measures in both training scripts."""

import json
import math
import re
from pathlib import Path

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import llm_finetune
import llm_pretrain
from qtrain.__main__ import main
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl, write_questions
from tests.system import call, flags, only_run, write_model

TRAIN = {"type": "text", "paths": "jsonl/0.jsonl", "tokenizer": "byte"}
HELD = {"type": "text", "paths": "jsonl/1.jsonl", "tokenizer": "byte"}
ASKED = {"type": "instruct", "dataset": "questions.jsonl", "template": "gsm8k", "tokenizer": "byte"}
TINY = {"model": "tiny.json", "pretrained": False, "seq_len": 48, "batch_size": 2, "n_steps": 2, "device": "cpu"}
HELLASWAG = {"ctx": "A man sits", "endings": ["down.", "up", "on", "x"], "label": 0}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"), max_position_embeddings=512)
    write_jsonl(Path("jsonl"))
    write_questions(Path("questions.jsonl"))
    Path("asked.jsonl").write_text(json.dumps(HELLASWAG) + "\n")


def trained(script=llm_pretrain, **settings) -> Path:
    done = call(script.main, flags(**{**TINY, "train_ds": TRAIN, **settings}))
    assert done.code == 0, done.err
    return only_run(Path("runs"), script.__name__)


def evaluated(*words: str, **settings) -> dict[str, float]:
    done = call(main, ["evaluate", *words, *flags(device="cpu", **settings)])
    assert done.code == 0, done.err
    return {name: float(value) for name, value in re.findall(r"^\| (\S+) +\| +([\d.]+) \|", done.out, re.M)}


@pytest.mark.parametrize("script", [llm_pretrain, llm_finetune])
def test_both_scripts_measure_the_same(script):
    asked = {"eval_ds": ASKED, "accuracy": 2, "answer_tokens": 3, "sample_prompts": ["a"], "sample_tokens": 2}
    asked |= {"hellaswag": True, "hellaswag_file": "asked.jsonl", "eval_sequences": 2, "final_eval": "all"}
    run = trained(script, **asked, seq_len=160)
    *_, last, final = (r for r in read_metrics(run / "metrics.jsonl") if "loss" not in r)
    assert {"eval_loss", "accuracy", "hellaswag", "hellaswag_norm", "samples"} <= last.keys()
    assert [prompt for prompt, _ in last["samples"]][-1] == "a" and len(last["samples"]) == 3
    assert final.keys() == {"step", "final_eval_loss"} and final["final_eval_loss"] != last["eval_loss"]
    assert "Loss over all validation data" in (run / "report.html").read_text()


@pytest.mark.parametrize(
    ("script", "settings"),
    [
        (llm_pretrain, {"quantize": "int8", "ckpt_interval": 1, "optim": "adamw_schedule_free"}),
        (llm_finetune, {"lora": {"r": 2, "base": "nf4"}, "lr": 0.01}),
        (llm_finetune, {"freeze_embedding_layer": True}),
    ],
)
def test_a_checkpoint_has_the_loss_that_its_run_has_logged(script, settings):
    """In its scheme, with adapters, with averaged weights; its export, in fp32 products, has about the same."""
    run = trained(script, eval_ds=HELD, final_eval="all", **settings)
    logged = read_metrics(run / "metrics.jsonl")[-1]["final_eval_loss"]
    found = evaluated(str(run / "checkpoints/00000002"))
    assert found["loss"] == pytest.approx(logged, abs=1e-4)
    assert found["perplexity"] == pytest.approx(math.exp(logged), rel=1e-3)
    exported = evaluated(str(run), data=HELD)
    assert exported == evaluated(str(run / "hf"), data=HELD) and exported["loss"] == pytest.approx(logged, abs=0.02)
    first = evaluated(str(run), sequences=1)
    assert first["loss"] != exported["loss"]


def test_the_first_line_says_what_is_measured():
    """The weights, their step and dtype, the scheme, the data and how much of them."""
    run = trained(eval_ds=HELD, quantize="int8", quantize_kwargs={"stochastic_rounding": True})
    first = {}
    for name, words in {"export": [], "checkpoint": ["--sequences=3"], "folder": ["--sequences=1"]}.items():
        at = {"export": run, "checkpoint": run / "checkpoints/00000002", "folder": run / "hf"}[name]
        given = ["evaluate", str(at), "--device=cpu", *words]
        done = call(
            main,
            given
            + (flags(data={"own": HELD}, hellaswag=True, hellaswag_file="asked.jsonl") if name == "folder" else []),
        )
        assert done.code == 0, done.err
        first[name] = done.out.splitlines()[0]
    data = json.dumps(HELD, separators=(",", ":"))
    int8 = 'int8 {"stochastic_rounding":true}'
    assert first["export"] == (
        f"measured: export {run / 'hf'} of the run {run.name}, step 2, fp32; trained in {int8}; "
        f"loss on --eval_ds of the run {data}: all sequences x 48 tokens"
    )
    assert first["checkpoint"] == (
        f"measured: checkpoint {run / 'checkpoints/00000002'}, step 2, fp32, in {int8}; "
        f"loss on --eval_ds of the run {data}: 3 sequences x 48 tokens"
    )
    assert first["folder"].endswith(f"; loss on --data.own {data}: 1 sequence x 48 tokens; --hellaswag")


def test_results_are_also_files():
    run = trained(export=False)
    found = evaluated(str(run), "--hellaswag", hellaswag_file="asked.jsonl", data=HELD, json="out/x.json")
    cells = {row["name"]: row["cells"] for row in json.loads(Path("out/x.json").read_text())["tables"][0]["rows"]}
    assert cells["loss"]["value"]["value"] == pytest.approx(found["loss"], abs=1e-4)
    assert {"hellaswag", "hellaswag_norm"} <= cells.keys()


@pytest.mark.parametrize("script", [llm_pretrain, llm_finetune])
def test_several_named_sets(script):
    """Each has its losses, in the log, the screen, the report and afterwards; the best is chosen by the mean of all."""
    named = {"wiki": HELD, "asked": ASKED, "own": TRAIN}
    done = call(script.main, flags(**TINY | {"seq_len": 160}, train_ds=TRAIN, eval_ds=named, dry_run=True))
    assert done.out.count("warning") == 1 and "all of --eval_ds.own is also read by --train_ds" in done.out
    settings = {"eval_sequences": 2, "final_eval": "all", "keep_best": True, "accuracy": 1, "answer_tokens": 2}
    run = trained(script, eval_ds=named, seq_len=160, **settings)
    *_, last, final = (r for r in read_metrics(run / "metrics.jsonl") if "loss" not in r)
    names = {f"eval_{name}_loss" for name in named}
    assert {"eval_loss", "accuracy", *names} <= last.keys()
    assert final.keys() == {"step", "final_eval_loss", *(f"final_{name}" for name in names)}
    assert min(last[name] for name in names) < last["eval_loss"] < max(last[name] for name in names)
    assert "Loss over all of wiki" in (run / "report.html").read_text()
    assert f"eval_wiki_loss {last['eval_wiki_loss']:.4f}" in (run / "train.log").read_text()
    found = evaluated(str(run / "checkpoints/00000002"))
    for name in named:
        assert found[f"{name}/loss"] == pytest.approx(final[f"final_eval_{name}_loss"], abs=1e-4)
    assert found["loss"] == pytest.approx(final["final_eval_loss"], abs=1e-4) and "wiki/perplexity" in found


def test_the_set_is_named_that_cannot_be_read():
    settings = {**TINY, "train_ds": TRAIN, "eval_ds": {"wiki": HELD, "code": {**HELD, "paths": "absent"}}}
    done = call(llm_pretrain.main, flags(**settings))
    assert done.code == 2 and "--eval_ds.code" in done.err and not Path("runs").exists()
    done = call(llm_pretrain.main, flags(**settings | {"eval_ds": {"wiki": HELD, "code": {"paths": "x"}}}))
    assert done.code == 2 and "--eval_ds.code: the key 'type' is missing" in done.err


@pytest.mark.parametrize(
    ("train_ds", "eval_ds", "warns"),
    [
        (TRAIN, TRAIN, True),
        (TRAIN, HELD, False),
        ({**TRAIN, "paths": "jsonl"}, HELD, True),
        ({"type": "mix", "datasets": [{**TRAIN, "weight": 1}]}, {**TRAIN, "paths": "./jsonl/../jsonl/0.jsonl"}, True),
        (ASKED, {**ASKED, "part": "validation"}, True),
        ({**ASKED, "part": "train"}, {**ASKED, "part": "validation"}, False),
        ({**ASKED, "part": "train"}, {**ASKED, "part": "validation", "validation_fraction": 0.3}, True),
    ],
)
def test_training_data_are_no_evaluation_data(train_ds, eval_ds, warns):
    settings = {**TINY, "train_ds": train_ds, "eval_ds": eval_ds, "seq_len": 160, "eval_sequences": 1}
    done = call(llm_pretrain.main, flags(**settings, dry_run=True))
    assert done.code == 0, done.err
    assert ("its loss is not that of held-out data" in done.out) is warns


def test_evaluating_a_run_on_its_training_data_is_told():
    run = trained()
    assert "is also read by --train_ds" in call(main, ["evaluate", str(run), *flags(data=TRAIN, device="cpu")]).out


def test_a_model_that_transformers_alone_knows():
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=258, n_positions=64, n_embd=32, n_layer=1, n_head=2)
    GPT2LMHeadModel(config).save_pretrained("gpt2")
    assert evaluated("gpt2", data=HELD, seq_len=48, sequences=4)["loss"] == pytest.approx(5.5, abs=0.2)


def test_help_names_the_commands():
    assert "evaluate" in call(main, []).out
    assert "--tasks" in call(main, ["evaluate", "--help"]).out
