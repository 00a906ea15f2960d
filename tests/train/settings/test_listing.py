"""`--list` shows every entry of every registry with its line and its options."""

import dataclasses
import sys
import types

import pytest
import torch

from qtrain.core.registry import Registry, field_docs
from qtrain.data.images.images import IMAGE_SETS
from qtrain.data.stream import DATASETS
from qtrain.data.tokenizers.tokenizer import TOKENIZERS
from qtrain.models import list_models
from qtrain.optim import OPTIMIZERS
from qtrain.quant import SCHEMES
from qtrain.train.settings.listing import listing


def block(title: str) -> list[str]:
    """The lines of the listing under a title."""
    (found,) = [part for part in listing().split("\n\n") if part.startswith(title)]
    return found.splitlines()[1:]


@pytest.mark.parametrize(
    ("title", "registry"), [("schemes", SCHEMES), ("optimizers (--optim)", OPTIMIZERS), ("dataset types", DATASETS)]
)
def test_entries_are_listed_with_their_options(title: str, registry: Registry):
    lines = block(title)
    for name, description in registry.describe():
        start = next(i for i, line in enumerate(lines) if line.split() == [name, *description.split()])
        indent = len(lines[start]) - len(lines[start].lstrip()) + max(len(n) for n, _ in registry.describe()) + 4
        found = []
        for line in lines[start + 1 :]:
            if line[:indent].strip():
                break  # the next entry
            found += [line.split()[0]] if line[indent] != " " else []  # deeper lines continue the one above
        assert found == [f"{field.name}:" for field in dataclasses.fields(registry.get(name, ""))]


def test_options_say_what_they_are():
    """Every option of every optimizer and dataset has a docstring, which the listing shows."""
    text = " ".join(listing().split())
    for registry in (OPTIMIZERS, DATASETS, IMAGE_SETS):
        for name in registry.names():
            docs, cls = field_docs(registry.get(name, "")), registry.get(name, "")
            assert all(f"{field.name}: {docs[field.name]}; " in text for field in dataclasses.fields(cls)), name


def test_other_libraries_are_listed(monkeypatch):
    """By the names of their classes where they are installed, else by how to install them."""
    for module in ("bitsandbytes", "bitsandbytes.optim"):
        monkeypatch.setitem(sys.modules, module, None)
    installed = types.ModuleType("torchao.optim")
    installed.AdamW8bit = type("AdamW8bit", (torch.optim.Optimizer,), {})
    monkeypatch.setitem(sys.modules, "torchao", types.ModuleType("torchao"))
    monkeypatch.setitem(sys.modules, "torchao.optim", installed)
    lines = {line.split()[0]: line for line in block("optimizers of other libraries") if line.split()[0].endswith(".*")}
    assert lines.keys() == {"torch.*", "bnb.*", "torchao.*"}
    assert all(name in lines["torch.*"] for name in ("AdamW", "NAdam", "SGD")) and "LBFGS" not in lines["torch.*"]
    assert "bnb.AdamW8bit" in lines["bnb.*"] and "pip install bitsandbytes" in lines["bnb.*"]
    assert "AdamW8bit" in lines["torchao.*"] and "pip install" not in lines["torchao.*"]


@pytest.mark.parametrize(("title", "entries"), [("tokenizers", sorted(TOKENIZERS.items())), ("models", list_models())])
def test_names_are_listed_with_their_lines(title, entries):
    assert [line.split() for line in block(title)] == [[name, *line.split()] for name, line in entries]


def test_the_vision_script_lists_vision_models():
    timm = pytest.importorskip("timm")
    shown = set(listing(vision=True).split())
    assert set(timm.list_models()) <= shown and "llama2-470m" not in shown


def test_lines_fit_a_wide_terminal():
    assert all(len(line) <= 160 for line in (listing() + listing(vision=True)).splitlines())
