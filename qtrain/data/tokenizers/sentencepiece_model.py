"""sentencepiece .model files: converted for the `tokenizers` library, and trained for code.

A .model file is a protocol buffer (sentencepiece_model.proto): pieces with scores and types, and the settings of the
trainer and the normalizer. This file reads the few fields that matter and builds the same tokenizer from components of
`tokenizers`: normalizer (spaces become U+2581), BPE or unigram with byte fallback, and the inverse decoder. BPE merges
follow from the pieces: sentencepiece joins the pair whose joint piece has the best score, so the pairs sorted by that
score are the merge list. Ids are identical to sentencepiece's, except that the two libraries may break ties between
equally likely segmentations of a unigram model differently (in about one line of code in a thousand).

Models trained here are lossless for every text: no normalization, no dummy prefix, whitespace kept, byte fallback. One
character needs an escape: sentencepiece encodes a space as U+2581, so a U+2581 in the text would decode to a space. A
private-use character ESCAPE, a user-defined piece of these models, encodes both: ESCAPE "1" is U+2581 and ESCAPE "0" is
ESCAPE itself.
"""

import io
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtrain.core.errors import UserError, first_line

if TYPE_CHECKING:
    from tokenizers.models import Model

SPACE = "\u2581"
ESCAPE = "\ue581"
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # SentencePiece.Type
UNIGRAM, BPE = 1, 2  # TrainerSpec.ModelType
TRAINING_CHARACTERS = 20_000_000
MAX_LINE_BYTES = 1 << 16


def convert_sentencepiece(model: bytes, path: str | Path, flag: str) -> tuple[str, dict[str, Any]]:
    """(text of tokenizer.json, tokenizer_config) from the bytes of a .model file. UserErrors name `flag` and `path`."""
    from tokenizers import AddedToken
    from tokenizers import Tokenizer as Backend

    try:
        pieces, trainer, normalizer = _read_model(model)
    except (ValueError, TypeError, LookupError, struct.error) as error:
        raise UserError(f"{flag}: {path} is not a sentencepiece model: {error}") from None
    kind = trainer.get(3, UNIGRAM)
    if kind not in (UNIGRAM, BPE):
        raise UserError(f"{flag}: {path} is a word or character model; only BPE and unigram models can be used.")
    own_symbols = any(type_ == USER_DEFINED for _, _, type_ in pieces)
    if trainer.get(24, 0) or (own_symbols and (normalizer.get(3, 1) or normalizer.get(4, 1))):
        raise UserError(
            f"{flag}: {path} treats whitespace as a suffix, or has user-defined symbols and whitespace rules; its "
            "ids could not be reproduced. Give its tokenizer.json instead."
        )
    backend = Backend(_model(pieces, kind, byte_fallback=bool(trainer.get(35, 0))))
    escaped = (ESCAPE, USER_DEFINED) in {(piece, type_) for piece, _, type_ in pieces}
    _set_text_rules(backend, normalizer, escaped)
    backend.add_special_tokens([piece for piece, _, type_ in pieces if type_ in (UNKNOWN, CONTROL)])
    symbols = [p for p, _, type_ in pieces if type_ == USER_DEFINED and p != ESCAPE and " " not in p]
    backend.add_tokens([AddedToken(p, normalized=True, special=False) for p in symbols])
    config: dict[str, Any] = {"split_special_tokens": True}  # sentencepiece never encodes "</s>" in a text as eos
    for key, field, default in (("unk_token", 40, 0), ("bos_token", 41, 1), ("eos_token", 42, 2)):
        if 0 <= trainer.get(field, default) < len(pieces):
            config[key] = pieces[trainer.get(field, default)][0]
    return backend.to_str(), config


def _model(pieces: list[tuple[str, float, int]], kind: int, byte_fallback: bool) -> "Model":
    from tokenizers import models

    unknown = next((i for i, (_, _, type_) in enumerate(pieces) if type_ == UNKNOWN), None)
    if kind == UNIGRAM:
        return models.Unigram([(piece, score) for piece, score, _ in pieces], unknown, byte_fallback)
    vocab = {piece: i for i, (piece, _, _) in enumerate(pieces)}  # ids are places in the file
    merges = []
    for piece, score, type_ in pieces:
        if type_ == NORMAL:
            # Every pair of pieces that makes this one; its score is the pair's rank.
            cuts = ((piece[:k], piece[k:]) for k in range(len(piece) - 1, 0, -1))
            merges += [(-score, cut) for cut in cuts if cut[0] in vocab and cut[1] in vocab]
    merges.sort(key=lambda merge: merge[0])  # stable: pairs of one piece keep the order of their cuts
    unknown_piece = None if unknown is None else pieces[unknown][0]
    return models.BPE(
        vocab, [m[1] for m in merges], unk_token=unknown_piece, byte_fallback=byte_fallback, fuse_unk=True
    )


