"""The table of experts: forward and backward of a MoE's experts per scheme, from tokens to tokens, against bf16 and
against the roofline.

A call gathers and quantizes the rows of every expert, multiplies, and returns sums to the tokens, in both directions.
The weights' codes, which are computed once an optimizer step, are there already. Routes are drawn at random.

The roofline is the sum of the shortest times of the steps that no fusion avoids: products at the dense peak of their
arithmetic, or their bytes at the copy bandwidth if that takes longer; and one pass, over what it must read and write,
each for the rows of x and of dout, SwiGLU and its backward, and the sums of y and of dx. R rows = T tokens x k routes.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.bench.case import UNIT, Bench, Case, check_against, fill_by_scheme, swapped
from qtrain.bench.tables import Table
from qtrain.bench.timing import copy_bandwidth
from qtrain.core.hardware.device import Hardware
from qtrain.models.native.moe import Experts
from qtrain.quant import Scheme
from qtrain.quant.tensor_roles import Gemm
from qtrain.train.log.status import three_digits

ELEMENT = 2  # bytes of bf16


@dataclass(frozen=True)
class ExpertsShape:
    """experts: on one GPU; per_token: routes of each of `tokens` to them; hidden, width: of x and of an expert."""

    experts: int
    per_token: int
    hidden: int
    width: int
    tokens: int

    @property
    def rows(self) -> int:
        return self.tokens * self.per_token


SHAPES = {
    "cuda": {
        "DeepSeek-V2-Lite (16B)": ExpertsShape(64, 6, 2048, 1408, 16384),
        "DeepSeek-V3 (671B), 8 of its experts": ExpertsShape(8, 2, 7168, 2048, 16384),
        "Qwen3-30B-A3B": ExpertsShape(128, 8, 2048, 768, 16384),
    },
    "cpu": {"4 experts": ExpertsShape(4, 2, 128, 64, 96)},
}


@dataclass(frozen=True)
class ExpertsProblem:
    """Tokens x [T, C] with routes, and the gradient of the output: random, bf16 on a GPU."""

    shape: ExpertsShape
    device: torch.device

    @cached_property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16 if self.device.type == "cuda" else torch.float32

    def _normal(self, *shape: int, seed: int) -> Tensor:
        generator = torch.Generator(self.device).manual_seed(seed)
        return torch.randn(shape, device=self.device, generator=generator)

    @cached_property
    def inputs(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """x, experts int64 [T, k], weights fp32 [T, k], dout."""
        s = self.shape
        # Top-k of independent normals: distinct experts of a token, even loads on average.
        experts = self._normal(s.tokens, s.experts, seed=1).topk(s.per_token).indices
        weights = self._normal(s.tokens, s.per_token, seed=2).softmax(dim=-1)
        x, dout = (self._normal(s.tokens, s.hidden, seed=seed).to(self.dtype) for seed in (3, 4))
        return x, experts, weights, dout

    def module(self) -> nn.Sequential:
        """The experts, with weights of the size of initialized ones."""
        s = self.shape
        experts = Experts(s.experts, s.hidden, s.width).to(self.device, self.dtype)
        with torch.no_grad():
            for seed, p in enumerate(experts.parameters(), start=5):
                p.copy_(0.02 * self._normal(*p.shape, seed=seed))
        return nn.Sequential(experts)

    @cached_property
    def truth(self) -> tuple[Tensor, ...]:
        """y, dx and the gradients of both weights in fp64, expert by expert, stored in fp32."""
        x, experts, weights, dout = self.inputs
        gate_up, down = (p.detach() for p in self.module().parameters())
        y, dx = (torch.zeros_like(x, dtype=torch.float64) for _ in range(2))
        gradients = [torch.empty_like(p, dtype=torch.float32) for p in (gate_up, down)]
        chunks = zip(*(p.chunk(self.shape.experts) for p in (gate_up, down, *gradients)), strict=True)
        for e, (up, out, dup, ddown) in enumerate(chunks):
            token, route = (experts == e).nonzero(as_tuple=True)  # tokens of expert e, and which of their k routes
            rows = x[token].double().requires_grad_()
            up, out = (w.double().requires_grad_() for w in (up, out))
            gate, linear = (rows @ up.t()).chunk(2, dim=-1)  # [tokens of e, width] each
            found = (nn.functional.silu(gate) * linear) @ out.t() * weights[token, route, None].double()
            drows, *own = torch.autograd.grad(found, (rows, up, out), dout[token].double())
            y.index_add_(0, token, found.detach())  # a token sums its k experts
            dx.index_add_(0, token, drows)
            dup.copy_(own[0])
            ddown.copy_(own[1])
        return y.float(), dx.float(), *gradients


def roofline_ms(shape: ExpertsShape, scheme: Scheme, hardware: Hardware, bandwidth: float) -> float:
    """See the top of this file. bandwidth: TB/s of a copy."""
    r, t, c, i, weights = shape.rows, shape.tokens, shape.hidden, shape.width, shape.experts * shape.hidden
    kinds = scheme.gemm_dtypes()
    peaks = {role: hardware.peak(name) for role, name in kinds.items()}
    code = {role: ELEMENT if name == "bf16" else 1 for role, name in kinds.items()}  # bytes; 4 bits are unpacked to 8

    def written(first: Gemm) -> int:
        """Bytes of an element of rows that the product `first` and grad_weight read: in two layouts if in codes."""
        return code[first] + (code["grad_weight"] if code["grad_weight"] < ELEMENT else 0)

    def product(role: Gemm, out: int, width: int, result: int) -> float:
        """r rows x `width` x `out`, whose result has `result` bytes."""
        # grad_weight reads two operands of R rows; the other two read rows and every expert's matrix.
        # Operands [r, width], [r, out]; or rows and all matrices.
        read = code[role] * (r * (width + out) if role == "grad_weight" else r * width + weights * out * width // c)
        # compute-bound or memory-bound, whichever takes longer; ms
        return max(2 * r * out * width / peaks[role] / 1e9, (read + result) / bandwidth / 1e9)

    passes = 2 * (t * c * ELEMENT) + r * c * (written("output") + written("grad_input"))  # x and dout
    passes += r * 2 * i * ELEMENT + r * i * written("output")  # SwiGLU
    passes += r * 3 * i * ELEMENT + r * 2 * i * written("grad_input")  # its backward
    passes += 2 * (r + t) * c * ELEMENT  # sums of y and dx
    products = [
        product("output", 2 * i, c, r * 2 * i * ELEMENT),
        product("output", c, i, r * c * ELEMENT),
        product("grad_input", i, c, r * i * ELEMENT),
        product("grad_input", c, 2 * i, r * c * ELEMENT),
        product("grad_weight", 2 * i, c, weights * 2 * i * ELEMENT),
        product("grad_weight", c, i, weights * i * ELEMENT),
    ]
    return sum(products) + passes / bandwidth / 1e9


def experts_case(problem: ExpertsProblem, scheme: Scheme) -> Case:
    """The experts under a scheme. UnavailableError where it does not quantize them."""
    model = problem.module()
    swapped(model, scheme)
    experts: Any = model[0]

    def run(x: Tensor, chosen: Tensor, weights: Tensor, dout: Tensor) -> tuple[Tensor, ...]:
        x, weights = x.detach().requires_grad_(), weights.detach().requires_grad_()
        y = experts(x, chosen, weights)
        trained = x, weights, experts.gate_up.weight, experts.down_proj.weight
        dx, _, *gradients = torch.autograd.grad(y, trained, dout)
        return y.detach(), dx, *gradients

    return Case(problem.inputs, run, check_against(("y", "dx", "dgate_up", "ddown"), lambda: problem.truth, scheme))


def experts_table(shapes: dict[str, ExpertsShape], schemes: dict[str, Scheme], bench: Bench) -> Table:
    """Milliseconds of forward and backward of every scheme, compared with bf16 if it is among the schemes."""
    bandwidth = copy_bandwidth(bench.device)
    note = f"Roofline: products at peak, passes over memory at the copy bandwidth, {three_digits(bandwidth)} TB/s."
    table = Table("MoE experts", UNIT, list(shapes), [note])
    problems = {name: ExpertsProblem(shape, bench.device) for name, shape in shapes.items()}
    roofline = lambda problem, scheme: roofline_ms(problem.shape, scheme, bench.hardware, bandwidth)  # noqa: E731
    fill_by_scheme(table, problems, schemes, experts_case, roofline, bench)
    return table
