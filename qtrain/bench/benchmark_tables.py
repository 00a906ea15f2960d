"""The tables of benchmark_mm.py, chosen and checked before anything is measured."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import torch

from qtrain.bench.arguments import BenchmarkSettings, compared_schemes, parse_sizes, split_list, wanted_names
from qtrain.bench.attention import ATTENTION_ROWS, AttentionProblem, attention_table
from qtrain.bench.case import Bench
from qtrain.bench.conv2d import conv2d_table
from qtrain.bench.experts import SHAPES as EXPERT_SHAPES
from qtrain.bench.experts import experts_table
from qtrain.bench.grouped import GROUPED_ROWS, GroupedProblem, grouped_table
from qtrain.bench.linears import SHAPES, linear_table
from qtrain.bench.matmul_rows import ROWS
from qtrain.bench.matmuls import Problem, matmul_table
from qtrain.bench.quantizers import QUANTIZER_ROWS, quantizer_table
from qtrain.bench.roofline import SHAPES as ROOFLINE_SHAPES
from qtrain.bench.roofline import roofline_table
from qtrain.bench.tables import Table
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hardware.device import datasheet_hardware, describe_hardware
from qtrain.models import read_model_source
from qtrain.models.cost.parameters import layer_linears
from qtrain.quant import SCHEMES
from qtrain.quant.schemes.auto import Auto

SIZES = {
    "cuda": {
        "shapes": "1024x1024x1024,2048x2048x2048,4096x4096x4096",
        "quantizer_shapes": "16384x4096,16384x14336",
        # DeepSeek-V3, 8 experts a GPU: up, down, gate and up; Qwen3-30B-A3B: gate and up, down; Llama 4 Scout: up.
        "grouped_shapes": "8x32768x2048x7168,8x32768x7168x2048,8x32768x4096x7168,"
        "128x131072x1536x2048,128x131072x2048x768,16x32768x8192x5120",
        # Qwen2.5 of 0.5B, 1.5B and 7B; Llama-3.1-8B.
        "attention_shapes": "32x1024x14x2x64,16x1024x12x2x128,4x4096x28x4x128,2x8192x32x8x128",
        "tokens": 16384,
    },
    "cpu": {
        "shapes": "256x256x256,512x512x512",
        "quantizer_shapes": "256x1024",
        "grouped_shapes": "4x512x128x256",
        "attention_shapes": "2x128x4x2x64",
        "tokens": 256,
    },
}
"""Default sizes; on a CPU small ones that show that everything works."""
INT8_ROUNDINGS = ('int8:{"stochastic_rounding":false}', 'int8:{"stochastic_rounding":true}')
"""Beside the default of int8, stochastic rounding in one of its three products: in none, and in all."""
SQUARE_BLOCKS = 'fp8_blockwise:{"grad_weight_x":"128x128"}'  # of x in grad_weight, which is no scheme's default
EXPERT_SCHEMES = ("bf16", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", SQUARE_BLOCKS, "int8")
Job = Callable[[Bench], Table]  # measures a table

R = TypeVar("R", bound=Any)  # a row of a table, which has a name


def with_default_sizes(settings: BenchmarkSettings, device: torch.device) -> BenchmarkSettings:
    """The settings with this device's sizes where none are given."""
    sizes: dict[str, Any] = {key: v for key, v in SIZES[device.type].items() if not getattr(settings, key)}
    return replace(settings, **sizes)


def chosen_tables(settings: BenchmarkSettings, device: torch.device) -> list[Job]:
    """The tables that --tables names, ready to be measured. Raises UserError."""
    chosen = split_list(settings.tables)
    for name in chosen:
        if name not in TABLES:
            raise unknown_name("--tables", "table", name, TABLES)
    if not chosen:
        raise UserError(f"--tables: it is empty; name some of {', '.join(TABLES)}.")
    for flag, given in (("--gpu", settings.gpu), ("--roofline_shapes", settings.roofline_shapes)):
        if given and "roofline" not in chosen:
            raise UserError(f"{flag}: it is of the roofline only; add --tables roofline, or leave it out.")
    # In the order of TABLES, all checked before any runs.
    return [make(settings, device) for name, make in TABLES.items() if name in chosen]


def row_names() -> list[str]:
    """The names that --rows and --skip choose among."""
    return [row.name for row in (*ROWS, *QUANTIZER_ROWS, *GROUPED_ROWS, *ATTENTION_ROWS)]


