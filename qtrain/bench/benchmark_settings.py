"""The settings of benchmark_mm.py. Nothing here imports torch: the command line is parsed before."""

from dataclasses import dataclass
from typing import Annotated, Literal

from qtrain.core.checks import Range

MAX_SIZE = 10_000_000
"""The largest size that is accepted."""


@dataclass(frozen=True)
class BenchmarkSettings:
    """Time matrix products, quantizers and linears. Every result is checked against fp64 before it is timed."""

    tables: str = "mm"
    """Tables, separated by commas: mm (matrix products), quantizers, grouped (products of experts), linears, experts
    (of a mixture, forward and backward)."""
    shapes: str = ""
    """Sizes MxNxK of the matrix products, separated by commas; empty: 1024, 2048 and 4096 cubed, on a CPU 256, 512."""
    model: str | None = None
    """Use the linears of this model (as for llm_pretrain.py --model) with --tokens rows instead of --shapes."""
    tokens: Annotated[int, Range(0, MAX_SIZE)] = 0
    """Rows of the inputs of linears, with --model and in the table of linears; 0: 16384, on a CPU 256."""
    a_column_major: bool = False
    """Store A [M, K] column-major, like dy in the gradient of a weight."""
    b_column_major: bool = False
    """Store B [N, K] column-major: A·B instead of A·Bᵀ, like the weight in the gradient of the input."""
    rows: str = ""
    """Only rows whose name contains one of these words, separated by commas: int8, cublas, 128x128."""
    skip: str = ""
    """No rows whose name contains one of these words."""
    quantizer_shapes: str = ""
    """Sizes MxK of the quantizers' inputs, separated by commas; empty: 16384x4096, 16384x14336, on a CPU 256x1024."""
    grouped_shapes: str = ""
    """Sizes ExTxNxK of the grouped products: experts, tokens over all of them, N and K of each; separated by commas;
    empty: of DeepSeek-V3, Qwen3-30B-A3B and Llama 4, on a CPU a small one."""
    linear_shapes: str = ""
    """Sizes NxK of the linears, separated by commas; empty: of --model, or of Llama and DeepSeek-V3, on a CPU
    512x256."""
    schemes: str = ""
    """Schemes of the tables of linears and of experts, separated by commas; NAME:{JSON} sets options; empty: for
    linears all schemes, and int8 also with stochastic rounding in none and in all of its GEMMs; for experts bf16, FP8
    and INT8."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    budget_ms: Annotated[float, Range(1, 10_000)] = 150.0
    """Milliseconds of calls per figure, which is their median."""
    json: str | None = None
    """File for all figures; none: runs/benchmark_mm/<time>.json."""
    png: str | None = None
    """Draw the tables as bar charts into this file; needs matplotlib."""
