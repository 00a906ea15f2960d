"""A language model's evaluation measures what is given, skips the rest, and does not change the model."""

import pytest
import torch

from qtrain.data.batch import Batch
from qtrain.data.stream import StreamContext
from qtrain.data.tokenizers.tokenizer import load_tokenizer
from qtrain.models import ModelSource, build_model
from qtrain.train.eval.exact_match import WrittenQuestion
from qtrain.train.eval.hellaswag import HellaSwagQuestion
from qtrain.train.eval.language import EvalSet, EvaluationData, LanguageEvaluation, summed_loss
from qtrain.train.settings.evaluation import EvaluationSettings
from qtrain.train.step.forward import language_forward
from tests.system import TINY

QUESTIONS = [HellaSwagQuestion("a b", ("c", "d e", "f"), 1), HellaSwagQuestion("the end of", ("x", "y"), 0)]

WRITTEN = [WrittenQuestion("1 + 1 = ", [49, 43, 49, 61], "2")]


def evaluation(**given) -> LanguageEvaluation:
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=0)
    settings = EvaluationSettings(sample_prompts=tuple(given.pop("prompts", ())), sample_tokens=3, answer_tokens=4)
    if windows := given.pop("windows", None):
        given["sets"] = {"": EvalSet(windows, windows)}
    data = EvaluationData(ctx=StreamContext(16, tokenizer=load_tokenizer("byte", "")), **given)
    return LanguageEvaluation(model, language_forward(model, None), data, settings, seed=1)


def batches() -> list[Batch]:
    tokens = torch.randint(0, 258, (6, 17), generator=torch.Generator().manual_seed(0))
    return [Batch(part[:, :-1], part[:, 1:].clone()) for part in tokens.split(4)]


def test_only_what_was_given_is_measured():
    assert evaluation()() == {}
    assert evaluation(windows=batches)().keys() == {"eval_loss"}
    assert evaluation(questions=QUESTIONS)().keys() == {"hellaswag", "hellaswag_norm"}
    assert evaluation(written=WRITTEN)().keys() == {"accuracy", "samples"}
    assert evaluation(prompts=["a"])().keys() == {"samples"}


def test_results_equal_their_measures_and_are_deterministic():
    measured = evaluation(windows=batches, questions=QUESTIONS, prompts=["a", "b"])
    found = measured()
    assert (
        found["eval_loss"]
        == summed_loss(measured.model, measured.forward, batches()).mean
        == pytest.approx(5.5, abs=0.3)
    )
    assert found["hellaswag"] in (0, 0.5, 1) and found["hellaswag_norm"] in (0, 0.5, 1)
    assert [prompt for prompt, _ in found["samples"]] == ["a", "b"]
    state = torch.get_rng_state()
    assert measured() == found
    assert torch.equal(torch.get_rng_state(), state)  # so that evaluating does not change the training that follows


def test_named_sets_have_their_losses_and_the_mean_over_all_tokens():
    first, second = batches()  # of 4 and of 2 sequences
    sets = {"a": EvalSet(lambda: [first], batches), "b-2": EvalSet(lambda: [second], lambda: [second])}
    measured = evaluation(sets=sets)
    found = measured()
    assert found.keys() == {"eval_loss", "eval_a_loss", "eval_b-2_loss"}
    assert found["eval_a_loss"] == summed_loss(measured.model, measured.forward, [first]).mean != found["eval_b-2_loss"]
    assert found["eval_loss"] == pytest.approx(summed_loss(measured.model, measured.forward, batches()).mean, abs=1e-6)
    final = measured.over_all()
    assert final["final_eval_a_loss"] == pytest.approx(found["eval_loss"], abs=1e-6)
    assert final["final_eval_b-2_loss"] == found["eval_b-2_loss"] and len(final) == 3


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_unchanged(training):
    measured = evaluation(windows=batches, questions=QUESTIONS, prompts=["a"])
    measured.model.train(training)
    before = {name: p.clone() for name, p in measured.model.named_parameters()}
    measured()
    assert measured.model.training is training
    assert all(torch.equal(p, before[n]) and p.grad is None for n, p in measured.model.named_parameters())
