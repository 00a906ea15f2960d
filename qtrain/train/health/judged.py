"""What a health sample says of one linear or router, and what is to be done."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from qtrain.quant.scheme_map import Spec


@dataclass
class Judged:
    """What is wrong with a linear or a router: cause -> (order, sentence, advice); and the scheme that mends it, if it
    is known and the linear can run in it. Of several causes a tensor's comes before a product's, which follows."""

    causes: dict[str, tuple[tuple[bool, float], str, str]] = field(default_factory=dict)
    remedy: Spec | None = None
    steps: int = 0
    """For so many it must go on before it counts."""
    severe: bool = False
    """Whether one sample is enough to act."""
    balances: bool = False
    """Whether a load-balancing loss would act on the router, which has less than BALANCE of it."""

    def _worst(self, causes: Sequence[str]) -> tuple[tuple[bool, float], str, str]:
        # Tuples compare by their order first: a tensor before a product, then the furthest over its bound.
        return max(self.causes[cause] for cause in causes)

    def text(self, causes: Sequence[str], since: int) -> str:
        return f"{self._worst(causes)[1]} since step {since:,}"

    def advice(self, causes: Sequence[str]) -> str:
        return self._worst(causes)[2]
