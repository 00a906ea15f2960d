"""Softmax cross-entropy over rows of logits, whose memory then holds their gradient.

One CTA per row: a first pass keeps a running maximum and sum per lane, a second replaces the row by its gradient: two
reads and one write of each logit, where Inductor takes three reads and one write in two launches, and 8% of a 0.5B
model's step (vocabulary 151,936, H200).

With L = logsumexp(row): nll = L - logit[label], loss = nll + z_loss * L²,
d loss / d logit = softmax * (1 + 2 * z_loss * L) - onehot(label). A row labeled -100 has loss and gradient 0.

`cross_entropy_statistics` leaves the logits as they are, and gives L too: a quantizer computes codes of the gradient
from both (`quantize/softmax_grad.py`).
"""

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_ptx
from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.softmax import IGNORED, LOG2_E, exp_less


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
    if with_grad:
        x.mul_((1.0 + 2.0 * z_loss * log_total).unsqueeze(-1) / total)
        x.scatter_add_(-1, target, torch.full_like(target, -1, dtype=torch.float32))
        logits.copy_(x.masked_fill_(~trained.unsqueeze(-1), 0.0))
    return torch.stack(_loss_and_nll(log_total, target_logit, trained, z_loss))


def _loss_and_nll(log_total: Tensor, target_logit: Tensor, trained: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    nll = torch.where(trained, log_total - target_logit, 0.0)
    return nll + torch.where(trained, z_loss * log_total.square(), 0.0), nll


def cross_entropy_statistics_ref(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """logits [T, V] fp32/bf16, labels int64 [T] -> fp32 [3, T]: loss, nll and L of each row."""
    x, trained = logits.float(), labels != IGNORED
    target_logit = x.gather(-1, torch.where(trained, labels, 0).unsqueeze(-1)).squeeze(-1)
    peak = x.amax(dim=-1, keepdim=True)
    log_total = (peak + (x - peak).exp_().sum(dim=-1, keepdim=True).log()).squeeze(-1)
    return torch.stack([*_loss_and_nll(log_total, target_logit, trained, z_loss), log_total])


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


# ---- statistics alone ------------------------------------------------------------------------------------------------

GROUP = 8
"""Neighbors that one thread reads in 16 bytes, and whose maximum it takes before their exponentials."""
STATISTICS_BLOCK, STATISTICS_WARPS = 4096, 8


@triton.jit
def _load_groups(row_ptr, start, width, GROUP: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK logits from number `start` of a row, [BLOCK / GROUP, GROUP]; -inf past the end."""
    column = start + tl.arange(0, BLOCK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(row_ptr + column, column < width, float("-inf"))


@triton.jit
def _cross_entropy_statistics_kernel(
    # fp32 or bf16 [rows, width], rows `stride` apart; int64 [rows]; fp32 [3, rows]: loss, nll and L.
    logits_ptr, labels_ptr, out_ptr, rows, width, stride, z_loss,
    PTX: tl.constexpr, GROUP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    # Online softmax with a maximum and a sum per group of neighbors: one exponential more for each group, not for each
    # logit, rescales its sum.
    peak, total = tl.full([BLOCK // GROUP], float("-inf"), tl.float32), tl.zeros([BLOCK // GROUP], tl.float32)
    logits = _load_groups(logits_ptr, 0, width, GROUP, BLOCK)
    for start in range(0, width, BLOCK):
        x = logits.to(tl.float32)
        logits = _load_groups(logits_ptr, start + BLOCK, width, GROUP, BLOCK)  # in flight during this one's arithmetic
        higher = tl.maximum(peak, tl.max(x, 1))
        # A group without a logit yet has peak -inf, and -inf - -inf would be NaN.
        log2_peak = tl.where(higher == float("-inf"), 0.0, higher * LOG2_E)
        total = total * exp_less(peak, log2_peak, PTX) + tl.sum(exp_less(x, log2_peak[:, None], PTX), 1)
        peak = higher
    top = tl.max(peak, 0)
    # Maxima ignore NaN, the sum does not: a NaN logit gives a NaN loss.
    log_total = top + tl.log(tl.sum(total * exp_less(peak, top * LOG2_E, PTX), 0))
    label = tl.load(labels_ptr + row)
    trained = label != -100
    nll = log_total - tl.load(logits_ptr + tl.where(trained, label, 0)).to(tl.float32)
    nll = tl.where(trained, nll, 0.0)
    tl.store(out_ptr + row, nll + tl.where(trained, z_loss * log_total * log_total, 0.0))
    tl.store(out_ptr + rows + row, nll)
    tl.store(out_ptr + 2 * rows + row, log_total)


def launch_cross_entropy_statistics(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """The kernel for `cross_entropy_statistics_ref`; the last dimension of logits contiguous."""
    rows, width = logits.shape
    out = logits.new_empty(3, rows, dtype=torch.float32)
    if rows:
        block = max(min(triton.next_power_of_2(width), STATISTICS_BLOCK), GROUP)
        _cross_entropy_statistics_kernel[(rows,)](
            logits, labels.contiguous(), out, rows, width, logits.stride(0), z_loss,
            PTX=has_ptx(logits.device), GROUP=GROUP, BLOCK=block, num_warps=STATISTICS_WARPS,
        )  # fmt: skip
    return out


@operator("cross_entropy_statistics", fake=lambda logits: logits.new_empty(3, logits.shape[0], dtype=torch.float32))
def cross_entropy_statistics(logits: Tensor, labels: Tensor, z_loss: float) -> Tensor:
    """logits [T, V], labels int64 [T] -> fp32 [3, T] (loss, nll, L) from one read of the logits, which stay."""
    if logits.is_cuda:
        return launch_cross_entropy_statistics(logits, labels, z_loss)
    return cross_entropy_statistics_ref(logits, labels, z_loss)
