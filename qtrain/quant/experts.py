"""The experts of a mixture: a SwiGLU MLP each, all of them in one call.

out[t] = sum over k of weights[t, k] * down_e(silu(gate_e(x[t])) * up_e(x[t])) with e = experts[t, k]
"""

import torch.nn.functional as F
from torch import Tensor

from qtrain.quant.grouped_linear import GroupedLinear


def experts_mlp(gate_up: GroupedLinear, down: GroupedLinear, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
    """x [T, C], experts int64 [T, k], weights fp32 [T, k] -> [T, C] in x's dtype, summed over k in fp32.

    gate_up: per expert the rows of gate, then those of up.
    """
    w_up = gate_up.weight.view(gate_up.groups, -1, gate_up.in_features)
    w_down = down.weight.view(down.groups, -1, down.in_features)
    tokens, routes = x.shape[0], experts.shape[1]
    y = x.new_zeros(tokens * routes, x.shape[1])
    flat = experts.reshape(-1)
    for e in range(gate_up.groups):
        mine = (flat == e).nonzero().squeeze(1)
        gate, up = F.linear(x[mine // routes], w_up[e]).chunk(2, dim=-1)
        y = y.index_copy(0, mine, F.linear(F.silu(gate) * up, w_down[e]))
    return (y.view(tokens, routes, -1).float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)
