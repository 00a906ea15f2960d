"""Continuing a batch of prompts token by token: read the prompts, then sample and step until every row has ended.

Tokens stay on the device: the host reads them, and sees which rows have ended, every few steps, while the next ones
run.
"""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError
from qtrain.models.generation.cache import rows_at_once
from qtrain.models.generation.reader import CachedReader, Reader, reader_of
from qtrain.models.generation.sampling import GREEDY, Sampling, draws, penalized, sample

STEPS_PER_CHECK = 8
"""Steps of a GPU whose tokens the host reads together, while it computes as many more. A CPU's are read one by one."""

Finish = Literal["eos", "stop", "length"]
"""Why a row has ended: an end token, a stop string, or --max_new_tokens or the model's last position."""


@dataclass(frozen=True)
class Decoding:
    """How every prompt is continued."""

    max_new_tokens: int
    sampling: Sampling = GREEDY
    eos_ids: tuple[int, ...] = ()
    """Tokens that end a row."""
    vocab_size: int | None = None
    """Only ids below it are sampled: a model's vocabulary is often padded beyond its tokenizer's. None: all."""
    context: int | None = None
    """The most positions that a row may read; None: those of the model's table of positions, if it has one."""
    logprobs: bool = False
    """Keep each token's log-probability under the model: before penalty, temperature and filters."""
    fast: bool = False
    """On a GPU, record a step as a CUDA graph, of the kernels of generation where they compute the model: it does not
    quantize a single row's activations (`fused_step.py`). Their first use on a machine times them."""


@dataclass
class Row:
    """One continuation. ids: without the end token."""

    limit: int
    """Of new tokens."""
    ids: list[int]
    finish: Finish | None = None
    """None: it goes on."""


