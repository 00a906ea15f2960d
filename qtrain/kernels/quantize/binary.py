"""Binary codes of a whole matrix: the sign of each element less their mean, times the mean of their absolute values.

    code = 1 where x >= mean x, else -1          scale = mean |x|

A matrix with a NaN or an Inf has a NaN scale, so that products with it are NaN. Codes are made once per optimizer step,
by a few elementwise operations of PyTorch on every device. Both means follow from sums in fp64, which may be those of
parts that several processes have.

Source: Wang et al., "BitNet: Scaling 1-bit Transformers for Large Language Models", arXiv:2310.11453.
"""

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import SCALE_EPS, pack


def binary_statistic(x: Tensor) -> Tensor:
    """x fp32/bf16 of any shape -> sum of |x|, sum of x, number of elements: fp64 [3], which parts of x add up to."""
    total = x.sum(dtype=torch.float64)
    return torch.stack([x.abs().sum(dtype=torch.float64), total, torch.full_like(total, x.numel())])


def binary_scale(statistic: Tensor) -> Tensor:
    """The scale, fp32 [1]; SCALE_EPS of zeros."""
    scale = _mean(statistic, 0)
    return torch.where(scale.isfinite(), scale.clamp(min=SCALE_EPS), float("nan"))


def binary_center(statistic: Tensor) -> Tensor:
    """The mean that elements are compared with, fp32 [1]."""
    return _mean(statistic, 1)


def _mean(statistic: Tensor, index: int) -> Tensor:
    return (statistic[index] / statistic[2].clamp(min=1)).float().view(1)


def binary_codes(x: Tensor, center: Tensor) -> Tensor:
    """x [M, K] fp32/bf16, center fp32 [1] -> packed codes uint8 [M, ceil(K / 8)]."""
    below = x < center  # in fp32: the center is no scalar, and is not rounded to the dtype of x
    return pack(1 - 2 * below.to(torch.int8), "binary")
