"""Cases of the table of quantizers: the loss of logits [M, V], and FP8 codes of their gradient in both layouts.

Either the gradient is written over the logits and then quantized, 10 bytes a logit, or its codes are computed from the
logits, 6 bytes. The fewest bytes that the table counts are 4.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from qtrain.bench.case import Case, WrongResultError
from qtrain.kernels.cross_entropy import cross_entropy, cross_entropy_statistics
from qtrain.kernels.quantize.operators import quantize_dual_delayed
from qtrain.kernels.quantize.softmax_grad import quantize_softmax_grad_delayed, softmax_grad_ref

ROWS = 1024
"""Rows of the gradient that a check computes at a time in fp32."""


def loss_case(from_logits: bool, error: Callable[[Tensor, Tensor, Tensor], float]) -> Any:
    """Prepares a case of the shape [M, V]. error: of codes under a scale, relative to that of rounding."""

    def prepare(shape: tuple[int, int], device: torch.device) -> Case:
        generator = torch.Generator(device).manual_seed(0)
        logits = torch.randn(shape, device=device, generator=generator).bfloat16()
        labels = torch.randint(0, shape[1], shape[:1], device=device, generator=generator)
        known = torch.full((1,), 1 / 448, device=device)  # gradients are at most 1
        exact = logits.to("cpu", copy=True)  # the run may overwrite them, and memory of the device is scarce

        def run(logits: Tensor) -> tuple[Tensor, ...]:
            if from_logits:
                loss, nll, log_total = cross_entropy_statistics(logits, labels, 0.0)
                return *quantize_softmax_grad_delayed(logits, log_total, labels, 0.0, "e4m3", known), loss, nll
            losses = cross_entropy(logits, labels, 0.0, True)
            return *quantize_dual_delayed(logits, "e4m3", known), losses

        def check(out: Any) -> float:
            codes, codes_t, scale, *_ = out
            if not torch.equal(codes.view(torch.uint8), codes_t.view(torch.uint8).t()):
                raise WrongResultError("transposed codes are not the transpose of the codes")
            share = 0.0
            for start in range(0, shape[0], ROWS):
                part = slice(start, start + ROWS)
                x = exact[part].to(device)
                grad = softmax_grad_ref(x, x.float().logsumexp(dim=-1), labels[part], 0.0)
                share = max(share, error(grad if from_logits else grad.bfloat16(), codes[part], scale))
            # A gradient near a tie may be another number in bf16: one of its steps is an eighth of half a code's.
            if share > (1 if from_logits else 1.125):
                raise WrongResultError(f"an error {share:.3g} times that of rounding")
            return share

        return Case((logits,), run, check)

    return prepare
