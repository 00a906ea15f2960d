"""Cross-entropy through a head whose vocabulary is divided over a tensor group: no rank has all logits of a token.

As in `loss.py`, in chunks of tokens whose logits are overwritten with their gradient. Of each token a rank sends three
numbers: the maximum of its logits, the sum of exponentials below it, and the label's logit, if it is among them. From
those of all ranks everyone computes the same logsumexp and loss. In PyTorch's operations on all devices.
"""

import torch
from torch import Tensor

from qtrain.comm.rank_group import RankGroup
from qtrain.kernels.cross_entropy import IGNORED

STATISTICS = "loss statistics"
"""The kind of message."""


def sharded_cross_entropy(
    logits: Tensor, labels: Tensor, z_loss: float, with_grad: bool, group: RankGroup, first: int
) -> Tensor:
    """logits [t, rows of this rank], which begin at the token `first` -> fp32 [2, t]: loss and nll of each row.

    with_grad: the logits are overwritten by their gradient."""
    x = logits.float()
    trained, target = labels != IGNORED, labels - first
    own = trained & (target >= 0) & (target < x.shape[1])
    target = torch.where(own, target, 0).unsqueeze(-1)
    label_logit = torch.where(own, x.gather(-1, target).squeeze(-1), 0.0)
    peak = x.amax(dim=-1)
    below = (x - peak.unsqueeze(-1)).exp_().sum(dim=-1)
    every = group.all_gather_no_grad(torch.stack([peak, below, label_logit])[None], STATISTICS)  # [ranks, 3, t]
    top = every[:, 0].amax(dim=0)
    log_total = top + (every[:, 1] * (every[:, 0] - top).exp()).sum(dim=0).log()
    nll = torch.where(trained, log_total - every[:, 2].sum(dim=0), 0.0)
    loss = nll + torch.where(trained, z_loss * log_total.square(), 0.0)
    if with_grad:
        x = x.sub_(log_total.unsqueeze(-1)).exp_().mul_((1.0 + 2.0 * z_loss * log_total).unsqueeze(-1))
        x.scatter_add_(-1, target, -own.float().unsqueeze(-1))
        logits.copy_(x.masked_fill_(~trained.unsqueeze(-1), 0.0))
    return torch.stack([loss, nll])
