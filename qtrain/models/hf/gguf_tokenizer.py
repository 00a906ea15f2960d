"""A tokenizer in a GGUF file, as llama.cpp runs it: byte-level BPE, whose merges it applies after a split by a pattern
that it knows by name, or sentencepiece's BPE, which joins the pair whose piece has the best score.

Both are read from tokenizer.json. A merge's place in its list is the score of the piece that it makes, with the sign
turned: sentencepiece's own scores give the same order (`data/tokenizers/sentencepiece_model.py`).
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtrain.models.hf.io import ExportableTokenizer

_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
PRE_TOKENIZERS = {rf"{_LETTERS}\p{{N}}{{1,3}}{_REST}": "llama-bpe", rf"{_LETTERS}\p{{N}}{_REST}": "qwen2"}
"""The regular expression that splits text -> llama.cpp's name for it."""
SPACE, ESCAPE = "\u2581", "\ue581"
"""What a space is encoded as, and what escapes it in models that `train_tokenizer` made."""
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
UNREACHED = -1e9
"""Score of a piece that no merge makes, below all others."""


def add_tokenizer(writer: Any, folder: Path, tokenizer: ExportableTokenizer, vocab_size: int) -> bool:
    """Add the vocabulary of the tokenizer.json in `folder`, with a piece for each of the `vocab_size` rows of the
    embedding. Of one that llama.cpp would not run alike, print a line. Returns whether it was added."""
    saved = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    is_bpe = saved["model"].get("type") == "BPE"
    pre = _pre_tokenizer(saved) if is_bpe else None
    if pre is not None:
        _add_pieces(writer, saved, vocab_size)
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        merges = saved["model"]["merges"]
        writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in merges])
    elif is_bpe and _is_sentencepiece(saved):
        pieces = _add_pieces(writer, saved, vocab_size)
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        writer.add_token_scores(_scores(saved, pieces))
        writer.add_add_space_prefix(any(step["type"] == "Prepend" for step in _normalizers(saved)))
        writer.add_remove_extra_whitespaces(False)
        first = ((saved.get("post_processor") or {}).get("single") or [{}])[0]
        writer.add_add_bos_token("SpecialToken" in first)  # llama.cpp adds one unless it is told
        if (unknown := saved["model"]["vocab"].get(saved["model"].get("unk_token"))) is not None:
            writer.add_unk_token_id(unknown)
    else:
        print(
            "note    the GGUF file has no tokenizer: llama.cpp is not known to run this one alike; its files are beside"
        )
        return False
    if tokenizer.bos_id is not None:
        writer.add_bos_token_id(tokenizer.bos_id)
    if tokenizer.eos_id is not None:
        writer.add_eos_token_id(tokenizer.eos_id)
    return True


def _add_pieces(writer: Any, saved: Mapping[str, Any], vocab_size: int) -> list[str]:
    """Add the pieces by id, and what each is. Returns them."""
    import gguf

    kinds, model = gguf.TokenType, saved["model"]
    added = {token["id"]: token for token in saved.get("added_tokens", ())}
    known = {number: piece for piece, number in model["vocab"].items()}
    known |= {number: token["content"] for number, token in added.items()}
    pieces = [known.get(i, f"[PAD{i}]") for i in range(max(vocab_size, max(known) + 1))]

    def kind(number: int, piece: str) -> Any:
        if number not in known:
            return kinds.UNUSED
        if model.get("byte_fallback") and _BYTE.fullmatch(piece):
            return kinds.BYTE
        if model.get("byte_fallback") and piece == model.get("unk_token"):
            return kinds.UNKNOWN
        if number in added:
            return kinds.CONTROL if added[number]["special"] else kinds.USER_DEFINED
        return kinds.NORMAL

    writer.add_token_list(pieces)
    writer.add_token_types([kind(number, piece) for number, piece in enumerate(pieces)])
    return pieces


def _scores(saved: Mapping[str, Any], pieces: list[str]) -> list[float]:
    """Of each piece: minus the place of the first merge that makes it. Single characters are made by none and are
    never compared."""
    found: dict[str, float] = {}
    for place, merge in enumerate(saved["model"]["merges"]):
        joined = merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
        found.setdefault(joined, -float(place))
    return [found.get(piece, UNREACHED) for piece in pieces]


def _normalizers(saved: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The steps before the split, in order."""
    normalizer = saved.get("normalizer") or {}
    return [step for step in normalizer.get("normalizers", [normalizer]) if step]


def _is_sentencepiece(saved: Mapping[str, Any]) -> bool:
    """Whether it is sentencepiece's BPE over the whole text, with spaces as SPACE, unknown characters as bytes and no
    other change of the text but for escapes of SPACE itself."""
    steps = [(step.get("type"), (step.get("pattern") or {}).get("String")) for step in _normalizers(saved)]
    escapes = [("Replace", pattern) for _, pattern in steps if pattern in (ESCAPE, SPACE)]
    rest = [step for step in steps if step not in escapes and step != ("Prepend", None)]
    model = saved["model"]
    plain = model.get("byte_fallback") and not model.get("ignore_merges") and not saved.get("pre_tokenizer")
    return bool(plain) and rest == [("Replace", " ")]


def _pre_tokenizer(model: dict[str, Any]) -> str | None:
    """llama.cpp's name of how a tokenizer.json splits text; None: it is not known."""
    steps = model.get("pre_tokenizer") or {}
    steps = steps.get("pretokenizers", [steps])
    patterns = [step["pattern"].get("Regex") for step in steps if step.get("type") == "Split"]
    if not patterns and any(step.get("type") == "ByteLevel" and step.get("use_regex", True) for step in steps):
        return "gpt-2"
    return PRE_TOKENIZERS.get(patterns[0]) if len(patterns) == 1 else None