def _set_text_rules(backend: Any, normalizer: dict[int, Any], escaped: bool) -> None:
    """Set the backend's normalizer as NormalizerSpec says, and the inverse decoder."""
    from tokenizers import Regex, decoders, normalizers

    before: list[Any] = []
    after: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if normalizer.get(2):
        before.append(normalizers.Precompiled(normalizer[2]))
    if normalizer.get(4, 1):  # remove_extra_whitespaces
        before += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if escaped:
        before += [normalizers.Replace(ESCAPE, ESCAPE + "0"), normalizers.Replace(SPACE, ESCAPE + "1")]
        after += [decoders.Replace(ESCAPE + "1", SPACE), decoders.Replace(ESCAPE + "0", ESCAPE)]
    if normalizer.get(3, 1):  # add_dummy_prefix
        before.append(normalizers.Prepend(SPACE))
        after.append(decoders.Strip(" ", 1, 0))
    if normalizer.get(5, 1):  # escape_whitespaces
        before.append(normalizers.Replace(" ", SPACE))
    backend.normalizer = normalizers.Sequence(before)
    backend.decoder = decoders.Sequence(after)


def _read_model(data: bytes) -> tuple[list[tuple[str, float, int]], dict[int, Any], dict[int, Any]]:
    """([(piece, score, type)], trainer settings, normalizer settings) of a ModelProto; settings by field number."""
    pieces, trainer, normalizer = [], {}, {}
    for field, value in _fields(data):
        if field == 1:
            piece = dict(_fields(value))
            pieces.append((piece[1].decode(), struct.unpack("<f", piece[2])[0] if 2 in piece else 0.0, piece.get(3, 1)))
        elif field == 2:
            trainer = dict(_fields(value))
        elif field == 3:
            normalizer = dict(_fields(value))
    if not pieces:
        raise ValueError("it holds no pieces")
    return pieces, trainer, normalizer


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """(field number, value) of a protocol buffer message; integers are decoded, other values are bytes."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value - (1 << 64) if value >> 63 else value  # int32 and int64 are two's complement

    while at < len(data):
        key = varint()
        wire = key & 7  # 0: varint, 1: 8 bytes, 2: length-delimited, 5: 4 bytes
        if wire == 0:
            yield key >> 3, varint()
            continue
        if wire not in (1, 2, 5):
            raise ValueError("it is not a protocol buffer")
        size = {1: 8, 5: 4}.get(wire) or varint()  # fixed, or stated before the bytes
        if not 0 <= size <= len(data) - at:
            raise ValueError("it is truncated")
        yield key >> 3, data[at : at + size]
        at += size


def train_tokenizer(texts: Iterable[str], vocab_size: int, flag: str) -> bytes:
    """Train a BPE model of `vocab_size` pieces (256 bytes, unk, bos and eos included); returns the bytes of the .model.

    Reads at most TRAINING_CHARACTERS of `texts`, so give them in random order. The same texts give the same file."""
    import sentencepiece

    file = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=_lines(texts),
            model_writer=file,
            model_type="bpe",
            vocab_size=vocab_size,
            byte_fallback=True,
            normalization_rule_name="identity",
            add_dummy_prefix=False,
            remove_extra_whitespaces=False,
            allow_whitespace_only_pieces=True,  # indentation in one piece
            split_digits=True,
            character_coverage=0.9995,
            user_defined_symbols=[ESCAPE],
            max_sentence_length=MAX_LINE_BYTES,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            pad_id=-1,
            num_threads=8,  # fixed, because it is stored in the file
            minloglevel=2,
        )
    except (RuntimeError, ValueError) as error:
        raise UserError(f"{flag}: {vocab_size} pieces cannot be trained on this text. {_reason(str(error))}") from None
    return file.getvalue()


def _lines(texts: Iterable[str]) -> Iterator[str]:
    left = TRAINING_CHARACTERS
    for text in texts:
        # Escaped as the converted tokenizer will: pieces are learned from what it encodes.
        for line in text.replace(ESCAPE, ESCAPE + "0").replace(SPACE, ESCAPE + "1").split("\n"):
            if line and "\0" not in line:
                yield line
        left -= len(text)
        if left <= 0:
            return


def _reason(error: str) -> str:
    if "too high" in error:  # "... Vocabulary size too high (4000). Please set it to a value <= 286."
        return f"Give at most {error.rsplit('<=', 1)[1].strip(' .')}, or more text."
    if "smaller than required_chars" in error:  # "... 100 vs 349. Increase vocab_size ..."
        return f"Give at least {error.split(' vs ')[1].split('.')[0]}."
    return "There is no text to train on." if "sentences_.empty()" in error else first_line(error)
