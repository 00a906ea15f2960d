"""llm_pretrain.py from its command line: what parses, what is printed, what is written, and why a run stops."""

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import llm_finetune
import llm_pretrain
import timm_finetune
import tokenize_data
from qtrain.core import checksums
from qtrain.core.config import parse
from qtrain.data.stream import DATASETS
from qtrain.data.tokenizers.tokenizer import TOKENIZERS
from qtrain.models import build_model, export_hf, list_models, read_model_source
from qtrain.models.hf import initial_values
from qtrain.optim import OPTIMIZERS
from qtrain.quant import SCHEMES
from qtrain.train import loop
from qtrain.train.assembly import language_architecture
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl
from tests.system import ROOT, call, flags, losses, only_run, serving, tree, write_model

SETTINGS = {
    "llm_pretrain": llm_pretrain.PretrainSettings,
    "llm_finetune": llm_finetune.FinetuneSettings,
    "timm_finetune": timm_finetune.VisionSettings,
    "tokenize_data": tokenize_data.TokenizeSettings,
}
MAINS = {
    "llm_pretrain": llm_pretrain.main,
    "llm_finetune": llm_finetune.main,
    "timm_finetune": timm_finetune.main,
    "tokenize_data": tokenize_data.main,
}


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    """A working folder with a tiny model and some text."""
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    return tmp_path


def tiny(**settings) -> list[str]:
    text = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    chosen = {"model": "tiny.json", "train_ds": text, "seq_len": 32, "n_steps": 4, "export": False}
    return flags(**{**chosen, "device": "cpu", **settings})


def test_a_frozen_embedding_does_not_train(here):
    """Untied, so that the head trains; the plan's memory has no gradients and states of it."""
    write_model(Path("untied.json"), tie_word_embeddings=False)
    settings = {"model": "untied.json", "n_steps": 2, "lr": 0.1, "export": True, "weight_decay": 0.5}
    assert call(llm_pretrain.main, tiny(**{**settings, "lr": 0}, runs_dir="start")).code == 0
    done = call(llm_pretrain.main, tiny(**settings, freeze_embedding_layer=True))
    assert done.code == 0 and "frozen: the embedding\ntrained: " in done.out, done.err
    start, end = (load_file(only_run(Path(runs)) / "hf/model.safetensors") for runs in ("start", "runs"))
    same = {name for name, tensor in start.items() if torch.equal(tensor, end[name])}
    assert same == {"model.embed_tokens.weight"}
    assert "frozen: the embedding" in (only_run(Path("runs")) / "train.log").read_text()


@pytest.mark.parametrize("kind", [{"type": "text", "paths": "jsonl"}, {"type": "hf_text", "dataset": "jsonl/*.jsonl"}])
def test_text_takes_the_tokenizer_of_a_pretrained_model(here, kind):
    text = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    assert call(llm_pretrain.main, tiny(train_ds=text, export=True)).code == 0
    model = only_run(Path("runs")) / "hf"
    done = call(llm_pretrain.main, tiny(model=model, pretrained=True, train_ds=kind, eval_ds=kind, runs_dir="more"))
    assert done.code == 0, done.err
    # A model with random weights has none, whatever its folder holds.
    done = call(llm_pretrain.main, tiny(model=model, train_ds=kind))
    assert done.code == 2 and '--train_ds: it does not say its tokenizer; add "tokenizer":"NAME" to it' in done.err


# ---- the command line ------------------------------------------------------------------------------------------------

