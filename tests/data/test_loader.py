"""The loader hands out the stream's batches in order, with positions that resume exactly, for any number of workers."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.data import loader
from qtrain.data.batch import IGNORED, Batch, Sample
from qtrain.data.loader import PIPE_BYTES, Loader, PrefetchProcess
from qtrain.data.stream import StreamContext, open_stream
from tests.cases import sampled
from tests.data.corpora import specs, write_raw

FLAG = "--train_ds"


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return specs(tmp_path_factory.mktemp("corpora"))


def test_batch_shifts_labels_and_masks_them():
    tokens = np.arange(10, 20)
    trained = np.array([True] * 4 + [False] * 5)
    batch = Batch.of([Sample(tokens), Sample(tokens + 1, trained)])
    assert batch.input_ids.dtype == batch.labels.dtype == torch.int64
    assert batch.input_ids.tolist() == [[*range(10, 19)], [*range(11, 20)]]
    assert batch.labels.tolist() == [[*range(11, 20)], [*range(12, 16)] + [IGNORED] * 5]
    assert batch.input_ids.is_contiguous() and batch.labels.is_contiguous()
    assert batch.to("cpu").labels.tolist() == batch.labels.tolist()


KINDS = ["token", "text", "hf_text", "mix"]


@pytest.mark.parametrize(("kind", "before", "after"), [*[(k, 0, n) for k in KINDS for n in (0, 2)], ("mix", 3, 0)])
def test_batches_are_the_streams_and_positions_resume(datasets, kind, before, after):
    """With `before` workers up to a position, and with `after` workers from there on."""
    spec, ctx = datasets[kind][-1], StreamContext(100, seed=9)
    stream = open_stream(spec, ctx, FLAG)
    expected = [Batch.of([stream.next_sample() for _ in range(3)]) for _ in range(24)]
    with Loader(open_stream(spec, ctx, FLAG), 3, num_workers=before, prefetch=4) as loader:
        got = [next(loader) for _ in range(14)]
    for (batch, _), wanted in zip(got, expected, strict=False):
        assert torch.equal(batch.input_ids, wanted.input_ids) and torch.equal(batch.labels, wanted.labels)
    position = json.loads(json.dumps(got[-1][1]))
    with Loader(open_stream(spec, ctx, FLAG), 3, num_workers=after, position=position) as loader:
        for wanted in expected[14:]:
            assert torch.equal(next(loader)[0].input_ids, wanted.input_ids)


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_users_mistake_met_on_the_way_is_raised_once(num_workers, tmp_path):
    write_raw(tmp_path / "x.bin", np.arange(1000))
    spec, ctx = {"type": "token", "dataset_dir": str(tmp_path)}, StreamContext(9, shuffle=False, vocab_size=500)
    with Loader(open_stream(spec, ctx, FLAG), 2, num_workers=num_workers) as loader:
        with pytest.raises(UserError, match=r"x\.bin, token 50\d: the token id .* beyond") as caught:
            for _ in range(100):
                next(loader)
        assert "\n" not in str(caught.value)
        with pytest.raises(StopIteration):
            next(loader)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_an_opened_stream_is_read_on_from_where_it_is(datasets, num_workers):
    """Scripts open the data once, read a sample to see that it can be read, and train on that stream."""
    ctx = StreamContext(100, seed=9)
    whole, stream = (open_stream(datasets["mix"][0], ctx, FLAG) for _ in range(2))
    expected = [Batch.of([whole.next_sample()]) for _ in range(3)]
    stream.next_sample()
    with Loader(stream, 1, num_workers=num_workers) as loader:
        for wanted in expected[1:]:
            assert torch.equal(next(loader)[0].input_ids, wanted.input_ids)


def test_a_position_of_other_data_is_refused_before_anything_runs(datasets):
    stream = open_stream(datasets["token"][0], StreamContext(9, seed=1), FLAG)
    with pytest.raises(UserError, match=r"--seed: cannot resume: .* had --seed 2"):
        Loader(stream, 2, num_workers=2, position={**stream.position(), "seed": 2})


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_ending_stream_ends_the_loader_with_full_batches_only(num_workers, tmp_path):
    write_raw(tmp_path / "x.bin", np.arange(101))
    spec, ctx = {"type": "token", "dataset_dir": str(tmp_path)}, StreamContext(10, epochs=1)
    with Loader(open_stream(spec, ctx, FLAG), 3, num_workers=num_workers) as loader:
        assert [batch.input_ids.shape for batch, _ in loader] == [(3, 10)] * 3


def test_the_next_batch_is_prepared_while_this_one_is_used(datasets, monkeypatch):
    from qtrain.data.text import token_dataset

    next_sample = token_dataset.TokenStream.next_sample
    monkeypatch.setattr(token_dataset.TokenStream, "next_sample", lambda s: (time.sleep(0.05), next_sample(s))[1])
    with Loader(open_stream(datasets["token"][0], StreamContext(10), FLAG), 2) as loader:
        next(loader)
        time.sleep(0.5)
        started = time.perf_counter()
        next(loader)
        assert time.perf_counter() - started < 0.1  # two samples take 0.1 s to make


def test_a_producer_that_dies_is_noticed(datasets):
    with Loader(open_stream(datasets["token"][0], StreamContext(10), FLAG), 2, num_workers=1) as loader:
        next(loader)
        loader.producers[0].process.kill()
        with pytest.raises(RuntimeError, match="the data process has died"):
            for _ in range(100_000):
                next(loader)


FORGETFUL = """
import os, signal, sys
from qtrain.data.loader import PIPE_BYTES, Loader, PrefetchProcess
from qtrain.data.stream import StreamContext, open_stream
if __name__ == "__main__":
    loader = Loader(open_stream({spec!r}, StreamContext(100), "--train_ds"), 2, num_workers={num_workers})
    next(loader)
    print(loader.producers[0].process.pid if {num_workers} else 0, flush=True)
    if {killed}:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("num_workers", "killed"),
    sampled([(0, False), (1, False), (1, True)], lambda workers, killed: not killed),
)
def test_a_loader_that_is_not_closed_does_not_disturb_the_end(datasets, num_workers, killed, tmp_path):
    """The interpreter ends quietly with status 0; and when it is killed, its producer goes too."""
    script = tmp_path / "forgetful.py"
    spec = datasets["token" if killed else "hf_text"][0]  # of hf_text, threads of pyarrow are there at the end
    script.write_text(FORGETFUL.format(spec=spec, num_workers=num_workers, killed=killed))
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run([sys.executable, script], env=environment, capture_output=True)
    assert result.returncode == (-signal.SIGKILL if killed else 0)
    assert killed or result.stderr == b""
    deadline = time.monotonic() + 10
    while num_workers and Path(f"/proc/{int(result.stdout)}").exists():
        assert time.monotonic() < deadline, "the data process outlived its parent"
        time.sleep(0.05)


