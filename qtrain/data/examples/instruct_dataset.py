"""Dataset type `instruct`: a template turns the columns of a row into a prompt and its answer."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtrain.data.examples.examples import ExampleDataset, Renderer, Segment
from qtrain.data.examples.templates import Template, make_template
from qtrain.data.stream import DATASETS
from qtrain.data.tokenizers.tokenizer import Tokenizer


@DATASETS.register("instruct")
@dataclass(frozen=True)
class InstructDataset(ExampleDataset):
    """Prompts and answers that a template makes from columns; only answers are trained on"""

    dataset: str = "meta-math/MetaMathQA"
    template: str | dict[str, Any] = "metamathqa"
    """alpaca, gsm8k, metamathqa, or {"prompt": "... {column} ...", "answer": "{column}"}"""

    def chat_template(self, tokenizer: Tokenizer, flag: str) -> str | None:
        if tokenizer.chat_template is not None:  # of a model that chats; the template names no role
            return None
        return make_template(self.template, f"{flag}.template").chat_template()

    def renderer(self, tokenizer: Tokenizer, flag: str) -> Renderer:
        return InstructRenderer(make_template(self.template, f"{flag}.template"), flag)


class InstructRenderer(Renderer):
    """A prompt and an answer, then the end token."""

    def __init__(self, template: Template, flag: str):
        self._template, self._flag, self.columns = template, flag, template.columns

    def segments(self, row: Mapping[str, Any]) -> list[Segment]:
        prompt, answer = self._template.fill(row, self._flag)
        return [Segment(prompt, False), Segment(answer, True)]
