"""A differentiable function in eager and compiled code, with and without recomputation."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from qtrain.models.native.recompute import selective_contexts


def check_modes(
    function: Callable[..., Tensor], leaves: Sequence[Tensor], backend: str, *same: Callable[..., Tensor]
) -> None:
    """Results and gradients are those of `function` in every mode, and of the functions `same`. leaves: the arguments,
    all differentiated."""

    def recomputed(*arguments: Tensor) -> Tensor:
        return checkpoint(function, *arguments, use_reentrant=False, context_fn=selective_contexts)

    leaves = [leaf.requires_grad_() for leaf in leaves]
    compiled = [torch.compile(f, fullgraph=True, backend=backend) for f in (function, recomputed)]
    found = []
    for run in (function, *same, recomputed, *compiled):
        y = run(*leaves)
        found.append([y, *torch.autograd.grad(y.square().sum(), leaves)])
    for other in found[1:]:
        for a, b in zip(other, found[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
