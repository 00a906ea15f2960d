"""Codes and scales back to values: value = code * scale, in plain PyTorch on every device."""

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import group_shape
from qtrain.kernels.numerics.packing import unpack

MX_GROUP = 32
"""Elements along K that share a scale in the OCP microscaling (MX) formats."""


def expand_scale(scale: Tensor, granularity: str, shape: tuple[int, int]) -> Tensor:
    """One scale per group (`scale_shape`) -> a tensor that broadcasts with [M, K] = shape."""
    if granularity == "tensorwise":
        return scale
    if granularity == "rowwise":
        return scale[:, None]
    (m, k), (group_m, group_k) = shape, group_shape(granularity, *shape)
    return scale.repeat_interleave(group_m, 0)[:m].repeat_interleave(group_k, 1)[:, :k]


def dequantize(
    codes: Tensor,
    scale: Tensor,
    fmt: str,
    granularity: str,
    shape: tuple[int, int],
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """codes and scale of a matrix of this shape, as `quantize` returns them -> values [M, K] in dtype, rounded once."""
    return (unpack(codes, fmt, shape[1]).float() * expand_scale(scale, granularity, shape)).to(dtype)


def dequantize_mx(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes fp8 [M, K], scale float8_e8m0fnu [M, ceil(K / 32)] -> values [M, K]."""
    expanded = scale.float().repeat_interleave(MX_GROUP, 1)[:, : codes.shape[1]]
    return (codes.float() * expanded).to(dtype)
