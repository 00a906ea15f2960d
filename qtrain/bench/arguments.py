"""The settings of benchmark_mm.py, and lists on a command line: NAME,NAME:{"key": value},...

Nothing here imports torch: the command line is parsed before.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from qtrain.core.checks import Range, parse_json, shown
from qtrain.core.errors import UserError

if TYPE_CHECKING:
    from qtrain.quant import Scheme

MAX_SIZE = 10_000_000  # the largest size that is accepted


@dataclass(frozen=True)
class BenchmarkSettings:
    """Time matrix products, quantizers and linears. Every result is checked against fp64 before it is timed."""

    tables: str = "mm"
    """Tables, separated by commas: mm (matrix products), quantizers (and what else moves memory between products),
    grouped (products of experts), attention, linears, experts (of a MoE, forward and backward), conv2d (convolutions of
    ResNet-50 and ConvNeXt-T), roofline (of linears, computed for --gpu)."""
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
    attention_shapes: str = ""
    """Sizes of attention, sequences x tokens x heads x key-value heads x D, separated by commas; empty: of Qwen2.5 and
    Llama-3.1-8B, on a CPU a small one."""
    linear_shapes: str = ""
    """Sizes NxK of the linears, separated by commas; empty: of --model, or of Llama and DeepSeek-V3, on a CPU
    512x256."""
    roofline_shapes: str = ""
    """Sizes MxNxK of the roofline's linears, separated by commas; empty: of --model with --tokens rows, or 1024, 4096
    and 16384 in all combinations."""
    gpu: str | None = None
    """GPU of the roofline (h100, h200, b200, a100, l40s, 4090, ...), which need not be here; none: the one that is."""
    schemes: str = ""
    """Schemes of the tables of linears, of experts and of the roofline, separated by commas; NAME:{JSON} sets options;
    empty: all schemes, for linears int8 also with stochastic rounding in none and in all of its GEMMs; for experts
    bf16, FP8 and INT8."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    budget_ms: Annotated[float, Range(1, 10_000)] = 150.0
    """Milliseconds of calls per figure, which is their median."""
    json: str | None = None
    """File for all figures; none: runs/benchmark_mm/<time>.json. A .csv with a line for each is written beside it."""
    png: str | None = None
    """Draw the tables as bar charts into this file; needs matplotlib."""


def split_list(text: str) -> list[str]:
    """The words between commas outside of braces, without empty ones."""
    words, depth = [""], 0
    for character in text:
        # Commas inside of a JSON object do not separate.
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth <= 0:
            words.append("")
        else:
            words[-1] += character
    return [word.strip() for word in words if word.strip()]


def name_and_options(word: str, flag: str) -> tuple[str, dict[str, Any]]:
    """NAME or NAME:{JSON object} -> (name, options). UserError naming `flag`."""
    name, colon, text = word.partition(":")
    options = parse_json(text, f"{flag} ({name})") if colon else {}
    if not isinstance(options, dict):
        raise UserError(f"{flag} ({name}): the options after the colon must be a JSON object, not {text!r}.")
    return name, options


def compared_schemes(words: Iterable[str]) -> "dict[str, Scheme]":
    """Words NAME or NAME:{JSON object} -> scheme by word. UserError naming --schemes."""
    from qtrain.quant import SCHEMES
    from qtrain.quant.schemes.auto import Auto

    schemes: dict[str, Scheme] = {}
    for word in words:
        name, kwargs = name_and_options(word, "--schemes")
        schemes[word] = SCHEMES.make(name, kwargs, "--schemes")
        if isinstance(schemes[word], Auto):
            raise UserError("--schemes: auto chooses among schemes itself; name the ones to compare.")
    return schemes


def parse_sizes(text: str, count: int, flag: str) -> Any:
    """'MxNxK' -> a tuple of its `count` whole numbers from 1 to MAX_SIZE. UserError naming `flag`."""
    numbers = text.lower().split("x")  # 4096X4096 is meant as 4096x4096
    # Length first: int() of a million digits takes seconds.
    whole = all(n.isascii() and n.isdigit() and len(n) <= len(str(MAX_SIZE)) for n in numbers)
    if len(numbers) != count or not whole or not all(1 <= int(n) <= MAX_SIZE for n in numbers):
        example = "x".join(["4096"] * count)
        raise UserError(
            f"{flag}: {shown(text)} is not a size; write {count} whole numbers from 1 to {MAX_SIZE:,} as in {example}."
        )
    return tuple(map(int, numbers))


def wanted_names(rows: str, skip: str, names: list[str], flag: str) -> set[str]:
    """The names that contain any word of `rows` (empty: all) and none of `skip`, ignoring case.

    UserError for a word of `rows` that is in no name.
    """
    keep, leave = ([word.lower() for word in split_list(text)] for text in (rows, skip))
    for option, words in ((flag, keep), ("--skip", leave)):
        for word in words:
            if not any(word in name.lower() for name in names):
                raise UserError(f"{option}: no row has {shown(word)} in its name; --list shows the rows.")
    found = {
        name
        for name in names
        if (not keep or any(word in name.lower() for word in keep)) and not any(word in name.lower() for word in leave)
    }
    if not found:
        raise UserError(f"{flag}, --skip: together they leave no row; --list shows the rows.")
    return found
