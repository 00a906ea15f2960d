"""Commands of the documentation run: with a tiny model, data that is here, two steps and one process in place of what
they name, and all else as it is written. `make test` runs a few; the full sweep all."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import benchmark_mm
import llm_finetune
import llm_pretrain
import timm_finetune
import tokenize_data
from qtrain.commands import evaluate, export, generate, report
from qtrain.core.config import as_dict
from tests.documentation import PAGES, Command, commands, parse_command
from tests.system import Outcome, call, flags, once, write_model

MAINS: dict[str, Callable[[list[str]], None]] = {
    module.__name__: module.main
    for module in (
        benchmark_mm,
        llm_finetune,
        llm_pretrain,
        timm_finetune,
        tokenize_data,
        evaluate,
        export,
        generate,
        report,
    )
}
NEEDS = ("--shapes", "--model qwen2.5-7b --tokens", "column_major", "--rows", "quantizers", "scaling")
NEEDS += ("--serve", "--chat")
"""Of benchmarks that time a GPU, of a server that goes on, and of a chat in a terminal."""
ALL = {command.label: command for page in PAGES for command in commands(page)}
RUN = [
    command
    for command in ALL.values()
    if (command.module() or ("", []))[0] in MAINS
    and len(command.module()[1]) > 0
    and not any(part in command.line for part in NEEDS)
]

SIZES = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
"""Of the tiny model: multiples of every block."""
QUESTIONS = {"question": "What is {} and one?", "answer": "It is {}.\n#### {}"}
VIT = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 2}
SMALL = {
    **{"device": "cpu", "compile": False, "pretrained": False, "batch_size": 4, "seq_len": 128, "runs_dir": "out"},
    **{"n_steps": 2, "eval_interval": 1, "eval_sequences": 2, "sample_tokens": 2, "answer_tokens": 2, "num_workers": 0},
}
DEFAULTS = (
    "n_epochs gpus tp ep cp dp_replicate dp_shard reshard_after_forward fit memory_limit offload mlp_chunks resume"
)
"""Flags that a tiny run on one CPU has no use for: they are left out."""


def make_folder(folder: Path) -> Path:
    """Where a reader of the pages would stand: texts, tokens, questions, conversations, photos and a run."""
    (folder / "texts").mkdir()
    for page in PAGES[:8]:
        (folder / f"texts/{page.stem}.txt").write_text(page.read_text())
    for place in ("gsm8k", "data/gsm8k"):
        (folder / place).mkdir(parents=True)
        for name in ("train", "test"):
            rows = [{key: text.format(i, i + 1) for key, text in QUESTIONS.items()} for i in range(40)]
            (folder / place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    turns = [("user", "Count to {}."), ("assistant", "One, two, {}.")]
    chats = [{"messages": [{"role": r, "content": t.format(i)} for r, t in turns]} for i in range(200)]
    (folder / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    (folder / "questions.jsonl").write_text('{"prompt":"What is one and one?"}\n{"prompt":"Count."}\n')
    for i in range(16):
        path = folder / f"photos/{'train' if i % 4 else 'val'}/{'cat' if i % 8 < 4 else 'dog'}/{i}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((32, 32, 3), 15 * i, dtype=np.uint8)).save(path)
    write_model(folder / "tiny.json", **SIZES)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        tokens = {"files": ["texts"], "split": "train,validation", "tokenizer": "byte", "output_dir": "tokens"}
        done = call(tokenize_data.main, flags(**tokens, n_procs=1))
        assert done.code == 0, done.err
        data = {"type": "token", "dataset_dir": "tokens_train"}
        start = {
            "model": "tiny.json",
            "quantize": "int8",
            "quantize_lm_head": True,  # as `generate --deterministic` takes it
            "train_ds": data,
            "eval_ds": data,
            "seq_len": 64,
            "n_steps": 2,
        }
        done = call(llm_pretrain.main, flags(**start, batch_size=2, device="cpu", eval_sequences=2))
        assert done.code == 0, done.err
        (made,) = (folder / "runs/llm_pretrain").iterdir()
        run = made.rename(folder / "runs/llm_pretrain/RUN")
        for copy in ("llm_pretrain/RUN2", "llm_pretrain/RUN3", "llm_finetune/RUN"):
            shutil.copytree(run, folder / "runs" / copy)
    return folder


def local_data(spec: dict[str, Any] | None, script: str) -> dict[str, Any]:
    """Data that is here, of the same type, with the template and the part that the page names."""
    if script == "timm_finetune":
        here = (spec or {}).get("type") in ("image_folder", "sklearn:digits")
        return spec if here else {"type": "image_folder", "path": "photos", "split": "train"}
    match (spec or {"type": "instruct", "template": "gsm8k"})["type"]:
        case "token":
            return {"type": "token", "dataset_dir": "tokens_train"}
        case "instruct":
            template = (spec or {}).get("template", "gsm8k")
            return {"type": "instruct", "dataset": "gsm8k/train.jsonl", "template": template, "tokenizer": "byte"}
        case "chat":
            return {**spec, "tokenizer": "byte", "template": "chatml"}
        case _:
            return {"type": "text", "paths": "texts", "tokenizer": "byte"}


def small_training(settings: Any, script: str) -> dict[str, Any]:
    """The settings of a training script with what is large made small."""
    given = as_dict(settings)
    defaults = as_dict(type(settings)())
    changed = {key: defaults[key] for key in f"{DEFAULTS} micro_batch_size".split() if key in defaults} | SMALL
    changed["train_ds"] = local_data(settings.train_ds, script)
    changed["eval_ds"] = settings.eval_ds and local_data(settings.eval_ds, script)
    changed["health"] = settings.health and 1
    changed["n_steps"] = 6 if given.get("quantize_schedule") else 2  # each of its schemes trains
    changed["accuracy"] = min(given.get("accuracy", 0), 2)
    if script == "timm_finetune":
        changed["eval_images"] = 4 if settings.eval_ds else 0
        digits = changed["train_ds"]["type"] == "sklearn:digits"
        changed |= {} if digits else {"model": "vit_tiny_patch16_224", "model_kwargs": VIT}
    else:
        mixture = any(word in settings.model.lower() for word in ("moe", "mixtral", "a3b"))
        changed |= {"model": "moe-quickstart" if mixture else "tiny.json"}
    return {**given, **{key: value for key, value in changed.items() if key in given}}


def small_tokens(settings: Any) -> dict[str, Any]:
    """The settings of tokenize_data.py, for files that are here."""
    rows = settings.template is not None
    changed = {
        "dataset": "gsm8k/train.jsonl" if rows else None,
        "files": [] if rows else ["texts"],
        "subset": None,
        "train_tokenizer": min(settings.train_tokenizer, 400),
        "tokenizer": None if settings.train_tokenizer else "byte",
        "output_dir": "made",
        "n_procs": 1,
    }
    return {**as_dict(settings), **changed}


def small_words(argv: list[str]) -> list[str]:
    """Words of a command that reads a run: the run that is here, no server, no task that needs a package."""
    replaced = {"RUN": "runs/llm_pretrain/RUN", "RUN2": "runs/llm_pretrain/RUN2", "RUN3": "runs/llm_pretrain/RUN3"}
    replaced |= {"wandb": "tensorboard", "Qwen/Qwen3-0.6B": "runs/llm_pretrain/RUN/hf"}
    replaced |= {"Qwen/Qwen2.5-0.5B": "runs/llm_pretrain/RUN/hf", "--sequences": "--sequences"}
    words, rest = [], iter(argv)
    for word in rest:
        if word in ("--tasks", "--push_to_hub"):
            next(rest)
            continue
        word = replaced.get(word, word).replace("checkpoints/00001000", "checkpoints/00000002")
        words.append(word.replace("tinystories_validation", "tokens_validation"))
    return words


@pytest.fixture
def folder(tmp_path_factory, tmp_path, monkeypatch) -> Path:
    made = once(tmp_path_factory, "documented", make_folder)
    shutil.copytree(made, tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    return tmp_path / "here"


def run_small(command: Command, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    name, argv = command.module()
    if name == "benchmark_mm" or name.startswith("qtrain.commands."):
        return call(MAINS[name], small_words(argv))
    with monkeypatch.context() as patch:
        settings = parse_command(name, argv, patch)
    if getattr(settings, "dry_run", False):
        return call(MAINS[name], argv)
    if "--resume" in argv and argv[argv.index("--resume") + 1] != "auto":
        return call(MAINS[name], argv)
    small = small_tokens(settings) if name == "tokenize_data" else small_training(settings, name)
    (folder / "small.json").write_text(json.dumps(small))
    return call(MAINS[name], ["--config", "small.json"])


@pytest.mark.parametrize("command", RUN, ids=lambda command: command.label)
def test_a_command_runs(command, folder, monkeypatch):
    done = run_small(command, folder, monkeypatch)
    assert done.code == 0, done.err
    assert done.out


def test_most_are_run():
    assert len(RUN) > 45
    assert {command.module()[0] for command in RUN} == MAINS.keys()
