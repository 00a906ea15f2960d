"""Evaluation of a language model: the mean loss over validation windows, HellaSwag, sampled text."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qtrain.data.batch import Batch
from qtrain.data.tokenizers.tokenizer import Tokenizer
from qtrain.models import generate
from qtrain.train.eval import hellaswag
from qtrain.train.step.forward import Forward


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
            found["eval_loss"] = mean_loss(self.model, self.forward, self.windows)
        if self.questions:
            score = self._hellaswag()
            found |= {"hellaswag": score.accuracy, "hellaswag_norm": score.accuracy_norm}
        if self.prompts:
            found["samples"] = sample_texts(self.model, self.tokenizer, self.prompts, self.sample_tokens, self.seed)
        return found

    def _hellaswag(self) -> hellaswag.Score:
        was_training = self.model.training
        self.model.eval()
        score = hellaswag.evaluate_hellaswag(
            self.model,
            self.tokenizer,
            self.questions,
            batch_size=16,
            max_len=self.seq_len,
            device=next(self.model.parameters()).device,
        )
        self.model.train(was_training)
        return score


def sample_texts(
    model: nn.Module, tokenizer: Tokenizer, prompts: Iterable[str], max_new_tokens: int, seed: int
) -> list[tuple[str, str]]:
    """(prompt, continuation) of each prompt: temperature 0.8, top-k 50, deterministic in `seed`."""
    device = next(model.parameters()).device
    samples = []
    for prompt in prompts:
        start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
        ids = tokenizer.encode(prompt) or [start or 0]
        out = generate(
            model,
            torch.tensor([ids], device=device),
            max_new_tokens,
            temperature=0.8,
            top_k=50,
            seed=seed,
            eos_id=tokenizer.eos_id,
            vocab_size=tokenizer.vocab_size,
        )
        samples.append((prompt, tokenizer.decode(out[0, len(ids) :].tolist())))
    return samples


@torch.no_grad()
def mean_loss(model: nn.Module, forward: Forward, batches: Iterable[Batch]) -> float:
    """Mean loss per trained token over all batches, without z-loss. The model keeps its training mode."""
    was_training = model.training
    model.eval()
    nll = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    trained = 0
    for batch in batches:
        nll += forward(batch).nll
        trained += batch.n_trained
    model.train(was_training)
    return float(nll) / max(trained, 1)
