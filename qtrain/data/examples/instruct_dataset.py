"""Dataset type `instruct`: rows whose columns a template makes into a prompt and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtrain.data.examples.examples import ExampleDataset, Part, Renderer
from qtrain.data.examples.templates import Template, make_template
from qtrain.data.stream import DATASETS
from qtrain.data.tokenizers.tokenizer import Tokenizer


@DATASETS.register("instruct")
@dataclass(frozen=True)
class InstructDataset(ExampleDataset):
    """Prompts and answers made from columns by a template; only answers are learned

    `dataset` is a hub id, a local .jsonl, .json, .csv or .parquet file or glob, or a format with `data_files`."""

    dataset: str = "meta-math/MetaMathQA"
    template: str | dict[str, Any] = "metamathqa"

    def renderer(self, tokenizer: Tokenizer, flag: str) -> Renderer:
        return InstructRenderer(make_template(self.template, f"{flag}.template"), flag)


class InstructRenderer(Renderer):
    """A prompt and an answer; the end token follows."""

    def __init__(self, template: Template, flag: str):
        self._template, self._flag, self.columns = template, flag, template.columns

    def parts(self, row: Mapping[str, Any]) -> list[Part]:
        prompt, answer = self._template.fill(row, self._flag)
        return [Part(prompt, False), Part(answer, True)]
