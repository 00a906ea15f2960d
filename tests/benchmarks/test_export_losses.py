"""Losses before and after exports: the table has a row for each format, and a reason where a reader is missing."""

import json
from pathlib import Path
from subprocess import CompletedProcess

import pytest

import llm_pretrain
from benchmarks import export_losses
from qtrain.core.errors import UserError
from qtrain.quant import SCHEMES
from tests.data.corpora import write_jsonl
from tests.system import call, flags, write_model

DATA = {"type": "text", "paths": "jsonl/0.jsonl", "tokenizer": "byte"}
SWEEP = pytest.mark.sweep
TINY = {"model": "tiny.json", "train_ds": DATA, "eval_ds": DATA, "n_steps": 2, "batch_size": 2, "seq_len": 32}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    """Trainings run in this process: a start of Python and torch takes seconds."""

    def pretrain(argv: list[str], **_) -> CompletedProcess:
        done = call(llm_pretrain.main, argv)
        return CompletedProcess(argv, done.code, done.out, done.err)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(export_losses, "pretrain", pretrain)
    write_model(Path("tiny.json"), hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    write_jsonl(Path("jsonl"))


def rows(**settings) -> dict[str, dict]:
    """Name of each row -> its cells."""
    export_losses.main(flags(**TINY, sequences=4, device="cpu", json="a.json", **settings))
    (table,) = json.loads(Path("a.json").read_text())["tables"]
    return {row["name"]: row["cells"] for row in table["rows"]}


@pytest.mark.parametrize(("scheme", "fmt"), [("int8", "ct_int8"), pytest.param("nvfp4", "ct_nvfp4", marks=SWEEP)])
def test_losses_of_exports_are_those_of_the_run(scheme, fmt):
    pytest.importorskip("gguf")
    pytest.importorskip("compressed_tensors")
    found = rows(schemes=scheme)
    dense, held, gguf = (found[f"{scheme}, {name}"] for name in ("hf", fmt, "gguf_q8_0"))
    for cells in (dense, held, gguf):
        losses = [cells[column]["value"] for column in export_losses.COLUMNS[1:4]]
        assert max(losses) - min(losses) < 0.02
    assert (dense["codes"]["text"], held["codes"]["text"][:5]) == ("dense", "equal")
    assert held["qtrain"]["value"] == pytest.approx(held["dequantized"]["value"], abs=1e-4)
    assert 0.3 < held["of bf16"]["value"] < 1 and dense["of bf16"]["value"] == 1
    assert gguf["qtrain"]["reason"] == "qtrain reads no GGUF"
    if scheme == "int8":
        assert found["int8, torchao_int8"]["qtrain"]["reason"] == "qtrain reads no torchao"


@SWEEP
def test_what_cannot_be_written_or_read_is_a_reason(monkeypatch):
    def missing(folder, device):
        raise ImportError("pip install it")

    monkeypatch.setattr(export_losses, "by_transformers", missing)
    write_model(Path("tiny.json"), hidden_size=128, intermediate_size=128, num_hidden_layers=1, model_type="gemma2")
    with pytest.raises(UserError, match="model_type"):
        rows()
    write_model(Path("tiny.json"), hidden_size=32, intermediate_size=160, num_hidden_layers=1)
    found = rows(schemes='bitnet:{"sub_norm":false}')
    name = 'bitnet:{"sub_norm":false}, '
    assert found[f"{name}hf"]["transformers"]["reason"] == "ImportError: pip install it"
    assert "in-features in multiples of 256" in found[f"{name}gguf_tq1_0"]["MB"]["reason"]
    assert found[f"{name}ct_int8"]["qtrain"]["value"] > 0


def test_the_declarations_name_the_formats():
    of = {name: export_losses.formats_of(SCHEMES.make(name, {}, "")) for name in ("nvfp4", "fp8_blockwise", "bf16")}
    assert of["nvfp4"] == ["hf", "ct_nvfp4", "gguf_q8_0"]
    assert set(of["fp8_blockwise"]) == {"hf", "fp8_block", "ct_fp8_block", "gguf_q8_0"}
    assert of["bf16"] == ["hf", "gguf_q8_0"]


@pytest.mark.parametrize(
    ("settings", "says"), [({"schemes": "int9"}, "int9"), ({"eval_ds": {"type": "token", "dataset_dir": "no"}}, "no")]
)
def test_a_mistake_is_refused_before_training(settings, says):
    with pytest.raises(UserError, match=says):
        export_losses.main(flags(**{**TINY, **settings}))
