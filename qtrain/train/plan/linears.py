"""What the swap will do to each linear, known before the model has memory, for the plan and its refusals."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from qtrain.errors import UserError
from qtrain.quant import LinearChoice, LowBitScheme, Scheme, choose_linears
from qtrain.train.settings import TrainSettings


@dataclass(frozen=True)
class PlannedLinear:
    """A linear, and the scheme that it will run in (None: the model's dtype)."""

    choice: LinearChoice
    scheme: LowBitScheme | None

    @property
    def name(self) -> str:
        return self.choice.name

    @property
    def is_head(self) -> bool:
        return self.choice.is_head

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.choice.groups * self.choice.out_features, self.choice.in_features

    @property
    def stored(self) -> bool:
        """Whether the weight itself is kept in low bits."""
        return self.scheme is not None and self.scheme.stored_format is not None

    @property
    def weights(self) -> int:
        rows, columns = self.shape
        return rows * columns


def plan_linears(
    model: nn.Module, scheme: Scheme, settings: TrainSettings, *, head: nn.Module | None, device: torch.device
) -> list[PlannedLinear]:
    """What `quantize_linears` will do to every linear of `model` (on the meta device) where it trains on `device`."""
    choices = choose_linears(
        model,
        scheme,
        device=device,
        head=head,
        quantize_head=settings.quantize_lm_head,
        min_size=settings.quantize_min_size,
    )

    def of(c: LinearChoice) -> PlannedLinear:
        own = scheme.for_linear(c.in_features, c.out_features, head=c.is_head) if c.reason is None else None
        return PlannedLinear(choice=c, scheme=own)

    return [of(choice) for choice in choices]


def refuse_no_swap(linears: Sequence[PlannedLinear], scheme: Scheme, quantize: str) -> None:
    """UserError where a low-bit scheme swaps no linear at all: the run would be one in high precision. quantize: what
    --quantize says."""
    if not isinstance(scheme, LowBitScheme) or any(linear.scheme for linear in linears):
        return
    flag, fix = ("--lora.base", '"base":"none"') if scheme.name else ("--quantize", "--quantize bf16")
    raise UserError(
        f"{flag}: {scheme.name or quantize!r} quantizes none of the model's {len(linears)} linears: "
        f"{_reasons(linears) or 'it has none'}. Change that, or train in high precision with {fix}."
    )


def warn_high_precision(
    linears: Sequence[PlannedLinear], scheme: Scheme, dtype: torch.dtype, rows: Mapping[str, float] | None
) -> list[str]:
    """A line where a low-bit scheme leaves more than half of the linears' FLOPs in high precision; else none.

    rows: of the input of each linear, by its name; None: the same for all.
    """
    if not isinstance(scheme, LowBitScheme):
        return []
    work = {linear: linear.weights * (1 if rows is None else rows.get(linear.name, 0)) for linear in linears}
    left = {linear: flops for linear, flops in work.items() if linear.scheme is None}
    share = sum(left.values()) / max(sum(work.values()), 1)
    if share <= 0.5:
        return []
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    return [f"warning: {100 * share:.0f}% of the linears' FLOPs stay in {name}: {_reasons(left)}"]


def _reasons(linears: Iterable[PlannedLinear]) -> str:
    """Why linears are left, each reason once with the number of linears."""
    counts = Counter(linear.choice.reason for linear in linears if linear.choice.reason)
    return "; ".join(f"{count} x {reason}" for reason, count in counts.items())


def shares(linears: Iterable[PlannedLinear], work: Mapping[str, float]) -> dict[LowBitScheme | None, float]:
    """The fraction of `work` (by name of the linear) that runs in each scheme; None: in the model's dtype."""
    found: dict[LowBitScheme | None, float] = {}
    for linear in linears:
        found[linear.scheme] = found.get(linear.scheme, 0.0) + work.get(linear.name, 0.0)
    total = sum(found.values())
    return {scheme: part / total for scheme, part in found.items()} if total else {None: 1.0}