HUB_TEXT = '{"type":"hf_text","dataset":"allenai/c4","subset":"en","split":"train","tokenizer":"TOKENIZER"}'
TEXT = '{"type":"text","paths":"python:stdlib","tokenizer":"byte"}'
COMMANDS = [  # the design's, as they stand, and others that need the hub; what the answer names
    (
        "llm_pretrain",
        ["--train_ds", HUB_TEXT.replace("TOKENIZER", "llama2"), "--seed", "2024"],
        "the tokenizer 'llama2'",
    ),
    (
        "llm_pretrain",
        ["--train_ds", '{"type":"token","dataset_dir":"tinystories_train"}', "--seed", "2024"],
        "'tinystories_train' does not exist. Token shards are made by tokenize_data.py",
    ),
    (
        "llm_finetune",
        [
            "--model",
            "HuggingFaceTB/SmolLM-1.7B",
            "--freeze_embedding_layer",
            "--batch_size",
            "4",
            "--n_steps",
            "100_000",
            "--ckpt_interval",
            "10_000",
            "--seed",
            "2024",
            "--compile",
        ],
        "--model: config.json of 'HuggingFaceTB/SmolLM-1.7B'",
    ),
    (
        "llm_finetune",
        ["--model", "quickstart", "--no_pretrained", "--train_ds", '{"type":"instruct","tokenizer":"byte"}'],
        "the dataset 'meta-math/MetaMathQA'",
    ),
    ("tokenize_data", ["--dataset", "tinystories", "--split", "train"], "the dataset 'roneneldan/TinyStories'"),
    ("llm_pretrain", ["--train_ds", HUB_TEXT.replace("TOKENIZER", "byte")], "the dataset 'allenai/c4'"),
    ("llm_pretrain", ["--model", "HuggingFaceTB/SmolLM-1.7B", "--train_ds", TEXT], "--model: config.json of"),
    ("llm_pretrain", ["--model", "quickstart", "--hellaswag", "--train_ds", TEXT], "--hellaswag_file FILE"),
    ("tokenize_data", ["--files", "python:stdlib"], "--tokenizer: the tokenizer 'llama2'"),
]


@pytest.mark.timeout(60)
def test_commands_that_need_the_hub_say_so_at_once_and_write_nothing(tmp_path):
    """With an unreachable hub and an empty cache, each in its own process, so that none uses what another found."""
    nowhere = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": ""}
    proxies = dict.fromkeys(("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy"), "")
    with serving(tmp_path, "import datasets", **nowhere, **proxies) as server:
        for script, argv, says in COMMANDS:
            begin = time.monotonic()
            done = server.run(script, argv)
            assert time.monotonic() - begin < 5
            assert done.code == 2 and done.err.startswith("error: --") and done.err.count("\n") == 1, done
            assert says in done.err and ("could not be reached" in done.err) == ("does not exist" not in says), done.err
    assert {p.suffix for p in tmp_path.iterdir()} <= {".out", ".err", ""} and not (tmp_path / "runs").exists()
    assert not any(p.is_dir() and p.name != "cache" for p in tmp_path.iterdir())


@pytest.mark.parametrize("script", SETTINGS)
def test_every_flag_has_a_help_line(script):
    done = call(MAINS[script], ["--help"])
    assert done.code == 0 and done.err == ""
    text = " ".join(done.out.replace("│", " ").split())
    for field in dataclasses.fields(SETTINGS[script]):
        start = text.index(f"--{field.name}{',' if field.type is bool else ' '}")
        line = text[start : text.index("(default: ", start)]
        assert len(line.split()) >= 4 and line.strip().endswith((".", "all")), f"--{field.name} has no help: {line}"


def test_help_shows_the_recipes_values():
    done = call(llm_pretrain.main, ["--config", str(ROOT / "configs/quickstart.json"), "--help"])
    text = " ".join(done.out.replace("│", " ").split())
    recipe = json.loads((ROOT / "configs/quickstart.json").read_text())
    for key in ("n_steps", "seq_len", "model", "quantize", "lr"):
        shown = text[text.index(f"--{key} ") :]
        assert f"(default: {recipe[key]})" in shown[:200], key


