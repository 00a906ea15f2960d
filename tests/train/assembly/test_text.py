"""The training data is opened once; its first sample is read to refuse early, and training still starts with it."""

import contextlib
import dataclasses
from pathlib import Path

import pytest

import llm_finetune
import llm_pretrain
from qtrain.core.errors import UserError
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
MIX = {"type": "mix", "datasets": [{**TEXT, "weight": 1}]}


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


EPOCHS = {"model": "tiny.json", "seq_len": 64, "batch_size": 2, "device": "cpu", "n_epochs": 3}


@pytest.mark.parametrize("train_ds", [TEXT, INSTRUCT])
def test_epochs_become_steps(train_ds):
    """As many as the samples of the epochs fill, counted by reading one; a run's config.json has both, which agree."""
    settings = LanguageSettings(**EPOCHS, train_ds=train_ds)
    checked = check_settings(settings, "script")
    architecture = LanguageArchitecture.of(settings, checked.mesh)
    text = open_text(checked, architecture)
    epoch, count = open_stream(train_ds, dataclasses.replace(text.context, epochs=1), "--train_ds"), 0
    with contextlib.suppress(StopIteration):
        while True:
            epoch.next_sample()
            count += 1
    assert text.settings.n_steps == 3 * count // 2 > 3
    again = open_text(dataclasses.replace(checked, settings=text.settings), architecture)
    assert again.settings == text.settings
    # The loader stands at the first sample still.
    assert text.stream.position() == open_stream(train_ds, text.context, "--train_ds").position()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_steps": 5}, r"3 epochs are [\d,]+ steps, not 5; give one of them; --n_epochs 0 and --n_steps None leave"),
        ({"train_ds": MIX}, "--n_epochs: the size of data of type 'mix' is not known before all are read; give --n_st"),
        ({"batch_size": 10**6}, r"--n_epochs: 3 epochs of \d+ sequences are less than one batch of 1,000,000"),
        ({"lr_schedule_kwargs": {"warmup": 10**6}}, r"--lr_schedule_kwargs: warmup and decay are 1,000,000 \+"),
    ],
)
def test_epochs_that_are_no_steps_are_refused(changes, message):
    settings = LanguageSettings(**{**EPOCHS, "train_ds": TEXT, **changes})
    checked = check_settings(settings, "script")
    with pytest.raises(UserError, match=message):
        open_text(checked, LanguageArchitecture.of(settings, checked.mesh))


def test_without_either_a_thousand_steps():
    settings = LanguageSettings(**{**EPOCHS, "n_epochs": 0}, train_ds=TEXT)
    checked = check_settings(settings, "script")
    assert open_text(checked, LanguageArchitecture.of(settings, checked.mesh)).settings.n_steps == 1000


def test_what_would_take_long_to_count_is_not_counted(monkeypatch):
    monkeypatch.setattr("qtrain.data.stream.COUNTED_TOKENS", 100)
    settings = LanguageSettings(**EPOCHS, train_ds=TEXT)
    checked = check_settings(settings, "script")
    with pytest.raises(UserError, match=r"--n_epochs: some .* sequences .* or tokenize them first with tokenize_data"):
        open_text(checked, LanguageArchitecture.of(settings, checked.mesh))