class Generation:
    """The continuations of prompts of at least one id each; iterate once, then read `rows`.

    numbers: of the rows, which with the seed and the step determine their random numbers; None: 0, 1, ... A prompt that
    is longer than the model's table of positions loses its beginning.
    """

    def __init__(
        self,
        model: nn.Module,
        prompts: Sequence[Sequence[int]],
        decoding: Decoding,
        numbers: Sequence[int] | None = None,
    ):
        if not all(prompts):
            raise UserError("generation: a prompt has no token; give at least one.")
        self._model, self._decoding = model, decoding
        context = decoding.context or getattr(model, "max_positions", None)
        prompts = prompts if context is None else [prompt[-context:] for prompt in prompts]
        self._prompts = prompts
        # The last token need not be read: it takes no position.
        limits = [decoding.max_new_tokens if context is None else context + 1 - len(prompt) for prompt in prompts]
        self.rows = [Row(min(limit, decoding.max_new_tokens), []) for limit in limits]
        self._numbers = range(len(prompts)) if numbers is None else numbers
        longest = max(map(len, prompts))
        self._places = longest + max(row.limit for row in self.rows)
        if context is not None:
            self._places = min(self._places, context)
        self.prompt_seconds = 0.0
        """Until the first tokens were there."""
        self.decode_seconds = 0.0
        self._logprobs: Tensor | None = None

    def __iter__(self) -> Iterator[list[list[int]]]:
        """The new ids of every row, from check to check; none of rows that have ended."""
        if (steps := max(row.limit for row in self.rows)) == 0:
            return
        was_training, started = self._model.training, time.perf_counter()
        self._model.eval()
        reader = reader_of(self._model, len(self.rows), self._places, self._decoding.fast)
        draw = draws(self._decoding.sampling.seed, torch.tensor(list(self._numbers), device=reader.token.device), steps)
        sampler = _Sampler(reader.token, draw, self._prompts, self._decoding)
        self._logprobs = sampler.logprobs
        try:
            self._begin(reader, sampler)
            new, done = self._extend(sampler.written[:, :1].tolist()), 1
            self.prompt_seconds = time.perf_counter() - started
            yield new
            step, ahead = _Step(reader, sampler, self._decoding.fast), runs_ahead(reader.token.device)
            per_check, launched, waiting = STEPS_PER_CHECK if ahead else 1, done, deque[_HostCopy]()
            while done < steps and any(row.finish is None for row in self.rows):
                started = time.perf_counter()
                # A GPU computes the next steps while the host reads these: they are for nothing where all rows end.
                while launched < steps and len(waiting) <= ahead:
                    end = min(launched + per_check, steps)
                    for _ in range(launched, end):
                        step()
                    waiting.append(_HostCopy(sampler.written[:, launched:end]))
                    launched = end
                new = self._extend(waiting.popleft().tolist())
                self.decode_seconds += time.perf_counter() - started
                done = min(done + per_check, steps)
                yield new
        finally:
            reader.close()
            self._model.train(was_training)

    def stop(self, row: int, length: int) -> None:
        """End a row, whose text has a stop string within its first `length` tokens."""
        self.rows[row].ids = self.rows[row].ids[:length]
        self.rows[row].finish = "stop"

    def logprobs(self, row: int) -> list[float] | None:
        """The log-probabilities of a row's `ids`; None unless they are asked for."""
        if self._logprobs is None or not self._decoding.logprobs:
            return None
        return self._logprobs[row, : len(self.rows[row].ids)].tolist()

    @torch.no_grad()
    def _begin(self, reader: Reader, sampler: "_Sampler") -> None:
        lengths = torch.tensor([len(prompt) for prompt in self._prompts])
        ids = torch.zeros(len(self._prompts), int(lengths.max()), dtype=torch.int64)
        for row, prompt in zip(ids, self._prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        reader.at.copy_(lengths - 1)
        with torch.compiler.set_stance("force_eager"):  # every length is a new shape
            sampler.take(reader.read_prompts(ids.to(reader.at.device)))

    def _extend(self, found: list[list[int]]) -> list[list[int]]:
        """Of what steps have sampled for each row, the new ids."""
        return [self._extend_row(row, ids) for row, ids in zip(self.rows, found, strict=True)]

    def _extend_row(self, row: Row, ids: list[int]) -> list[int]:
        if row.finish is not None:
            return []
        ended = next((at for at, token in enumerate(ids) if token in self._decoding.eos_ids), None)
        new = ids[: row.limit - len(row.ids)]
        if ended is not None and ended < len(new):
            new, row.finish = ids[:ended], "eos"
        elif len(row.ids) + len(new) == row.limit:
            row.finish = "length"
        row.ids += new
        return new


class _HostCopy:
    """Tokens that are copied to the host once the device has sampled them."""

    def __init__(self, tokens: Tensor):
        self._host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=tokens.is_cuda)
        self._host.copy_(tokens, non_blocking=True)
        self._copied = torch.cuda.Event() if tokens.is_cuda else None
        if self._copied is not None:
            self._copied.record()

    def tolist(self) -> list[list[int]]:
        """Waits for them, and for nothing that was launched later."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host.tolist()


def runs_ahead(device: torch.device) -> bool:
    """Whether the host may launch steps that the device has not begun."""
    return device.type == "cuda"


class _Step:
    """One token more for every row. Recorded as a CUDA graph by the second call, which later ones replay: a step
    launches hundreds of kernels that take microseconds. The first call tunes them and allocates."""

    def __init__(self, reader: Reader, sampler: "_Sampler", record: bool):
        self._reader, self._sampler = reader, sampler
        self._records = record and isinstance(reader, CachedReader) and reader.token.is_cuda
        self._graph: torch.cuda.CUDAGraph | None = None
        self._called = False

    @torch.no_grad()
    def __call__(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        with torch.compiler.set_stance("force_eager"):
            if not (self._records and self._called):
                self._run()
                self._called = True
                return
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._run()
        self._graph = graph
        graph.replay()

    def _run(self) -> None:
        reader = self._reader
        reader.at.add_(1).clamp_(max=reader.places - 1)  # rows that have ended stay within the cache
        self._sampler.take(reader.step())


class _Sampler:
    """Samples into memory that stays where it is: `token` int64 [B], which the reader reads, and `written`. draw: the
    random numbers of each row's steps, int64 [B, steps]."""

    def __init__(self, token: Tensor, draw: Tensor, prompts: Sequence[Sequence[int]], decoding: Decoding):
        self._token, self._draws, self._prompts, self._decoding = token, draw, prompts, decoding
        self._index = torch.zeros_like(token).unsqueeze(1)
        self.written = torch.zeros_like(draw)
        self.logprobs = torch.zeros(draw.shape if decoding.logprobs else (len(draw), 0), device=token.device)
        self._seen: Tensor | None = None

    def take(self, logits: Tensor) -> None:
        """Sample the next token of every row from logits [B, V]."""
        sampling = self._decoding.sampling
        logits = own = logits[:, : self._decoding.vocab_size]
        if sampling.repetition_penalty != 1:
            self._seen = self._of_prompts(logits) if self._seen is None else self._seen
            logits = penalized(logits.float(), self._seen, sampling.repetition_penalty)
        token = sample(logits, sampling, self._draws.gather(1, self._index).squeeze(1)).unsqueeze(1)
        if self._seen is not None:
            self._seen.scatter_(1, token, True)
        if self._decoding.logprobs:
            self.logprobs.scatter_(1, self._index, own.float().log_softmax(dim=-1).gather(1, token))
        self.written.scatter_(1, self._index, token)
        self._index += 1
        self._token.copy_(token.squeeze(1))

    def _of_prompts(self, logits: Tensor) -> Tensor:
        """bool [B, V]: the tokens of each prompt."""
        seen = torch.zeros(logits.shape, dtype=torch.bool)
        for row, prompt in zip(seen, self._prompts, strict=True):
            row[[token for token in set(prompt) if token < len(row)]] = True
        return seen.to(logits.device)


def continuations(model: nn.Module, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[int]]:
    """The ids that continue each prompt, without the end token; neighbors are continued together."""
    found: list[list[int]] = []
    together = rows_at_once(model, max(map(len, prompts), default=0) + decoding.max_new_tokens)
    for start in range(0, len(prompts), together):
        batch = prompts[start : start + together]
        generation = Generation(model, batch, decoding, range(start, start + len(batch)))
        for _ in generation:
            pass
        found += [row.ids for row in generation.rows]
    return found
