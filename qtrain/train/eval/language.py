"""Evaluation of a language model during training: loss over fixed windows, HellaSwag, and sampled text."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from qtrain.data import Batch, Tokenizer
from qtrain.train.eval import hellaswag
from qtrain.train.language import Forward, sample_texts
from qtrain.train.step import evaluate


@dataclass(kw_only=True)
class LanguageEvaluation:
    """Called by the training loop. Empty windows, questions or prompts are skipped."""

    model: nn.Module
    forward: Forward
    windows: Sequence[Batch]
    tokenizer: Tokenizer | None
    questions: Sequence[hellaswag.HellaSwagQuestion]
    prompts: Sequence[str]
    sample_tokens: int
    seq_len: int
    seed: int

    def __call__(self) -> dict[str, Any]:
        """`eval_loss`, `hellaswag` and `hellaswag_norm` (accuracies), `samples` [(prompt, continuation)]."""
        found: dict[str, Any] = {}
        if self.windows:
            found["eval_loss"] = evaluate(self.model, self.forward, self.windows)
        if self.questions:
            score = self._hellaswag()
            found |= {"hellaswag": score.accuracy, "hellaswag_norm": score.accuracy_norm}
        if self.prompts:
            found["samples"] = sample_texts(self.model, self.tokenizer, self.prompts, self.sample_tokens, self.seed)
        return found

    def _hellaswag(self) -> hellaswag.Score:
        was_training = self.model.training
        self.model.eval()
        score = hellaswag.evaluate(
            self.model,
            self.tokenizer,
            self.questions,
            batch_size=16,
            max_len=self.seq_len,
            device=next(self.model.parameters()).device,
        )
        self.model.train(was_training)
        return score