def test_list_shows_every_entry_of_every_registry():
    for script, main in MAINS.items():
        done = call(main, ["--list"])
        assert done.code == 0
        entries = [
            *SCHEMES.describe(),
            *OPTIMIZERS.describe(),
            *DATASETS.describe(),
            *TOKENIZERS.items(),
            *([] if script == "timm_finetune" else list_models()),  # that one lists timm's
        ]
        for name, line in entries:
            assert line and any(row.split()[:1] == [name] and line in row for row in done.out.splitlines()), name
    names = {name for name, _ in entries}
    assert {"int8", "bf16", "adamw", "token", "text", "hf_text", "mix", "byte", "llama2"} <= names


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.json")), ids=lambda p: p.name)
def test_every_recipe_parses_with_its_script(path):
    recipe = json.loads(path.read_text())
    keys = {key for key in recipe if not key.startswith("_")}
    scripts = [name for name, cls in SETTINGS.items() if keys <= {f.name for f in dataclasses.fields(cls)}]
    assert scripts and recipe["_comment"], f"{path.name} is no script's recipe"
    for script in scripts:
        settings = parse(SETTINGS[script], ["--config", str(path)], "script.py")
        assert all(json.loads(json.dumps(getattr(settings, key))) == recipe[key] for key in keys)


@pytest.mark.parametrize("name", [name for name, _ in list_models()])
def test_every_shipped_model_plans(here, name):
    """Its config loads, and the plan counts its parameters, its work and its memory."""
    done = call(llm_pretrain.main, tiny(model=name, dry_run=True))
    assert done.code == 0 and f"model   {name}, " in done.out and "memory" in done.out and "time" in done.out
    assert read_model_source(name).model_config().vocab_size > 0


def test_options_without_effect_on_a_cpu_are_one_line(here):
    for offload in (True, False):
        done = call(llm_pretrain.main, tiny(optim_kwargs={"offload": offload}, n_steps=1))
        assert done.code == 0 and done.out.count("offload: has no effect on a CPU") == offload, done.err


ABSENT = {"type": "text", "paths": "elsewhere", "tokenizer": "byte"}


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train_ds": None}, "--train_ds: no training data is given"),
        ({"train_ds": ABSENT, "sample_prompts": ["a"]}, "--train_ds: 'elsewhere' does not exist"),
        ({"train_ds": {**ABSENT, "paths": "jsonl", "tokenizer": "./no.json"}}, "the tokenizer './no.json' does not ex"),
        ({"eval_ds": ABSENT}, "--eval_ds: 'elsewhere' does not exist"),
        ({"config": str(ROOT / "configs/learning.json"), "train_ds": ABSENT}, "--train_ds: 'elsewhere' does not exist"),
    ],
)
def test_a_dry_run_plans_without_data(here, settings, says):
    """The last line about the data says so; the run itself is refused."""
    words = [word for word in tiny(**settings) if settings.get("train_ds", 0) is not None or "train_ds" not in word]
    plan, whole = call(llm_pretrain.main, [*words, "--dry_run"]), call(llm_pretrain.main, tiny(dry_run=True))
    assert plan.code == 0 and plan.err == "", plan.err
    line = [line for line in plan.out.splitlines() if line.startswith("data")][-1]
    assert says in line and line.endswith("This is planned without data.")
    if "config" not in settings:
        kept = [
            [x for x in text.splitlines() if x.startswith(("model", "steps", "batch"))]
            for text in (plan.out, whole.out)
        ]
        assert kept[0] == kept[1] and "linears" in plan.out
    done = call(llm_pretrain.main, words)
    assert done.code == 2 and says in done.err


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"train_ds": {**ABSENT, "path": "x"}}, "--train_ds (text): unknown key 'path'. Did you mean 'paths'?"),
        ({"train_ds": {**ABSENT, "type": "txt"}}, "--train_ds: unknown dataset type 'txt'"),
        ({"train_ds": ABSENT, "n_steps": "None", "n_epochs": 2}, "Without data --n_epochs is no number of steps"),
    ],
)
def test_a_dry_run_still_refuses(here, settings, says):
    done = call(llm_pretrain.main, tiny(dry_run=True, **settings))
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1


def test_a_dry_run_prints_the_plan_and_writes_nothing(here):
    before = tree(here)
    eval_ds = {"type": "text", "paths": "jsonl/0.jsonl", "tokenizer": "byte"}
    settings = {"quantize": "int8", "batch_size": 8, "micro_batch_size": 2, "n_steps": 500, "eval_ds": eval_ds}
    done = call(llm_pretrain.main, tiny(**settings, dry_run=True))
    assert done.code == 0 and done.err == "" and tree(here) == before
    for part in ("26.8k parameters, linears in int8", "8 sequences (2 x 4 accumulated x 1 device), 256 tokens"):
        assert part in done.out
    assert "steps   500, 128k tokens" in done.out and "jsonl/0.jsonl" in done.out and "GiB" in done.out


