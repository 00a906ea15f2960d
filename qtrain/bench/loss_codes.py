"""Cases of the table of quantizers: the loss of logits [M, V], and codes of their gradient in both layouts.

Either the gradient is written over the logits and then quantized, or its codes are computed from the logits: FP8 under
a known scale 6 bytes a logit instead of 10, INT8 under scales of rows 8 instead of 12. The fewest bytes that the table
counts are 4.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from qtrain.bench.case import Case, WrongResultError, within
from qtrain.kernels.cross_entropy import cross_entropy, cross_entropy_statistics
from qtrain.kernels.quantize.operators import quantize_dual, quantize_dual_delayed
from qtrain.kernels.quantize.softmax_grad import (
    quantize_softmax_grad,
    quantize_softmax_grad_delayed,
    softmax_grad_ref,
)

ROWS = 1024
"""Rows of the gradient that a check computes at a time in fp32."""
OF_ROUNDING = "that of rounding"
NEAR_A_TIE = 2
"""Errors of rounding that codes may have: there a number may be another one in bf16, half a step of a code away."""
Error = Callable[[Tensor, Tensor, Tensor], float]
"""Of codes under a scale, relative to that of rounding: (values, codes, scale)."""


def delayed_loss_case(from_logits: bool, error: Error) -> Any:
    """Prepares a case of the shape [M, V] in e4m3, under a scale that is known."""

    def prepare(shape: tuple[int, int], device: torch.device) -> Case:
        logits, labels, exact = _problem(shape, device)
        known = torch.full((1,), 1 / 448, device=device)  # gradients are at most 1

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
            for part, grad in _gradients(exact, labels):
                share = max(share, error(grad if from_logits else grad.bfloat16(), codes[part], scale))
            # A gradient near a tie may be another number in bf16. One of its steps is an eighth of half a code's, at
            # most 1.75 times that: over the scale, 1 / 448, powers of two become 1.75 times powers of two.
            return within(share, OF_ROUNDING, 1 if from_logits else 1 + 1.75 / 8)

        return Case((logits,), run, check)

    return prepare


def rowwise_loss_case(from_logits: bool, error: Error) -> Any:
    """The same in INT8, with scales of rows and of columns."""

    def prepare(shape: tuple[int, int], device: torch.device) -> Case:
        logits, labels, exact = _problem(shape, device)

        def run(logits: Tensor) -> tuple[Tensor, ...]:
            if from_logits:
                loss, nll, log_total = cross_entropy_statistics(logits, labels, 0.0)
                codes = quantize_softmax_grad(logits, log_total, labels, 0.0, "int8", "rowwise", "rowwise")
                return *codes, loss, nll
            losses = cross_entropy(logits, labels, 0.0, True)
            return *quantize_dual(logits, "int8", "rowwise", "rowwise"), losses

        def check(out: Any) -> float:
            codes, scale, codes_t, scale_t, *_ = out
            share = 0.0
            for part, grad in _gradients(exact, labels):
                grad = grad.bfloat16()
                share = max(share, error(grad, codes[part], scale[part]), error(grad.t(), codes_t[:, part], scale_t))
            return within(share, OF_ROUNDING, NEAR_A_TIE)

        return Case((logits,), run, check)

    return prepare


def _problem(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Logits and labels, and the logits on the CPU: a run may overwrite them, and memory of the device is scarce."""
    generator = torch.Generator(device).manual_seed(0)
    logits = torch.randn(shape, device=device, generator=generator).bfloat16()
    labels = torch.randint(0, shape[1], shape[:1], device=device, generator=generator)
    return logits, labels, logits.to("cpu", copy=True)


def _gradients(logits: Tensor, labels: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Slices of the rows, each with the gradient of its logits, fp32."""
    for start in range(0, len(logits), ROWS):
        part = slice(start, start + ROWS)
        x = logits[part].to(labels.device)
        yield part, softmax_grad_ref(x, x.float().logsumexp(dim=-1), labels[part], 0.0)
