"""Dataset type `mix`: a weighted mixture of other datasets."""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from qtrain.core.errors import UserError
from qtrain.data.batch import Sample
from qtrain.data.permutation import hash64, uniform
from qtrain.data.stream import DATASETS, Dataset, Stream, StreamContext, check_position
from qtrain.data.tokenizers.tokenizer import Tokenizer


@DATASETS.register("mix")
@dataclass(frozen=True)
class MixDataset(Dataset):
    """A weighted mixture of datasets: each sample comes from one of them, drawn by its weight"""

    datasets: list[dict[str, Any]]
    """[{"weight": 3, "type": ..., ...}, ...]; weights are relative"""

    def _components(self, flag: str) -> list[tuple[float, Dataset, str]]:
        if not self.datasets:
            raise UserError(f"{flag}.datasets: the list is empty; give at least one dataset with a weight.")
        components = []
        for i, spec in enumerate(self.datasets):
            where = f"{flag}.datasets[{i}]"
            weight = spec.get("weight")
            if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < math.inf:
                raise UserError(f"{where}.weight: {weight!r} is not allowed; it must be a number above 0.")
            dataset = DATASETS.make_typed({k: v for k, v in spec.items() if k != "weight"}, where)
            components.append((weight, dataset, where))
        if not math.isfinite(sum(weight for weight, _, _ in components)):
            raise UserError(f"{flag}.datasets: the weights are too large to be added; give smaller ones.")
        return components

    def load_tokenizer(self, flag: str) -> Tokenizer | None:
        found: Tokenizer | None = None
        for _, dataset, where in self._components(flag):
            tokenizer = dataset.load_tokenizer(where)
            if found and tokenizer and found.fingerprint() != tokenizer.fingerprint():
                raise UserError(
                    f"{where}: its tokenizer {tokenizer.name!r} differs from {found.name!r} of a dataset before it. "
                    "All datasets of a mix must use the same tokenizer."
                )
            found = found or tokenizer
        return found

    def tokenizes(self, flag: str) -> bool:
        return any(dataset.tokenizes(where) for _, dataset, where in self._components(flag))

    def chat_template(self, tokenizer: Tokenizer, flag: str) -> str | None:
        found = {dataset.chat_template(tokenizer, where) for _, dataset, where in self._components(flag)} - {None}
        return found.pop() if len(found) == 1 else None

    def open(self, ctx: StreamContext, flag: str) -> Stream:
        components = self._components(flag)
        if ctx.tokenizer is None:
            ctx = dataclasses.replace(ctx, tokenizer=self.load_tokenizer(flag))
        streams = [
            # Each component has its own seed: the same dataset given twice is read in two orders.
            dataset.open(dataclasses.replace(ctx, seed=hash64(ctx.seed, i) >> 1), where)
            for i, (_, dataset, where) in enumerate(components)
        ]
        return MixStream([weight for weight, _, _ in components], streams, ctx, flag)


class MixStream(Stream):
    """The component of a sample is a hash of (seed, index of the sample), so only the index is stored.

    With `epochs`, the stream ends when the drawn component has ended. Position: `sample`, how many have been taken,
    and the positions of the components."""

    def __init__(self, weights: list[float], streams: list[Stream], ctx: StreamContext, flag: str):
        self._streams, self._ctx, self._flag = streams, ctx, flag
        self._thresholds = [t / sum(weights) for t in accumulate(weights)]  # cumulative, in [0, 1]
        self._fixed = {"weights": weights, "seed": ctx.seed}
        self.files = [path for stream in streams for path in stream.files]
        self.reads = [extent for stream in streams for extent in stream.reads]
        self._sample = 0

    def next_sample(self) -> Sample:
        draw = uniform(self._ctx.seed, self._sample)  # no state: sample i is of the same component in every run
        # Rounding may leave the last threshold below 1: then a draw above it is the last component's.
        choice = next((i for i, t in enumerate(self._thresholds) if draw < t), len(self._thresholds) - 1)
        sample = self._streams[choice].next_sample()
        self._sample += 1
        return sample

    def position(self) -> dict[str, Any]:
        return {"sample": self._sample, "datasets": [s.position() for s in self._streams], **self._fixed}

    def seek(self, position: Mapping[str, Any]) -> None:
        check_position(position, self._fixed, self._flag)
        self._sample = position["sample"]
        for stream, own_position in zip(self._streams, position["datasets"], strict=True):
            stream.seek(own_position)