# ---- the run folder --------------------------------------------------------------------------------------------------


def test_the_run_folder_holds_what_the_design_says(here):
    settings = {"eval_ds": {"type": "text", "paths": "jsonl", "tokenizer": "byte"}, "eval_sequences": 4}
    argv = tiny(
        **settings, sample_prompts=["def "], sample_tokens=4, profile=True, n_steps=9, eval_interval=6, export=True
    )
    done = call(llm_pretrain.main, [*argv, "--run_name=all.of-it_1"])
    assert done.code == 0, done.err
    run = only_run(Path("runs"))
    assert run.name.endswith("_all.of-it_1")
    names = {p.name for p in run.iterdir()}
    assert {"config.json", "metrics.jsonl", "train.log", "checkpoints", "hf", "report.html", "profile"} == names
    records = read_metrics(run / "metrics.jsonl")
    steps = [r for r in records if "loss" in r]
    assert [r["step"] for r in steps] == [*range(1, 10)] and [r["tokens"] for r in steps] == [
        128 * n for n in range(1, 10)
    ]
    keys = {"step", "loss", "grad_norm", "lr", "tok_s", "tokens", "sol", "mfu", "mem", "data", "data_wait", "time"}
    assert all(r.keys() - {"ms", "hours_billion", "start"} == keys for r in steps)
    assert ["start" in r for r in steps] == [True] + 8 * [False]
    parts = ["flags", "imports", "plan", "data", "model", "run folder", "evaluation", "first step"]
    assert list(steps[0]["start"]) == parts and all(seconds >= 0 for seconds in steps[0]["start"].values())
    assert steps[-1]["sol"] > 0 and all(r["mfu"] is None for r in steps)  # a CPU has no datasheet
    assert steps[-1]["data"] is not None
    # Of the steps that count: not of the first two.
    assert [r["step"] for r in steps if "ms" in r] == [*range(3, 10)]
    assert list(steps[-1]["ms"]) == ["data", "forward_backward", "optimizer"]
    assert steps[-1]["hours_billion"] == pytest.approx(1e9 / steps[-1]["tok_s"] / 3600)
    evaluations = [r for r in records if "eval_loss" in r]
    assert [r["step"] for r in evaluations] == [0, 6, 9]
    assert all(r["samples"][0][0] == "def " and isinstance(r["samples"][0][1], str) for r in evaluations)
    assert [p.name for p in (run / "checkpoints").iterdir()] == ["00000009"]
    log = (run / "train.log").read_text()
    for part in (
        "model   tiny.json",
        "linears",
        "step 9: checkpoint",
        "sample: def ",
        "step 9/9",
        "trace written",
        "start  ",
    ):
        assert part in log, part
    config = json.loads((run / "config.json").read_text())
    assert config["run_name"] == "all.of-it_1" and torch.__version__.startswith(config["_versions"]["torch"])
    for part in (str(run), "checkpoint", "exported", "try next"):
        assert part in done.out
    for said, path in (("report", "report.html"), ("exported", "hf")):
        assert any(line.startswith(said) and str(run / path) in line for line in done.out.splitlines())


@pytest.mark.parametrize(
    ("scheme", "options", "other"), [("int8", {"stochastic_rounding": True}, "bf16"), ("bf16", {}, "int8")]
)
def test_the_suggested_command_works_as_printed(here, scheme, options, other):
    first = call(llm_pretrain.main, tiny(quantize=scheme, quantize_kwargs=options, export=True))
    (line,) = [line for line in first.out.splitlines() if line.startswith("try next")]
    words = line.split("llm_pretrain.py ")[1].split()
    assert call(llm_pretrain.main, words).code == 0
    runs = sorted((here / "runs/llm_pretrain").iterdir())
    assert len(runs) == 2  # a new run, also where the first was a resumed one
    assert json.loads((runs[1] / "config.json").read_text())["quantize"] == other


