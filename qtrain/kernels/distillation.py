"""Cross-entropy mixed with the divergence from a teacher, over rows of logits, whose memory then holds the gradient.

With student logits s, teacher logits t, temperature τ, q = softmax(s / τ) and p = softmax(t / τ):

    kl   = sum p · (log p - log q)                                  KL(teacher || student), Hinton et al. 2015,
    loss = (1 - weight) · cross_entropy(s) + weight · τ² · kl       arXiv:1503.02531
    d loss / d s = (1 - weight) · d cross_entropy(s) / d s + weight · τ · (q - p)

`cross_entropy` includes its z-loss. The factor τ² keeps the gradient's size independent of τ. One CTA per row, as in
`cross_entropy.py`: a first pass over both rows for all sums, a second for the gradient. A row labeled -100 has loss, kl
and gradient 0. With weight 0 losses and gradients are those of `cross_entropy`, bit for bit.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.cross_entropy import IGNORED, cross_entropy_ref


def distilled_cross_entropy_ref(
    logits: Tensor, teacher: Tensor, labels: Tensor, z_loss: float, weight: float, temperature: float, with_grad: bool
) -> Tensor:
    """logits, teacher [T, V] fp32/bf16, labels int64 [T] -> fp32 [3, T]: loss, nll and kl of each row.

    with_grad: the logits are overwritten by d loss / d logits, computed in fp32.
    """
    trained = labels != IGNORED
    x = logits.float()
    log_q, log_p = ((a.float() / temperature).log_softmax(dim=-1) for a in (x, teacher))
    p = log_p.exp()
    kl = torch.where(trained, (p * (log_p - log_q)).sum(dim=-1), 0.0)
    # Overwrites x by its gradient in fp32, which may be the memory of the logits.
    loss, nll = cross_entropy_ref(x, labels, z_loss, with_grad)
    if with_grad:
        pull = log_q.exp_().sub_(p).masked_fill_(~trained.unsqueeze(-1), 0.0)
        logits.copy_(x.mul_(1.0 - weight).add_(pull, alpha=weight * temperature))
    return torch.stack([(1.0 - weight) * loss + weight * temperature**2 * kl, nll, kl])


@triton.jit
def _distilled_cross_entropy_kernel(
    # fp32 or bf16 [rows, width] twice, rows `stride` and `teacher_stride` apart; int64 [rows]; fp32 [3, rows].
    logits_ptr, teacher_ptr, labels_ptr, out_ptr, rows, width, stride, teacher_stride, z_loss, weight, inv_temperature,
    WITH_GRAD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride
    teacher_ptr += row * teacher_stride
    label = tl.load(labels_ptr + row)
    columns = tl.arange(0, BLOCK)
    # Online softmax with maxima and sums per lane, as in `cross_entropy`: of s, of s / τ (of the same maximum), and of
    # t / τ, where a third sum has (t - s) / τ weighted by its exponentials.
    peak, teacher_peak = tl.full([BLOCK], float("-inf"), tl.float32), tl.full([BLOCK], float("-inf"), tl.float32)
    total, soft_total = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    teacher_total, gap = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        inside = start + columns < width
        x = tl.load(logits_ptr + start + columns, inside, float("-inf")).to(tl.float32)
        higher = tl.maximum(peak, x)
        # A lane without a logit yet has peak -inf, and -inf - -inf would be NaN.
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        total = total * tl.exp(peak - safe) + tl.exp(x - safe)
        soft_total = soft_total * tl.exp((peak - safe) * inv_temperature) + tl.exp((x - safe) * inv_temperature)
        peak = higher
        t = tl.load(teacher_ptr + start + columns, inside, float("-inf")).to(tl.float32)
        higher = tl.maximum(teacher_peak, t)
        safe = tl.where(higher == float("-inf"), 0.0, higher)
        decay, own = tl.exp((teacher_peak - safe) * inv_temperature), tl.exp((t - safe) * inv_temperature)
        teacher_total = teacher_total * decay + own
        gap = gap * decay + own * tl.where(inside, (t - x) * inv_temperature, 0.0)  # past the end -inf - -inf
        teacher_peak = higher
    top, teacher_top = tl.max(peak, 0), tl.max(teacher_peak, 0)
    log_total = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    soft_sum = tl.sum(soft_total * tl.exp((peak - top) * inv_temperature), 0)
    soft_log = top * inv_temperature + tl.log(soft_sum)
    decay = tl.exp((teacher_peak - teacher_top) * inv_temperature)
    teacher_sum = tl.sum(teacher_total * decay, 0)
    teacher_log = teacher_top * inv_temperature + tl.log(teacher_sum)
    trained = label != -100
    # sum p · (t - s) / τ, less the difference of the normalizers.
    kl = tl.where(trained, tl.sum(gap * decay, 0) / teacher_sum - teacher_log + soft_log, 0.0)
    target = tl.load(logits_ptr + tl.where(trained, label, 0)).to(tl.float32)
    nll = tl.where(trained, log_total - target, 0.0)
    loss = nll + tl.where(trained, z_loss * log_total * log_total, 0.0)
    tl.store(out_ptr + row, (1.0 - weight) * loss + weight * kl / (inv_temperature * inv_temperature))
    tl.store(out_ptr + rows + row, nll)
    tl.store(out_ptr + 2 * rows + row, kl)
    if WITH_GRAD:
        z_weight = tl.where(trained, 1.0 + 2.0 * z_loss * log_total, 0.0)
        tl.debug_barrier()  # every warp has read the target before any overwrites it
        for start in range(0, width, BLOCK):
            inside = start + columns < width
            x = tl.load(logits_ptr + start + columns, inside, float("-inf")).to(tl.float32)
            t = tl.load(teacher_ptr + start + columns, inside, float("-inf")).to(tl.float32)
            grad = tl.exp(x - log_total) * z_weight - tl.where(start + columns == label, 1.0, 0.0)
            pull = tl.exp(x * inv_temperature - soft_log) - tl.exp(t * inv_temperature - teacher_log)
            grad = grad * (1.0 - weight) + pull * (weight / inv_temperature)
            grad = tl.where(trained, grad, 0.0)
            tl.store(logits_ptr + start + columns, grad.to(logits_ptr.dtype.element_ty), inside)


def launch_distilled_cross_entropy(
    logits: Tensor, teacher: Tensor, labels: Tensor, z_loss: float, weight: float, temperature: float, with_grad: bool
) -> Tensor:
    """The kernel for `distilled_cross_entropy_ref`; the last dimensions of logits and teacher contiguous."""
    rows, width = logits.shape
    out = logits.new_empty(3, rows, dtype=torch.float32)
    if rows:
        block = min(triton.next_power_of_2(width), 4096)  # six accumulators per lane: 8 lanes a thread
        _distilled_cross_entropy_kernel[(rows,)](
            logits, teacher, labels.contiguous(), out, rows, width, logits.stride(0), teacher.stride(0),
            z_loss, weight, 1.0 / temperature, WITH_GRAD=with_grad, BLOCK=block, num_warps=16,
        )  # fmt: skip
    return out


def _empty_distilled(logits):
    return logits.new_empty(3, logits.shape[0], dtype=torch.float32)


@operator("distilled_cross_entropy", fake=_empty_distilled, mutates_args={"logits"})
def distilled_cross_entropy(
    logits: Tensor, teacher: Tensor, labels: Tensor, z_loss: float, weight: float, temperature: float, with_grad: bool
) -> Tensor:
    """logits, teacher [T, V], labels int64 [T] -> fp32 [3, T] (loss, nll, kl); see the top of the file. Overwrites
    logits."""
    if logits.is_cuda:
        return launch_distilled_cross_entropy(logits, teacher, labels, z_loss, weight, temperature, with_grad)
    return distilled_cross_entropy_ref(logits, teacher, labels, z_loss, weight, temperature, with_grad)
