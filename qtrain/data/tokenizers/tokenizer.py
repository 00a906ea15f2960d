"""Text to token ids and back: one interface over bytes, sentencepiece files, tokenizer.json and the hub.

All but `byte` run on the Rust library `tokenizers`, sentencepiece files included, which are converted when read
(`sentencepiece_model.py`). So training uses the same code as `AutoTokenizer.from_pretrained` on the files that
`save_hf` writes.
"""

import contextlib
import copy
import hashlib
import json
import re
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qtrain.core.checks import read_json, user_path
from qtrain.core.checksums import check_checksums
from qtrain.core.errors import NotHere, UserError, did_you_mean, first_line, os_errors
from qtrain.core.hub import hub_reachable, reaching_hub
from qtrain.core.reading import refuse_special
from qtrain.data.tokenizers.panics import muted_panics
from qtrain.data.tokenizers.sentencepiece_model import convert_sentencepiece

ALIASES = {
    "llama2": ("NousResearch/Llama-2-7b-hf", "Llama 2's 32,000 pieces, from an ungated mirror"),
    "llama3": ("NousResearch/Meta-Llama-3-8B", "Llama 3's 128,256 pieces, from an ungated mirror"),
    "mistral": ("mistral-community/Mistral-7B-v0.2", "Mistral 7B's 32,000 pieces, from an ungated mirror"),
    "qwen2.5": ("Qwen/Qwen2.5-0.5B", "Qwen2.5's 151,665 pieces"),
}

TOKENIZERS: dict[str, str] = {
    "byte": "the 256 bytes, bos and eos; needs no file",
    **{name: f"{line} ({repo})" for name, (repo, line) in ALIASES.items()},
}
"""Names that `load_tokenizer` knows -> their lines in `--list`."""

OTHER_FORMS = "a sentencepiece .model file, a tokenizer.json, a folder with one of them, or a hub id"

HUB_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
USUAL_EOS = ["</s>", "<|endoftext|>", "<|end_of_text|>", "<|eos|>", "<eos>"]
USUAL_BOS = ["<s>", "<|begin_of_text|>", "<|bos|>", "<bos>"]

NESTED_QUANTIFIER = re.compile(r"[+*}]\)+[+*{]")
"""A repeated group that ends in a repetition, such as (a+)+: it may backtrack without end."""

PROBE = (
    "The quick brown fox jumps over 13 lazy dogs; it's 3.14159, isn't it?\n\n\tdef f(x: int = 0) -> str:\r\n"
    "        return {'key': [x ** 2, ...]}  # ünïcödé — “quotes” № ½ ≤ ∑ → ▁ \u200b\u00a0\n"
    "Привет, мир! 你好,世界。 こんにちは 안녕하세요 नमस्ते مرحبا שלום ไทย 😀👩‍💻 <s> </s> <|endoftext|> 1234567890   \n"
)


class Tokenizer(ABC):
    """Text to ids, without added special tokens. `vocab_size`: the largest id plus one."""

    name: str
    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    chat_template: str | None = None
    """Jinja template that renders a conversation as text, as in transformers."""

    @abstractmethod
    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text."""

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens included; invalid UTF-8 becomes U+FFFD."""

    @abstractmethod
    def save_hf(self, folder: str | Path) -> None:
        """Write tokenizer.json and tokenizer_config.json: `AutoTokenizer.from_pretrained(folder)` gives these ids."""

    @abstractmethod
    def pieces(self) -> list[tuple[str, int]]:
        """(piece, id) of the whole vocabulary in the order of ids, spelled as in tokenizer.json."""

    def begin_ids(self) -> list[int]:
        """The special tokens that its pipeline puts before a text, as Llama's <s>."""
        return []

    def with_chat_template(self, template: str) -> "Tokenizer":
        """The same tokenizer with another chat template."""
        other = copy.copy(self)
        other.chat_template = template
        return other

    def encode(self, text: str) -> list[int]:
        return self.encode_batch([text])[0]

    def fingerprint(self) -> str:
        """16 hex digits, equal for tokenizers with the same pieces that segment PROBE, a text of many scripts, equally.

        It does not depend on the file format, so the copy of a tokenizer in a dataset matches its original."""
        # Pieces alone do not tell normalizers and pre-tokenizers apart: PROBE does.
        described = [self.vocab_size, self.bos_id, self.eos_id, self.pieces(), self.encode(PROBE)]
        return hashlib.sha256(json.dumps(described).encode()).hexdigest()[:16]