def test_the_config_of_a_resumed_run_is_a_recipe_for_a_new_one(here):
    assert call(llm_pretrain.main, tiny()).code == 0
    run = only_run(Path("runs"))
    assert call(llm_pretrain.main, tiny(n_steps=6, resume=run)).code == 0
    assert call(llm_pretrain.main, ["--config", str(run / "config.json")]).code == 0
    assert len(list((here / "runs/llm_pretrain").iterdir())) == 2


def test_runs_of_one_second_get_folders_of_their_own_and_auto_finds_the_last(here):
    for _ in range(3):
        assert call(llm_pretrain.main, tiny(n_steps=1)).code == 0
    runs = sorted((here / "runs/llm_pretrain").iterdir())
    assert len(runs) == 3
    done = call(llm_pretrain.main, tiny(n_steps=2, resume="auto"))
    assert done.code == 0 and f"run folder  {runs[-1].relative_to(here)}" in done.out
    assert [len(losses(run)) for run in runs] == [1, 1, 2]


@pytest.mark.parametrize("impl", ["native", "hf"])
def test_native_and_transformers_models_train_in_the_same_loop(here, impl):
    write_model(Path("model.json"), **({} if impl == "native" else {"model_type": "gpt_neox"}))
    done = call(llm_pretrain.main, tiny(model="model.json", model_impl=impl, n_steps=30, lr=0.01, quantize="int8"))
    assert done.code == 0, done.err
    found = [row[1] for row in losses(only_run(Path("runs")))]
    assert found[-1] < found[0] - 0.5


def test_an_empty_prompt_and_unusual_options_work(here):
    options = {"sample_prompts": [""], "sample_tokens": 2, "loss_chunks": 3, "z_loss": 1e-4, "clip_grad_norm": 0}
    options |= {
        "doc_mask": True,
        "num_workers": 1,
        "log_interval": 3,
        "activation_checkpointing": "full",
        "dtype": "bf16",
    }
    done = call(llm_pretrain.main, tiny(**options, keep_ckpts=0, quantize="int8", quantize_lm_head=True))
    assert done.code == 0, done.err
    run = only_run(Path("runs"))
    assert [row[0] for row in losses(run) if row[1] is not None] == [3, 4] and not (run / "checkpoints").exists()
    # Samples need no --eval_ds, and a record without a number has no line of its own.
    assert "step 0: sample: " in done.out and "step 4: sample: " in done.out and "step 0: \n" not in done.out


# ---- why a run stops -------------------------------------------------------------------------------------------------


def test_a_nan_weight_stops_at_the_first_step(here, monkeypatch):
    """One that was not in the file: those are refused as they are loaded."""
    monkeypatch.setattr(initial_values, "refuse_nonfinite", lambda *_: None)
    source = read_model_source("tiny.json")
    export_hf(build_model(source), source, Path("bad"))
    Path("bad", checksums.NAME).unlink()
    tensors = load_file("bad/model.safetensors")
    tensors["model.layers.1.mlp.down_proj.weight"][3, 5] = float("nan")
    save_file(tensors, "bad/model.safetensors", metadata={"format": "pt"})
    for scheme in ("bf16", "int8"):
        done = call(llm_pretrain.main, tiny(model="bad", pretrained=True, quantize=scheme, run_name=scheme))
        assert done.code == 1
        said = done.err.splitlines()
        assert len(said) == 1 and said[0].startswith("error: step 1: the loss is nan.")
        assert (
            "First non-finite tensor: the weight of layers.1.mlp.down_proj.weight (1 NaN and 0 Inf among 2,048 values)."
            in said[0]
        )
        assert "No checkpoint yet." in said[0]


