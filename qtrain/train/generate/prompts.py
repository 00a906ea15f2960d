"""Prompts: of the command line, of a file of lines, of a file of JSON lines with texts or conversations."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from qtrain.core.checks import MAX_JSON, is_unicode, json_type, parse_json, shown, user_path
from qtrain.core.errors import UserError, nearest
from qtrain.core.reading import read_small
from qtrain.data.examples.chat_dataset import CHAT_TEMPLATES, ChatRenderer
from qtrain.data.tokenizers.tokenizer import Tokenizer

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Given:
    """A prompt as it was given. where: the flag, and the line of a file."""

    content: str | Messages
    where: str


@dataclass(frozen=True)
class Prompt:
    """A prompt as the model reads it."""

    given: Given
    ids: list[int]


def read_prompts(file: str, flag: str) -> list[Given]:
    """The prompts of a .txt, one a line, or of a .jsonl, whose objects have "prompt" or "messages". Empty lines are
    skipped. UserError naming `flag`, the file and the line."""
    path = user_path(file, flag)
    if path.suffix not in (".txt", ".jsonl"):
        raise UserError(f"{flag}: {file} is neither .txt, a prompt a line, nor .jsonl, an object a line; name it so.")
    try:
        text = read_small(path, MAX_JSON).decode("utf-8-sig")
    except FileNotFoundError:
        close = nearest(str(path), [str(p) for p in path.parent.glob(f"*{path.suffix}")])
        hint = f" Did you mean {close}?" if close else ""
        raise UserError(f"{flag}: the file {file} does not exist.{hint}") from None
    except OSError as error:
        raise UserError(f"{flag}: cannot read {file}: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: {file} is not UTF-8 text (byte {error.start}).") from None
    # Not splitlines: a JSON string may hold U+2028.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise UserError(f"{flag}: {file} holds no prompts; write one a line.")
    places = [f"{flag} ({file}, line {number})" for number, _ in lines]
    if path.suffix == ".txt":
        return [Given(line.rstrip("\r"), where) for (_, line), where in zip(lines, places, strict=True)]
    return [_of_object(line, where) for (_, line), where in zip(lines, places, strict=True)]


def _of_object(line: str, where: str) -> Given:
    value = parse_json(line, where)
    if not isinstance(value, dict):
        raise UserError(f'{where}: a line is an object with "prompt" or "messages", not {json_type(value)}.')
    found = [key for key in ("prompt", "messages") if key in value]
    if len(found) != 1:
        what = "both" if found else "neither"
        raise UserError(f'{where}: the object has {what} of "prompt" and "messages"; give one of them.')
    content = value[found[0]]
    if found == ["messages"]:
        return Given(content, where)  # checked where it is rendered
    if not isinstance(content, str) or not content:
        what = "is empty" if content == "" else f"is {shown(content)}, not text"
        raise UserError(f'{where}: "prompt" {what}; give a text to continue.')
    if not is_unicode(content):
        raise UserError(f'{where}: "prompt" is not valid Unicode text (it holds a lone surrogate).')
    return Given(content, where)


def chat_renderer(tokenizer: Tokenizer, model: str, where: str) -> ChatRenderer:
    """What renders conversations by the tokenizer's chat template. UserError if it has none."""
    if tokenizer.chat_template is None:
        raise UserError(
            f"{where}: the tokenizer of {model} has no chat template; give plain prompts, or a model that was trained "
            f'on conversations ("template":"{next(iter(CHAT_TEMPLATES))}" of a chat dataset).'
        )
    return ChatRenderer(tokenizer.chat_template, "messages", tokenizer, where)


def with_system(messages: Any, system: str | None) -> Any:
    """The conversation with a system message before it, unless it begins with one."""
    starts = isinstance(messages, list) and messages and isinstance(messages[0], dict)
    if system is None or not starts or messages[0].get("role", messages[0].get("from")) == "system":
        return messages
    return [{"role": "system", "content": system}, *messages]


@dataclass(frozen=True)
class PromptReader:
    """Makes token ids of prompts. model: its name, for messages. begin: ids before every plain text. positions: the
    most tokens that the model reads; None: no limit is known."""

    tokenizer: Tokenizer
    model: str
    begin: Sequence[int]
    vocab_size: int | None
    positions: int | None
    system: str | None = None

    def read(self, given: Given) -> Prompt:
        """UserError for a prompt of no tokens, of more than there are positions, or of ids beyond the vocabulary."""
        if isinstance(given.content, str):
            ids = [*self.begin, *self.tokenizer.encode(given.content)]
        else:
            renderer = chat_renderer(self.tokenizer, self.model, given.where)
            ids = self.tokenizer.encode(renderer.prompt(with_system(given.content, self.system)))
        if not ids:
            raise UserError(f"{given.where}: the prompt has no tokens; give a text to continue.")
        if self.positions is not None and len(ids) > self.positions:
            raise UserError(
                f"{given.where}: the prompt has {len(ids):,} tokens, {self.model} has {self.positions:,} positions; "
                "shorten it."
            )
        if self.vocab_size is not None and max(ids) >= self.vocab_size:
            raise UserError(
                f"{given.where}: the tokenizer {self.tokenizer.name!r} makes the id {max(ids)} of the prompt, and the "
                f"model's vocabulary has {self.vocab_size:,}; they do not belong together."
            )
        return Prompt(given, ids)
