"""Every kind of tokenizer: lossless on real text, and equal, id for id, to what AutoTokenizer loads from its export."""

import json
import os
import pickle
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

from qtrain.core.errors import UserError
from qtrain.data.tokenizers.panics import muted_panics
from qtrain.data.tokenizers.sentencepiece_model import ESCAPE, SPACE, train_tokenizer
from qtrain.data.tokenizers.tokenizer import ALIASES, TOKENIZERS, load_tokenizer
from tests.data.corpora import source_texts
from tests.data.tokenizers.test_sentencepiece_model import train

ODD = [
    "",
    " ",
    "\n",
    "\t\tx\r\n\r",
    "  a  b  ",
    "\0",
    "a\0b",
    "\ufeffbom",
    "\U0010ffff\ud7ff\ue000",
    "e\u0301é",
    "日本語😀👩‍💻",
]
ODD += [
    "<|begin_of_text|>x <|end_of_text|>",
    "</s><s><unk>",
    "<|bos|><|eos|>",
    SPACE,
    ESCAPE,
    f"{ESCAPE}0{ESCAPE}1{SPACE}0 {SPACE}",
    "-" * 300,
    " " * 300,
    "<0x41>",
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    """Name of each kind -> what --tokenizer is given."""
    root = tmp_path_factory.mktemp("tokenizers")
    (root / "code.model").write_bytes(train_tokenizer(source_texts(), 1200, "--train_tokenizer"))
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    special = ["<|begin_of_text|>", "<|end_of_text|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    backend.train_from_iterator(
        source_texts(), trainers.BpeTrainer(vocab_size=900, special_tokens=special, initial_alphabet=alphabet)
    )
    backend.post_processor = processors.TemplateProcessing("<|begin_of_text|> $A", special_tokens=[(special[0], 0)])
    (root / "llama3ish").mkdir()
    backend.save(str(root / "llama3ish" / "tokenizer.json"))
    config = {
        "bos_token": special[0],
        "eos_token": {"content": special[1], "lstrip": False},
        "tokenizer_class": "LlamaTokenizerFast",
    }
    (root / "llama3ish" / "tokenizer_config.json").write_text(json.dumps(config | {"auto_map": {"x": "y"}}))
    (root / "llama3ish" / "chat_template.jinja").write_text("{{ messages }}")
    (root / "alone").mkdir()
    backend.save(str(root / "alone" / "tokenizer.json"))
    return {
        "byte": "byte",
        "sentencepiece": str(root / "code.model"),
        "folder": str(root / "llama3ish"),
        "file": str(root / "alone" / "tokenizer.json"),
    }


KINDS = ["byte", "sentencepiece", "folder", "file"]


@pytest.mark.parametrize("kind", KINDS)
def test_decoding_gives_the_text_back(paths, kind):
    tokenizer = load_tokenizer(paths[kind], "--tokenizer")
    texts = ODD + source_texts()
    for text, ids in zip(texts, tokenizer.encode_batch(texts), strict=True):
        assert tokenizer.decode(ids) == text
        assert ids == tokenizer.encode(text)
        assert all(0 <= i < tokenizer.vocab_size for i in ids)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model_type", [None, "llama"])
def test_autotokenizer_loads_the_export_with_the_same_ids(paths, kind, model_type, tmp_path):
    from transformers import AutoTokenizer

    tokenizer = load_tokenizer(paths[kind], "--tokenizer")
    tokenizer.save_hf(tmp_path)
    if model_type:  # an exported model stands beside it, whose type transformers would rather believe
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.bos_token_id, loaded.eos_token_id) == (tokenizer.bos_id, tokenizer.eos_id)
    assert len(loaded) == tokenizer.vocab_size
    for text in ODD + source_texts():
        ids = loaded(text, add_special_tokens=False)["input_ids"]
        assert ids == tokenizer.encode(text)
        assert loaded.decode(ids) == text
    if kind in ("byte", "sentencepiece"):  # made here: nothing is added to a text, as in training
        assert loaded("x = 1")["input_ids"] == tokenizer.encode("x = 1")
    if kind == "folder":
        assert loaded.chat_template == "{{ messages }}"


@pytest.mark.parametrize("kind", KINDS)
def test_export_loads_here_with_the_same_fingerprint(paths, kind, tmp_path):
    tokenizer = load_tokenizer(paths[kind], "--tokenizer")
    tokenizer.save_hf(tmp_path)
    copy = load_tokenizer(str(tmp_path), "--tokenizer")
    assert copy.fingerprint() == tokenizer.fingerprint()
    assert (copy.bos_id, copy.eos_id, copy.vocab_size) == (tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size)


@pytest.mark.parametrize("kind", KINDS)
def test_an_export_says_whether_a_space_is_put_before_a_text(paths, kind, tmp_path):
    """llama.cpp's converter reads this key and takes true where it is missing."""
    tokenizer = load_tokenizer(paths[kind], "--tokenizer")
    tokenizer.save_hf(tmp_path)
    pieces = dict((i, p) for p, i in tokenizer.pieces())
    first = "".join(pieces[i] for i in tokenizer.encode("x = 1"))[0]
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_prefix_space"] is (first != "x") is False


def test_second_readers_of_a_sentencepiece_export_give_its_ids(paths, tmp_path):
    """tokenizers reads tokenizer.json, sentencepiece the tokenizer.model that llama.cpp converts; also after training
    has read the tokenizer from a folder of both."""
    import sentencepiece

    load_tokenizer(paths["sentencepiece"], "--tokenizer").save_hf(tmp_path / "data")
    tokenizer = pickle.loads(pickle.dumps(load_tokenizer(str(tmp_path / "data"), "--tokenizer")))
    tokenizer.save_hf(tmp_path / "hf")
    other = Backend.from_file(str(tmp_path / "hf" / "tokenizer.json"))
    third = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "hf" / "tokenizer.model"))
    for text in source_texts():
        assert other.encode(text).ids == third.encode(text) == tokenizer.encode(text)


