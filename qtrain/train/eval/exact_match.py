"""Questions with answers that can be compared: answered greedily, correct if the final answers are equal."""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from qtrain.core.errors import UserError
from qtrain.data.examples.examples import ExampleDataset
from qtrain.data.stream import DATASETS, StreamContext
from qtrain.data.tokenizers.tokenizer import Tokenizer
from qtrain.models import answer, rows_at_once

_MARKED = (
    re.compile(r"####\s*(.+)"),  # GSM8K
    re.compile(r"[Tt]he (?:final )?answer is:?\s*(.+)"),  # MetaMathQA
    re.compile(r"\\boxed\{(.+)\}"),
)
SHOWN = 3
"""Answers that are logged as samples."""

_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class WrittenQuestion:
    """prompt, its token ids, and the reference answer: the whole text of the dataset."""

    prompt: str
    ids: list[int]
    answer: str


def final_answer(text: str) -> str | None:
    """The final answer of a solution: what follows a marker (####, "The answer is:", a box), else the last number."""
    # The last one counts: a solution may repeat the marker in its reasoning.
    for pattern in _MARKED:
        if found := pattern.findall(text):
            return _normalized(found[-1])
    numbers = _NUMBER.findall(text)
    return _normalized(numbers[-1]) if numbers else None


def _normalized(text: str) -> str:
    """A canonical spelling: "1,234.00 dollars." becomes "1234"."""
    text = text.strip().strip("$").rstrip(".").strip()
    if number := _NUMBER.match(text.lstrip("$")):
        value = float(number.group().replace(",", ""))
        return f"{value:.10g}"
    return text


def load_written_questions(
    spec: Mapping[str, Any] | None, ctx: StreamContext, count: int, longest: int
) -> list[WrittenQuestion]:
    """The first `count` questions of --eval_ds whose prompts leave room in `longest` tokens; `ctx` is the training's.

    UserError without a dataset, or one without prompts and answers, or none whose answer can be checked."""
    if spec is None:
        raise UserError("--accuracy: questions come from --eval_ds; give that, or leave --accuracy out.")
    # The same questions at every evaluation, whatever the seed of the run.
    flag, ctx = "--eval_ds", dataclasses.replace(ctx, seed=0, shuffle=False)
    dataset = DATASETS.make_typed(spec, flag)
    if not isinstance(dataset, ExampleDataset):
        raise UserError(f"--accuracy: {flag} holds no prompts and answers; give one of type instruct or chat.")
    found = (parts for parts in dataset.examples(ctx, flag) if final_answer(_last_answer(parts)) is not None)
    texts = [("".join(p.text for p in parts[: _last(parts)]), _last_answer(parts)) for parts in islice(found, count)]
    prompts = ctx.tokenizer.encode_batch([prompt for prompt, _ in texts])
    # As the training data begin their examples.
    begin = [ctx.tokenizer.bos_id] if dataset.begin_token and ctx.tokenizer.bos_id is not None else []
    pairs = zip(texts, prompts, strict=True)
    questions = [WrittenQuestion(prompt, begin + ids, gold) for (prompt, gold), ids in pairs if 0 < len(ids) < longest]
    if not questions:
        raise UserError(f"--accuracy: {flag} has no question whose answer can be checked and that fits --seq_len.")
    return questions


def _last(parts: Sequence[Any]) -> int:
    return max(number for number, part in enumerate(parts) if part.trained)


def _last_answer(parts: Sequence[Any]) -> str:
    return parts[_last(parts)].text


def ask(model: nn.Module, tokenizer: Tokenizer, questions: Sequence[WrittenQuestion], max_new_tokens: int) -> list[str]:
    """The model's answer to each question, in their order."""
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].ids))  # similar lengths together
    answers: dict[int, str] = {}
    rows = rows_at_once(model, max(len(q.ids) for q in questions) + max_new_tokens)
    for start in range(0, len(order), rows):
        batch = order[start : start + rows]
        ids = answer(model, [questions[i].ids for i in batch], max_new_tokens, tokenizer.eos_id, tokenizer.vocab_size)
        answers |= {i: tokenizer.decode(answer_ids) for i, answer_ids in zip(batch, ids, strict=True)}
    return [answers[i] for i in range(len(questions))]


@dataclass(kw_only=True)
class FinetuneEvaluation:
    """Called by the training loop: validation loss, and accuracy over questions, if there are any."""

    model: nn.Module
    validation_loss: Callable[[], float] | None
    tokenizer: Tokenizer
    questions: Sequence[WrittenQuestion]
    max_new_tokens: int

    def __call__(self) -> dict[str, Any]:
        """`eval_loss`, `accuracy` (a fraction), `samples` [(prompt, answer with the expected one)]."""
        found: dict[str, Any] = {}
        if self.validation_loss is not None:
            found["eval_loss"] = self.validation_loss()
        if self.questions:
            answers = ask(self.model, self.tokenizer, self.questions, self.max_new_tokens)
            correct = [
                final_answer(given) == final_answer(q.answer) for q, given in zip(self.questions, answers, strict=True)
            ]
            found["accuracy"] = sum(correct) / len(correct)
            found["samples"] = [
                (q.prompt, f"{given} [expected {final_answer(q.answer)}: {'right' if ok else 'wrong'}]")
                for q, given, ok in list(zip(self.questions, answers, correct, strict=True))[:SHOWN]
            ]
        return found
