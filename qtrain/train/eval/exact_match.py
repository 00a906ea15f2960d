"""Questions with answers that can be compared: answered greedily, correct if the final answers are equal."""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from torch import nn

from qtrain.core.errors import UserError
from qtrain.data.examples.examples import ExampleDataset
from qtrain.data.stream import DATASETS, StreamContext
from qtrain.data.tokenizers.tokenizer import Tokenizer
from qtrain.models import Decoding, continuations

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
    spec: Mapping[str, Any] | None, ctx: StreamContext, count: int, flag: str = "--eval_ds"
) -> list[WrittenQuestion]:
    """The first `count` questions of `flag` whose prompts leave room in ctx.seq_len tokens; `ctx` has a tokenizer.

    UserError without a dataset, or one without prompts and answers, or none whose answer can be checked."""
    if spec is None:
        raise UserError(f"--accuracy: questions come from {flag}; give that, or leave --accuracy out.")
    # The same questions at every evaluation, whatever the seed of the run.
    ctx = dataclasses.replace(ctx, seed=0, shuffle=False)
    dataset = DATASETS.make_typed(spec, flag)
    if not isinstance(dataset, ExampleDataset):
        raise UserError(f"--accuracy: {flag} holds no prompts and answers; give one of type instruct or chat.")
    found = (parts for parts in dataset.examples(ctx, flag) if final_answer(_last_answer(parts)) is not None)
    texts = [("".join(p.text for p in parts[: _last(parts)]), _last_answer(parts)) for parts in islice(found, count)]
    prompts = ctx.tokenizer.encode_batch([prompt for prompt, _ in texts])
    # As the training data begin their examples.
    begin = [ctx.tokenizer.bos_id] if dataset.begin_token and ctx.tokenizer.bos_id is not None else []
    pairs = zip(texts, prompts, strict=True)
    questions = [
        WrittenQuestion(prompt, begin + ids, gold) for (prompt, gold), ids in pairs if 0 < len(ids) < ctx.seq_len
    ]
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
    eos_ids = () if tokenizer.eos_id is None else (tokenizer.eos_id,)
    greedy = Decoding(max_new_tokens, eos_ids=eos_ids, vocab_size=tokenizer.vocab_size)
    ids = continuations(model, [questions[i].ids for i in order], greedy)
    answers = {i: tokenizer.decode(answer_ids) for i, answer_ids in zip(order, ids, strict=True)}
    return [answers[i] for i in range(len(questions))]


def graded(
    model: nn.Module, tokenizer: Tokenizer, questions: Sequence[WrittenQuestion], longest: int
) -> tuple[float, list[tuple[str, str]]]:
    """Ask all questions, answers of at most `longest` tokens. Returns the fraction of right ones, and the first of them
    to show: (prompt, answer with the expected one)."""
    answers = ask(model, tokenizer, questions, longest)
    right = [final_answer(given) == final_answer(q.answer) for q, given in zip(questions, answers, strict=True)]
    shown = [
        (q.prompt, f"{given} [expected {final_answer(q.answer)}: {'right' if ok else 'wrong'}]")
        for q, given, ok in list(zip(questions, answers, right, strict=True))[:SHOWN]
    ]
    return sum(right) / len(right), shown