def products(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of matrix products, ready to be measured."""
    sizes = _products_of(settings.model, settings.tokens) if settings.model else _shapes(settings, "shapes", 3)
    layout = settings.a_column_major, settings.b_column_major
    problems = {name: Problem(m, n, k, device, *layout) for name, (m, n, k) in sizes.items()}
    return partial(matmul_table, problems, rows_among(settings, ROWS))


def quantizers(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of quantizers, ready to be measured."""
    shapes = _shapes(settings, "quantizer_shapes", 2)
    return partial(quantizer_table, [*shapes.values()], rows_among(settings, QUANTIZER_ROWS))


def grouped_products(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of grouped products, ready to be measured."""
    sizes = _shapes(settings, "grouped_shapes", 4)
    problems = {text: GroupedProblem(groups, t, n, k, device) for text, (groups, t, n, k) in sizes.items()}
    return partial(grouped_table, problems, rows_among(settings, GROUPED_ROWS))


def attention(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of attention, ready to be measured."""
    problems = {}
    for text, (batch, seq, heads, kv_heads, head_dim) in _shapes(settings, "attention_shapes", 5).items():
        if heads % kv_heads:
            raise UserError(f"--attention_shapes: {text}: {heads} heads are no multiple of {kv_heads} key-value heads.")
        problems[text] = AttentionProblem(batch, seq, heads, kv_heads, head_dim, device)
    return partial(attention_table, problems, rows_among(settings, ATTENTION_ROWS))


def linears(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of linears under schemes, ready to be measured."""
    if settings.linear_shapes:
        shapes = _shapes(settings, "linear_shapes", 2)
    elif settings.model:
        shapes = _linear_shapes(settings.model)
    else:
        shapes = SHAPES if device.type == "cuda" else {"512x256": (512, 256)}
    schemes = compared_schemes(split_list(settings.schemes) or [*_scheme_names(), *INT8_ROUNDINGS])
    return partial(linear_table, shapes, settings.tokens, schemes)


def experts(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The table of experts under schemes, ready to be measured."""
    schemes = compared_schemes(split_list(settings.schemes) or EXPERT_SCHEMES)
    return partial(experts_table, EXPERT_SHAPES[device.type], schemes)


def roofline(settings: BenchmarkSettings, device: torch.device) -> Job:
    """The roofline of linears under schemes, ready to be computed."""
    if settings.gpu is None and device.type != "cuda":
        raise UserError("--gpu: there is no GPU here whose roofline could be drawn; name one, such as --gpu h100.")
    gpu = datasheet_hardware(settings.gpu) if settings.gpu is not None else describe_hardware(device)
    if settings.roofline_shapes:
        shapes = _shapes(settings, "roofline_shapes", 3)
    elif settings.model:
        shapes = _products_of(settings.model, max(settings.tokens, SIZES["cuda"]["tokens"]))
    else:
        shapes = {f"{m}x{n}x{k}": (m, n, k) for m, n, k in ROOFLINE_SHAPES}
    return partial(roofline_table, shapes, compared_schemes(split_list(settings.schemes) or _scheme_names()), gpu)


def _scheme_names() -> list[str]:
    """Without auto, which chooses among the others."""
    return [name for name in SCHEMES.names() if SCHEMES.get(name, "") is not Auto]


def _linear_shapes(model: str) -> dict[str, tuple[int, int]]:
    """(out-features, in-features) of each linear of a layer; of experts those of one."""
    found = layer_linears(read_model_source(model).model_config())
    return {name: (linear.out_features, linear.in_features) for name, linear in found.items()}


def _products_of(model: str, tokens: int) -> dict[str, tuple[int, int, int]]:
    """(M, N, K) of the linears of a layer, by their names and sizes."""
    return {f"{name} {tokens}x{n}x{k}": (tokens, n, k) for name, (n, k) in _linear_shapes(model).items()}


TABLES: dict[str, Callable[[BenchmarkSettings, torch.device], Job]] = {
    "mm": products,
    "quantizers": quantizers,
    "grouped": grouped_products,
    "attention": attention,
    "linears": linears,
    "experts": experts,
    "conv2d": lambda settings, device: conv2d_table,
    "roofline": roofline,
}


def _shapes(settings: BenchmarkSettings, name: str, count: int) -> dict[str, Any]:
    """The sizes of `count` numbers each that the flag `name` lists, by their texts."""
    found = {text: parse_sizes(text, count, f"--{name}") for text in split_list(getattr(settings, name))}
    if not found:
        raise UserError(f"--{name}: it is empty; name at least one size.")
    return found


def rows_among(settings: BenchmarkSettings, rows: Sequence[R]) -> list[R]:
    """The rows that --rows and --skip select."""
    wanted = wanted_names(settings.rows, settings.skip, row_names(), "--rows")
    return [row for row in rows if row.name in wanted]