def test_a_learning_rate_that_diverges_stops_and_names_the_last_good_checkpoint(here):
    schedule = {"warmup": 0.5, "decay": 0}
    options = {"n_steps": 400, "ckpt_interval": 1, "clip_grad_norm": 0, "lr_schedule_kwargs": schedule}
    done = call(llm_pretrain.main, tiny(**options, lr=1e30))
    assert done.code == 1 and done.err.count("\n") == 1
    run = only_run(Path("runs"))
    last = sorted((run / "checkpoints").iterdir())[-1]
    step = int(last.name) + 1
    assert done.err.startswith(f"error: step {step}: the ") and "First non-finite tensor: the gradient of " in done.err
    assert f"The last good checkpoint is {last} (--resume {last})." in done.err and "--lr" in done.err
    assert [row[0] for row in losses(run)] == [*range(1, step)]  # the bad step changed nothing
    again = call(llm_pretrain.main, tiny(**options, lr=1e-3, resume=last))
    assert again.code in (0, 1)


def test_running_out_of_memory_prints_the_plan_and_the_flags_to_change(here, monkeypatch):
    def exhausted(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(loop, "compute_gradients", exhausted)
    done = call(llm_pretrain.main, tiny(batch_size=16, micro_batch_size=8))
    assert done.code == 1 and "Traceback" not in done.err
    first, *rest = done.err.splitlines()
    assert (
        first.startswith("error: step 1: out of memory. The plan was ")
        and "weights" in first
        and "peak so far" in first
    )
    advice = [line.strip() for line in rest if line.startswith("  ")]
    assert advice[0].startswith("1. --micro_batch_size 4 --gradient_accumulation 4")
    assert any("--activation_checkpointing" in line for line in advice)
    given = advice[0].split(" ", 1)[1].split(" (")[0].split()
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert call(llm_pretrain.main, [*tiny(batch_size=16), *given]).code == 0  # the advice works as it is printed


def test_a_model_that_does_not_fit_prints_the_same_and_writes_nothing(here, monkeypatch):
    def exhausted(*_args, **_kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")

    monkeypatch.setattr(language_architecture, "build_model", exhausted)
    done = call(llm_pretrain.main, tiny())
    assert done.code == 1 and done.err.startswith("error: step 0: out of memory. The plan was ")
    assert not Path("runs").exists()


def test_other_errors_are_not_reported_as_out_of_memory(here, monkeypatch):
    def broken(*_args, **_kwargs):
        raise RuntimeError("mat1 and mat2 shapes cannot be multiplied")

    monkeypatch.setattr(loop, "compute_gradients", broken)
    with pytest.raises(RuntimeError, match="mat1"):
        call(llm_pretrain.main, tiny())


def test_data_that_breaks_in_the_middle_is_a_message(here):
    lines = [json.dumps({"text": "word " * 8})] * 40 + ["{broken"]
    Path("late.jsonl").write_text("\n".join(lines))
    done = call(
        llm_pretrain.main, tiny(train_ds={"type": "text", "paths": "late.jsonl", "tokenizer": "byte"}, n_steps=99)
    )
    assert done.code == 2 and done.err.count("\n") == 1 and "late.jsonl, line at byte" in done.err


@pytest.mark.parametrize("encoding", ["ascii", pytest.param("cp1252", marks=pytest.mark.sweep)])
def test_a_console_that_is_not_utf8_ends_no_run(here, encoding):
    """A process of its own: prompts and samples are outside of the console's encoding."""
    chosen = {"sample_prompts": ["\u6f22\u5b57 \U0001f600"], "sample_tokens": 4, "n_steps": 2, "run_name": "ascii"}
    console = f"sys.stdout.reconfigure(encoding={encoding!r}, errors='strict')"  # as PYTHONIOENCODING sets it
    with serving(Path.cwd()) as server:
        done = server.start("llm_pretrain", tiny(**chosen), patch=console).wait()
    assert done.code == 0, done.err
    assert "sample: \\u6f22\\u5b57 \\U0001f600 [>]" in done.out and done.err == ""


@pytest.mark.parametrize("flag", [pytest.param("--list", marks=pytest.mark.sweep), "--help"])
def test_a_closed_pipe_is_no_traceback(flag):
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(ROOT / "llm_pretrain.py"), flag]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE)
    os.close(write)
    assert done.returncode == 141 and done.stderr == b""
