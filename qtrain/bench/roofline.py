"""The roofline of a linear under schemes, from a datasheet: nothing runs, so the GPU need not be here.

A GEMM takes as long as its FLOPs at the dense peak of its arithmetic, or the bytes of its operands and output, or a
launch, whichever is longest. Quantization takes the passes over x, w and dy that a scheme cannot do without, of which a
kernel that writes both layouts of codes is one. Peaks are reached to the fractions that torchao's float8_roofline.py
assumes, which it models: one micro-batch, no fusion with what comes before, no recomputation, no collectives.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import get_args

import torch

from qtrain.bench.case import Bench
from qtrain.bench.tables import Cell, Table
from qtrain.core.hardware.device import Hardware
from qtrain.quant import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.tensor_roles import Gemm, TensorName
from qtrain.tensors.quantized_tensor import OperandFormat

GEMM_REACHED, BANDWIDTH_REACHED = 0.78, 0.92
"""Of the dense peak, and of the memory bandwidth."""
LAUNCH_SECONDS = 2e-6
"""The shortest kernel."""
BF16_BYTES = 2
SHAPES = [(m, n, k) for m in (1024, 4096, 16384) for n in (1024, 4096, 16384) for k in (1024, 4096, 16384)]


@dataclass(frozen=True)
class Roofline:
    """Seconds of forward and backward."""

    gemms: float
    quantize: float

    @property
    def total(self) -> float:
        return self.gemms + self.quantize


def linear_roofline(m: int, n: int, k: int, scheme: Scheme, hardware: Hardware) -> Roofline:
    """x [M, K] through a linear of N out-features and back, with one quantization of its weight."""
    scheme = scheme.for_linear(k, n)
    if not isinstance(scheme, LowBitScheme):
        return Roofline(sum(_gemm(*sizes, "bf16", (None, None), hardware) for sizes in _sizes(m, n, k).values()), 0.0)
    dtypes = scheme.gemm_dtypes()
    gemms = (
        _gemm(*sizes, dtypes[gemm], scheme.operand_formats(gemm), hardware) for gemm, sizes in _sizes(m, n, k).items()
    )
    elements: dict[TensorName, int] = {"x": m * k, "w": n * k, "dy": m * n}
    passes = (p for name, count in elements.items() for p in _passes(name, count, scheme))
    return Roofline(sum(gemms), sum(_moved(size, hardware) for size in passes))


def _sizes(m: int, n: int, k: int) -> dict[Gemm, tuple[int, int, int]]:
    """Rows, columns and length of the sums of each product."""
    return dict(zip(get_args(Gemm), ((m, n, k), (m, k, n), (n, k, m)), strict=True))


def _gemm(
    rows: int, columns: int, length: int, arithmetic: str, formats: tuple[OperandFormat | None, ...], hardware: Hardware
) -> float:
    a, b = (_bytes_per_element(fmt) for fmt in formats)
    compute = 2 * rows * columns * length / (hardware.peak(arithmetic) * 1e12 * GEMM_REACHED)
    return max(compute, _moved(length * (rows * a + columns * b) + BF16_BYTES * rows * columns, hardware))


def _passes(name: TensorName, count: int, scheme: LowBitScheme) -> list[float]:
    """Bytes that each kernel moves which quantizes the tensor of `count` elements."""
    formats = [fmt for fmt in scheme.formats_of(name) if fmt is not None]
    if not formats or (name == "w" and scheme.stored_format is not None):
        return []
    passes = [count * (BF16_BYTES + sum(_bytes_per_element(fmt) for fmt in formats))]
    # The optimizer's step leaves the absmax of weights, delayed scaling that of earlier steps.
    tensorwise = any(fmt.granularity == "tensorwise" for fmt in formats)
    if tensorwise and name != "w" and not scheme.amax_history:
        passes.append(count * BF16_BYTES)
    # A column's absmax is known after all rows: they are read once more.
    columns = scheme.formats_of(name)[1]
    if columns is not None and columns.granularity == "rowwise":
        passes.append(count * BF16_BYTES)
    return passes


def _bytes_per_element(fmt: OperandFormat | None) -> float:
    return BF16_BYTES if fmt is None else fmt.bytes_per_element


def _moved(size: float, hardware: Hardware) -> float:
    """Seconds of a kernel that moves `size` bytes."""
    return max(size / (hardware.memory_bandwidth * BANDWIDTH_REACHED), LAUNCH_SECONDS)


def roofline_table(
    shapes: Mapping[str, tuple[int, int, int]], schemes: Mapping[str, Scheme], gpu: Hardware, bench: Bench
) -> Table:
    """The speedup over bf16 of each scheme (M, N, K) by shape. bench: of this machine, on which nothing runs."""
    notes = [
        f"Computed: {GEMM_REACHED:.0%} of dense peaks, {BANDWIDTH_REACHED:.0%} of {gpu.memory_bandwidth / 1e12:.3g} "
        "TB/s; forward and backward of one micro-batch, its weight quantized once.",
        "Of schemes that store weights in low bits, unpacking them is not counted.",
    ]
    title = f"Roofline of linears MxNxK on {gpu.name}, of its datasheet"
    table = Table(title, "speedup over bf16", [*schemes], notes, measured=False)
    for name, shape in shapes.items():
        plain = linear_roofline(*shape, SCHEMES.make("bf16", {}, "--schemes"), gpu)
        for column, scheme in schemes.items():
            table.put(name, column, _cell(shape, scheme, plain, gpu))
    return table


def _cell(shape: tuple[int, int, int], scheme: Scheme, plain: Roofline, gpu: Hardware) -> Cell:
    _, n, k = shape
    lacks = sorted(name for name in set(scheme.gemm_dtypes().values()) - {"bf16"} if gpu.emulates(name))
    if lacks:
        return Cell(reason=f"{gpu.name} has no {', '.join(lacks)}")
    if isinstance(scheme, LowBitScheme) and (why := scheme.refusal(k, n, torch.device("meta"))):
        return Cell(reason=why)
    found = linear_roofline(*shape, scheme, gpu)
    speedup, seconds = plain.total / found.total, {"gemms": found.gemms, "quantize": found.quantize}
    details = {f"{part}_us": round(1e6 * s, 3) for part, s in {**seconds, "total": found.total}.items()}
    return Cell(speedup, text=f"{speedup:.2f}", details={**details, "bf16_us": round(1e6 * plain.total, 3)})