def test_a_model_with_a_dummy_prefix_says_so(tmp_path):
    theirs = train(tmp_path / "x.model", model_type="bpe", byte_fallback=True, remove_extra_whitespaces=False)
    tokenizer = load_tokenizer(str(tmp_path / "x.model"), "--tokenizer")
    tokenizer.save_hf(tmp_path)
    assert json.loads((tmp_path / "tokenizer_config.json").read_text())["add_prefix_space"] is True
    assert theirs.id_to_piece(tokenizer.encode("x = 1")[0]).startswith(SPACE)
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert all(loaded(t, add_special_tokens=False)["input_ids"] == theirs.encode(t) for t in source_texts())


def test_fingerprints_tell_tokenizers_apart(paths, tmp_path):
    (tmp_path / "other.model").write_bytes(train_tokenizer(source_texts()[:5], 1200, "--train_tokenizer"))
    names = [paths["byte"], paths["sentencepiece"], paths["folder"], str(tmp_path / "other.model")]
    assert len({load_tokenizer(name, "--tokenizer").fingerprint() for name in names}) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_pickled_for_a_worker_it_is_the_same(paths, kind):
    tokenizer = load_tokenizer(paths[kind], "--tokenizer")
    copy = pickle.loads(pickle.dumps(tokenizer))
    assert [copy.encode(text) for text in ODD] == [tokenizer.encode(text) for text in ODD]
    assert copy.fingerprint() == tokenizer.fingerprint()


def test_special_tokens_in_a_text_are_plain_text_for_our_own_kinds(paths):
    for kind in ("byte", "sentencepiece"):
        tokenizer = load_tokenizer(paths[kind], "--tokenizer")
        assert tokenizer.eos_id is not None
        assert not {tokenizer.bos_id, tokenizer.eos_id} & set(tokenizer.encode("<s></s><|bos|><|eos|>"))


def test_a_tokenizer_json_alone_still_has_its_eos(paths):
    assert load_tokenizer(paths["file"], "--tokenizer").eos_id == 1


def test_what_a_pipeline_puts_before_a_text_is_told_and_not_added(paths):
    found = {kind: load_tokenizer(path, "-") for kind, path in paths.items()}
    assert [len(found[kind].begin_ids()) for kind in KINDS] == [0, 0, 1, 1]
    folder = found["folder"]
    assert folder.begin_ids() == [folder.bos_id] and folder.bos_id not in folder.encode("a")


def test_byte_ids_are_bytes():
    tokenizer = load_tokenizer("byte", "--tokenizer")
    assert tokenizer.encode("é\n") == [0xC3, 0xA9, 10]
    assert tokenizer.decode([0xC3, 65, 257]) == "\ufffdA<|eos|>"


def test_listing_has_every_alias():
    assert {"byte", *ALIASES} == set(TOKENIZERS) and all(TOKENIZERS.values())


@pytest.fixture
def offline(monkeypatch):
    import huggingface_hub.constants

    from qtrain.core.hub import hub_reachable

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    hub_reachable.cache_clear()
    yield
    hub_reachable.cache_clear()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("lama2", "'llama2'"),
        ("llama2", "could not be reached"),
        ("nobody/nothing-here", "could not be reached"),
        ("gone.model", "does not exist"),
        ("./nowhere", "does not exist"),
        ("a/b/c", "does not exist"),
        ("two words", "Allowed: byte"),
        ("{tmp}/empty", "neither tokenizer.json nor tokenizer.model"),
        ("{tmp}/bad.json", "is not a tokenizer.json"),
        ("{tmp}/bad.model", "is not a sentencepiece model"),
        ("{tmp}/short.model", "is not a sentencepiece model"),
        ("{tmp}/broken", "not valid JSON"),
    ],
)
def test_errors_are_one_line(name, said, paths, tmp_path, offline):
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad.json").write_text('{"version": "1.0"}')
    (tmp_path / "bad.model").write_bytes(b"no protocol buffer\n" * 10)
    (tmp_path / "short.model").write_bytes(Path(paths["sentencepiece"]).read_bytes()[:-100])
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text("{}")
    (tmp_path / "broken" / "tokenizer_config.json").write_text("{")
    with pytest.raises(UserError, match=r"^--tokenizer") as caught:
        load_tokenizer(name.format(tmp=tmp_path), "--tokenizer")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("step", ["normalizer", "pre_tokenizer"])
def test_a_pattern_that_backtracks_without_end(step, tmp_path, capfd):
    """pyo3's PanicException is no Exception, and no process of a pool can send it. Rust's backtrace is held back."""
    backend = Backend(models.WordLevel({"<unk>": 0, "</s>": 1}, unk_token="<unk>"))
    pattern = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
    if step == "pre_tokenizer":
        pattern = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    (tmp_path / "bad.json").write_text(json.dumps({**json.loads(backend.to_str()), step: pattern}))
    tokenizer = load_tokenizer(str(tmp_path / "bad.json"), "--tokenizer")
    with pytest.raises(UserError) as caught:
        tokenizer.encode_batch(["fine", "a" * 3000 + "b"])
    said = f"the tokenizer '{tmp_path}/bad.json' cannot process a text of at most 3,001 characters: a pattern (regex)"
    assert str(caught.value).startswith(said) and "\n" not in str(caught.value)
    assert "bad.json" in str(pickle.loads(pickle.dumps(caught.value)))
    assert capfd.readouterr() == ("", "")
    with muted_panics():
        os.write(2, b"kept")
    assert capfd.readouterr().err == "kept"
