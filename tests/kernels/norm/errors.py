"""How far results are from fp64, row by row."""

from collections.abc import Sequence

import torch
from torch import Tensor


def worst_error(found: Tensor, truth: Tensor) -> float:
    """The largest relative error of a head, or of a weight's gradient."""
    found, truth = (t.double().unflatten(-1, (-1, truth.shape[-1])) for t in (found, truth))
    rows = truth.norm(dim=-1).clamp_min(1e-30)
    return float(((found - truth).norm(dim=-1) / rows).max()) if truth.numel() else 0.0


def assert_no_further(
    names: Sequence[str],
    found: Sequence[Tensor],
    truths: Sequence[Tensor],
    theirs: Sequence[Tensor],
    rounding: float,
    case: object,
) -> None:
    """Each result found is no further from its truth than theirs, or than `rounding`, with NaN at the same places."""
    for name, *values in zip(names, found, truths, theirs, strict=True):
        ours, truth, other = (t.detach() for t in values)
        assert torch.equal(ours.isnan(), truth.isnan()), (case, name)
        ours, truth, other = (t.nan_to_num() for t in (ours, truth, other))
        assert worst_error(ours, truth) <= max(worst_error(other, truth), rounding), (case, name)
