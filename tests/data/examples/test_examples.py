"""Examples to samples: what is learned, packing and padding, what is left out and counted, and chats."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer as Backend
from tokenizers.models import WordLevel

from qtrain.core.errors import UserError
from qtrain.data.batch import IGNORED, Batch
from qtrain.data.examples.chat_dataset import CHAT_TEMPLATES, ChatRenderer
from qtrain.data.examples.example_packing import Example, pack_examples, pad_examples
from qtrain.data.examples.instruct_dataset import PRESETS, Text, make_template
from qtrain.data.stream import DATASETS, StreamContext, open_stream, with_chat_template
from qtrain.data.tokenizers.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.corpora import write_questions

FLAG = "--train_ds"
EOS = 257


@pytest.fixture
def questions(tmp_path) -> Path:
    write_questions(tmp_path / "questions.jsonl")
    return tmp_path / "questions.jsonl"


def spec(path: Path, **changes) -> dict:
    return {"type": "instruct", "dataset": str(path), "template": "gsm8k", "tokenizer": "byte", **changes}


def epoch(given: dict, **context) -> list:
    stream, samples = open_stream(given, StreamContext(**{"seq_len": 150, "epochs": 1, **context}), FLAG), []
    while True:
        try:
            samples.append(stream.next_sample())
        except StopIteration:
            return samples


def learned(batch: Batch) -> list[str]:
    """The text of every run of labels that count."""
    found = []
    for row in batch.labels.tolist():
        runs = bytes({IGNORED: 0, EOS: 4}.get(i, i) for i in row)
        found += [run.decode() for run in runs.split(b"\0") if run]
    return found


@pytest.mark.parametrize("multiple", [0, 50])
def test_what_is_learned_is_every_answer_and_its_end_token_and_nothing_else(questions, multiple):
    batch = Batch.of(epoch(spec(questions), seq_len_multiple=multiple))
    answers = [json.loads(line)["answer"] + "\x04" for line in questions.read_text().splitlines()]
    assert sorted(learned(batch)) == sorted(answers)


def test_train_on_all_learns_prompts_too_but_not_across_examples(questions):
    batch = Batch.of(epoch(spec(questions, train_on_all=True)))
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    texts = [f"Question: {r['question']}\nAnswer: {r['answer']}\x04"[1:] for r in rows]
    assert sorted(learned(batch)) == sorted(texts)


def test_packed_documents_are_whole_and_numbered(questions):
    samples = epoch(spec(questions))
    assert all(len(s.tokens) == 151 and s.doc_ids.shape == (150,) for s in samples)
    for sample in samples:
        for number in range(int(sample.doc_ids[-1] if sample.doc_ids[-1] else 1)):
            places = np.flatnonzero(sample.doc_ids == number)
            text = bytes(i for i in sample.tokens[places].tolist() if i < 256).decode()
            assert text.startswith("Question: ") and text.count("Question") == 1
    lengths = [len(f"Question: {r['question']}\nAnswer: {r['answer']}") + 1 for r in map(json.loads, questions.open())]
    assert len(samples) <= 1.2 * sum(lengths) / 151 + 1


def test_padded_samples_share_lengths_in_groups(questions):
    samples = epoch(spec(questions), seq_len_multiple=25, micro_batch_size=4)
    lengths = [len(s.tokens) - 1 for s in samples]
    assert len(samples) == 60 and all(n % 25 == 0 for n in lengths)
    groups = [set(lengths[at : at + 4]) for at in range(0, 60, 4)]
    assert all(len(group) == 1 for group in groups) and len(set(lengths)) > 1
    assert lengths != sorted(lengths)


@pytest.mark.parametrize(
    ("changed", "flag"),
    [({"seq_len_multiple": 50}, "seq_len_multiple"), ({"micro_batch_size": 2}, "micro_batch_size")],
)
def test_a_position_of_other_settings_names_the_flag(questions, changed, flag):
    settings = {"seq_len_multiple": 25, "micro_batch_size": 4}
    position = open_stream(spec(questions), StreamContext(150, **settings), FLAG).position()
    old, new = settings[flag], changed[flag]
    with pytest.raises(UserError, match=f"^--{flag}: cannot resume: .* had --{flag} {old}, this one has {new}"):
        open_stream(spec(questions), StreamContext(150, **{**settings, **changed}), FLAG).seek(position)


def test_examples_longer_than_a_sample_are_dropped_or_cut_and_counted(questions):
    rows = [json.loads(line) for line in questions.read_text().splitlines()]
    lengths = [len(f"Question: {r['question']}\nAnswer: {r['answer']}") + 1 for r in rows]
    limit = sorted(lengths)[40]
    over = sum(n > limit + 1 for n in lengths)
    for kind, key in (("drop", "dropped"), ("cut", "cut")):
        stream = open_stream(spec(questions, too_long=kind), StreamContext(limit, epochs=1), FLAG)
        samples = [stream.next_sample()]
        position = stream.position()
        assert position["read"] == 60 and position[key] == over > 0
        assert position["dropped"] + position["cut"] == over
        assert len(samples[0].tokens) == limit + 1


def test_empty_answers_are_left_out_and_counted(questions):
    rows = [{"question": "a", "answer": ""}, {"question": "b", "answer": None}, {"question": "c", "answer": "d"}]
    questions.write_text("".join(json.dumps(r) + "\n" for r in rows))
    stream = open_stream(spec(questions), StreamContext(64, epochs=2), FLAG)
    stream.next_sample()
    assert stream.position()["empty"] == 2


def test_parts_share_the_examples(questions):
    found = {p: sum(map(len, map(learned_of, epoch(spec(questions, part=p, validation_fraction=0.3))))) for p in PARTS}
    assert found["all"] == found["train"] + found["validation"] == 60 and found["validation"] > 5


PARTS = ("all", "train", "validation")


def learned_of(sample) -> list[str]:
    return learned(Batch.of([sample]))


def test_packing_wastes_little():
    rng = np.random.default_rng(0)
    examples = [Example(np.arange(n), np.ones(n, bool)) for n in rng.integers(20, 300, 1000).tolist()]
    samples = pack_examples(examples, 1024, EOS)
    assert sum(len(e.ids) for e in examples) / (1025 * len(samples)) > 0.98
    assert all(len(group) <= 3 for group in pad_examples(examples, 64, 3, EOS))


# ---- templates -------------------------------------------------------------------------------------------------------


def test_presets_fill_in():
    row = {"instruction": "Add.", "input": "1 2", "output": "3"}
    prompt, answer = make_template("alpaca", FLAG).fill(row, FLAG)
    assert "paired with an input" in prompt and "### Input:\n1 2\n" in prompt and answer == "3"
    prompt, _ = make_template("alpaca", FLAG).fill({**row, "input": ""}, FLAG)
    assert "paired" not in prompt and "### Input" not in prompt
    assert set(PRESETS) == {"alpaca", "gsm8k", "metamathqa"}
    own = make_template({"prompt": "{{{a}}} and {b}", "answer": "{c}"}, FLAG)
    assert own.fill({"a": "{x}", "b": 3, "c": 1.5}, FLAG) == ("{{x}} and 3", "1.5") and own.columns == ("a", "b", "c")


@pytest.mark.parametrize("text", ["{a.b}", "{a[0]}", "{a!r}", "{a:>9}", "{}", "{a", "}", "{a.__class__}", "{0.x}"])
def test_a_template_can_do_nothing_but_put_text_into_text(text):
    with pytest.raises(UserError, match="the template is broken"):
        Text(text, FLAG)


# ---- chats -----------------------------------------------------------------------------------------------------------


def chat(path: Path, **changes) -> dict:
    return {"type": "chat", "dataset": str(path), "template": "chatml", "tokenizer": "byte", **changes}


def test_only_the_assistants_turns_are_learned(questions):
    batch = Batch.of(epoch(chat(questions), seq_len=300))
    rows = [json.loads(line)["messages"] for line in questions.read_text().splitlines()]
    answers = [m["content"] + "<|im_end|>\n" for row in rows for m in row if m["role"] == "assistant"]
    assert sorted(text.removesuffix("\x04") for text in learned(batch)) == sorted(answers)
    assert sum(text.endswith("\x04") for text in learned(batch)) == 60  # the end, once each


def test_the_tokenizers_own_template_and_other_words_for_roles(tmp_path):
    words = Backend(WordLevel({"a": 0, "b": 1, "[UNK]": 2, "</s>": 3}, unk_token="[UNK]"))
    words.add_special_tokens(["</s>"])
    words.save(str(tmp_path / "tokenizer.json"))
    end = "{% if m['role'] == 'assistant' %}{{ eos_token }}{% endif %}"
    template = "{% for m in messages %}{{ m['content'] }}" + end + "{% endfor %}"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "chat_template": template}))
    assert load_tokenizer(str(tmp_path), FLAG).chat_template == template
    turns = [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]
    (tmp_path / "x.jsonl").write_text(json.dumps({"conversations": turns}) + "\n")
    given = chat(tmp_path / "x.jsonl", tokenizer=str(tmp_path), template=None, messages="conversations")
    (sample,) = epoch({k: v for k, v in given.items() if v is not None}, seq_len=8)
    assert sample.tokens[:4].tolist() == [0, 1, 3, 3]  # the template writes the end token; then filling
    assert sample.trained.tolist() == [True, True] + [False] * 6


@pytest.mark.parametrize("name", ["q.jsonl.gz", "q.jsonl.bz2", "q.jsonl.xz", "q.arrow", "q.jsonl"])
def test_local_files_of_every_kind_give_the_same_samples(name, tmp_path):
    """Compressed, and in Arrow's stream format."""
    import bz2
    import gzip
    import lzma

    import pyarrow.json

    write_questions(tmp_path / "plain.jsonl")
    data = (tmp_path / "plain.jsonl").read_bytes()
    path = tmp_path / name
    if name.endswith(".arrow"):
        table = pyarrow.json.read_json(tmp_path / "plain.jsonl")
        with pyarrow.ipc.new_stream(path, table.schema) as writer:
            writer.write_table(table)
    else:
        packers = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress, ".jsonl": bytes}
        path.write_bytes(packers[path.suffix](data))
    options = {"type": "instruct", "template": "gsm8k", "tokenizer": "byte"}
    streams = [
        open_stream({**options, "dataset": str(file)}, StreamContext(seq_len=128, seed=1), "--train_ds")
        for file in (path, tmp_path / "plain.jsonl")
    ]
    for _ in range(5):
        first, second = (stream.next_sample() for stream in streams)
        assert np.array_equal(first.tokens, second.tokens)


