"""The table of causal attention: of all keys, of packed documents, of a sliding window.

Rates count each product once, over the queries and keys that see each other: two forward, five backward. q, k, v and
the gradient of the output are [B, S, heads, D], as the projections before and after attention have them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from qtrain.bench.case import Bench, Case, UnavailableError, relative_error
from qtrain.bench.tables import Cell, Table
from qtrain.kernels.attention.blocks import VisibleKeys
from qtrain.kernels.attention.causal import causal_attention, supports_causal_attention
from qtrain.models.native.attention import attend, attention_mask

LIMIT = 0.02
"""Error (Frobenius norm) of an output or gradient in bf16, relative to fp64, above which it is wrong."""
SEEN = ("causal", "documents", "window")


@dataclass(frozen=True)
class AttentionProblem:
    """Random sequences; documents end at random, eight a sequence on average; a window is an eighth of a sequence."""

    batch: int
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    device: torch.device

    @cached_property
    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """q, k, v and the gradient of the output."""
        generator = torch.Generator(self.device).manual_seed(0)
        heads = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        shapes = [(self.batch, self.seq, count, self.head_dim) for count in heads]
        q, k, v, do = (torch.randn(shape, device=self.device, generator=generator).bfloat16() for shape in shapes)
        return q, k, v, do

    def sees(self, seen: str) -> tuple[Tensor | None, int | None]:
        """Numbers of documents [B, S], and the window."""
        if seen != "documents":
            return None, max(self.seq // 8, 1) if seen == "window" else None
        generator = torch.Generator(self.device).manual_seed(1)
        draws = torch.rand(self.batch, self.seq, device=self.device, generator=generator)
        return (draws < 8 / self.seq).cumsum(1), None

    def visible(self, seen: str) -> VisibleKeys:
        return VisibleKeys.make(self.batch, self.seq, *self.sees(seen), self.device)

    def operations(self, seen: str, products: int) -> float:
        keys = torch.arange(1, self.seq + 1, device=self.device) - self.visible(seen).first  # of each query
        return 2.0 * products * self.heads * self.head_dim * int(keys.sum())

    def truth(self, seen: str, sequence: int, group: int) -> tuple[Tensor, ...]:
        """o, dq, dk and dv of the heads that share a key-value head of a sequence, in fp64 [S, heads, D]."""
        own = slice(group * self.heads // self.kv_heads, (group + 1) * self.heads // self.kv_heads)
        q, k, v, do = (t[sequence].double() for t in self.tensors)
        inputs = [t.detach().requires_grad_() for t in (q[:, own], k[:, group], v[:, group])]
        scores = self.head_dim**-0.5 * torch.einsum("qhd,kd->hqk", *inputs[:2])
        place = torch.arange(self.seq, device=self.device)
        hidden = (place > place[:, None]) | (place < self.visible(seen).first[sequence, :, None])
        o = torch.einsum("hqk,kd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), inputs[2])
        dq, dk, dv = torch.autograd.grad(o, inputs, do[:, own])
        return o.detach(), dq, dk[:, None], dv[:, None]


def check_attention(problem: AttentionProblem, seen: str) -> Callable[[Any], float]:
    """The check of o, or of o, dq, dk and dv: of the first and the last sequence, a key-value head each."""

    def check(out: Any) -> float:
        worst = 0.0
        for sequence, group in ((0, 0), (problem.batch - 1, problem.kv_heads - 1)):
            expected = problem.truth(seen, sequence, group)
            for name, result, true in zip(("o", "dq", "dk", "dv"), out, expected, strict=False):
                heads = true.shape[1]
                found = result[sequence, :, group * heads : (group + 1) * heads]
                worst = max(worst, relative_error(name, found, true, LIMIT))
        return worst / LIMIT

    return check


# ---- implementations: [B, heads, S, D] in and out --------------------------------------------------------------------

Attention = Callable[[Tensor, Tensor, Tensor], Tensor]


def library(backend: SDPBackend, problem: AttentionProblem, seen: str) -> Attention:
    if problem.device.type != "cuda":
        raise UnavailableError("PyTorch has this kernel for a GPU only")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    return run


def flex(problem: AttentionProblem, seen: str) -> Attention:
    if problem.device.type != "cuda":
        raise UnavailableError("FlexAttention's backward pass runs on a GPU only")
    documents, window = problem.sees(seen)
    mask = attention_mask(documents, problem.batch, problem.seq, window, problem.device)
    return lambda q, k, v: attend(q, k, v, mask)


def ours(problem: AttentionProblem, seen: str) -> Attention:
    q, k, v = (t.transpose(1, 2) for t in problem.tensors[:3])
    if problem.device.type == "cuda" and not supports_causal_attention(q, k, v):
        raise UnavailableError("the kernels take D of 64 and 128, and multiples of 128 tokens up to 8192, on Hopper")
    visible = None if seen == "causal" else problem.visible(seen)
    return lambda q, k, v: causal_attention(q, k, v, problem.head_dim**-0.5, visible)


@dataclass(frozen=True)
class AttentionRow:
    """A line of the table: an implementation of what is seen, forward alone or both passes."""

    name: str
    seen: str
    both: bool
    make: Callable[[AttentionProblem, str], Attention]
    family: str | None = None

    def prepare(self, problem: AttentionProblem) -> Case:
        attention = self.make(problem, self.seen)

        def run(q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> tuple[Tensor, ...]:
            inputs = [t.detach().requires_grad_(self.both) for t in (q, k, v)]
            o = attention(*(t.transpose(1, 2) for t in inputs)).transpose(1, 2)
            return (o.detach(), *torch.autograd.grad(o, inputs, do)) if self.both else (o,)

        return Case(problem.tensors, run, check_attention(problem, self.seen), self.family)


def _rows() -> list[AttentionRow]:
    found = []
    for seen in SEEN:
        others = {"FlexAttention": flex}
        if seen == "causal":
            backends = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}
            others = {name: partial(library, backend) for name, backend in backends.items()}
        for passes, both in (("forward", False), ("both passes", True)):
            found += [AttentionRow(f"{seen}, {passes}, {name}", seen, both, make) for name, make in others.items()]
            found += [AttentionRow(f"{seen}, {passes}, Triton", seen, both, ours, "triton")]
        if seen == "causal":
            found.append(AttentionRow(f"{seen}, both passes, qtrain", seen, True, ours))
    return found


ATTENTION_ROWS = _rows()


def attention_table(problems: dict[str, AttentionProblem], rows: Sequence[AttentionRow], bench: Bench) -> Table:
    """TFLOP/s of every row on every problem."""
    table = Table("Causal attention, sequences x tokens x heads x key-value heads x D", "us (TFLOP/s)", list(problems))
    for row in rows:
        for column, problem in problems.items():

            def show(_: Case, ms: float, row: AttentionRow = row, problem: AttentionProblem = problem) -> Cell:
                rate = problem.operations(row.seen, 7 if row.both else 2) / ms / 1e9
                return Cell(1000 * ms, text=f"{1000 * ms:,.0f} ({rate:.0f})", details={"tflops": rate})

            bench.fill(table, row.name, column, partial(row.prepare, problem), show)
    return table
