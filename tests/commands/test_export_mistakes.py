"""A mistake about exports is one short line that names the flag, what was given and what is allowed; nothing is
trained or written."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub
import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

import llm_finetune
import llm_pretrain
from qtrain.__main__ import main
from qtrain.core import hub
from qtrain.models.hf import exports
from tests.data.corpora import write_jsonl
from tests.system import call, flags, only_run, tree, write_model

TRAIN = {"type": "text", "paths": "jsonl/0.jsonl", "tokenizer": "byte"}
RUN = {"model": "wide.json", "pretrained": False, "seq_len": 48, "batch_size": 2, "n_steps": 2, "device": "cpu"}
RUN |= {"train_ds": TRAIN, "runs_dir": "elsewhere"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A run with a checkpoint and an export, and what is neither."""
    folder, before = tmp_path_factory.mktemp("mistakes"), Path.cwd()
    os.chdir(folder)
    try:
        write_jsonl(Path("jsonl"))
        write_model(Path("wide.json"), hidden_size=128, intermediate_size=256, num_key_value_heads=2)
        write_model(Path("tiny.json"))
        write_model(Path("odd.json"), hidden_size=48, num_attention_heads=2, num_key_value_heads=2)
        write_model(Path("linear_rope.json"), rope_scaling={"type": "linear", "factor": 2.0})
        done = call(llm_pretrain.main, flags(**{**RUN, "runs_dir": "runs"}, quantize="int8"))
        assert done.code == 0, done.err
        run = only_run(Path("runs"), "llm_pretrain").rename("run")
        shutil.copytree(run / "checkpoints/00000002", "truncated/00000002")
        (Path("truncated/00000002") / "COMPLETE").unlink()
        shutil.copytree(run, "damaged")
        for data in Path("damaged/checkpoints/00000002").glob("*.distcp"):
            data.write_bytes(data.read_bytes()[:-1] + b"x")
        shutil.copytree(run / "hf", "flipped")
        weights = Path("flipped/model.safetensors")
        weights.write_bytes(weights.read_bytes()[:-1] + b"x")
        shutil.copytree(run / "hf", "in_codes")
        config = json.loads(Path("in_codes/config.json").read_text())
        Path("in_codes/config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}))
        Path("in_codes/checksums.json").unlink()
        torch.manual_seed(0)
        small = GPT2Config(vocab_size=258, n_positions=64, n_embd=32, n_layer=1, n_head=2)
        GPT2LMHeadModel(small).save_pretrained("gpt2")
        Path("mine/ct_int8").mkdir(parents=True)
        Path("mine/ct_int8/thesis.txt").write_text("irreplaceable")
        Path("locked").mkdir(mode=0o555)
        Path("file").write_text("")
        Path("empty").mkdir()
    finally:
        os.chdir(before)
    return folder


TRAINING = [
    ({"export_format": ["ct_int9"]}, "--export_format: unknown export format 'ct_int9'. Did you mean 'ct_int8'?"),
    ({"export_format": ["hf", "fp8-block2"]}, "Did you mean 'fp8_block'?"),
    ({"export_format": ["gguf"]}, "--export_format: unknown export format 'gguf'. Did you mean 'gguf_f16'?"),
    ({"export_format": ["CT_INT8"]}, "Did you mean 'ct_int8'?"),
    ({"export_format": ["awq"]}, "Allowed: bitnet, ct_fp8_block, ct_fp8_row"),
    ({"export_format": ["ct_int8,hf"]}, "unknown export format 'ct_int8,hf'"),
    ({"export_format": [""]}, "--export_format: the value is empty"),
    ({"export_formats": ["hf"]}, "--export_formats: unknown flag. Did you mean --export_format?"),
    (
        {"export_format": ["bitnet"], "quantize": "int8"},
        "'bitnet' holds ternary weights, which --quantize bitnet trains",
    ),
    ({"export_format": ["bitnet"]}, "'bitnet' holds ternary weights"),
    ({"export_format": ["fp8_block"], "model": "tiny.json"}, "it takes in-features in multiples of 128, not 32"),
    (
        {"export_format": ["ct_int4_g128"], "model": "tiny.json"},
        "q_proj.weight: it takes in-features in multiples of 128",
    ),
    ({"export_format": ["ct_int4_g32"], "model": "odd.json"}, "it takes in-features in multiples of 32, not 48"),
    ({"export_format": ["mxfp8"], "model": "odd.json"}, "'mxfp8' cannot hold model.layers.0.self_attn.q_proj.weight"),
    ({"export_format": ["ct_int8"], "model_impl": "hf"}, "--export_format: 'ct_int8' needs qtrain's own decoder"),
    (
        {"export_format": ["ct_int8"], "tp": 2, "gpus": 2, "dry_run": True},
        "python -m qtrain export RUN --format ct_int8",
    ),
    ({"export_format": ["ct_int8"], "lm_eval": "base"}, "--lm_eval: it evaluates the dense export; add hf to"),
    ({"push_to_hub": "me/model", "export": False}, "--push_to_hub: it uploads the export; leave out --no_export"),
    ({"push_to_hub": "a/b/c"}, "--push_to_hub: 'a/b/c' is no name of a repository; write OWNER/NAME"),
    ({"push_to_hub": "me/a b"}, "--push_to_hub: 'me/a b' is no name of a repository"),
    ({"push_to_hub": "me/model"}, "--push_to_hub: there is no login for the hub; log in with: hf auth login"),
    ({"push_to_hub": "me/model"}, "the Hugging Face hub could not be reached"),
    ({"export_format": ["gguf_q8_0"]}, "Install it with: pip install gguf"),
]


def of_hub(monkeypatch, says: str) -> None:
    """A login, where the message is about something else; never the network."""
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: None if "login" in says else "token")
    monkeypatch.setattr(hub, "hub_reachable", lambda: "reached" not in says)


