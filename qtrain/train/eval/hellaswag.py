"""HellaSwag: which of four endings is most likely to the model? Text, tokens and scores as in lm-evaluation-harness.

A context and an ending are one text, "context ending"; the ending's tokens are those after the context's own. The
score of an ending is the sum of their log probabilities. Accuracy takes the highest score; normalized accuracy the
highest score per character of the ending, which is the figure that is usually quoted (acc_norm).
Source: Zellers et al., "HellaSwag: Can a Machine Really Finish Your Sentence?", 2019.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from qtrain.core.checks import check_value
from qtrain.core.errors import UserError
from qtrain.core.hub import reaching_hub
from qtrain.data.tokenizers.tokenizer import Tokenizer

HUB = "Rowan/hellaswag"
PAD_TO = 64  # lengths are rounded up to a multiple of it: few shapes, few compilations


@dataclass(frozen=True)
class HellaSwagQuestion:
    """A context, its possible endings, and the index of the correct one."""

    context: str
    endings: tuple[str, ...]
    answer: int


class Score(NamedTuple):
    """The fraction of questions answered correctly by plain and by normalized score."""

    accuracy: float
    accuracy_norm: float


# ---- questions ------------------------------------------------------------------------------------------------------


def _clean(text: str) -> str:
    """The dataset's text without the markers of its WikiHow part."""
    text = text.strip().replace(" [title]", ". ")
    text = re.sub(r"\[.*?\]", "", text)
    return text.replace("  ", " ")


def read_question(row: dict[str, Any], where: str) -> HellaSwagQuestion:
    """A row as published (ctx_a, ctx_b, activity_label, endings, label) or short (ctx, endings, label)."""
    try:
        if "ctx_a" in row:
            context = f"{row['activity_label']}: {row['ctx_a']} {row['ctx_b'].capitalize()}"
        else:
            context = row["ctx"]
        endings = tuple(_clean(ending) for ending in check_value(f"{where}: endings", row["endings"], list[str]))
        answer = int(row["label"])
        context = _clean(context)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise UserError(
            f"{where}: not a HellaSwag question ({type(error).__name__}: {error}). It needs endings, label, and either "
            "ctx, or ctx_a, ctx_b and activity_label; the published test split has no labels."
        ) from None
    if not all(endings):
        raise UserError(f"{where}: an ending is empty.")
    if not 0 <= answer < len(endings):
        raise UserError(f"{where}: label {answer} names none of the {len(endings)} endings; they count from 0.")
    return HellaSwagQuestion(context, endings, answer)


def load_hellaswag(source: str, limit: int | None, flag: str) -> list[HellaSwagQuestion]:
    """The first `limit` questions (None: all) of a local .jsonl or, for the source "hub", of the validation split."""
    if source == "hub":
        fix = (
            f"Download {HUB} where there is a network, or give a local .jsonl of its questions: --hellaswag_file FILE."
        )
        with reaching_hub(flag, f"the dataset {HUB}", fix):
            from datasets import load_dataset

            rows: Any = load_dataset(HUB, split="validation")
        rows = rows.select(range(min(limit, len(rows)))) if limit else rows
        return [read_question(row, f"{flag} ({HUB}, row {number})") for number, row in enumerate(rows)]
    questions: list[HellaSwagQuestion] = []
    try:
        with Path(source).open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if limit and len(questions) == limit:
                    break
                if line.strip():
                    questions.append(read_question(json.loads(line), f"{flag} ({source}, line {number})"))
    except OSError as error:
        raise UserError(f"{flag}: cannot read {source} ({error.strerror}); give a .jsonl of questions.") from None
    except (ValueError, RecursionError) as error:  # JSON and UTF-8
        raise UserError(f"{flag}: {source} is not a .jsonl file ({error}).") from None
    if not questions:
        raise UserError(f"{flag}: {source} holds no questions.")
    return questions


# ---- scoring --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Candidate:
    """An ending as tokens: the model reads `tokens[:-1]` and is scored on the last `n_ending` of `tokens[1:]`."""

    question: int
    ending: int
    tokens: list[int]
    n_ending: int


def _candidates(questions: Sequence[HellaSwagQuestion], tokenizer: Tokenizer, max_len: int) -> list[_Candidate]:
    found = []
    for number, asked in enumerate(questions):
        n_context = len(tokenizer.encode(asked.context.rstrip()))  # a space at the end belongs to the ending
        for which, ending in enumerate(asked.endings):
            tokens = tokenizer.encode(f"{asked.context} {ending}")
            # Encoded together, as the model reads them: the ending is what follows as many tokens as the context has.
            # A long text loses its beginning, never its ending.
            n_ending = max(1, min(len(tokens) - n_context, len(tokens) - 1, max_len))
            found.append(_Candidate(number, which, tokens[-(max_len + 1) :], n_ending))
    return found


@torch.no_grad()
def _log_likelihoods(
    logits: Callable[[Tensor], Tensor], batch: list[_Candidate], size: int, max_len: int, device: torch.device
) -> list[float]:
    longest = max(len(c.tokens) - 1 for c in batch)
    # Few different lengths: each one is compiled once.
    length = min(-(-longest // PAD_TO) * PAD_TO, max_len)
    ids = torch.zeros(size, length, dtype=torch.int64)  # padded on the right, where a causal model does not look
    for row, candidate in enumerate(batch):
        ids[row, : len(candidate.tokens) - 1] = torch.tensor(candidate.tokens[:-1])
    out = logits(ids.to(device))  # [size, length, V]
    sums = []
    for row, candidate in enumerate(batch):
        end = len(candidate.tokens) - 1
        # Logits at position t predict token t + 1: those of the ending begin one before it.
        scored = out[row, end - candidate.n_ending : end].float()  # [n_ending, V]
        targets = torch.tensor(candidate.tokens[-candidate.n_ending :], device=device)
        picked = scored.gather(1, targets[:, None])[:, 0] - scored.logsumexp(dim=1)
        sums.append(picked.sum())
    return torch.stack(sums).tolist()


def evaluate_hellaswag(
    logits: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    questions: Sequence[HellaSwagQuestion],
    *,
    batch_size: int,
    max_len: int,
    device: torch.device,
) -> Score:
    """Answer `questions` with the model `logits`: ids int64 [batch_size, S <= max_len] -> logits [batch_size, S, V].

    A text of more than max_len + 1 tokens is truncated on the left.
    """
    scores = [[0.0] * len(asked.endings) for asked in questions]
    # The longest first: running out of memory shows early.
    ordered = sorted(_candidates(questions, tokenizer, max_len), key=lambda c: len(c.tokens), reverse=True)
    for start in range(0, len(ordered), batch_size):
        batch = ordered[start : start + batch_size]
        for candidate, score in zip(batch, _log_likelihoods(logits, batch, batch_size, max_len, device), strict=True):
            scores[candidate.question][candidate.ending] = score
    right = right_norm = 0
    for asked, plain in zip(questions, scores, strict=True):
        # Longer endings have lower likelihoods: the normalized score is per character, as in lm-evaluation-harness.
        per_character = [score / max(len(ending), 1) for score, ending in zip(plain, asked.endings, strict=True)]
        right += plain.index(max(plain)) == asked.answer
        right_norm += per_character.index(max(per_character)) == asked.answer
    return Score(right / len(questions), right_norm / len(questions))
