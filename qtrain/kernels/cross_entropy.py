"""Softmax cross-entropy over rows of logits, whose memory then holds their gradient.

One CTA per row: a first pass keeps a running maximum and sum per lane, a second replaces the row by its gradient: two
reads and one write of each logit, where Inductor takes three reads and one write in two launches, and 8% of a 0.5B
model's step (vocabulary 151,936, H200).

With L = logsumexp(row): nll = L - logit[label], loss = nll + z_loss * L²,
d loss / d logit = softmax * (1 + 2 * z_loss * L) - onehot(label). A row labeled -100 has loss and gradient 0.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton

IGNORED = -100
"""The label of a position without a loss."""


def cross_entropy_ref(logits: Tensor, labels: Tensor, z_loss: float, with_grad: bool) -> Tensor:
    """logits [T, V] fp32/bf16, labels int64 [T] -> fp32 [2, T]: loss and nll of each row.

    with_grad: the logits are overwritten by d loss / d logits, computed in fp32.
    """
    x = logits.float()  # in place from here on: on a CPU, allocating a [T, V] costs more than the arithmetic on it
    trained = labels != IGNORED
    target = torch.where(trained, labels, 0).unsqueeze(-1)
    target_logit = x.gather(-1, target).squeeze(-1)
    peak = x.amax(dim=-1, keepdim=True)  # [T, 1]; exponents are at most 0
    x = x.sub_(peak).exp_() if with_grad else (x - peak).exp_()
    total = x.sum(dim=-1, keepdim=True)  # [T, 1]
    log_total = (peak + total.log()).squeeze(-1)
    nll = torch.where(trained, log_total - target_logit, 0.0)
    loss = nll + torch.where(trained, z_loss * log_total.square(), 0.0)
    if with_grad:
        x.mul_((1.0 + 2.0 * z_loss * log_total).unsqueeze(-1) / total)
        x.scatter_add_(-1, target, torch.full_like(target, -1, dtype=torch.float32))
        logits.copy_(x.masked_fill_(~trained.unsqueeze(-1), 0.0))
    return torch.stack([loss, nll])


@triton.jit
def _cross_entropy_kernel(
    # fp32 or bf16 [rows, width], rows `stride` apart; int64 [rows]; fp32 [2, rows], loss and nll.
    logits_ptr, labels_ptr, out_ptr, rows, width, stride, z_loss, WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    label = tl.load(labels_ptr + row)
    columns = tl.arange(0, BLOCK)
    # Online softmax, with a maximum and a sum per lane: lanes meet once, after the loop.
    peak = tl.full([BLOCK], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        # -inf past the end: its exponential adds 0 to the sum.
        x = tl.load(logits_ptr + start + columns, inside, float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, x)
        # A lane without a logit yet has peak -inf, and -inf - -inf would be NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.exp(x - safe)
        peak = higher
    top = tl.max(peak, 0)
    # Maxima ignore NaN, the sum does not: a NaN logit gives a NaN loss.
    log_total = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    trained = label != -100
    target = tl.load(logits_ptr + tl.where(trained, label, 0)).to(tl.float32)
    nll = tl.where(trained, log_total - target, 0.0)
    loss = nll + tl.where(trained, z_loss * log_total * log_total, 0.0)
    tl.store(out_ptr + row, loss)
    tl.store(out_ptr + rows + row, nll)
    if WITH_GRAD:
        # The second read comes from L2: a row of 151,936 bf16 logits is 300 KB.
        weight = tl.where(trained, 1.0 + 2.0 * z_loss * log_total, 0.0)
        tl.debug_barrier()  # every warp has read the target before any overwrites it
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            x = tl.load(logits_ptr + start + columns, inside, float("-inf")).to(tl.float32)
            grad = tl.exp(x - log_total) * weight - tl.where(start + columns == label, 1.0, 0.0)
            grad = tl.where(trained, grad, 0.0)
            tl.store(logits_ptr + start + columns, grad.to(logits_ptr.dtype.element_ty), inside)


def launch_cross_entropy(logits: Tensor, labels: Tensor, z_loss: float, with_grad: bool) -> Tensor:
    """The kernel for `cross_entropy_ref`; the last dimension of logits contiguous."""
    rows, width = logits.shape
    out = logits.new_empty(2, rows, dtype=torch.float32)
    if rows:
        block = min(triton.next_power_of_2(width), 8192)
        _cross_entropy_kernel[(rows,)](
            logits, labels.contiguous(), out, rows, width, logits.stride(0), z_loss,
            WITH_GRAD=with_grad, BLOCK=block, num_warps=16,
        )  # fmt: skip
    return out


def _empty_cross_entropy(logits):
    return logits.new_empty(2, logits.shape[0], dtype=torch.float32)


@operator("cross_entropy", fake=_empty_cross_entropy, mutates_args={"logits"})
def cross_entropy(logits: Tensor, labels: Tensor, z_loss: float, with_grad: bool) -> Tensor:
    """logits [T, V], labels int64 [T] -> fp32 [2, T] (loss, nll); see the top of the file. Overwrites logits."""
    if logits.is_cuda:
        return launch_cross_entropy(logits, labels, z_loss, with_grad)
    return cross_entropy_ref(logits, labels, z_loss, with_grad)
