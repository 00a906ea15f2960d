"""Templates that turn the columns of a row into a prompt and an answer: text with column names in braces.

A template is parsed once. Braces contain the name of a column and nothing else, no attributes, indices or formats, so a
template cannot do more than insert text.
"""

import json
import string
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from qtrain.core.checks import json_type
from qtrain.core.errors import UserError, unknown_name
from qtrain.data.examples.examples import ExampleDataset, Renderer, Segment
from qtrain.data.stream import DATASETS
from qtrain.data.tokenizers.tokenizer import Tokenizer

_ALPACA = (
    "Below is an instruction that describes a task{}. Write a response that appropriately completes the request.\n\n"
)

PRESETS: dict[str, dict[str, Any]] = {
    "alpaca": {
        "prompt": _ALPACA.format(", paired with an input that provides further context")
        + "### Instruction:\n{instruction}\n\n### Input:\n{input}\n\n### Response:\n",
        "answer": "{output}",
        "prompt_without": {"input": _ALPACA.format("") + "### Instruction:\n{instruction}\n\n### Response:\n"},
    },
    "gsm8k": {"prompt": "Question: {question}\nAnswer: ", "answer": "{answer}"},
    "metamathqa": {
        "prompt": _ALPACA.format("") + "### Instruction:\n{query}\n\n### Response:\n",
        "answer": "{response}",
    },
}
"""Named templates. `prompt_without`: column -> the prompt of rows in which that column is empty."""


class Text:
    """A parsed template: literal text and columns, alternating."""

    def __init__(self, template: Any, where: str):
        if not isinstance(template, str):
            raise UserError(f"{where}: {template!r} is not allowed; it must be text with {{column}} names in it.")
        self._fields: list[tuple[str, str | None]] = []
        try:
            for literal, name, spec, conversion in string.Formatter().parse(template):
                # A format or an attribute would let a template do more than insert text.
                if name is not None and (spec or conversion or not name or set(name) & set(".[]{}")):
                    raise ValueError(f"braces may contain only the name of a column, not {name!r}")
                self._fields.append((literal, name))
        except ValueError as error:
            raise UserError(
                f"{where}: the template is broken: {error}. A brace itself is written {{{{ or }}}}."
            ) from None

    @property
    def columns(self) -> list[str]:
        return [name for _, name in self._fields if name is not None]

    def fill(self, row: Mapping[str, Any], where: str) -> str:
        """The text for a row; null columns are empty. UserError for a column that does not hold text."""
        return "".join(literal + (_text(row, name, where) if name else "") for literal, name in self._fields)

    def jinja(self, expression: str) -> str:
        """The same text as a Jinja template, with a Jinja expression in place of each column."""
        parts = []
        for literal, name in self._fields:
            # A JSON string is a Jinja string: the literal text needs no other escape.
            parts += [json.dumps(literal, ensure_ascii=False), *([expression] if name else [])]
        return "".join(f"{{{{ {part} }}}}" for part in parts)


@dataclass(frozen=True)
class Template:
    """The prompt and the answer."""

    prompt: Text
    answer: Text
    prompt_without: Mapping[str, Text] = field(default_factory=dict)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that are read, each once."""
        texts = [self.prompt, self.answer, *self.prompt_without.values()]
        return tuple(dict.fromkeys(name for text in texts for name in text.columns))

    def fill(self, row: Mapping[str, Any], where: str) -> tuple[str, str]:
        """(prompt, answer) of a row."""
        # The first column that is empty decides: Alpaca's prompt without an input.
        without = next((text for name, text in self.prompt_without.items() if not row[name]), self.prompt)
        return without.fill(row, where), self.answer.fill(row, where)

    def chat_template(self) -> str | None:
        """A Jinja template that renders a user's message as the prompt and an assistant's as the answer; None where
        a prompt takes more columns than one: messages have none."""
        # A message is one text: only a prompt of one column can be rendered from it.
        prompts = [text for text in (self.prompt, *self.prompt_without.values()) if len(text.columns) == 1]
        if not prompts or len(self.answer.columns) != 1:
            return None
        user, assistant = prompts[0].jinja("message['content']"), self.answer.jinja("message['content']")
        refused = "{{ raise_exception('this model was trained on questions and answers, without ' ~ message['role']) }}"
        return (
            "{% for message in messages %}"
            f"{{% if message['role'] == 'user' %}}{user}"
            f"{{% elif message['role'] == 'assistant' %}}{assistant}"
            f"{{% else %}}{refused}{{% endif %}}"
            "{% endfor %}"
        )


def make_template(spec: str | Mapping[str, Any], flag: str) -> Template:
    """The preset called `spec`, or the template {"prompt": ..., "answer": ...}. Raises UserError naming `flag`."""
    if isinstance(spec, str):
        if spec not in PRESETS:
            raise unknown_name(flag, "template", spec, PRESETS, 'Or write {"prompt": "...", "answer": "..."}.')
        spec = PRESETS[spec]
    for key in spec:
        if key not in ("prompt", "answer", "prompt_without"):
            raise unknown_name(flag, "key", key, ("prompt", "answer", "prompt_without"))
    for key in ("prompt", "answer"):
        if key not in spec:
            raise UserError(f"{flag}: the key {key!r} is missing; it must be text with {{column}} names in it.")
    answer = Text(spec["answer"], f"{flag}.answer")
    if not answer.columns:
        raise UserError(f"{flag}.answer: it names no column, so every answer would be the same; write {{column}}.")
    others = spec.get("prompt_without", {})
    if not isinstance(others, Mapping):
        raise UserError(f"{flag}.prompt_without: it must be a JSON object of column names and prompts.")
    without = {name: Text(text, f"{flag}.prompt_without.{name}") for name, text in others.items()}
    return Template(Text(spec["prompt"], f"{flag}.prompt"), answer, without)


def _text(row: Mapping[str, Any], name: str, where: str) -> str:
    value = row[name]
    if value is None:
        return ""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        raise UserError(f"{where}: the column {name!r} holds {json_type(value)}, not text.")
    return str(value)


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
