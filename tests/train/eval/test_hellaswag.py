"""HellaSwag: text and tokens as in lm-evaluation-harness, scores against a plain computation."""

import json

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.train.eval.hellaswag import HellaSwagQuestion, Score, evaluate_hellaswag, load_hellaswag, read_question

CPU = torch.device("cpu")

RAW = [
    {
        "ind": 24,
        "activity_label": "Roof shingle removal",
        "ctx_a": "A man is sitting on a roof.",
        "ctx_b": "he",
        "ctx": "A man is sitting on a roof. he",
        "endings": ["is using wrap to wrap a pair of skis.", "is ripping level tiles off.", "is holding.", "starts."],
        "label": "3",
    },
    {
        "activity_label": "How to bake",
        "ctx_a": "[header] How to bake [title] Mix the flour. [step] Take  a bowl.",
        "ctx_b": "",
        "endings": ["[substeps] Stir.", "Eat [title] it.", "Go.", "Run far away from it."],
        "label": 0,
    },
]


class Bytes:
    """A tokenizer of UTF-8 bytes, but "in" and "ing" are one token: so a boundary can move when texts are joined."""

    def encode(self, text: str) -> list[int]:
        data, ids = text.encode(), []
        while data:
            merged = next((m for m in (b"ing", b"in") if data.startswith(m)), None)
            ids.append({b"ing": 256, b"in": 257}.get(merged, data[0]))
            data = data[len(merged or b"x") :]
        return ids


class Causal(nn.Module):
    """A small causal model: each position sees the mean of the ones up to it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(258, 24)
        self.mix = nn.Linear(24, 24)
        self.head = nn.Linear(24, 258)
        self.shapes = set()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self.shapes.add(tuple(ids.shape))
        x = self.embed(ids)
        mean = x.cumsum(1) / torch.arange(1, ids.shape[1] + 1)[:, None]
        return self.head(torch.relu(self.mix(x + 3 * mean)))


@torch.no_grad()
def plain_scores(model: nn.Module, asked: HellaSwagQuestion, max_len: int) -> list[float]:
    """One ending at a time, unpadded, token by token."""
    scores = []
    for ending in asked.endings:
        start = len(Bytes().encode(asked.context))
        tokens = Bytes().encode(asked.context + " " + ending)
        first, cut = start, max(0, len(tokens) - max_len - 1)
        total = 0.0
        log_probs = model(torch.tensor([tokens[cut:-1]]))[0].double().log_softmax(-1)
        for position in range(max(first, cut + 1), len(tokens)):
            total += log_probs[position - cut - 1, tokens[position]].item()
        scores.append(total)
    return scores


def many_questions(count: int) -> list[HellaSwagQuestion]:
    generator = torch.Generator().manual_seed(1)

    def text(low, high):
        length = int(torch.randint(low, high, (1,), generator=generator))
        return "".join(chr(97 + c) for c in torch.randint(26, (length,), generator=generator).tolist())

    return [HellaSwagQuestion(text(3, 60), tuple(text(1, 25) for _ in range(4)), n % 4) for n in range(count)]


def test_a_published_row_becomes_the_text_of_the_harness():
    first, second = (read_question(row, "test") for row in RAW)
    assert first.context == "Roof shingle removal: A man is sitting on a roof. He"
    assert first.endings[0] == "is using wrap to wrap a pair of skis." and first.answer == 3
    # " [title]" is a full stop, other brackets go, and each pair of spaces becomes one
    assert second.context == "How to bake: How to bake. Mix the flour. Take a bowl."
    assert second.endings == (" Stir.", "Eat. it.", "Go.", "Run far away from it.")


def test_a_short_row_keeps_its_context():
    short = read_question({"ctx": "A dog [x] runs", "endings": ["on.", "off."], "label": 1}, "test")
    assert short == HellaSwagQuestion("A dog runs", ("on.", "off."), 1)


@pytest.mark.parametrize("max_len", [256, 40, 12])
@pytest.mark.parametrize("batch_size", [1, 7, 64])
def test_accuracies_are_those_of_a_plain_computation(max_len, batch_size):
    """Batching, padding, ordering and truncation change no answer."""
    model, asked = Causal(), many_questions(30)
    right = right_norm = 0
    for one in asked:
        scores = plain_scores(model, one, max_len)
        right += scores.index(max(scores)) == one.answer
        per_character = [s / len(e) for s, e in zip(scores, one.endings, strict=True)]
        right_norm += per_character.index(max(per_character)) == one.answer
    model.shapes.clear()
    got = evaluate_hellaswag(model, Bytes(), asked, batch_size=batch_size, max_len=max_len, device=CPU)
    assert got == Score(right / 30, right_norm / 30)
    assert got.accuracy != got.accuracy_norm, "the two accuracies should be told apart by this data"
    assert all(rows == batch_size and length in (64, 128, max_len) for rows, length in model.shapes)


def test_a_token_across_the_boundary_belongs_to_the_ending():
    """ "rin" + "g": the context alone ends in the token "in", the joined text has "ing" there."""
    asked = HellaSwagQuestion("he was r", ("inging", "owing"), 0)
    model = Causal()
    scores = plain_scores(model, asked, 64)
    got = evaluate_hellaswag(model, Bytes(), [asked], batch_size=2, max_len=64, device=CPU)
    assert got.accuracy == (scores[0] > scores[1])


def test_a_model_that_knows_the_answer_scores_one():
    asked = many_questions(12)
    follows = {}
    for one in asked:
        tokens = Bytes().encode(one.context + " " + one.endings[one.answer])
        for end in range(1, len(tokens)):
            follows[tuple(tokens[:end])] = tokens[end]

    def oracle(ids):
        out = torch.zeros(*ids.shape, 258)
        for row in range(ids.shape[0]):
            for position in range(ids.shape[1]):
                if (token := follows.get(tuple(ids[row, : position + 1].tolist()))) is not None:
                    out[row, position, token] = 20.0
        return out

    got = evaluate_hellaswag(oracle, Bytes(), asked, batch_size=8, max_len=128, device=CPU)
    assert got.accuracy == got.accuracy_norm == 1.0


def test_a_local_file_is_read_up_to_the_limit(tmp_path):
    path = tmp_path / "hellaswag.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in RAW) + "\n\n")
    assert len(load_hellaswag(str(path), None, "--hellaswag")) == 2
    assert load_hellaswag(str(path), 1, "--hellaswag") == [read_question(RAW[0], "test")]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "cannot read"),
        ("", "holds no questions"),
        ("{not json\n", "not a .jsonl"),
        ("[1, 2]\n", "line 1): not a HellaSwag question"),
        ('{"ctx": "a", "endings": ["b", "c"]}\n', "KeyError: 'label'"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": ""}\n', "test split has no labels"),
        ('{"ctx": "a", "endings": ["b", "c"], "label": 2}\n', "label 2 names none of the 2 endings"),
    ],
)
def test_a_bad_file_is_one_message(tmp_path, content, expected):
    path = tmp_path / "h.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as raised:
        load_hellaswag(str(path), None, "--hellaswag_file")
    message = str(raised.value)
    assert message.startswith("--hellaswag_file") and expected in message and str(path) in message


def test_without_the_hub_the_message_says_what_to_do(monkeypatch, tmp_path):
    pytest.importorskip("datasets")
    import datasets.config
    import huggingface_hub.constants

    for module in (huggingface_hub.constants, datasets.config):
        monkeypatch.setattr(module, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path)
    with pytest.raises(UserError, match=r"--hellaswag: .*Rowan/hellaswag.*could not be reached.*local \.jsonl"):
        load_hellaswag("hub", None, "--hellaswag")
