"""What the tests of the documentation share: its pages, the commands on them, and the parsers that will read these."""

import argparse
import importlib
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from qtrain.core import config
from qtrain.data.images.images import IMAGE_SETS
from qtrain.data.stream import DATASETS
from qtrain.optim import OPTIMIZERS, make_schedule
from qtrain.quant import SCHEMES
from qtrain.quant.scheme_map import with_overrides
from tests.system import ROOT

FILES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")]
PAGES = [*FILES, *sorted(path for path in (ROOT / "docs").rglob("*.md") if "results" not in path.parts)]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MEASURED = re.compile(r"<!-- results: .*?<!-- end -->", re.DOTALL)
"""Records of what was run, which need not be what is run today."""
SCRIPTS = ("llm_pretrain", "llm_finetune", "timm_finetune", "tokenize_data", "benchmark_mm")
ELSEWHERE = {"vllm", "llama-server", "hf", "ssh", "source", "pre-commit", "echo"}
"""Programs of other projects, and of the shell."""


def load_reference() -> Any:
    """docs/reference.py as a module."""
    spec = importlib.util.spec_from_file_location("reference_pages", ROOT / "docs/reference.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of every fenced block."""
    return BLOCK.findall(page.read_text())


def prose(page: Path) -> str:
    """A page without its blocks and measured tables."""
    return BLOCK.sub("", MEASURED.sub("", page.read_text()))


def lines_of(block: str) -> Iterator[str]:
    """Commands of a block of shell: continued lines as one, without comments."""
    for line in block.replace("\\\n", " ").splitlines():
        if line.strip() and not line.startswith("#") and not re.match(r"\w+=", line):
            yield line


@dataclass(frozen=True)
class Command:
    """A command on a page."""

    page: str
    line: str

    @property
    def words(self) -> list[str]:
        words = shlex.split(self.line, comments=True)
        words = words[: words.index(">")] if ">" in words else words
        return words[1:] if words[0] == "srun" else words

    @property
    def label(self) -> str:
        return f"{Path(self.page).stem}: {' '.join(self.line.split())[:90]}"

    def module(self) -> tuple[str, list[str]] | None:
        """The module of this repository that it starts, such as llm_pretrain, and its arguments."""
        words = self.words
        installed = words[0].removeprefix("qtrain-").replace("-", "_")
        if "--completion" in words:  # prints and exits
            return None
        if installed in SCRIPTS:
            return installed, words[1:]
        if words[0] == "torchrun" or words[1:3] == ["-m", "torch.distributed.run"]:
            words = ["python", *launched(words)[1]]
        if Path(words[0]).name != "python":
            return None
        if words[1] == "-m":
            if words[2] == "qtrain":
                return f"qtrain.commands.{words[3]}", words[4:]
            return (words[2], words[3:]) if words[2].startswith(("qtrain.", "benchmarks.")) else None
        name = words[1].removesuffix(".py")
        return (name, words[2:]) if name in SCRIPTS else None


def launched(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """torchrun's own arguments, and the words from the script on."""
    given = get_args_parser().parse_args(words[1 if words[0] == "torchrun" else 3 :])
    script = ["-m", given.training_script] if given.module else [given.training_script]
    return given, [*script, *given.training_script_args]


def commands(page: Path) -> list[Command]:
    """Every command of a page: lines of its blocks of shell, and code within text that begins as one does."""
    found = [line for language, block in blocks(page) if language == "bash" for line in lines_of(block)]
    spans = re.findall(r"`([^`]+)`", prose(page))
    within = [
        " ".join(span.split()) for span in spans if re.match(r"(python|make|pip|torchrun|\.venv/bin/python) ", span)
    ]
    return [Command(name_of(page), line) for line in dict.fromkeys([*found, *within])]


class Parsed(Exception):
    """Carries what a command's parser made of it."""


def parse_command(module: str, argv: list[str], monkeypatch: pytest.MonkeyPatch) -> Any:
    """The settings that a command's own parser makes of its arguments. UserError or SystemExit: it refuses them."""

    def parse(*arguments: Any) -> Any:
        raise Parsed(config.parse(*arguments))

    def parse_args(self: argparse.ArgumentParser, given: list[str] | None = None) -> Any:
        raise Parsed(self.parse_known_args(given) if not argv else parsed_args(self, given))

    parsed_args = argparse.ArgumentParser.parse_args
    loaded = importlib.import_module(module)
    for at in [at for at, word in enumerate(argv) if word == "--config" and argv[at + 1].startswith("runs/")]:
        argv = [*argv[:at], *argv[at + 2 :]]  # of a run of the reader's
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", [module, *argv])
    if hasattr(loaded, "parse"):
        monkeypatch.setattr(loaded, "parse", parse)
    else:
        monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_args)
    with pytest.raises(Parsed) as parsed:
        loaded.main(argv) if loaded.main.__code__.co_argcount else loaded.main()
    return parsed.value.args[0]


def check_objects(settings: Any) -> None:
    """JSON objects, which the parser does not look into. UserError for a key or a value that is none."""
    if hasattr(settings, "quantize_overrides") and settings.quantize is not None:
        scheme = SCHEMES.make(settings.quantize, settings.quantize_kwargs or {}, "--quantize")
        with_overrides(settings.quantize_overrides, scheme)
    if hasattr(settings, "lr_schedule_kwargs"):
        OPTIMIZERS.make(settings.optim, settings.optim_kwargs or {}, "--optim")
        make_schedule(settings.lr_schedule_kwargs)
    kinds = IMAGE_SETS if hasattr(settings, "augment") else DATASETS
    for flag in ("train_ds", "eval_ds", "data"):
        given = getattr(settings, flag, None) or {}
        for spec in [given] if "type" in given else given.values():
            if "..." not in spec:
                kinds.make_typed(spec, f"--{flag}")
