"""What a run counts: the work that its speed and its totals are given in."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Unit:
    """one, many: in words, the second also the key of the total in metrics.jsonl; rate: the key of the speed there;
    per_second: the speed in words; batch: what a batch consists of."""

    one: str
    many: str
    rate: str
    per_second: str
    batch: str


TOKENS = Unit("a token", "tokens", "tok_s", "tok/s", "sequences")
IMAGES = Unit("an image", "images", "img_s", "img/s", "images")
