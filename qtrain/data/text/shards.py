"""Token shards (.bin): four formats, recognised by their contents.

- tokenize_data.py: no header, uint16 or uint32 tokens as the manifest.json next to the file says;
- raw: no header, uint16 tokens;
- llm.q: 1024 bytes of header: "BIN.TOK\\n", then as int32 [2] version (1 or 2), [3] bytes per token, [4] token count,
  [5] vocabulary, [6] mask flag; then the tokens, then, if flagged, one bit per token;
- llm.c: 1024 bytes of header: int32 [0] magic, [1] version, [2] token count; then the tokens: uint16 after magic
  20240520 version 1, uint32 after 20240801 version 7. Its other files have magics of their own, and are refused.

All are little-endian. llm.q's mask bit of position i is 0 where that position's target, token i+1, is not trained on.
A file whose size contradicts its header or manifest is refused, when it is opened and at every read. Files are read,
not memory-mapped: truncating a mapped file under a run would end it with SIGBUS.
"""

import functools
import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from qtrain.core.errors import UserError, os_errors
from qtrain.core.hub import HUB_DATASETS, hub_folder
from qtrain.core.reading import refuse_special
from qtrain.data.files import as_list, data_path, match_files
from qtrain.data.text.manifest import DTYPES, FILE_NAME, Manifest, read_manifest

HEADER_BYTES = 1024
LLMQ_MAGIC = b"BIN.TOK\n"
LLMC = {20240520: (1, "uint16"), 20240801: (7, "uint32")}
"""llm.c's magics -> version and dtype: GPT-2's tokens, Llama 3's tokens."""
LAYOUTS = ("raw", "llmq", "llmc")
"""Of shards that `shard_header` can begin."""
OTHER_FILES = {
    **{n.to_bytes(4, "little"): "a model of llm.c" for n in (20240326, 20240803)},
    **{n.to_bytes(4, "little"): "a state of llm.c" for n in (20240327, 20240527)},
    (20240328).to_bytes(4, "little"): "a tokenizer of llm.c",
    (20240522).to_bytes(4, "little"): "an evaluation file of llm.c",
    b"PK\3\4": "a zip or PyTorch file",
    b"PAR1": "a parquet file",
    b"GGUF": "a GGUF model",
    b"\x93NUM": "a .npy file",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"\x1f\x8b\x08": "compressed with gzip",
}
"""First bytes of files that are no raw tokens, though they may have the ending .bin."""


def shard_dtype(layout: str, vocab_size: int) -> str:
    """The dtype of ids in a layout. llm.q reads 4 bytes only; llm.c has a magic for either size."""
    return "uint32" if layout == "llmq" or vocab_size > 1 << 16 else "uint16"


