"""Documents to token shards: encoded by several processes, written in order, resumable at every finished shard.

The main process reads chunks of documents and writes; the others encode. Results are taken in the order of the chunks,
and shards are cut at exactly `shard_tokens`, so the files depend neither on the number of processes nor on where an
earlier run stopped. A shard is renamed to its final name when it is complete and on disk. Then the manifest is replaced
by one that lists it and has the place in the corpus where the next shard starts. Resuming discards unfinished shards.
"""

import contextlib
import hashlib
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from qtrain.core.checksums import sha256_of
from qtrain.core.errors import UserError, os_errors
from qtrain.data.text.corpus import Corpus, Document
from qtrain.data.text.manifest import Manifest, ShardEntry, damaged_shard, publish
from qtrain.data.text.shards import shard_header
from qtrain.data.tokenizers.tokenizer import Tokenizer


class Encoded(NamedTuple):
    """A chunk's ids [n], its number of non-empty documents, and the corpus state at its start. trained: bool [n],
    whether each position's target, the next id, is trained on; None: all are."""

    state: dict[str, Any]
    ids: np.ndarray
    documents: int
    trained: np.ndarray | None = None


def tokenize(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Path,
    manifest: Manifest,
    shard_tokens: int,
    n_procs: int,
    max_tokens: int = 0,
) -> tuple[Manifest, float]:
    """Write into `folder` the shards that `manifest` (new, or of an interrupted run) lacks; with `max_tokens` no more
    than as many in all.

    Returns the complete manifest and the tokens per second. UserError when the disk is full or there is no text."""
    cursor = manifest.cursor or {"source": None, "documents": 0, "tokens": 0}
    writer = ShardWriter(folder, manifest, shard_tokens)
    chunks = encode_chunks(corpus, tokenizer, cursor["source"], np.dtype(manifest.dtype), n_procs)
    documents, skip = cursor["documents"], cursor["tokens"]
    progress = TokenizeProgress(f"tokenizing {folder}", corpus.n_documents, documents)
    with contextlib.closing(chunks), os_errors(f"--output_dir: cannot write to {folder}", end=""), progress:
        left = max_tokens - manifest.tokens if max_tokens else sys.maxsize
        for chunk in chunks:
            chunk = chunk._replace(ids=chunk.ids[: skip + left])
            left -= len(chunk.ids) - skip
            writer.write(chunk, documents, skip)
            documents += chunk.documents
            progress.advance(chunk.documents, len(chunk.ids) - skip)
            skip = 0  # only the first chunk was begun by an earlier run
            if not left:
                break
        manifest.documents = documents
        writer.finish()
    return manifest, progress.speed


class ShardWriter:
    """Cuts a sequence of ids into files of `shard_tokens` and updates the manifest after each."""

    def __init__(self, folder: Path, manifest: Manifest, shard_tokens: int):
        self._folder, self._manifest, self._shard_tokens = folder, manifest, shard_tokens
        self._dtype = np.dtype(manifest.dtype).newbyteorder("<")
        self._vocab_size = manifest.tokenizer.get("vocab_size", 0)
        self._stream: Any = None

    def write(self, chunk: Encoded, documents_before: int, skip: int) -> None:
        """Append the chunk's ids from index `skip` on. documents_before: documents in the chunks before it."""
        while skip < len(chunk.ids):
            if self._stream is None:
                self._begin()
            ids = chunk.ids[skip : skip + self._shard_tokens - self._tokens]  # what still fits into this shard
            self._append(ids.astype(self._dtype).tobytes())
            if chunk.trained is not None:
                self._trained.append(chunk.trained[skip : skip + len(ids)])
            self._tokens += len(ids)
            self._max = max(self._max, int(ids.max()))
            skip += len(ids)
            if self._tokens == self._shard_tokens:
                self._end()
                # The shard is on disk; now the manifest may list it.
                self._manifest.cursor = {"source": chunk.state, "documents": documents_before, "tokens": skip}
                self._manifest.write(self._folder)

    def finish(self) -> None:
        """Close the last shard and mark the folder complete."""
        if self._stream is not None:
            self._end()
        if not self._manifest.shards:
            raise UserError("the corpus holds no text: every document is empty.")
        self._manifest.cursor, self._manifest.complete = None, True
        self._manifest.write(self._folder)

    def _begin(self) -> None:
        self._name = f"tokens_{len(self._manifest.shards):05d}.bin"
        self._stream = (self._folder / f"{self._name}.tmp").open("wb")
        self._sha256, self._tokens, self._max, self._trained = hashlib.sha256(), 0, 0, []
        # Of a full shard: only the last one has fewer tokens.
        self._append(self._header(self._shard_tokens))

    def _append(self, data: bytes) -> None:
        self._stream.write(data)
        self._sha256.update(data)

    def _header(self, tokens: int) -> bytes:
        manifest = self._manifest
        return shard_header(manifest.layout, manifest.dtype, tokens, self._vocab_size, manifest.masked)

    def _end(self) -> None:
        if self._trained:
            self._append(np.packbits(np.concatenate(self._trained), bitorder="little").tobytes())
        temporary = self._folder / f"{self._name}.tmp"
        sha256 = self._sha256.hexdigest()
        if (header := self._header(self._tokens)) and self._tokens != self._shard_tokens:
            self._stream.seek(0)
            self._stream.write(header)
            self._stream.flush()
            sha256 = sha256_of(temporary)
        # fsync before the rename: a shard that has its final name is whole, also after a power cut
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()
        self._stream = None
        publish(temporary, self._folder / self._name)
        self._manifest.shards.append(ShardEntry(self._name, self._tokens, sha256))
        self._manifest.tokens += self._tokens
        self._manifest.max_token_id = max(self._manifest.max_token_id, self._max)


