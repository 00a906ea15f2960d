"""The unit of a run's speed and totals: tokens or images."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """one, many: words for one and several; many is also the key of the total in metrics.jsonl, rate that of the speed.
    per_second: the unit of the speed. batch: what a batch consists of."""

    one: str
    many: str
    rate: str
    per_second: str
    batch: str


TOKENS = Unit("a token", "tokens", "tok_s", "tok/s", "sequences")
IMAGES = Unit("an image", "images", "img_s", "img/s", "images")
