"""Text in pieces: whole characters, the tokenizer's spaces, and nothing of a stop string."""

import json

import pytest

from qtrain.data.tokenizers.tokenizer import ByteTokenizer, FastTokenizer
from qtrain.models import TextStream

BYTES = ByteTokenizer()


def sentencepiece_like() -> FastTokenizer:
    """Pieces with ▁ for a space, bytes for what has no piece, a decoder that drops the first space, as Llama 2's."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "a", "b", "▁a", "▁b", "ab", "▁ab"]
    decoders = [
        {"type": "Replace", "pattern": {"String": "▁"}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
        {"type": "Strip", "content": " ", "start": 1, "stop": 0},
    ]
    vocab = {piece: i for i, piece in enumerate(pieces)}
    model = {"type": "BPE", "vocab": vocab, "merges": [], "unk_token": "<unk>", "byte_fallback": True}
    parts = {"model": model, "decoder": {"type": "Sequence", "decoders": decoders}}
    return FastTokenizer("pieces", json.dumps({"version": "1.0", "added_tokens": [], **parts}), {})


SPM = sentencepiece_like()
IDS = dict(SPM.pieces())


def pushed(decode, prompt, ids, stops=()) -> tuple[list[str], TextStream]:
    stream = TextStream(decode, prompt, stops)
    pieces = []
    for token in ids:
        pieces.append(stream.push(token))
        if stream.stopped:
            break
    pieces.append(stream.end())
    assert "".join(pieces) == stream.text
    return pieces, stream


def test_a_character_comes_when_its_last_byte_has():
    pieces, _ = pushed(BYTES.decode, BYTES.encode("x"), BYTES.encode("aé€😀b"))
    assert pieces == ["a", "", "é", "", "", "€", "", "", "", "😀", "b", ""]


def test_bytes_of_a_sentencepiece_tokenizer_are_characters_too_and_the_first_space_stays():
    text = "😀€"
    ids = [IDS["▁a"], *(IDS[f"<0x{byte:02X}>"] for byte in text.encode()), IDS["▁ab"], IDS["b"]]
    pieces, stream = pushed(SPM.decode, [IDS["a"]], ids)
    assert stream.text == " a😀€ abb" and not any("\ufffd" in piece for piece in pieces)
    assert SPM.decode([IDS["a"], *ids]) == "a" + stream.text
    assert pieces[0] == " a" and pieces[4] == "😀" and pieces[7] == "€"


def test_what_never_becomes_a_character_comes_at_the_end():
    pieces, stream = pushed(BYTES.decode, [65], [0xE2, 0x82])
    assert pieces == ["", "", "\ufffd"] and stream.text == "\ufffd"
    _, stream = pushed(BYTES.decode, [65], [0xE2, 0x82, 66])
    assert stream.text == "\ufffdB"


@pytest.mark.parametrize(
    ("text", "stops", "before"),
    [
        ("one two STOP three", ["STOP"], "one two "),
        ("one\n\nUser: two", ["\nUser:"], "one\n"),
        ("SSTOP", ["STOP"], "S"),
        ("STOSTOP", ["STOP"], "STO"),
        ("aab", ["b", "ab"], "a"),
        ("é€ x", ["€"], "é"),
        ("STO", ["STOP"], None),
        ("nothing", ["STOP", "END"], None),
    ],
)
def test_a_stop_string_across_tokens_ends_the_text_before_it(text, stops, before):
    pieces, stream = pushed(BYTES.decode, [65], BYTES.encode(text), stops)
    assert stream.stopped is (before is not None)
    assert stream.text == (text if before is None else before)
    end = min((text.find(stop) + len(stop) for stop in stops if stop in text), default=len(text))
    assert BYTES.decode(stream.ids) == text.encode()[: len(text[:end].encode())].decode()
    assert all(not stop.startswith(pieces[0]) or pieces[0] == "" for stop in stops)
