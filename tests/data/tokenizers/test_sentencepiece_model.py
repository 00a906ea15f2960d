"""Converted sentencepiece models give sentencepiece's own ids; training is deterministic and says what is wrong."""

import io
import random

import pytest
import sentencepiece

from qtrain.core.errors import UserError
from qtrain.data.tokenizers.sentencepiece_model import ESCAPE, SPACE, train_tokenizer
from qtrain.data.tokenizers.tokenizer import load_tokenizer
from tests.data.corpora import source_texts

LOSSLESS = {"normalization_rule_name": "identity", "add_dummy_prefix": False, "remove_extra_whitespaces": False}
KINDS = {
    "bpe": {"model_type": "bpe"},
    "bpe, as Llama's": {"model_type": "bpe", "byte_fallback": True, "remove_extra_whitespaces": False},
    "bpe with symbols": {"model_type": "bpe", "user_defined_symbols": [SPACE * 2, "self.", "\n\n"], **LOSSLESS},
    "unigram": {"model_type": "unigram"},
    "unigram with bytes": {"model_type": "unigram", "byte_fallback": True, **LOSSLESS},
}


def train(path, **settings) -> sentencepiece.SentencePieceProcessor:
    file = io.BytesIO()
    lines = (line for text in source_texts() for line in text.split("\n") if line)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=lines, model_writer=file, vocab_size=800, minloglevel=2, **settings
    )
    path.write_bytes(file.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=file.getvalue())


def periodic_strings(count: int) -> list[str]:
    """Where merge order is most ambiguous: runs and near-runs of few characters."""
    rng = random.Random(0)
    return [
        "".join(rng.choice(["  ", "-", "--", "=", "a", "ab", "aba", "()", "."]) for _ in range(30))
        for _ in range(count)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_sentencepieces_own(kind, tmp_path):
    theirs = train(tmp_path / "x.model", **KINDS[kind])
    ours = load_tokenizer(str(tmp_path / "x.model"), "--tokenizer")
    assert (ours.vocab_size, ours.bos_id, ours.eos_id) == (theirs.vocab_size(), theirs.bos_id(), theirs.eos_id())
    lines = [line for text in source_texts() for line in text.split("\n")] + ["", " ", "ﬁ ½ é", "x\ty", "日本語"]
    if kind.startswith("bpe"):
        assert ours.encode_batch(lines) == theirs.encode(lines)
        assert ours.encode_batch(source_texts()) == theirs.encode(source_texts())
        assert ours.encode_batch(periodic_strings(300)) == theirs.encode(periodic_strings(300))
    else:  # two cuts of equal likelihood may be decided differently
        differing = sum(a != b for a, b in zip(ours.encode_batch(lines), theirs.encode(lines), strict=True))
        assert differing <= 0.005 * len(lines)
    if "bytes" in kind or "Llama" in kind:
        assert [ours.decode(ids) for ids in ours.encode_batch(lines)] == [
            theirs.decode(ids) for ids in theirs.encode(lines)
        ]


def test_trained_model_is_a_plain_sentencepiece_file_and_reproducible(tmp_path):
    model = train_tokenizer(source_texts(), 1000, "--train_tokenizer")
    assert model == train_tokenizer(source_texts(), 1000, "--train_tokenizer")
    (tmp_path / "x.model").write_bytes(model)
    ours = load_tokenizer(str(tmp_path / "x.model"), "--tokenizer")
    theirs = sentencepiece.SentencePieceProcessor(model_proto=model)
    assert ours.vocab_size == theirs.vocab_size() == 1000
    assert ours.encode_batch(source_texts()) == theirs.encode(source_texts())
    assert not any(digits.isdigit() and len(digits) > 1 for digits in map(theirs.id_to_piece, range(1000)))
    assert any(set(theirs.id_to_piece(i)) == {SPACE} and len(theirs.id_to_piece(i)) >= 4 for i in range(1000))


def test_the_space_symbol_in_a_text_survives(tmp_path):
    (tmp_path / "x.model").write_bytes(train_tokenizer(source_texts(), 1000, "--train_tokenizer"))
    tokenizer = load_tokenizer(str(tmp_path / "x.model"), "--tokenizer")
    rng = random.Random(1)
    for _ in range(200):
        text = "".join(rng.choice([SPACE, ESCAPE, "0", "1", " ", "\n", "x"]) for _ in range(20))
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("texts", "size", "said"),
    [
        (["some text"] * 9, 4000, "at most"),
        (["some text"], 100, "at least"),
        ([], 500, "no text"),
        ([""], 500, "no text"),
    ],
)
def test_training_errors(texts, size, said):
    with pytest.raises(UserError, match=said) as caught:
        train_tokenizer(texts, size, "--train_tokenizer")
    assert "\n" not in str(caught.value) and str(size) in str(caught.value)


def test_models_that_cannot_be_reproduced_are_refused(tmp_path):
    for settings in ({"model_type": "char"}, {"model_type": "bpe", "user_defined_symbols": ["self."]}):
        train(tmp_path / "x.model", **settings)
        with pytest.raises(UserError, match=r"x\.model"):
            load_tokenizer(str(tmp_path / "x.model"), "--tokenizer")
