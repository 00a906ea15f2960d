"""Runs with --quantize_overrides: of text, adapters, experts and images; saved with their map, and resumed with it."""

import json
import sys
from pathlib import Path

import pytest

import llm_finetune
import llm_pretrain
import timm_finetune
from qtrain.models import ModelSource, empty_model
from qtrain.quant import LowBitLinear, describe_choices, reassign
from qtrain.quant.schemes import auto
from qtrain.train.assembly.assemble import assemble, build_quantized
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import Prepared, prepare
from qtrain.train.log.metrics import read_metrics
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.checkpoint import read_meta
from qtrain.train.state.run import Run
from tests.data.corpora import write_jsonl, write_questions
from tests.quant.test_reassign import schemes
from tests.system import call, flags, losses, only_run, write_model
from tests.test_mixture_runs import WIDE
from tests.train.state.test_run import train

OVERRIDES = {"*.down_proj": "fp8_rowwise", "layers.0.*": "bf16", "lm_head": {"scheme": "int8", "output": "bf16"}}
TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["script.py"])
    write_model(Path("tiny.json"), max_position_embeddings=512)
    write_model(Path("experts.json"), **WIDE)
    write_jsonl(Path("jsonl"))
    write_questions(Path("questions.jsonl"))
    return tmp_path


def prepared(**changes) -> Prepared:
    chosen = {"model": "tiny.json", "seq_len": 16, "n_steps": 10, "batch_size": 2, "device": "cpu", "quantize": "int8"}
    checked = check_settings(LanguageSettings(**{**chosen, **changes}), "script")
    return prepare(checked, LanguageArchitecture.of(checked.settings, checked.mesh), ())


def run_of(ready: Prepared) -> Run:
    return assemble(ready, *build_quantized(ready))


# ---- the map of a run ------------------------------------------------------------------------------------------------


def test_a_resumed_run_has_the_map_that_it_was_saved_with():
    """Also where linears were reassigned: losses are those of the run that goes on, bit for bit."""
    run = run_of(prepared(quantize_overrides=OVERRIDES))
    drawn = {"scheme": "int8", "stochastic_rounding": True}
    change = {"layers.0.attn.qkv": drawn, "layers.1.attn.o_proj": "bf16"}
    with run.opened_folder():
        train(run, 2)
        run.save()
        reassign(run.model, run.quantized, schemes(change))
        train(run, 1)
        path = run.save()
        told = train(run, 3)
    assert read_meta(path)["schemes"]["linears"] == run.quantized.schemes
    ready = prepared(quantize_overrides=OVERRIDES, resume=str(path))
    assert "1 x layers.attn.o_proj 32 -> 32 (1): left, reassigned in the run" in ready.text
    again = run_of(ready)
    assert again.quantized.schemes == run.quantized.schemes and train(again, 3) == told
    other = run_of(prepared(quantize_overrides={**OVERRIDES, "*.qkv": "bf16"}, resume=str(path)))
    assert type(other.model.layers[1].attn.qkv) is not LowBitLinear, "the flags say something else now"
    assert any("--resume: quantize_overrides.*.qkv None > 'bf16'" in note for note in other.notes)


