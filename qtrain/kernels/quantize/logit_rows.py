"""What the gradient of rows of logits is computed from as a quantizer reads them: device functions.

exp(x - L) * weight - onehot(label),    L = logsumexp of the row, weight = 1 + 2 * z_loss * L
"""

from typing import NamedTuple

from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.numerics.bf16x2 import halves_f32, to_bf16x2
from qtrain.kernels.softmax import LOG2_E, exp_less

TWO_INF = tl.constexpr(-8323200)
"""A word of two -inf in bf16, whose gradient is 0."""


class LogitRows(NamedTuple):
    """Of the rows [M] of logits; kernels take it as a tuple."""

    log_total: Tensor
    """fp32 [M], of `cross_entropy_statistics`, contiguous."""
    labels: Tensor
    """int64 [M], contiguous; -100: ignored."""
    z_loss: float


@triton.jit
def load_logit_rows(logit_rows, row, inside):
    """Of the rows `row`: label, L times log2(e), and the factor of the probabilities. Of one that is not trained L is
    0, as it may be NaN."""
    log_total_ptr, labels_ptr, z_loss = logit_rows
    label = tl.load(labels_ptr + row, inside, -1).to(tl.int32)
    log_total = tl.where(label != -100, tl.load(log_total_ptr + row, inside, 0.0), 0.0)
    return label, log_total * LOG2_E, 1.0 + 2.0 * z_loss * log_total


@triton.jit
def softmax_grad_bf16x2(words, j, statistics, PTX: tl.constexpr):
    """Pairs of logits int32 [R, C], number j [C] of their rows -> pairs of their gradient, rounded once; `TWO_INF`
    becomes 0. statistics: `load_logit_rows` of [R]."""
    label, log2_total, weight = statistics
    first, second = halves_f32(words)
    first = exp_less(first, log2_total[:, None], PTX) * weight[:, None]
    second = exp_less(second, log2_total[:, None], PTX) * weight[:, None]
    # The label's pair, and 1 at its half.
    at_label, odd = (label >> 1)[:, None] == j[None, :], (label & 1).to(tl.float32)[:, None]
    first, second = first - tl.where(at_label, 1.0 - odd, 0.0), second - tl.where(at_label, odd, 0.0)
    return tl.where((label == -100)[:, None], 0, to_bf16x2(first, second, PTX))
