"""Continuations: those of transformers, of each prompt alone, reproducible; the model is left as it was."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from qtrain.core.errors import UserError
from qtrain.models import (
    Decoding,
    Generation,
    Sampling,
    build_model,
    continuations,
    export_hf,
    read_model_source,
)
from qtrain.models.generation.engine import _Sampler
from qtrain.models.generation.sampling import penalized
from tests.models.families import batch, drawn, source_of

MODEL = drawn(source_of("llama2"))
PROMPTS = [ids[:length].tolist() for ids, length in zip(batch(rows=4)[0], (5, 1, 9, 3), strict=True)]
SAMPLED = Sampling(temperature=1.3, top_k=20, top_p=0.95, repetition_penalty=1.2, seed=4)


def written(prompts, numbers=None, model=MODEL, **options) -> list[list[int]]:
    """One batch."""
    generation = Generation(model, prompts, Decoding(**{"max_new_tokens": 12, **options}), numbers)
    pieces = [[] for _ in prompts]
    for new in generation:
        for row, ids in zip(pieces, new, strict=True):
            row += ids
    assert pieces == [row.ids for row in generation.rows], "what was given out is not what is kept"
    return pieces


@pytest.mark.parametrize("family", ["llama3", "mistral-window", "deepseek_v2", "qwen3", "qwen3_moe"])
def test_greedy_tokens_are_those_of_transformers(family, tmp_path):
    source = source_of(family)
    export_hf(drawn(source), source, tmp_path)
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).eval()
    model = build_model(read_model_source(str(tmp_path)), pretrained=True)
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": -1, "pad_token_id": -1}
    for prompt, found in zip(PROMPTS, written(PROMPTS, model=model), strict=True):
        ids = torch.tensor([prompt])
        expected = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert found == expected[0, len(prompt) :].tolist()


@pytest.mark.parametrize("sampling", [Sampling(0.0), SAMPLED], ids=["greedy", "sampled"])
def test_a_row_does_not_depend_on_its_batch(sampling):
    together = written(PROMPTS, sampling=sampling)
    apart = [written([prompt], [number], sampling=sampling)[0] for number, prompt in enumerate(PROMPTS)]
    assert together == apart
    assert together == continuations(MODEL, PROMPTS, Decoding(12, sampling))


def test_same_seed_same_text_and_another_seed_or_row_another_text():
    first, same, other = (written(PROMPTS, sampling=Sampling(seed=seed)) for seed in (1, 1, 2))
    assert first == same and first != other
    assert len({str(ids) for ids in written([PROMPTS[0]] * 4, sampling=Sampling())}) == 4


def test_rows_end_at_any_end_token_and_only_ids_of_the_tokenizer_are_sampled():
    free = written(PROMPTS)
    ends = (free[0][4], free[2][6])
    stopped = written(PROMPTS, eos_ids=ends)
    first = [next((at for at, token in enumerate(ids) if token in ends), 12) for ids in free]
    assert stopped == [ids[:at] for ids, at in zip(free, first, strict=True)] and min(first) < 12
    assert max(max(ids) for ids in written(PROMPTS, vocab_size=10, sampling=Sampling(2.0))) < 10


@pytest.mark.parametrize("ahead", [False, True])
def test_a_row_ends_at_the_last_position_whatever_the_others_do(ahead, monkeypatch):
    monkeypatch.setattr("qtrain.models.generation.engine.runs_ahead", lambda device: ahead)
    generation = Generation(MODEL, PROMPTS, Decoding(12, context=10))
    list(generation)
    assert [len(row.ids) for row in generation.rows] == [6, 10, 2, 8]
    assert {row.finish for row in generation.rows} == {"length"}
    assert [row.ids for row in generation.rows] == [
        ids[: 11 - len(prompt)] for prompt, ids in zip(PROMPTS, written(PROMPTS), strict=True)
    ]


def test_steps_between_checks_change_nothing(monkeypatch):
    """On a GPU the host looks every 8 steps, and has launched the next ones then."""
    ends = (written(PROMPTS)[0][5],)
    every, events = written(PROMPTS, eos_ids=ends), []
    extend, take = Generation._extend, _Sampler.take

    def recorded(self, found):
        events.append(len(found[0]))
        return extend(self, found)

    def sampled(self, logits):
        events.append("step")
        take(self, logits)

    monkeypatch.setattr(Generation, "_extend", recorded)
    monkeypatch.setattr(_Sampler, "take", sampled)
    monkeypatch.setattr("qtrain.models.generation.engine.runs_ahead", lambda device: True)
    assert written(PROMPTS, eos_ids=ends) == every
    assert events == ["step", 1, *["step"] * 11, 8, 3]


def test_tokens_of_the_text_so_far_are_penalized():
    rule = Sampling(0.0, repetition_penalty=1.5)
    for prompt, ids in zip(PROMPTS, written(PROMPTS, sampling=rule), strict=True):
        for at, token in enumerate(ids):
            text = prompt + ids[:at]
            with torch.no_grad():
                logits = MODEL(torch.tensor([text]))[:, -1]
            seen = torch.zeros_like(logits, dtype=torch.bool).scatter_(1, torch.tensor([text]), True)
            assert penalized(logits, seen, 1.5).argmax() == token


def test_log_probabilities_are_those_of_the_model():
    generation = Generation(MODEL, PROMPTS, Decoding(6, SAMPLED, logprobs=True))
    list(generation)
    for number, (prompt, row) in enumerate(zip(PROMPTS, generation.rows, strict=True)):
        found = generation.logprobs(number)
        with torch.no_grad():
            logprobs = MODEL(torch.tensor([prompt + row.ids])).log_softmax(dim=-1)[0, len(prompt) - 1 : -1]
        expected = logprobs.gather(1, torch.tensor(row.ids)[:, None])[:, 0]
        assert torch.allclose(torch.tensor(found), expected, atol=1e-4)


@pytest.mark.parametrize("training", [True, False])
def test_the_model_is_left_as_it_was_even_when_broken_off(training):
    MODEL.train(training)
    pieces = iter(Generation(MODEL, PROMPTS, Decoding(12)))
    next(pieces)
    assert not MODEL.training
    pieces.close()
    assert MODEL.training is training and all(layer.attn.cache is None for layer in MODEL.layers)


def test_no_token_is_asked_for_and_an_empty_prompt_is_refused():
    assert continuations(MODEL, PROMPTS, Decoding(0)) == [[]] * 4
    with pytest.raises(UserError, match="at least one"):
        written([[1], []])