class ByteTokenizer(Tokenizer):
    """Ids 0-255 are the bytes of the UTF-8 text, 256 is bos, 257 is eos."""

    name = "byte"
    bos_id, eos_id, vocab_size = 256, 257, 258

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        return [list(text.encode()) for text in texts]

    def decode(self, ids: Sequence[int]) -> str:
        special = {256: b"<|bos|>", 257: b"<|eos|>"}
        return b"".join(special.get(i) or bytes([i]) for i in ids).decode(errors="replace")

    def pieces(self) -> list[tuple[str, int]]:
        # Byte-level tokenizer.json files spell a byte as a printable character: itself, or one from U+0100 on.
        printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
        others = [b for b in range(256) if b not in printable]
        spelled = {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}
        return [(spelled[b], b) for b in range(256)] + [("<|bos|>", 256), ("<|eos|>", 257)]

    def save_hf(self, folder: str | Path) -> None:
        from tokenizers import Tokenizer as Backend
        from tokenizers import decoders, models, pre_tokenizers

        backend = Backend(models.BPE(vocab=dict(self.pieces()), merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens(["<|bos|>", "<|eos|>"])
        config = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "split_special_tokens": True}
        write_hf_files(Path(folder), backend.to_str(pretty=True), config, self.chat_template)


class FastTokenizer(Tokenizer):
    """A tokenizer.json run by the `tokenizers` library. `config`: the contents of tokenizer_config.json;
    `sentencepiece_model`: the .model file of the same tokenizer, which `save_hf` writes too: llama.cpp takes the scores
    of the pieces from it.

    With `split_special_tokens` in the config, "</s>" in a text is four characters, not the eos id."""

    def __init__(
        self,
        name: str,
        tokenizer_json: str,
        config: dict[str, Any],
        chat_template: str | None = None,
        sentencepiece_model: bytes | None = None,
    ):
        from tokenizers import Tokenizer as Backend

        self.name, self._json, self._config, self._chat_template = name, tokenizer_json, config, chat_template
        self._sentencepiece_model = sentencepiece_model
        self._backend = Backend.from_str(tokenizer_json)
        # Only where a pattern may backtrack without end: muting takes a lock and a file at every call.
        self._mute = muted_panics if NESTED_QUANTIFIER.search(tokenizer_json) else contextlib.nullcontext
        # A tokenizer.json may carry its model's truncation and padding.
        self._backend.no_truncation()
        self._backend.no_padding()
        self._backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
        self.vocab_size = 1 + max(self._backend.get_vocab(with_added_tokens=True).values(), default=-1)
        self.bos_id, self.eos_id = self._special_id("bos_token"), self._special_id("eos_token")
        in_config = config.get("chat_template")
        self.chat_template = self._own_template = chat_template or (in_config if isinstance(in_config, str) else None)

    def _special_id(self, key: str) -> int | None:
        token = self._config.get(key)
        return self._backend.token_to_id(token) if isinstance(token, str) else None

    def __reduce__(self) -> tuple:  # the backend's pickle omits encode_special_tokens
        return FastTokenizer, (self.name, self._json, self._config, self._chat_template, self._sentencepiece_model)

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """UserError for a text that the library cannot process, as where a pattern of it backtracks without end."""
        try:
            with self._mute():
                return [e.ids for e in self._backend.encode_batch_fast(list(texts), add_special_tokens=False)]
        except BaseException as error:
            reason = _library_error(error)
            raise UserError(
                f"the tokenizer {self.name!r} cannot process a text of at most {max(map(len, texts), default=0):,} "
                f"characters: {reason}. Give another tokenizer, or leave such text out."
            ) from error

    def begin_ids(self) -> list[int]:
        with_special = self._backend.encode("a", add_special_tokens=True)
        own = with_special.special_tokens_mask.index(0) if 0 in with_special.special_tokens_mask else 0
        return with_special.ids[:own]

    def decode(self, ids: Sequence[int]) -> str:
        return self._backend.decode([int(i) for i in ids], skip_special_tokens=False)

    def pieces(self) -> list[tuple[str, int]]:
        return sorted(self._backend.get_vocab(with_added_tokens=True).items(), key=lambda item: item[1])

    def save_hf(self, folder: str | Path) -> None:
        config, template = self._config, self._chat_template
        if self.chat_template != self._own_template:  # another than it was read with
            config, template = {k: v for k, v in config.items() if k != "chat_template"}, self.chat_template
        write_hf_files(Path(folder), self._backend.to_str(pretty=True), config, template)
        if self._sentencepiece_model is not None:
            (Path(folder) / "tokenizer.model").write_bytes(self._sentencepiece_model)


def write_hf_files(folder: Path, tokenizer_json: str, config: dict[str, Any], chat_template: str | None = None) -> None:
    """Write a tokenizer's Hugging Face files. They name the class that runs tokenizer.json unchanged: a model's own
    class (LlamaTokenizer, ...) rebuilds the pipeline from the vocabulary and may segment text differently.

    add_prefix_space is stated: llama.cpp's converter reads it, and adds a space where it is missing."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {k: v for k, v in config.items() if k not in ("auto_map", "name_or_path", "tokenizer_file", "backend")}
    kept = {"add_prefix_space": _adds_prefix_space(json.loads(tokenizer_json)), **kept}
    # A class that runs tokenizer.json as it is.
    kept |= {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (folder / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(kept, indent=2, ensure_ascii=False) + "\n", "utf-8")
    if chat_template is not None:
        (folder / "chat_template.jinja").write_text(chat_template, encoding="utf-8")


def _adds_prefix_space(tokenizer: Any) -> bool:
    """Whether the pipeline of a tokenizer.json puts a space before a text: its normalizer or its pre-tokenizer."""
    if isinstance(tokenizer, list):
        return any(map(_adds_prefix_space, tokenizer))
    if not isinstance(tokenizer, dict):
        return False
    match tokenizer.get("type"):
        case "Prepend":
            return True
        case "ByteLevel":
            return bool(tokenizer.get("add_prefix_space"))
        case "Metaspace":
            return tokenizer.get("prepend_scheme", "always") != "never"
    steps = ("normalizer", "normalizers", "pre_tokenizer", "pretokenizers")
    return any(_adds_prefix_space(tokenizer.get(step)) for step in steps)


def load_tokenizer(name: str, flag: str) -> Tokenizer:
    """The tokenizer `name`: a key of TOKENIZERS, or one of OTHER_FORMS. Raises UserError naming `flag`."""
    if name == "byte":
        return ByteTokenizer()
    if name in ALIASES:
        return _from_hub(name, ALIASES[name][0], flag)
    path = user_path(name, flag)
    refuse_special(path, flag)
    if path.is_dir():
        return _from_folder(name, path, flag)
    if path.is_file():
        return _from_file(name, path, flag)
    if path.suffix in (".json", ".model") or name.startswith((".", "/", "~")) or name.count("/") > 1:
        hint = did_you_mean(name, map(str, path.parent.glob("*")))
        raise NotHere(f"{flag}: the tokenizer {name!r} does not exist.{hint}")
    hint = did_you_mean(name, ["byte", *ALIASES]) if "/" not in name else ""
    if hint or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        raise UserError(f"{flag}: unknown tokenizer {name!r}.{hint} Allowed: {', '.join(TOKENIZERS)}, {OTHER_FORMS}.")
    return _from_hub(name, name, flag)


def _from_hub(name: str, repo: str, flag: str) -> Tokenizer:
    from huggingface_hub import snapshot_download

    fix = (
        "Check the name, or give a local tokenizer.json, a sentencepiece .model file, or 'byte'; "
        "tokenize_data.py --train_tokenizer N makes one of your text."
    )
    with reaching_hub(flag, f"the tokenizer {name!r}" + (f" ({repo})" if repo != name else ""), fix):
        folder = Path(snapshot_download(repo, allow_patterns=[*HUB_FILES, "tokenizer.model"]))
        if not hub_reachable() and not any((folder / f).exists() for f in ("tokenizer.json", "tokenizer.model")):
            raise ConnectionError  # the cache has other files of this repository, not its tokenizer
    return _from_folder(name, folder, flag)


def _from_folder(name: str, folder: Path, flag: str) -> Tokenizer:
    for file in ("tokenizer.json", "tokenizer.model"):
        refuse_special(folder / file, flag)
        if (folder / file).is_file():
            return _from_file(name, folder / file, flag)
    raise UserError(f"{flag}: {name!r} holds neither tokenizer.json nor tokenizer.model; give one of the two.")


def _plain_token(value: Any) -> Any:
    """The text of a serialized AddedToken, or of a list of them; their properties are in tokenizer.json."""
    if isinstance(value, list):
        return [_plain_token(v) for v in value]
    return value["content"] if isinstance(value, dict) and {"content", "lstrip"} <= value.keys() else value


def _from_file(name: str, path: Path, flag: str) -> Tokenizer:
    """Read a .model file, or a tokenizer.json with the tokenizer_config.json next to it."""
    if path.suffix == ".model":
        check_checksums(path.parent, flag, lambda file: file == path.name)
        with os_errors(f"{flag}: cannot read {path}", end=""):
            model = path.read_bytes()
        return FastTokenizer(name, *convert_sentencepiece(model, path, flag), sentencepiece_model=model)
    for file in (*HUB_FILES, "tokenizer.model"):
        refuse_special(path.parent / file, flag)
    check_checksums(path.parent, flag, lambda file: file in (*HUB_FILES, "tokenizer.model"))
    config: dict[str, Any] = {}
    for file in ("special_tokens_map.json", "tokenizer_config.json"):
        if (path.parent / file).is_file():
            read = read_json(path.parent / file, flag)
            if isinstance(read, dict):
                config |= {k: _plain_token(v) for k, v in read.items() if v is not None}
    template = path.parent / "chat_template.jinja"
    try:
        chat_template = template.read_text(encoding="utf-8") if template.is_file() else None
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{flag}: {template} cannot be read as text: {first_line(error)}") from None
    try:
        text = path.read_text(encoding="utf-8")
        # Only added tokens: `</s>` may be an ordinary piece too.
        known = {token["content"] for token in json.loads(text).get("added_tokens", [])}
        if not config:  # tokenizer.json alone does not tell which of its tokens is the end token
            for key, usual in (("bos_token", USUAL_BOS), ("eos_token", USUAL_EOS)):
                config[key] = next((token for token in usual if token in known), None)
        model = path.parent / "tokenizer.model"
        model_bytes = model.read_bytes() if path.name == "tokenizer.json" and model.is_file() else None
        tokenizer = FastTokenizer(name, text, config, chat_template, model_bytes)
        tokenizer.encode(PROBE)  # a vocabulary without its own unknown token fails at some text
        return tokenizer
    except BaseException as error:
        reason = _library_error(error.__cause__ if isinstance(error, UserError) and error.__cause__ else error)
        raise UserError(f"{flag}: {path} is not a tokenizer.json: {reason}") from None


def _library_error(error: BaseException) -> str:
    """What an error of the Rust library says: a bare Exception, or where it panics, as on a pattern that backtracks too
    far, pyo3's PanicException, which is no Exception and cannot be pickled. Any other one is raised."""
    if type(error).__name__ == "PanicException":
        return (
            f"a pattern (regex) of its normalizer or pre_tokenizer may need too many steps ({first_line(error)[:80]})"
        )
    if not isinstance(error, Exception):
        raise error
    return first_line(error)