def test_a_file_of_another_kind_is_not_a_missing_folder(tmp_path):
    (tmp_path / "q.xls").write_bytes(b"x")
    spec = {"type": "instruct", "template": "gsm8k", "tokenizer": "byte", "dataset": str(tmp_path / "q.xls")}
    with pytest.raises(UserError, match=r"q\.xls' cannot be read by its ending; allowed: \.jsonl"):
        open_stream(spec, StreamContext(seq_len=128, seed=1), "--train_ds")


def test_too_long_is_not_advised_where_it_is_set(tmp_path):
    write_questions(tmp_path / "q.jsonl")
    spec = {"type": "instruct", "template": "gsm8k", "tokenizer": "byte", "dataset": str(tmp_path / "q.jsonl")}
    for too_long, advised in (("drop", True), ("cut", False)):
        with pytest.raises(UserError, match=r"Raise --seq_len") as caught:
            stream = open_stream({**spec, "too_long": too_long}, StreamContext(seq_len=2, seed=1), "--train_ds")
            stream.next_sample()
        assert ("too_long to 'cut'" in str(caught.value)) is advised


QUESTION, ANSWER = "What is 2 + 2, {x} and \\n?\n\tÜ 😀 '\"", "It's 4 {{ 5 }}.\n#### 4"
WITH_TEMPLATES = {
    **{name: {"type": "instruct", "template": name} for name in PRESETS},
    "own": {"type": "instruct", "template": {"prompt": '{{%}} Q\'s "{q}" \\\n😀:', "answer": " {a}!"}},
    **{name: {"type": "chat", "template": name} for name in CHAT_TEMPLATES},
}


