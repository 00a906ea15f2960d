"""Dataset type `token`: shards of token ids, written by tokenize_data.py or by another tool."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from qtrain.core.errors import UserError
from qtrain.data.batch import Sample
from qtrain.data.permutation import Permutation
from qtrain.data.stream import DATASETS, Dataset, Extent, Stream, StreamContext, check_position, check_same_tokenizer
from qtrain.data.text.manifest import FILE_NAME, Manifest, check_tokenizer_files, damaged_shard
from qtrain.data.text.shards import Shard, TokenArray, find_shards
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer


@DATASETS.register("token")
@dataclass(frozen=True)
class TokenDataset(Dataset):
    """Shards of token ids: tokenize_data.py's, raw uint16, llm.q's (with masks) and llm.c's"""

    dataset_dir: str | list[str]
    """folders, .bin files or globs; of a dataset of the hub hf://datasets/OWNER/NAME/FOLDER"""
    tokenizer: str | None = None
    """tokenizer of the ids, where no manifest names it"""
    verify: bool = False
    """read all shards at the start and compare their sha256 with the manifest's; sizes are always checked"""

    def load_tokenizer(self, flag: str) -> Tokenizer | None:
        _, manifests = find_shards(self.dataset_dir, flag)
        for folder, manifest in manifests:
            check_tokenizer_files(folder, manifest, flag)
            # The folder holds a copy of its tokenizer; `byte` needs no file.
            byte = manifest.tokenizer["name"] == "byte"
            tokenizer = load_tokenizer("byte" if byte else str(folder), flag)
            if tokenizer.fingerprint() != manifest.tokenizer["fingerprint"]:
                raise UserError(f"{flag}: the tokenizer in {folder} is not the one that its shards were written with.")
            return tokenizer
        return super().load_tokenizer(flag)

    def tokenizes(self, flag: str) -> bool:
        return False

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        shards, manifests = find_shards(self.dataset_dir, flag)
        if self.verify:
            _verify(shards, manifests, flag)
        for folder, manifest in manifests:
            tokenizer = manifest.tokenizer
            if tokenizer["fingerprint"] != manifests[0][1].tokenizer["fingerprint"]:
                raise UserError(f"{flag}: {manifests[0][0]} and {folder} were written with different tokenizers.")
            check_same_tokenizer(ctx, tokenizer["name"], tokenizer["fingerprint"], flag)
            if ctx.vocab_size is not None and manifest.max_token_id >= ctx.vocab_size:
                raise _beyond_vocabulary(flag, str(folder), manifest.max_token_id, ctx.vocab_size)
        tokens = TokenArray(shards, flag)
        if len(tokens) <= ctx.seq_len:
            raise UserError(
                f"{flag}: {shards[0].path}{' and the others' if len(shards) > 1 else ''}: {len(tokens)} tokens are too "
                f"few for one window of seq_len+1 = {ctx.seq_len + 1}. Give more data or a smaller --seq_len."
            )
        return TokenStream(tokens, ctx, flag)


class TokenStream(Stream):
    """Windows of seq_len+1 tokens that start every seq_len tokens of the concatenated shards: a window may span two
    files, and a remainder at the end is dropped. Each epoch takes the windows in a new computed order.

    Position: `sample`, how many have been taken."""

    def __init__(self, tokens: TokenArray, ctx: StreamContext, flag: str):
        self._tokens, self._ctx, self._flag = tokens, ctx, flag
        self._windows = self.samples_per_epoch = (len(tokens) - 1) // ctx.seq_len  # - 1: the last window needs a label
        self.files = [shard.path for shard in tokens.shards]
        self.reads = [Extent(str(path.resolve())) for path in self.files]
        self._taken = 0
        self._epoch, self._order = -1, Permutation(1)

    def next_sample(self) -> Sample:
        epoch, place = divmod(self._taken, self._windows)
        if self._ctx.epochs is not None and epoch >= self._ctx.epochs:
            raise StopIteration
        if self._ctx.shuffle and epoch != self._epoch:
            self._epoch, self._order = epoch, Permutation(self._windows, self._ctx.seed, epoch)
        window = self._order(place) if self._ctx.shuffle else place
        start = window * self._ctx.seq_len
        tokens, trained = self._tokens.read(start, self._ctx.seq_len + 1)  # int64 [S+1], bool [S+1] or None
        if self._ctx.vocab_size is not None and tokens.max() >= self._ctx.vocab_size:
            raise self._beyond(start, tokens)
        self._taken += 1
        return Sample(tokens, None if trained is None else trained[:-1])  # labels are those of the first S positions

    def skip(self, count: int) -> None:
        self._taken += count  # computed order: what other ranks read is not touched

    def _beyond(self, start: int, tokens: np.ndarray) -> UserError:
        where = int(tokens.argmax())
        shard, place = self._tokens.shard_at(start + where)
        file = f"{self._tokens.shards[shard].path}, token {place}"
        return _beyond_vocabulary(self._flag, file, int(tokens[where]), self._ctx.vocab_size)

    def position(self) -> dict[str, Any]:
        ctx = self._ctx
        return {"sample": self._taken, "windows": self._windows, "seq_len": ctx.seq_len, "seed": ctx.seed}

    def seek(self, position: Mapping[str, Any]) -> None:
        # Positions of versions up to 0.2.0 have no seq_len; the number of windows tells most of them apart.
        length = {"seq_len": self._ctx.seq_len} if "seq_len" in position else {}
        check_position(position, {**length, "windows": self._windows, "seed": self._ctx.seed}, self._flag)
        self._taken = position["sample"]


def _verify(shards: list[Shard], manifests: list[tuple[Path, Manifest]], flag: str) -> None:
    """UserError for a shard whose contents are not the manifest's, or that no manifest lists."""
    listed = [folder for folder, _ in manifests]
    for shard in shards:
        if shard.path.parent not in listed:
            raise UserError(f"{flag}.verify: {shard.path} has no {FILE_NAME} next to it; leave verify out.")
    for folder, manifest in manifests:
        if damaged := damaged_shard(folder, manifest):
            raise UserError(
                f"{flag}: {damaged} is damaged: its sha256 is not the one in {FILE_NAME}. Write or copy it again."
            )


def _beyond_vocabulary(flag: str, where: str, token_id: int, vocab_size: int | None) -> UserError:
    return UserError(
        f"{flag}: {where}: the token id {token_id} is beyond the model's vocabulary of {vocab_size}. The data was "
        "written with another tokenizer than the model's, or the file has another format."
    )
