"""Orthogonalization of a batch of matrices by Newton-Schulz iteration, with matrix products only.

The quintic of Keller Jordan's Muon (kellerjordan.github.io/posts/muon): x <- a·x + (b·xxᵀ + c·(xxᵀ)²)·x. Its
coefficients trade exactness for a steep slope at zero: after five steps singular values are between 0.7 and 1.2.
"""

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


def newton_schulz(x: Tensor, steps: int = 5, eps: float = 1e-7) -> Tensor:
    """x [B, R, C] -> [B, R, C], with singular values near one. Computed in x's dtype."""
    a, b, c = COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=torch.promote_types(x.dtype, torch.float32))
    x = x * norm.clamp(min=eps).reciprocal().to(x.dtype)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
