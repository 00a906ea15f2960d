"""The table of linears: forward and backward of one linear per scheme, quantization included, against bf16.

A call is an optimizer step of a linear with one micro-batch: it refreshes the weight's codes and computes `output`,
`grad_input` and `grad_weight`. The roofline is the time of the three GEMMs at the dense peaks of their arithmetic.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.bench.case import UNIT, Bench, Case, check_against, fill_by_scheme, swapped
from qtrain.bench.tables import Table
from qtrain.core.hardware.device import Hardware
from qtrain.quant import Scheme

SHAPES = {
    "Llama-3.1-8B qkv": (6144, 4096),
    "Llama-3.1-8B gate_up": (28672, 4096),
    "Llama-3.1-8B down": (4096, 14336),
    "DeepSeek-V3 q_b": (24576, 1536),
    "DeepSeek-V3 o": (7168, 16384),
    "DeepSeek-V3 expert gate_up": (4096, 7168),
    "DeepSeek-V3 down": (7168, 18432),
}
"""Out- and in-features [N, K] of published models (arXiv:2407.21783, arXiv:2412.19437)."""


@dataclass(frozen=True)
class LinearProblem:
    """Forward of x [M, K] through a weight [N, K] and backward of dy [M, N]: random, bf16 on a GPU."""

    m: int
    n: int
    k: int
    device: torch.device

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """x, w, dy; w has the size of initialized weights."""
        generator = torch.Generator(self.device).manual_seed(0)
        dtype = torch.bfloat16 if self.device.type == "cuda" else torch.float32
        shapes = ((self.m, self.k), (self.n, self.k), (self.m, self.n))
        x, w, dy = (torch.randn(shape, device=self.device, generator=generator) for shape in shapes)
        return x.to(dtype), (0.02 * w).to(dtype), dy.to(dtype)

    @cached_property
    def truth(self) -> tuple[Tensor, ...]:
        """y, dx, dw of the linear in fp64, stored in fp32: the schemes' errors are far larger."""
        x, w, dy = (t.double() for t in self.tensors)
        return tuple(t.float() for t in (x @ w.t(), dy @ w, dy.t() @ x))  # y [M, N], dx [M, K], dw [N, K]

    def roofline_ms(self, scheme: Scheme, hardware: Hardware) -> float:
        work = 2.0 * self.m * self.n * self.k  # of each of the three GEMMs
        return sum(work / hardware.peak(name) / 1e9 for name in scheme.gemm_dtypes().values())


def linear_case(problem: LinearProblem, scheme: Scheme) -> Case:
    """One linear under a scheme. UnavailableError where the scheme does not quantize it."""
    x, w, dy = problem.tensors
    # A model of one layer: the swap replaces a submodule of its parent.
    linear = nn.Linear(problem.k, problem.n, bias=False, device=problem.device, dtype=w.dtype)
    model = nn.Sequential(linear)
    with torch.no_grad():
        linear.weight.copy_(w)
    quantized = swapped(model, scheme)

    def run(x: Tensor, dy: Tensor) -> tuple[Any, ...]:
        x = x.detach().requires_grad_()
        quantized.refresh()
        y = model(x)
        return y.detach(), *torch.autograd.grad(y, (x, *model.parameters()), dy)  # grad_input and grad_weight

    return Case((x, dy), run, check_against(("y", "dx", "dw"), lambda: problem.truth, scheme))


def linear_table(shapes: dict[str, tuple[int, int]], tokens: int, schemes: dict[str, Scheme], bench: Bench) -> Table:
    """Milliseconds of forward and backward of every scheme on every shape [N, K], compared with bf16 if it is among the
    schemes."""
    columns = {" ".join(dict.fromkeys([name, f"{n}x{k}"])): (n, k) for name, (n, k) in shapes.items()}
    problems = {column: LinearProblem(tokens, n, k, bench.device) for column, (n, k) in columns.items()}
    note = "Quantizing x, w and dy is included; the roofline is the three products at the peak of their arithmetic."
    table = Table(f"Linears, {tokens} tokens, N x K", UNIT, list(columns), [note])
    roofline = lambda problem, scheme: problem.roofline_ms(scheme, bench.hardware)  # noqa: E731
    fill_by_scheme(table, problems, schemes, linear_case, roofline, bench)
    return table