def check_finished_shards(folder: Path, manifest: Manifest) -> None:
    """Refuse to resume from shards whose sha256 is not the manifest's."""
    if damaged := damaged_shard(folder, manifest):
        raise UserError(f"--output_dir: {damaged} is missing or damaged. Delete {folder}, begin again.")


def encode_chunks(
    corpus: Corpus, tokenizer: Tokenizer, state: dict[str, Any] | None, dtype: np.dtype, n_procs: int
) -> Generator[Encoded, None, None]:
    """The corpus from `state` on, encoded by `n_procs` processes, in the order of the corpus."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process
    # Forked where that is safe: a fresh interpreter takes seconds to import the same modules.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    prepare = (tokenizer, dtype, os.getpid())
    waiting: deque[tuple[dict[str, Any], Future]] = deque()  # in the order of the corpus, which the shards keep

    def take() -> Encoded:
        chunk_state, future = waiting.popleft()
        return Encoded(chunk_state, *future.result())

    try:
        pool = ProcessPoolExecutor(n_procs, context, _prepare_process, prepare)
    except OSError as error:  # its semaphores are files of /dev/shm
        print(f"encoding in this process: no other can be started ({error.strerror}, of /dev/shm)", flush=True)
        _use(tokenizer, dtype)
        yield from (Encoded(chunk_state, *_encode(texts)) for chunk_state, texts in corpus.chunks(state))
        return
    try:
        for chunk_state, texts in corpus.chunks(state):
            waiting.append((chunk_state, pool.submit(_encode, texts)))
            # Enough that no process waits, few enough that their results fit into memory.
            if len(waiting) > 4 * n_procs:
                yield take()
        while waiting:
            yield take()
    except BrokenProcessPool:
        raise UserError(
            "--n_procs: an encoding process was killed, perhaps for memory. Give fewer processes."
        ) from None
    finally:
        pool.shutdown(cancel_futures=True)


def _prepare_process(tokenizer: Tokenizer, dtype: np.dtype, parent: int) -> None:
    _use(tokenizer, dtype)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process handles Ctrl-C
    threading.Thread(target=_exit_with, args=(parent,), daemon=True).start()


# Of an encoding process, set once when it starts.
_tokenizer: Tokenizer
_dtype: np.dtype


def _use(tokenizer: Tokenizer, dtype: np.dtype) -> None:
    """Of `_encode` in this process."""
    global _tokenizer, _dtype
    _tokenizer, _dtype = tokenizer, dtype


def _exit_with(parent: int) -> None:
    """Exit when `parent` is gone: a killed parent cannot stop its workers, which would wait forever."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def _encode(texts: list[Document]) -> tuple[np.ndarray, int, np.ndarray | None]:
    """The ids of the documents that are not empty, each ended by eos; their number; which targets are trained on."""
    documents = [(text,) if isinstance(text, str) else text for text in texts]
    documents = [parts for parts in documents if parts[-1]]
    encoded = iter(_tokenizer.encode_batch([part for parts in documents for part in parts]))
    ids, trained = [], []
    for parts in documents:
        *prompt, answer = (next(encoded) for _ in parts)
        before = [i for part in prompt for i in part]
        ids.append(np.array([*before, *answer, _tokenizer.eos_id], dtype=_dtype))
        # By the position before each id; what follows the end is another document's prompt.
        learned = np.arange(len(ids[-1])) >= len(before)
        trained.append(np.append(learned[1:], False))
    masked = any(len(parts) > 1 for parts in documents)
    if not documents:
        return np.empty(0, _dtype), 0, None
    return np.concatenate(ids), len(documents), np.concatenate(trained) if masked else None


PLAIN_INTERVAL_S = 5.0


class TokenizeProgress:
    """Counts documents and tokens. start: documents that an earlier run has finished. Use with `with`."""

    def __init__(self, title: str, total_documents: int | None, start: int):
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._title, self._total, self._start = title, total_documents, start
        self._done, self._tokens = start, 0
        self._began = self._last_line = time.monotonic()
        columns = [TextColumn("{task.description}"), BarColumn(), TextColumn("{task.percentage:>3.0f}%")]
        columns += [TextColumn("{task.fields[speed]}"), TextColumn("ETA"), TimeRemainingColumn()]
        self._console = Console()
        self._live = Progress(*columns, console=self._console) if self._console.is_terminal else None
        if self._live is not None:
            self._task = self._live.add_task(title, total=total_documents, completed=start, speed="")

    def __enter__(self) -> "TokenizeProgress":
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._live is not None:
            self._live.stop()

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def speed(self) -> float:
        """Tokens per second of this run."""
        return self._tokens / max(self.seconds, 1e-9)

    def advance(self, documents: int, tokens: int) -> None:
        self._done += documents
        self._tokens += tokens
        speed = f"{self._done:,} documents  {self._tokens:,} tokens  {self.speed:,.0f} tokens/s"
        if self._live is not None:
            self._live.update(self._task, completed=self._done, speed=speed)
        elif time.monotonic() - self._last_line >= PLAIN_INTERVAL_S:
            self._last_line = time.monotonic()
            print(f"{self._title}: {speed}{self._remaining()}", flush=True)

    def _remaining(self) -> str:
        if not self._total or self._done == self._start:
            return ""
        seconds = self.seconds * (self._total - self._done) / (self._done - self._start)
        return f"  {100 * self._done / self._total:.0f}%  ETA {time.strftime('%H:%M:%S', time.gmtime(max(seconds, 0)))}"