def test_an_older_checkpoint_has_its_own_map():
    """The newest is damaged, so the one before is loaded, with another map than the run was planned with."""
    run = run_of(prepared(quantize_overrides=OVERRIDES))
    with run.opened_folder():
        train(run, 1)
        run.save()
        told = train(run, 2)
        reassign(run.model, run.quantized, schemes({"layers.0.attn.qkv": "int8"}))
        path = run.save()
    shard = next(path.glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    again = run_of(prepared(quantize_overrides=OVERRIDES, resume=str(path.parent.parent)))
    assert again.state.step == 1 and again.quantized.schemes["layers.0.attn.qkv"] == "bf16"
    assert train(again, 2) == told


def test_overrides_win_over_what_auto_has_timed(monkeypatch):
    timed = []

    def time_linear(scheme, shape, *_):
        timed.append(shape)
        return 1.0 if type(scheme).__name__ == "Int8" else 2.0

    monkeypatch.setattr(auto, "time_linear", time_linear)
    options = {"quantize": "auto", "quantize_kwargs": {"candidates": ["bf16", "int8"]}}
    ready = prepared(**options, quantize_overrides={"*.qkv": "bf16", "layers.1.mlp.*": "fp8_rowwise"})
    assert (32, 64) not in timed, "no linear of that shape is left to choose for"
    lines = [line.strip() for line in describe_choices(list(ready.linears))]
    assert "2 x layers.attn.qkv 32 -> 64: left, --quantize_overrides leaves it" in lines
    assert "1 x layers.mlp.gate_up 32 -> 128 (0): quantized, int8" in lines
    assert "1 x layers.mlp.gate_up 32 -> 128 (1): quantized, fp8_rowwise" in lines
    assert set(ready.settings.quantize_kwargs["chosen"]) == {"32 -> 32", "32 -> 128", "64 -> 32"}


# ---- from the command line -------------------------------------------------------------------------------------------


def pretrain(**settings) -> list[str]:
    chosen = {"model": "tiny.json", "train_ds": TEXT, "seq_len": 32, "n_steps": 4, "device": "cpu", "eval_interval": 0}
    return flags(**{**chosen, "quantize": "int8", "export": False, **settings})


@pytest.mark.parametrize("model", ["tiny.json", "experts.json"])
def test_a_run_says_who_runs_in_which_scheme_and_resumes(model):
    overrides = {"*.down_proj": "fp8_rowwise", "layers.0.*": "bf16", "*.1.*.gate_up": "bf16"}
    options = {"model": model, "quantize_overrides": overrides, "ckpt_interval": 2}
    done = call(llm_pretrain.main, pretrain(**options))
    assert done.code == 0, done.err
    run = only_run(Path("runs"))
    told = losses(run)
    log = (run / "train.log").read_text()
    owner = "layers.mlp.experts.gate_up 4 of" if model == "experts.json" else "layers.mlp.gate_up"
    assert f"x {owner}" in log and "linears in int8, some by --quantize_overrides" in log
    if model == "tiny.json":
        assert "note    1 of 2 MLPs have one linear in low bits and one in high precision" in log
    first, *others = [r for r in read_metrics(run / "metrics.jsonl") if "loss" in r]
    assert first["schemes"]["fp8_rowwise"] == (1 if model == "tiny.json" else 2)
    assert not any("schemes" in record for record in others)
    halfway, _ = sorted((run / "checkpoints").iterdir())
    assert call(llm_pretrain.main, pretrain(**options, resume=str(halfway))).code == 0
    again = next(path for path in Path("runs").rglob("metrics.jsonl") if run not in path.parents).parent
    assert losses(again) == told


def test_a_frozen_base_in_several_formats():
    """Adapters on NF4, on INT8 products and on weights in the model's dtype."""
    data = {"type": "instruct", "dataset": "questions.jsonl", "template": "gsm8k", "tokenizer": "byte"}
    chosen = {
        "model": "tiny.json",
        "pretrained": False,
        "train_ds": data,
        "seq_len": 160,
        "n_steps": 3,
        "batch_size": 2,
    }
    overrides = {"*.down_proj": "int8", "layers.0.*": "bf16", "*.o_proj": "int8_weight"}
    done = call(
        llm_finetune.main,
        flags(**chosen, device="cpu", lora={"r": 2, "base": "nf4"}, quantize_overrides=overrides, lr=0.01),
    )
    assert done.code == 0, done.err
    for line in (
        "1 x layers.attn.qkv 32 -> 64 (0): left, --quantize_overrides leaves it",
        "1 x layers.attn.qkv 32 -> 64 (1): quantized, frozen nf4",
        "2 x layers.attn.o_proj 32 -> 32: quantized, int8_weight",
        "1 x layers.mlp.down_proj 64 -> 32 (1): quantized, int8",
    ):
        assert line in done.out
    run = only_run(Path("runs"), "llm_finetune")
    assert (run / "hf/model.safetensors").exists() and json.loads((run / "config.json").read_text())["lora"]["r"] == 2


def test_a_vision_model():
    timm = pytest.importorskip("timm")
    from tests.data.images.pictures import write_folder

    write_folder(Path("images"))
    shape = {"img_size": 8, "patch_size": 4, "embed_dim": 16, "depth": 3, "num_heads": 2}
    chosen = {
        "model": "vit_tiny_patch16_224",
        "model_kwargs": shape,
        "pretrained": False,
        "n_steps": 2,
        "batch_size": 4,
    }
    images = {"type": "image_folder", "path": "images"}
    overrides = {"blocks.1.*": "bf16", "*.fc2": "fp8_rowwise", "head": "int8_blockwise"}
    options = {"train_ds": images, "device": "cpu", "quantize": "int8", "quantize_overrides": overrides}
    done = call(timm_finetune.main, flags(**chosen, **options))
    assert done.code == 0, done.err
    assert "1 x blocks.attn.qkv 16 -> 48 (1): left, --quantize_overrides leaves it" in done.out
    assert "3 x blocks.mlp.fc2 64 -> 16: quantized, fp8_rowwise" in done.out
    assert "1 x head 16 -> 3: quantized, int8_blockwise" in done.out
    folder = only_run(Path("runs"), "timm_finetune") / "timm"
    assert timm.create_model(f"local-dir:{folder}", pretrained=True).num_classes == 3


MISTAKES = [
    ({"layers.9.*": "bf16"}, "unknown linear 'layers.9.*'. Did you mean 'layers.1.attn.qkv'?"),
    ({"*.q_proj": "bf16"}, "q, k and v are one linear here, qkv"),
    ({"*.dwon_proj": "int8"}, "Did you mean '*.down_proj'?"),
    ({"lm_head": "int8_weight"}, "int8_weight quantizes none of the 1 linears that it decides on: 1 x another module"),
    ({"*": "bf16"}, "--quantize: 'int8' quantizes none of the model's 9 linears: 9 x --quantize_overrides leaves it"),
    ({"*.qkv": "fp9"}, "(*.qkv): unknown scheme 'fp9'"),
    ({"": "bf16"}, "unknown linear ''"),
]


@pytest.mark.parametrize(("overrides", "says"), MISTAKES)
def test_a_mistake_is_one_message(overrides, says):
    done = call(llm_pretrain.main, pretrain(quantize_overrides=overrides))
    assert done.code == 2 and done.err.count("\n") == 1 and says in done.err, done.err
    assert done.err.startswith("error: --quantize") and not Path("runs").exists()


@pytest.mark.parametrize(
    ("word", "settings", "says"),
    [
        ('{"*.qkv":"bf16","*.qkv":"int8"}', {}, "the key '*.qkv' is given twice"),
        ("[]", {}, "'[]' is not a JSON object"),
        ('{"*":"int8_weight"}', {"optim": "torch.AdamW"}, "cannot update weights that --quantize stores in low bits"),
    ],
)
def test_a_mistake_of_the_command_line_is_one_message(word, settings, says):
    done = call(llm_pretrain.main, [*pretrain(**settings), f"--quantize_overrides={word}"])
    assert done.code == 2 and done.err.count("\n") == 1 and says in done.err, done.err
    assert not Path("runs").exists()


def test_names_are_those_of_the_planned_model():
    """A wrong name is refused where no file is written, before the model has memory."""
    model = empty_model(ModelSource("tiny", json.loads(Path("tiny.json").read_text()), "--model"))
    assert all(p.is_meta for p in model.parameters())
    assert {choice.name for choice in prepared().linears} < {name for name, _ in model.named_modules()}
