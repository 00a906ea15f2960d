"""`--export_format` and `python -m qtrain export`: a run's end, its checkpoint and its export write equal bytes."""

import json
import re
from pathlib import Path
from typing import ClassVar

import huggingface_hub
import pytest
from huggingface_hub import RepoUrl

import llm_finetune
import llm_pretrain
from qtrain.__main__ import main
from qtrain.core import hub
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_jsonl
from tests.models.hf.codes_reader import load_tensors
from tests.system import call, flags, only_run, write_model

WIDE = {"hidden_size": 128, "intermediate_size": 256, "num_key_value_heads": 2}
TRAIN = {"type": "text", "paths": "jsonl/0.jsonl", "tokenizer": "byte"}
TINY = {"model": "tiny.json", "pretrained": False, "seq_len": 48, "batch_size": 2, "n_steps": 2, "device": "cpu"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"), **WIDE)
    write_jsonl(Path("jsonl"))


def trained(script=llm_pretrain, **settings) -> tuple[Path, str]:
    """The run folder, and what was printed."""
    done = call(script.main, flags(**{**TINY, "train_ds": TRAIN, **settings}))
    assert done.code == 0, done.err
    return only_run(Path("runs"), script.__name__), done.out + done.err


def exported(*words: str, **settings) -> str:
    done = call(main, ["export", *words, *flags(device="cpu", **settings)])
    assert done.code == 0, done.err
    return done.out


def same(a: Path, b: Path) -> bool:
    """Whether two exports have the same files; only a run's own card knows its hardware."""
    names = sorted(path.name for path in a.iterdir())
    assert names == sorted(path.name for path in b.iterdir()) and "README.md" in names
    names.remove("README.md")
    return all((a / name).read_bytes() == (b / name).read_bytes() for name in names)


@pytest.mark.parametrize(
    ("settings", "fmt"),
    [
        ({"quantize": "int8", "dtype": "bf16"}, "ct_int8"),
        ({"quantize": "int8", "quantize_kwargs": {"stochastic_rounding": True}}, "ct_int8"),
        ({"quantize": "fp8_blockwise", "optim": "adamw_schedule_free"}, "fp8_block"),
        ({"quantize": "int4_weight"}, "ct_int4_g128"),
    ],
)
def test_a_run_and_its_checkpoint_export_the_same_codes(settings, fmt):
    run, log = trained(export_format=["hf", fmt], **settings)
    assert re.search(rf"codes +{fmt}: all 14 matrices hold the codes that training multiplied with", log)
    assert {path.name for path in run.iterdir()} >= {"hf", fmt}
    out = exported(str(run), format=[fmt], output="again")
    assert f"codes       {fmt}: all 14 matrices hold the codes" in out and "of step 2, " in out
    assert same(run / fmt, Path("again") / fmt)
    averaged = "adamw_schedule_free" in settings.values()
    assert ("averaged weights" in log) is ("averaged weights" in out) is averaged


def test_a_low_bit_run_names_the_format_that_keeps_its_codes():
    run, log = trained(quantize="int8")
    command = re.search(r"codes +the dense export has none; .*: python -m qtrain export (\S+) --format (\S+)", log)
    assert command and command[2] == "ct_int8" and not (run / "ct_int8").exists()
    exported(command[1], format=[command[2]])
    assert load_tensors(run / "ct_int8")["model.layers.0.mlp.up_proj.weight"].element_size() == 1


def test_a_run_whose_codes_no_format_keeps_names_none():
    assert "codes " not in trained()[1]


def test_nor_does_one_whose_sizes_do_not_fit():
    write_model(Path("tiny.json"), hidden_size=64)
    assert "codes " not in trained(quantize="fp8_blockwise")[1]


def test_nor_does_one_with_adapters():
    assert "codes " not in trained(llm_finetune, lora={"r": 2, "base": "int8"})[1]


def test_formats_alone_and_recipes():
    run, _ = trained(quantize="int8", export_format=["ct_int8"])
    assert (run / "ct_int8").is_dir() and not (run / "hf").exists()
    assert json.loads((run / "config.json").read_text())["export_format"] == ["ct_int8"]
    done = call(llm_pretrain.main, ["--config", str(run / "config.json"), "--dry_run"])
    assert done.code == 0, done.err


def test_an_exported_folder_gets_the_formats_own_codes():
    run, _ = trained()
    out = exported(str(run / "hf"), format=["ct_fp8_row", "mxfp8"])
    assert "0 of 14 matrices hold the codes that training multiplied with; new: 14 x trained in high precision" in out
    assert (run / "ct_fp8_row" / "tokenizer.json").is_file() and (run / "mxfp8" / "config.json").is_file()
    (run / "hf").rename("moved")
    exported("moved", format=["ct_int8"])
    assert (Path("moved-ct_int8") / "model.safetensors").is_file()


def test_adapters_are_merged_and_the_log_says_so():
    write_model(Path("tiny.json"), **WIDE)
    settings = {"lora": {"r": 2, "base": "int8"}, "lr": 0.01, "pretrained": False}
    run, log = trained(llm_finetune, export_format=["ct_int8"], **settings)
    assert "codes       are of weights with the adapters added" in log
    assert "0 of 14 matrices hold the codes that training multiplied with" in log
    out = exported(str(run), format=["ct_int8"], output="again")
    assert "adapters added" in out and same(run / "ct_int8", Path("again/ct_int8"))


def test_help_and_list_name_the_formats():
    assert "--export_format" in call(llm_pretrain.main, ["--help"]).out
    listing = call(main, ["export", "--list"]).out
    assert "ct_nvfp4" in listing and "fp8_block" in listing
    assert "export" in call(main, []).out


class Hub:
    """What the hub's library would be asked."""

    asked: ClassVar[list] = []

    def create_repo(self, repo_id: str, **options):
        self.asked.append(("create", repo_id, options))
        return RepoUrl(f"https://huggingface.co/{repo_id}")

    def upload_folder(self, *, repo_id: str, folder_path: Path, commit_message: str):
        self.asked.append(("upload", repo_id, sorted(path.name for path in folder_path.iterdir())))


@pytest.fixture
def hub_of_the_test(monkeypatch) -> list:
    monkeypatch.setattr(huggingface_hub, "HfApi", Hub)
    monkeypatch.setattr(huggingface_hub, "get_token", lambda: "token")
    monkeypatch.setattr(hub, "hub_reachable", lambda: True)
    monkeypatch.setattr(Hub, "asked", [])
    return Hub.asked


def test_exports_are_uploaded_with_their_cards(hub_of_the_test):
    run, log = trained(quantize="int8", export_format=["hf", "ct_int8"], push_to_hub="me/model", eval_ds=TRAIN)
    assert [what[:2] for what in hub_of_the_test] == [
        ("create", "me/model-hf"),
        ("upload", "me/model-hf"),
        ("create", "me/model-ct_int8"),
        ("upload", "me/model-ct_int8"),
    ]
    assert hub_of_the_test[0][2] == {"private": True, "exist_ok": True}
    assert {"README.md", "config.json", "generation_config.json", "tokenizer.json"} <= set(hub_of_the_test[3][2])
    assert "uploaded    https://huggingface.co/me/model-ct_int8" in log
    card = (run / "ct_int8/README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformers\n") and "all 14 matrices hold the codes" in card
    last = [r for r in read_metrics(run / "metrics.jsonl") if "eval_loss" in r][-1]
    assert f"| validation loss | {last['eval_loss']:.4f} (step 2) |" in card and '| quantize | "int8" |' in card
    assert '"quant_method": "compressed-tensors"' in card and "vllm serve" in card and "1 x CPU" in card
    assert str(Path.cwd()) not in card and "jsonl/0.jsonl" not in card  # paths stay private
    dense = (run / "hf/README.md").read_text()
    assert "quantization_config" not in dense and "from_pretrained" in dense
    assert "README.md" not in json.loads((run / "hf/checksums.json").read_text())["files"]
    del hub_of_the_test[:]
    out = exported(str(run), format=["mxfp8"], push_to_hub="me/other", output="out")
    assert [what[1] for what in hub_of_the_test] == ["me/other", "me/other"] and "uploaded" in out


def test_a_failed_upload_says_where_the_export_is(hub_of_the_test, monkeypatch):
    def broken(self, **_):
        raise ConnectionError("the line is dead")

    monkeypatch.setattr(Hub, "upload_folder", broken)
    done = call(llm_pretrain.main, flags(**TINY, train_ds=TRAIN, push_to_hub="me/model"))
    assert done.code == 1 and "hf could not be uploaded to me/model: the line is dead" in done.err
    assert "hf upload me/model" in done.err
    assert (only_run(Path("runs"), "llm_pretrain") / "hf/config.json").is_file()
