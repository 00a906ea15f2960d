"""Documents separated by their end token, and text sampled from a model."""

import torch

from qtrain.data.batch import Batch
from qtrain.data.tokenizers.tokenizer import load_tokenizer
from qtrain.models import ModelSource, build_model
from qtrain.train.eval.language import sample_texts
from qtrain.train.step.forward import document_ids, language_forward
from tests.system import TINY


def test_an_end_token_belongs_to_the_document_that_it_ends():
    ids = torch.tensor([[5, 9, 5, 5, 9, 9, 5], [9, 5, 5, 5, 5, 5, 9], [5, 5, 5, 5, 5, 5, 5]])
    expected = [[0, 0, 1, 1, 1, 2, 3], [0, 1, 1, 1, 1, 1, 1], [0] * 7]
    assert document_ids(ids, eos_id=9).tolist() == expected


def test_document_ids_reach_the_model_only_on_request():
    seen = []

    class Model(torch.nn.Linear):
        def forward(self, input_ids, labels=None, doc_ids=None):
            seen.append(doc_ids)

    batch = Batch(torch.tensor([[1, 9, 2]]), torch.tensor([[9, 2, 3]]))
    language_forward(Model(1, 1), None)(batch)
    language_forward(Model(1, 1), 9)(batch)
    assert seen[0] is None and seen[1].tolist() == [[0, 0, 1]]


def test_samples_are_text_of_the_tokenizer_and_the_same_for_the_same_seed():
    """Also where the model's vocabulary is larger than the tokenizer's, and for an empty prompt."""
    model = build_model(ModelSource("tiny", {**TINY, "vocab_size": 512}, "--model"), seed=0).train()
    tokenizer = load_tokenizer("byte", "--tokenizer")
    with torch.no_grad():
        model.embed_tokens.weight[258:] *= 50  # ids that mean nothing are the likeliest
    first = sample_texts(model, tokenizer, ["def f(", ""], 12, seed=3)
    assert [prompt for prompt, _ in first] == ["def f(", ""]
    assert all(isinstance(text, str) and text for _, text in first)
    assert sample_texts(model, tokenizer, ["def f(", ""], 12, seed=3) == first
    assert sample_texts(model, tokenizer, ["def f(", ""], 12, seed=4) != first
    assert sample_texts(model, tokenizer, ["a"], 0, seed=3) == [("a", "")]
    assert model.training