def large_batches(rows, work):
    """Of more bytes than a pipe holds, of none, of one element; labels in another order than their memory."""
    for n in (rows, 0, 1):
        yield Batch(torch.arange(8 * n).view(n, 8), torch.arange(8 * n).view(8, n).t(), None), {"work": len(work)}


def test_tensors_and_work_of_any_size_and_order_arrive():
    arguments = PIPE_BYTES // 4, bytes(8 * PIPE_BYTES)
    producer, unread = (PrefetchProcess(large_batches, arguments) for _ in range(2))
    unread.close()  # while its work is sent
    for expected, position in large_batches(*arguments):
        batch, found = producer.get()
        assert found == position and batch.doc_ids is None
        assert torch.equal(batch.input_ids, expected.input_ids) and torch.equal(batch.labels, expected.labels)
    producer.close()
    assert not unread.process.is_alive()


@pytest.mark.gpu
@pytest.mark.parametrize("num_workers", [0, 1])
def test_batches_are_pinned_for_the_gpu(datasets, num_workers):
    stream = open_stream(datasets["token"][0], StreamContext(10), FLAG)
    with Loader(stream, 2, num_workers=num_workers) as loader:
        batch, _ = next(loader)
    assert batch.input_ids.is_pinned() and batch.to("cuda", non_blocking=True).labels.is_cuda


@pytest.mark.parametrize("system", ["posix", "windows"])
def test_tensors_go_through_a_pipe_that_is_smaller(system, monkeypatch):
    """On Windows, whose pipes are no files, as messages."""
    if system == "windows":
        monkeypatch.setattr(loader, "PIPES_ARE_FILES", False)
    receiver, sender = multiprocessing.Pipe(duplex=False)
    values = [torch.arange(size, dtype=torch.int64) for size in (3, 100_000, 0, 7)]
    thread = threading.Thread(target=lambda: [loader._write(sender, loader._bytes_of(t)) for t in values])
    thread.start()
    for expected in values:
        found = torch.empty_like(expected)
        loader._read(receiver, loader._bytes_of(found))
        assert torch.equal(found, expected)
    thread.join()
