"""Evaluation of a language model: the mean loss over validation windows, HellaSwag, exact answers, sampled text.

`load_evaluation` reads all that it asks, and refuses what cannot be asked, before a model is built.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

from qtrain.data.batch import Batch
from qtrain.data.eval_windows import all_eval_batches, eval_batches, eval_sets, set_flag
from qtrain.data.examples.examples import ExampleDataset
from qtrain.data.stream import DATASETS, Extent, StreamContext, shared_sources, tokenizer_needed
from qtrain.data.tokenizers.tokenizer import Tokenizer
from qtrain.models import Decoding, Sampling, continuations
from qtrain.train.eval import hellaswag
from qtrain.train.eval.exact_match import WrittenQuestion, graded, load_written_questions
from qtrain.train.settings.evaluation import EvaluationSettings
from qtrain.train.step.forward import Forward


@dataclass(frozen=True)
class EvalSet:
    """A dataset whose loss is measured."""

    windows: Callable[[], Iterable[Batch]]
    """Those of an evaluation, the same ones each time."""
    all_windows: Callable[[], Iterable[Batch]]
    """Every window of the data."""
    sequences: int | None = None
    """Windows of an evaluation; None: all of data whose size is not known before they are read."""


@dataclass(frozen=True, kw_only=True)
class EvaluationData:
    """What is asked of a model: empty sets and questions are skipped. `ctx`: its sequences and tokenizer."""

    ctx: StreamContext
    sets: Mapping[str, EvalSet] = field(default_factory=dict)
    """By name; one without a name is the only one."""
    questions: Sequence[hellaswag.HellaSwagQuestion] = ()
    written: Sequence[WrittenQuestion] = ()
    """Questions that are answered in words."""
    notes: tuple[str, ...] = ()
    """Lines for the plan."""


def load_evaluation(
    settings: EvaluationSettings,
    ctx: StreamContext,
    data: Mapping[str, Any] | None,
    flag: str,
    sequences: int,
    trained_on: Sequence[Extent] = (),
    needs_tokenizer: Sequence[str] = (),
) -> EvaluationData:
    """What is asked with `data`, the value of `flag`, of whose datasets the first `sequences` windows count; 0: all.
    trained_on: what the model has seen. needs_tokenizer: further flags that need one. Raises UserError."""
    asked = [name for name in ("sample_prompts", "hellaswag", "accuracy") if getattr(settings, name)]
    needs = [*(f"--{name}" for name in asked), *needs_tokenizer]
    if needs and ctx.tokenizer is None:
        raise tokenizer_needed("--train_ds" if flag == "--eval_ds" else flag, " and ".join(needs))
    sets, notes, questions, written = {}, [], [], []
    specs = eval_sets(data, flag)
    for name, spec in specs.items():
        where = set_flag(flag, name)
        everything = partial(all_eval_batches, spec, ctx, ctx.micro_batch_size, where)
        # With all of them, one shows that there are some.
        windows = eval_batches(spec, ctx, ctx.micro_batch_size, sequences or 1, where)
        counted = windows.n_sequences if sequences else windows.n_all
        sets[name] = EvalSet(partial(list, windows.batches) if sequences else everything, everything, counted)
        notes += training_data_notes(windows.reads, trained_on, where)
    if settings.hellaswag:
        source_flag = "--hellaswag_file" if settings.hellaswag_file else "--hellaswag"
        limit = settings.hellaswag_limit or None
        questions = hellaswag.load_hellaswag(settings.hellaswag_file or "hub", limit, source_flag)
    if settings.accuracy:
        name = _asked_set(specs, flag)
        written = load_written_questions(specs.get(name), ctx, settings.accuracy, set_flag(flag, name))
    return EvaluationData(ctx=ctx, sets=sets, questions=questions, written=written, notes=tuple(notes))


def _asked_set(specs: Mapping[str, Mapping[str, Any]], flag: str) -> str:
    """The name of the dataset that --accuracy asks: the first that holds prompts, else the first."""
    kinds = {name: DATASETS.make_typed(spec, set_flag(flag, name)) for name, spec in specs.items()}
    return next((name for name, kind in kinds.items() if isinstance(kind, ExampleDataset)), next(iter(kinds), ""))


def training_data_notes(reads: Sequence[Extent], trained_on: Sequence[Extent], flag: str) -> tuple[str, ...]:
    """A warning where evaluation data are, or lie within, training data."""
    shared = shared_sources(reads, trained_on)
    if not shared:
        return ()
    what = f"{shared[0]}{f' and {len(shared) - 1} more' if len(shared) > 1 else ''}"
    how_many = "all" if len(shared) == len(reads) else f"{len(shared)} of {len(reads)} sources"
    return (
        f"warning: {how_many} of {flag} is also read by --train_ds ({what}): its loss is not that of held-out data",
    )


@dataclass
class LanguageEvaluation:
    """Called by the training loop. Nothing is measured that `data` and the prompts of `settings` do not have."""

    model: nn.Module
    forward: Forward
    data: EvaluationData
    settings: EvaluationSettings
    seed: int = 0
    """Of sampled text."""

    def __call__(self) -> dict[str, Any]:
        """`eval_loss` (see `_losses`), `hellaswag`, `hellaswag_norm` and `accuracy` (fractions), `samples` [(prompt,
        continuation)]."""
        found: dict[str, Any] = {}
        data, settings, samples = self.data, self.settings, []
        if data.sets:
            found |= self._losses("eval", {name: one.windows() for name, one in data.sets.items()})
        if data.questions:
            score = self._hellaswag()
            found |= {"hellaswag": score.accuracy, "hellaswag_norm": score.accuracy_norm}
        if data.written:
            found["accuracy"], samples = graded(self.model, data.ctx.tokenizer, data.written, settings.answer_tokens)
        if settings.sample_prompts:
            length, tokenizer = settings.sample_tokens, data.ctx.tokenizer
            samples = [*samples, *sample_texts(self.model, tokenizer, settings.sample_prompts, length, self.seed)]
        return found | ({"samples": samples} if samples else {})

    def over_all(self) -> dict[str, float]:
        """`final_eval_loss`, over every window of the data, likewise."""
        return self._losses("final_eval", {name: one.all_windows() for name, one in self.data.sets.items()})

    def _losses(self, prefix: str, sets: Mapping[str, Iterable[Batch]]) -> dict[str, float]:
        """`<prefix>_loss`, the mean over the tokens of all sets, and `<prefix>_<name>_loss` of each that has a name."""
        sums = {name: summed_loss(self.model, self.forward, batches) for name, batches in sets.items()}
        total = LossSum(sum(one.nll for one in sums.values()), sum(one.tokens for one in sums.values()))
        named = {f"{prefix}_{name}_loss": one.mean for name, one in sums.items() if name}
        return {f"{prefix}_loss": total.mean, **named}

    def _hellaswag(self) -> hellaswag.Score:
        model, ctx, questions = self.model, self.data.ctx, self.data.questions
        was_training, device = model.training, next(model.parameters()).device
        model.eval()
        score = hellaswag.evaluate_hellaswag(
            model, ctx.tokenizer, questions, batch_size=16, max_len=ctx.seq_len, device=device
        )
        model.train(was_training)
        return score


def sample_texts(
    model: nn.Module, tokenizer: Tokenizer, prompts: Iterable[str], max_new_tokens: int, seed: int
) -> list[tuple[str, str]]:
    """(prompt, continuation) of each prompt: temperature 0.8, top-k 50, deterministic in `seed`."""
    prompts = list(prompts)
    start = tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id
    ids = [found or [start or 0] for found in tokenizer.encode_batch(prompts)]
    decoding = Decoding(
        max_new_tokens,
        Sampling(temperature=0.8, top_k=50, seed=seed),
        eos_ids=() if tokenizer.eos_id is None else (tokenizer.eos_id,),
        vocab_size=tokenizer.vocab_size,
    )
    return [(p, tokenizer.decode(new)) for p, new in zip(prompts, continuations(model, ids, decoding), strict=True)]


class LossSum(NamedTuple):
    """nll: the negative log-likelihoods of `tokens` trained tokens, added."""

    nll: float
    tokens: int

    @property
    def mean(self) -> float:
        return self.nll / max(self.tokens, 1)


@torch.no_grad()
def summed_loss(model: nn.Module, forward: Forward, batches: Iterable[Batch]) -> LossSum:
    """The loss of all trained tokens of the batches, without z-loss. The model keeps its training mode."""
    was_training = model.training
    model.eval()
    nll = torch.zeros((), dtype=torch.float64, device=next(model.parameters()).device)
    trained = 0
    for batch in batches:
        nll += forward(batch).nll
        trained += batch.n_trained
    model.train(was_training)
    return LossSum(float(nll), trained)
