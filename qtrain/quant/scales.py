"""Scales that cover more than one process holds: a statistic of what is here, a reduction, and the scale that follows.

    most formats   absmax, fp32 [1]                             reduced by maximum
    ternary        sum of |t| and number of elements, fp64 [2]  reduced by sum
    binary         those and the sum of t, fp64 [3]             reduced by sum

Every scale that spans processes is computed here: of weights, of activations, of gradients, of shards.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import FORMATS, SCALE_EPS
from qtrain.kernels.quantize.absmax import absmax
from qtrain.kernels.quantize.binary import binary_center, binary_scale, binary_statistic
from qtrain.kernels.quantize.delayed_scale import record_amax
from qtrain.kernels.quantize.reference import scale_from_amax_ref
from qtrain.quant.tensor_roles import DelayedScale
from qtrain.tensors.quantized_tensor import OperandFormat

Reduce = Callable[[Tensor], Tensor]
"""Statistics of one process -> those of all: fp32 by maximum, NaN above all; fp64 by sum, in a fixed order."""


def is_mean(fmt: OperandFormat) -> bool:
    """Whether the scale is a mean, not an absmax."""
    return fmt.fmt == "ternary" or FORMATS[fmt.fmt].signs


def tensor_statistic(t: Tensor, fmt: OperandFormat, known_amax: Tensor | None = None) -> Tensor:
    """What a tensorwise scale depends on. known_amax: of t, as fp32 bits in int32 [1]."""
    if FORMATS[fmt.fmt].signs:
        return binary_statistic(t)
    if is_mean(fmt):
        # In fp64: sums of parts add up to the whole's far below the rounding of an fp32 scale.
        total = t.abs().sum(dtype=torch.float64)
        return torch.stack([total, torch.full_like(total, t.numel())])
    # The optimizer's kernel has left the absmax of what it stored: no second pass over the weight.
    return absmax(t).view(1).float() if known_amax is None else known_amax.view(torch.float32)


def scale_of_statistic(
    statistic: Tensor, fmt: OperandFormat, shape: Sequence[int], power_of_two: bool = False
) -> Tensor:
    """The scale, fp32, laid out as `scale_shape` of fmt's granularity for a tensor of `shape`."""
    if FORMATS[fmt.fmt].signs:
        return binary_scale(statistic)
    if is_mean(fmt):
        # Mean |t|; an all-zero tensor divides by eps.
        return (statistic[:1] / statistic[1:]).float().clamp(min=SCALE_EPS)
    return scale_from_amax_ref(statistic, fmt.fmt, fmt.granularity, shape, power_of_two)


def center_of_statistic(statistic: Tensor, fmt: OperandFormat) -> Tensor | None:
    """What elements are compared with, fp32 [1], where codes are signs."""
    return binary_center(statistic) if FORMATS[fmt.fmt].signs else None


def reduce_all(statistics: Sequence[Tensor], reduce: Reduce) -> list[Tensor]:
    """Reduce many statistics with one call per dtype."""
    reduced = list(statistics)
    for dtype in (torch.float32, torch.float64):
        indices = [i for i, s in enumerate(statistics) if s.dtype is dtype]
        if indices:
            # All weights of a step in one message: a collective costs its latency, not these bytes.
            flat = reduce(torch.cat([statistics[i] for i in indices]))
            for i, part in zip(indices, flat.split([len(statistics[i]) for i in indices]), strict=True):
                reduced[i] = part
    return reduced


def spanning_scale(
    t: Tensor, fmt: OperandFormat, reduce: Reduce, power_of_two: bool, delayed: DelayedScale | None = None
) -> Tensor:
    """The tensorwise scale of t here and on other processes, fp32 [1]; with delayed scaling that of earlier steps,
    once there are any, while the absmax of all is recorded."""
    amax = reduce(absmax(t).view(1))
    scale = scale_of_statistic(amax, fmt._replace(granularity="tensorwise"), t.shape, power_of_two)
    if delayed is None:
        return scale
    # On the device: the host does not know whether there is a history.
    scale = torch.where(delayed.scale > 0, delayed.scale, scale)
    return scale if delayed.amax is None else record_amax(delayed.amax, amax, scale)
