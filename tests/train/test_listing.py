"""`--list` shows every entry of every registry with its line and its options."""

import dataclasses

import pytest

from qtrain.data import DATASETS, TOKENIZERS
from qtrain.models import list_models
from qtrain.optim import OPTIMIZERS
from qtrain.quant import SCHEMES
from qtrain.registry import Registry
from qtrain.train.listing import listing


def block(title: str) -> list[str]:
    """The lines of the listing under a title."""
    (found,) = [part for part in listing().split("\n\n") if part.startswith(title)]
    return found.splitlines()[1:]


@pytest.mark.parametrize(
    ("title", "registry"), [("schemes", SCHEMES), ("optimizers", OPTIMIZERS), ("dataset types", DATASETS)]
)
def test_entries_are_listed_with_their_options(title: str, registry: Registry):
    lines = block(title)
    for name, description in registry.describe():
        start = next(i for i, line in enumerate(lines) if line.split() == [name, *description.split()])
        options = [field.name for field in dataclasses.fields(registry.get(name, ""))]
        assert [line.split()[0] for line in lines[start + 1 : start + 1 + len(options)]] == [f"{o}:" for o in options]


@pytest.mark.parametrize(("title", "entries"), [("tokenizers", sorted(TOKENIZERS.items())), ("models", list_models())])
def test_names_are_listed_with_their_lines(title, entries):
    assert [line.split() for line in block(title)] == [[name, *line.split()] for name, line in entries]


def test_lines_fit_a_wide_terminal():
    assert all(len(line) <= 160 for line in listing().splitlines())