def without_packages(monkeypatch, says: str) -> None:
    if "pip install" in says:
        monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: None)
    else:
        monkeypatch.setattr(exports.importlib.util, "find_spec", lambda name: name)


def check(done, says: str, before: dict) -> None:
    assert done.code == 2 and says in done.err, done.err
    assert done.err.count("\n") == 1 and len(done.err) < 420 and "Traceback" not in done.err
    assert tree(Path()) == before


@pytest.mark.parametrize(("settings", "says"), TRAINING, ids=str)
def test_before_training(settings, says, folder, monkeypatch):
    monkeypatch.chdir(folder)
    of_hub(monkeypatch, says)
    without_packages(monkeypatch, says)
    before = tree(Path())
    check(call(llm_pretrain.main, flags(**{**RUN, **settings})), says, before)


def test_before_fine_tuning(folder, monkeypatch):
    monkeypatch.chdir(folder)
    before = tree(Path())
    merge = {"lora": {"base": "nf4", "merge": "original"}, "model": "run/hf", "pretrained": True}
    done = call(llm_finetune.main, flags(**{**RUN, **merge, "export_format": ["ct_int8"]}))
    check(done, "'ct_int8' holds codes of the trained weights, not of those of --model; use hf alone", before)


EXPORTING = [
    ([], {"format": ["ct_int8"]}, "--model: nothing to export is named; give a run folder"),
    (["run"], {}, "--format: no format is named; allowed: bitnet, ct_fp8_block"),
    (["run"], {"format": ["int8"]}, "--format: unknown export format 'int8'. Did you mean 'ct_int8'?"),
    (["run"], {"format": ["ct_int8", "fp8_blok"]}, "Did you mean 'fp8_block'?"),
    (["run"], {"formats": ["ct_int8"]}, "--formats: unknown flag. Did you mean --format?"),
    (["rum"], {"format": ["ct_int8"]}, "--model: unknown model 'rum'"),
    (["no/such/run"], {"format": ["ct_int8"]}, "--model: there is no folder no/such/run"),
    (["empty"], {"format": ["ct_int8"]}, "--model: empty cannot be loaded"),
    (["truncated/00000002"], {"format": ["ct_int8"]}, "truncated/00000002 cannot be loaded"),
    (["truncated"], {"format": ["ct_int8"]}, "--model: truncated/00000002 cannot be loaded"),
    (["damaged/checkpoints/00000002"], {"format": ["ct_int8"]}, "is damaged (checksum)"),
    (["flipped"], {"format": ["ct_int8"]}, "model.safetensors"),
    (["wide.json"], {"format": ["ct_int8"]}, "wide.json is a shape without weights"),
    (["in_codes"], {"format": ["ct_int8"]}, "quantization_config"),
    (["gpt2"], {"format": ["ct_int8"]}, "unknown model_type 'gpt2'"),
    (["run"], {"format": ["bitnet"]}, "--format: 'bitnet' holds ternary weights, which --quantize bitnet trains"),
    (["run"], {"format": ["gguf_tq2_0"]}, "'gguf_tq2_0' cannot hold model.layers.0.self_attn.q_proj.weight"),
    (["run"], {"format": ["ct_int8"], "output": "file"}, "--output: cannot write file/ct_int8: "),
    (["run"], {"format": ["ct_int8"], "output": "mine"}, "--output: mine/ct_int8 is there and is no export"),
    (["run"], {"format": ["ct_int8"], "output": "locked"}, "--output: cannot write locked/ct_int8: no permission"),
    (["run/hf"], {"format": ["hf"]}, "--output: run/hf is what is exported; name another folder"),
    (
        ["run"],
        {"format": ["gguf_f16"]},
        "--format gguf_f16 needs the package 'gguf'. Install it with: pip install gguf",
    ),
    (["run"], {"format": ["ct_int8"], "push_to_hub": "x y"}, "'x y' is no name of a repository"),
    (["run"], {"format": ["ct_int8"], "push_to_hub": "me/x"}, "there is no login for the hub"),
    (["run"], {"format": ["ct_int8"], "device": "tpu"}, "--device: 'tpu' is not allowed"),
]


@pytest.mark.parametrize(("words", "settings", "says"), EXPORTING, ids=str)
def test_before_exporting(words, settings, says, folder, monkeypatch):
    if "permission" in says and os.access(folder / "locked", os.W_OK):
        pytest.skip("this user may write everywhere")
    monkeypatch.chdir(folder)
    of_hub(monkeypatch, says)
    without_packages(monkeypatch, says)
    before = tree(Path())
    check(call(main, ["export", *words, *flags(**{"device": "cpu", **settings})]), says, before)


def test_the_run_is_exported_without_a_mistake(folder, monkeypatch, tmp_path):
    monkeypatch.chdir(folder)
    done = call(main, ["export", "run", *flags(device="cpu", format=["ct_int8"], output=tmp_path)])
    assert done.code == 0 and "all 14 matrices" in done.out
    assert len(TRAINING) + len(EXPORTING) > 45
