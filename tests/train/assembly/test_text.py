"""The training data is opened once; its first sample is read to refuse early, and training still starts with it."""

from pathlib import Path

import pytest

import llm_finetune
import llm_pretrain
from qtrain.data.examples.examples import ExampleDataset
from qtrain.data.stream import open_stream
from qtrain.data.text.text_datasets import TextDataset
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.text import open_text
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.settings import LanguageSettings
from tests.data.corpora import write_jsonl, write_questions
from tests.system import call, flags, write_model

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
INSTRUCT = {"type": "instruct", "dataset": "questions.jsonl", "template": "gsm8k", "tokenizer": "byte"}


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    write_questions(Path("questions.jsonl"))


@pytest.mark.parametrize(
    ("script", "dataset", "train_ds"), [(llm_pretrain, TextDataset, TEXT), (llm_finetune, ExampleDataset, INSTRUCT)]
)
def test_a_run_opens_its_training_data_once(script, dataset, train_ds, monkeypatch):
    opened, original = [], dataset.open

    def counted(self, ctx, flag):
        opened.append(flag)
        return original(self, ctx, flag)

    monkeypatch.setattr(dataset, "open", counted)
    settings = {"model": "tiny.json", "pretrained": False, "train_ds": train_ds, "seq_len": 64, "n_steps": 2}
    assert call(script.main, flags(**settings, device="cpu", keep_ckpts=0, export=False)).code == 0
    assert opened == ["--train_ds"]


@pytest.mark.parametrize("train_ds", [TEXT, INSTRUCT])
def test_the_sample_that_is_read_to_refuse_early_is_not_lost(train_ds):
    settings = LanguageSettings(model="tiny.json", train_ds=train_ds, seq_len=64, batch_size=2, device="cpu")
    checked = check_settings(settings, "script")
    text = open_text(checked, LanguageArchitecture.of(settings, checked.mesh))
    fresh = open_stream(train_ds, text.context, "--train_ds")
    first = [fresh.next_sample() for _ in range(2)]
    with text.loader(None) as loader:
        batch, position = next(loader)
    assert position == fresh.position()
    assert batch.input_ids.tolist() == [sample.tokens[:-1].tolist() for sample in first]