def shard_header(layout: str, dtype: str, tokens: int, vocab_size: int, masked: bool = False) -> bytes:
    """What a shard of `tokens` ids begins with."""
    if layout == "raw":
        return b""
    header = np.zeros(HEADER_BYTES // 4, "<i4")
    if layout == "llmq":
        header[:2] = np.frombuffer(LLMQ_MAGIC, "<i4")
        header[2:7] = [2, DTYPES[dtype], tokens, vocab_size, masked]
    else:
        magic, version = next((magic, version) for magic, (version, of) in LLMC.items() if of == dtype)
        header[:3] = [magic, version, tokens]
    return header.tobytes()


@dataclass(frozen=True)
class Shard:
    """A file with `tokens` ids of type `dtype` from byte `offset` on. masked: mask bits follow them."""

    path: Path
    tokens: int
    dtype: str
    offset: int = 0
    masked: bool = False

    @property
    def mask_offset(self) -> int:
        return self.offset + self.tokens * np.dtype(self.dtype).itemsize

    @property
    def size(self) -> int:
        """Bytes of the whole file."""
        return self.mask_offset + ((self.tokens + 7) // 8 if self.masked else 0)


def find_shards(dataset_dir: str | list[str], flag: str) -> tuple[list[Shard], list[tuple[Path, Manifest]]]:
    """The shards of folders, .bin files and globs, in order, and the manifests of their folders."""
    shards: list[Shard] = []
    manifests: dict[Path, Manifest] = {}
    for entry in as_list(dataset_dir):
        if entry.startswith(HUB_DATASETS):
            entry = str(hub_folder(entry, flag))
        folder = data_path(entry, flag)
        if folder.is_dir() and os.path.lexists(folder / FILE_NAME):
            # In the order that they were written.
            paths = [folder / shard.file for shard in _manifest(folder, manifests, flag).shards]
        else:
            paths = [
                file.path for file in match_files(entry, [".bin"], flag, " Token shards are made by tokenize_data.py.")
            ]
        for path in paths:
            has_manifest = os.path.lexists(path.parent / FILE_NAME)
            manifest = _manifest(path.parent, manifests, flag) if has_manifest else None
            shards.append(open_shard(path, manifest, flag))
    if not shards:
        raise UserError(f"{flag}: {', '.join(as_list(dataset_dir)) or 'an empty list'} holds no token shards.")
    return shards, list(manifests.items())


def _manifest(folder: Path, known: dict[Path, Manifest], flag: str) -> Manifest:
    if folder not in known:
        known[folder] = read_manifest(folder, flag)
        if not known[folder].complete:
            raise UserError(f"{flag}: {folder} is not finished; run its tokenize_data.py command again to complete it.")
    return known[folder]


def open_shard(path: Path, manifest: Manifest | None, flag: str) -> Shard:
    """Recognise a .bin file and check its size. Raises UserError naming the file."""
    refuse_special(path, flag)
    with os_errors(f"{flag}: cannot read {path}", end=""), path.open("rb") as stream:
        size = os.fstat(stream.fileno()).st_size
        header = stream.read(HEADER_BYTES)
    if manifest is not None and manifest.layout == "raw":
        shard = _listed(path, manifest, flag)
    elif header.startswith(LLMQ_MAGIC) or int.from_bytes(header[:4], "little") in LLMC:
        if len(header) < HEADER_BYTES:
            raise UserError(f"{flag}: {path} ends within its header, after {size} bytes. Write or copy it again.")
        shard = (_llmq if header.startswith(LLMQ_MAGIC) else _llmc)(path, header, flag)
    else:
        for start, kind in OTHER_FILES.items():
            # Raw files have no magic of their own: a wrong file would be read as random tokens.
            if header.startswith(start):
                raise UserError(f"{flag}: {path} is {kind}, not a file of token ids.")
        if size % 2 or not size:
            raise UserError(f"{flag}: {path} is not a file of uint16 tokens: it has {size} bytes. Is it truncated?")
        shard = Shard(path, size // 2, "uint16")
    if size != shard.size:
        source = "the manifest" if shard.offset == 0 and manifest is not None else "its header"
        raise UserError(
            f"{flag}: {path} has {size} bytes, but {source} says {shard.tokens} tokens, {shard.size} bytes. "
            "It is truncated or damaged: write or copy it again."
        )
    if manifest is not None and shard.tokens != _listed(path, manifest, flag).tokens:
        raise UserError(f"{flag}: {path} has {shard.tokens} tokens, but the manifest says otherwise; copy it again.")
    return shard


def _listed(path: Path, manifest: Manifest, flag: str) -> Shard:
    entry = next((shard for shard in manifest.shards if shard.file == path.name), None)
    if entry is None:
        raise UserError(f"{flag}: {path} is not in the {FILE_NAME} next to it; give the folder, or move the file.")
    return Shard(path, entry.tokens, manifest.dtype)


def _llmq(path: Path, header: bytes, flag: str) -> Shard:
    version, token_bytes, tokens, _, masked = np.frombuffer(header, "<i4")[2:7].tolist()
    known = version == 1 or (version == 2 and masked in (0, 1))
    if not known or token_bytes not in DTYPES.values() or tokens < 0:
        raise UserError(
            f"{flag}: {path}: an llm.q header with version {version}, {token_bytes} bytes per token, {tokens} tokens "
            f"and mask flag {masked}; supported are versions 1 and 2 with 2 or 4 bytes and a flag of 0 or 1."
        )
    return Shard(path, tokens, "uint16" if token_bytes == 2 else "uint32", HEADER_BYTES, version == 2 and masked == 1)


def _llmc(path: Path, header: bytes, flag: str) -> Shard:
    magic, version, tokens = np.frombuffer(header, "<i4")[:3].tolist()
    known, dtype = LLMC[magic]
    if version != known or tokens < 0:
        raise UserError(
            f"{flag}: {path}: an llm.c header with magic {magic}, version {version} and {tokens} tokens; supported are "
            f"{' and '.join(f'magic {m} with version {v} ({d} ids)' for m, (v, d) in LLMC.items())}."
        )
    return Shard(path, tokens, dtype, HEADER_BYTES)


class TokenArray:
    """The tokens of many shards as one array; a read may span shards. For one thread."""

    def __init__(self, shards: list[Shard], flag: str):
        """flag: named in errors."""
        self.shards, self._flag = shards, flag
        self._ends = np.cumsum([shard.tokens for shard in shards], dtype=np.int64)  # first token after each shard
        self.masked = any(shard.masked for shard in shards)
        # Recently used ones stay open. Unbuffered: reads are of whole windows, far from each other.
        self._opened = functools.lru_cache(maxsize=64)(lambda index: shards[index].path.open("rb", buffering=0))

    def __len__(self) -> int:
        return int(self._ends[-1])

    def _read(self, shard_index: int, offset: int, count: int, dtype: np.dtype) -> np.ndarray:
        """`count` items from byte `offset` of a shard. UserError where the file cannot be read or has another size."""
        shard, items = self.shards[shard_index], np.empty(count, dtype)
        with os_errors(f"{self._flag}: cannot read {shard.path}", end=""):
            file = self._opened(shard_index)
            size, read = os.fstat(file.fileno()).st_size, 0
            file.seek(offset)
            # A read may return less than asked for, as over a network.
            while size == shard.size and read < items.nbytes:
                n = file.readinto(items.data.cast("B")[read:])
                if not n:  # truncated since fstat
                    size = offset + read
                read += n
        if size != shard.size:
            raise UserError(
                f"{self._flag}: {shard.path} has changed under the run: it had {shard.size} bytes, now {size}. Write "
                "or copy it again."
            )
        return items

    def shard_at(self, index: int) -> tuple[int, int]:
        """(index of the shard that holds token `index`, offset of the token in it)."""
        shard_index = int(np.searchsorted(self._ends, index, side="right"))
        return shard_index, index - (int(self._ends[shard_index]) - self.shards[shard_index].tokens)

    def read(self, start: int, count: int) -> tuple[np.ndarray, np.ndarray | None]:
        """Tokens `start` to `start + count`, int64 [count]; and bool [count], whether each position's target is trained
        on, or None where no shard has a mask."""
        tokens = np.empty(count, np.int64)  # what embeddings take; files hold uint16 or uint32
        trained = np.ones(count, bool) if self.masked else None
        done = 0
        while done < count:
            shard_index, at = self.shard_at(start + done)
            n = min(count - done, self.shards[shard_index].tokens - at)  # up to the end of this shard
            shard = self.shards[shard_index]
            dtype = np.dtype(shard.dtype).newbyteorder("<")
            tokens[done : done + n] = self._read(shard_index, shard.offset + at * dtype.itemsize, n, dtype)
            if trained is not None and shard.masked:
                # Bit `at` of the mask is in byte at // 8, counted from its lowest bit.
                first = at // 8
                packed = self._read(shard_index, shard.mask_offset + first, (at + n + 7) // 8 - first, np.dtype("u1"))
                bits = np.unpackbits(packed, bitorder="little")
                trained[done : done + n] = bits[at - 8 * first : at - 8 * first + n]
            done += n
        return tokens, trained
