"""What a health sample says of one linear or router, and what is to be done."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

from qtrain.models.native.router import Router
from qtrain.quant import LinearChoice, LowBitLinear
from qtrain.quant.health.findings import Finding, alternatives, findings, percent, remedy
from qtrain.quant.scheme_map import Spec
from qtrain.quant.tensor_roles import READERS
from qtrain.train.health.sample import Row

BALANCE = 0.01
"""The weight of the load-balancing loss that a fallback gives collapsed routers, if they have less."""

CONFIRMED, DELAYED = 2, 4
"""Samples in a row after which a fault is one; under delayed scaling. There a batch with larger gradients than those
before puts one linear in a hundred over its bound, of runs without a fault too."""


@dataclass
class Judged:
    """What is wrong with a linear or a router: cause -> (order, sentence, advice); and the scheme that mends it, if it
    is known and the linear can run in it. Of several causes a tensor's comes before a product's, which follows."""

    causes: dict[str, tuple[tuple[bool, float], str, str]] = field(default_factory=dict)
    remedy: Spec | None = None
    samples: int = CONFIRMED
    """In so many in a row it must be before it counts."""
    steps: int = 0
    """Over so many it must go on before it counts."""
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


def judge_linear(row: Row, choice: LinearChoice, linear: LowBitLinear, moved_to: Spec | None) -> Judged:
    """moved_to: the scheme that a fallback has moved it to before."""
    name = row["linear"]
    tensors = {tensor: row[tensor] for tensor in READERS if tensor in row}
    found = findings(linear.scheme, tensors, row.get("products"))
    if not found:
        return Judged()
    scheme, what_if = None, row.get("what_if")
    if moved_to == choice.spec:
        scheme = "bf16"  # what seemed to mend it has not
    elif what_if:
        scheme = remedy(found, what_if, alternatives(choice, linear.weight.device))

    def advice(finding: Finding) -> str:
        other = (what_if or {}).get(scheme or "", {})
        if finding.tensor is None:
            better = other.get("products", {}).get(finding.gemm)
        else:
            better = other.get(finding.tensor, {}).get(finding.measure)
        has = "leaves it in high precision" if better is None else f"has {percent(better)}"
        override = json.dumps({name: scheme or "bf16"}, separators=(",", ":"))
        return f"--quantize_overrides '{override}' {has}"

    fixed = linear.scheme.latent or linear.scheme.stored_format is not None
    delayed = linear.scheme.amax_history
    return Judged(
        {
            f.cause: ((f.tensor is not None, f.value / f.bound), f"{name} {f.gemm}: {f.words()}", advice(f))
            for f in found
        },
        None if fixed else scheme,
        DELAYED if delayed else CONFIRMED,
        delayed,
        not fixed and not delayed and any(f.severe for f in found),
    )


def judge_router(row: Row, router: Router, balance: float) -> Judged:
    """balance: the weight of the load-balancing loss."""
    moe, load = router.moe, row["experts"]["load"]
    # Effective number of experts (inverse Simpson index): `experts` where the load is even.
    used = 1 / sum(share**2 for share in load)
    # All tokens at the same experts is `per_token`; a quarter of the experts in use is a bad balance.
    if moe.per_token >= moe.experts or used >= max(moe.experts / 4, 1.25 * moe.per_token):
        return Judged()
    most = sorted(load, reverse=True)[: moe.per_token]
    what = f"{row['linear']}: {len(most)} of {moe.experts} experts get {percent(sum(most))} of the routes"
    if moe.selection_bias:
        flag = "--router_bias_rate 0.001"
    else:
        flag = f"--router_balance_loss {BALANCE}" if balance < BALANCE else f"--router_balance_loss above {balance:g}"
    balances = router.weight.requires_grad and balance < BALANCE
    return Judged({"load": ((True, 1.0), what, f"{flag} evens them out")}, balances=balances)