def test_a_question_is_opened_and_an_answer_closed_as_in_training():
    """Also by a template whose rendered answers do not begin with what opens one, as of models that reason first."""
    plain, reasons = (
        ChatRenderer(template, "messages", ByteTokenizer(), FLAG)
        for template in (
            CHAT_TEMPLATES["chatml"],
            "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s> {% endfor %}"
            "{% if add_generation_prompt %}<assistant><think>{% endif %}",
        )
    )
    asked = [{"from": "human", "value": "Why?"}]
    assert plain.prompt(asked) == "<|im_start|>user\nWhy?<|im_end|>\n<|im_start|>assistant\n"
    assert plain.end_of_turn() == "<|im_end|>"
    assert reasons.prompt(asked) == "<user>Why?</s> <assistant><think>" and reasons.end_of_turn() == "</s>"
    for broken, says in (([], "no list of messages"), ([*asked, {"from": "gpt", "value": "So."}], "the assistant's")):
        with pytest.raises(UserError, match=says):
            plain.prompt(broken)


@pytest.mark.parametrize("name", WITH_TEMPLATES)
@pytest.mark.parametrize("backend", ["byte", "fast"])
def test_the_exported_chat_template_renders_the_text_of_the_training(tmp_path, name, backend):
    from transformers import AutoTokenizer

    given = WITH_TEMPLATES[name]
    turns = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": ANSWER}]
    columns = {"instruction": QUESTION, "question": QUESTION, "query": QUESTION, "q": QUESTION, "input": ""}
    columns |= {"output": ANSWER, "answer": ANSWER, "response": ANSWER, "a": ANSWER, "messages": turns}
    (tmp_path / "rows.jsonl").write_text(json.dumps(columns) + "\n")
    ByteTokenizer().save_hf(tmp_path / "fast")
    tokenizer = load_tokenizer("byte" if backend == "byte" else str(tmp_path / "fast"), FLAG)
    spec = {**given, "dataset": str(tmp_path / "rows.jsonl"), "tokenizer": tokenizer.name}
    (segments,) = DATASETS.make_typed(spec, FLAG).examples(StreamContext(64), FLAG)
    with_chat_template(tokenizer, spec, FLAG).save_hf(tmp_path / "hf")
    exported = AutoTokenizer.from_pretrained(tmp_path / "hf")
    assert exported.apply_chat_template(turns, tokenize=False) == "".join(s.text for s in segments)
    asked = exported.apply_chat_template(turns[:1], tokenize=False, add_generation_prompt=True)
    assert asked == segments[0].text
    assert load_tokenizer(str(tmp_path / "hf"), FLAG).chat_template == exported.chat_template


def test_a_template_replaces_the_tokenizers_own_where_it_is_a_chats(tmp_path):
    own = ByteTokenizer().with_chat_template("own")
    given = {"dataset": "rows.jsonl", "tokenizer": "byte"}
    kept = [{"type": "instruct", **given}, {"type": "chat", **given}]
    chatml = {"type": "chat", "template": "chatml", **given}
    kept.append({"type": "mix", "datasets": [{**spec, "weight": 1} for spec in kept]})
    assert {with_chat_template(own, spec, FLAG).chat_template for spec in kept} == {"own"}
    mixed = {"type": "mix", "datasets": [{**spec, "weight": 1} for spec in (kept[0], chatml)]}
    for spec in (chatml, mixed):
        assert with_chat_template(own, spec, FLAG).chat_template == CHAT_TEMPLATES["chatml"]
    own.save_hf(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": "in the config"}))
    (tmp_path / "chat_template.jinja").unlink()
    read = load_tokenizer(str(tmp_path), FLAG)
    assert read.chat_template == "in the config"
    with_chat_template(read, chatml, FLAG).save_hf(tmp_path)
    assert load_tokenizer(str(tmp_path), FLAG).chat_template == CHAT_TEMPLATES["chatml"]
