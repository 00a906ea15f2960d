"""Linears of many experts in one parameter: their matrices stacked along rows.

    weight [E * N, K]: rows [e * N, (e + 1) * N) are expert e's

It is [E, N, K] with its first two dimensions flattened: a matrix like any other for quantizers, low-bit storage,
optimizers, shards by rows and checkpoints. Products are computed by `experts.py`, for all experts in one call.
"""

from torch import Tensor, nn


class GroupedLinear(nn.Linear):
    """`groups` matrices of [N, K], without biases. in_features: K; out_features: groups * N."""

    def __init__(self, groups: int, in_features: int, out_features: int):
        """out_features: N, of one group."""
        super().__init__(in_features, groups * out_features, bias=False)
        self.groups = groups

    def forward(self, x: Tensor) -> Tensor:
        raise NotImplementedError("which rows belong to which expert is known to `experts_mlp` only")

    def extra_repr(self) -> str:
        return f"groups={self.groups}, in_features={self.in_features}, out_features={self.out_features // self.groups}"


def groups_of(linear: nn.Linear) -> int:
    """The matrices in its weight."""
    return linear.groups if isinstance(linear, GroupedLinear) else 1
