"""FP8 and bf16 products by cuBLASLt, called for what PyTorch does not offer: any of the algorithms that the library
proposes, not the first alone, and an FP8 product that is added to what is in memory.

The library is the one that torch has loaded, its handle torch's (a cuBLAS handle holds one of cuBLASLt). The calls,
enumerations and structures are those of cublasLt.h, which have been the same since CUDA 11.8:
https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint32, c_uint64, c_void_p
from typing import Any, NamedTuple

import torch
from torch import Tensor

MOST_ALGORITHMS = 16
"""Of those that the library's heuristic offers, the best first."""
ALGORITHMS = {f"cublas {i}": i for i in range(MOST_ALGORITHMS)}
"""By the names that they have as the autotuner's candidates."""
WORKSPACE_BYTES = 2**25
"""What NVIDIA advises for Hopper, and PyTorch gives."""
ALIGNMENT, LEAST_ALIGNMENT = 256, 16
"""Bytes of addresses: those of whole tensors, of which the library has the most algorithms, and of parts of tensors."""

# cudaDataType_t.
_TYPES = {torch.bfloat16: 14, torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_FLOAT, _COMPUTE_FLOAT = 0, 68
# cublasLtMatmulDescAttributes_t.
_TRANSPOSE_A, _TRANSPOSE_B, _EPILOGUE, _BIAS = 3, 4, 7, 8
_SCALE_A, _SCALE_B, _FAST_ACCUM, _MODE_A, _MODE_B = 17, 18, 25, 31, 32
_ROWS = 3  # cublasLtMatmulMatrixScale_t: a scale for each row
_ADD_BIAS = 4  # cublasLtEpilogue_t
_WORKSPACE, _ALIGNMENTS = 1, (5, 6, 7, 8)  # cublasLtMatmulPreferenceAttributes_t: of A, B, C and D

_ZERO, _ONE = c_float(0.0), c_float(1.0)
_ALIGNED = c_void_p(256)
"""An address while algorithms are asked for, which reads nothing."""
_lock = threading.Lock()
"""A plan holds the addresses of scales between two calls."""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


@functools.cache
def cublas_lt() -> Any:
    """libcublasLt as torch has loaded it, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:  # not by that name: another platform
        return None


def algorithm_names() -> list[str]:
    """Those of ALGORITHMS; none where there is no library."""
    return [] if cublas_lt() is None else [*ALGORITHMS]


def _call(function: Callable[..., int], *arguments: Any) -> None:
    """RuntimeError for a status that is not success."""
    status = function(*arguments)
    if status:
        raise RuntimeError(f"cuBLASLt's {function.__name__} returned {status}")  # a _FuncPtr has its symbol's name


def _created(function: Callable[..., int], *arguments: Any) -> c_void_p:
    """A new object of the library, kept for the process's life."""
    made = c_void_p()
    _call(function, byref(made), *arguments)
    return made


class MatrixLayout(NamedTuple):
    """How an operand [rows, K], or an output [M, N], is in memory."""

    dtype: torch.dtype
    by_rows: bool
    """Whether neighbors in a row are neighbors in memory; else those in a column are."""
    stride: int
    """Elements from one row, or column, to the next."""


class ProductPlan:
    """A product of one shape: its description, and the algorithms for it.

    The library's matrices are column-major: out [M, N] is one of N x M, B [N, K] by rows is one of K x N that is
    transposed, and A [M, K] by rows one of K x M. So its first operand is B.
    """

    def __init__(
        self, handle: int, sizes: tuple[int, int, int], a: MatrixLayout, b: MatrixLayout, out: MatrixLayout,
        scales: str, fast: bool, bias: bool, alignment: int,
    ):  # fmt: skip
        """sizes: (m, n, k). scales: "" none, "tensorwise", or "rowwise" one for each row. fast: FP8's accumulation.
        bias: whether one of out's dtype is added. alignment: bytes of the addresses of A, B and out."""
        lt, (m, n, k) = cublas_lt(), sizes
        self.description = _created(lt.cublasLtMatmulDescCreate, _COMPUTE_FLOAT, _FLOAT)
        attributes: dict[int, Any] = {_TRANSPOSE_A: c_int(b.by_rows), _TRANSPOSE_B: c_int(not a.by_rows)}
        if scales:
            attributes |= {_FAST_ACCUM: c_int8(fast), _SCALE_A: _ALIGNED, _SCALE_B: _ALIGNED}
        if scales == "rowwise":
            attributes |= {_MODE_A: c_int(_ROWS), _MODE_B: c_int(_ROWS)}
        if bias:
            attributes |= {_EPILOGUE: c_int(_ADD_BIAS), _BIAS: _ALIGNED}
        for attribute, value in attributes.items():
            self.set(attribute, value)
        self.a, self.b, self.out = _matrix(a, m, k), _matrix(b, n, k), _matrix(out, m, n)
        preference, count = _created(lt.cublasLtMatmulPreferenceCreate), c_int()
        preferences = {_WORKSPACE: c_size_t(WORKSPACE_BYTES), **dict.fromkeys(_ALIGNMENTS, c_uint32(alignment))}
        for which, value in preferences.items():
            size = c_size_t(ctypes.sizeof(value))
            _call(lt.cublasLtMatmulPreferenceSetAttribute, preference, which, byref(value), size)
        found = (_Found * MOST_ALGORITHMS)()
        _call(
            lt.cublasLtMatmulAlgoGetHeuristic, c_void_p(handle), self.description, self.b, self.a, self.out, self.out,
            preference, MOST_ALGORITHMS, found, byref(count),
        )  # fmt: skip
        self.algorithms = [found[i] for i in range(count.value) if found[i].state == 0]
        if not self.algorithms:
            raise RuntimeError("cuBLASLt has no algorithm for this product")

    def set(self, attribute: int, value: Any) -> None:
        """Of the description. value: a ctypes object."""
        size = c_size_t(ctypes.sizeof(value))
        _call(cublas_lt().cublasLtMatmulDescSetAttribute, self.description, attribute, byref(value), size)


def _matrix(layout: MatrixLayout, rows: int, columns: int) -> c_void_p:
    """The library's, of a matrix [rows, columns]."""
    high, wide = (columns, rows) if layout.by_rows else (rows, columns)
    of, stride = _TYPES[layout.dtype], c_int64(layout.stride)
    return _created(cublas_lt().cublasLtMatrixLayoutCreate, of, c_uint64(high), c_uint64(wide), stride)


@functools.cache
def _plan(*arguments: Any) -> ProductPlan:
    return ProductPlan(*arguments)


def fp8_mm(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    out: Tensor,
    *,
    algorithm: int,
    bias: Tensor | None = None,
    fast_accum: bool = True,
    add: bool = False,
) -> Tensor:
    """out [M, N] = (A [M, K] · B [N, K]ᵀ) * scale_a * scale_b + bias; with `add` this is added to out.

    A, B FP8, K-major; fp32 scales, [M] and [N], or [1] both; out bf16 or fp32, contiguous, rows at multiples of 16
    bytes; bias [N] of out's dtype. algorithm: below MOST_ALGORITHMS, the library's first choice is 0, which is taken
    where it has fewer, or an address is no multiple of ALIGNMENT: an algorithm is chosen by sizes alone.

    RuntimeError where the library takes no such product."""
    m, n, rows = len(a), len(b), scale_a.numel() > 1 or scale_b.numel() > 1
    if rows:
        scale_a, scale_b = scale_a.expand(m).contiguous(), scale_b.expand(n).contiguous()
    pointers = {_SCALE_A: scale_b, _SCALE_B: scale_a}
    return _multiply(a, b, out, algorithm, bias, pointers, "rowwise" if rows else "tensorwise", fast_accum, add)


def takes_plain_mm(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether `plain_mm` takes these operands and this output."""
    typed = a.dtype == b.dtype == torch.bfloat16 and out.dtype in (torch.bfloat16, torch.float32)
    if cublas_lt() is None or not (a.is_cuda and typed and a.numel() and b.numel()):
        return False
    for t in (a, b, out):
        layout = _layout_of(t)
        if layout is None or t.data_ptr() % LEAST_ALIGNMENT or layout.stride * t.itemsize % LEAST_ALIGNMENT:
            return False
    return out.stride(1) == 1


def plain_mm(
    a: Tensor, b: Tensor, out: Tensor, *, algorithm: int, bias: Tensor | None = None, add: bool = False
) -> Tensor:
    """out [M, N] = A [M, K] · B [N, K]ᵀ + bias; with `add` this is added to out.

    A and B bf16, by rows or by columns, out bf16 or fp32, `takes_plain_mm`; bias [N] of out's dtype; algorithm as for
    `fp8_mm`. With few rows the library rounds the product to bf16 before it adds to an out in bf16."""
    return _multiply(a, b, out, algorithm, bias, {}, "", False, add)


def _layout_of(t: Tensor) -> MatrixLayout | None:
    """None: neither rows nor columns are contiguous."""
    (rows, columns), (row, column) = t.shape, t.stride()
    # Of one row or column the stride is anything.
    if column == 1 and (row >= columns or rows == 1):
        return MatrixLayout(t.dtype, True, max(row, columns))
    if row == 1 and (column >= rows or columns == 1):
        return MatrixLayout(t.dtype, False, max(column, rows))
    return None


def _multiply(
    a: Tensor, b: Tensor, out: Tensor, algorithm: int, bias: Tensor | None, pointers: dict[int, Tensor], scales: str,
    fast: bool, add: bool,
) -> Tensor:  # fmt: skip
    """pointers: what the description has the addresses of, but for the bias."""
    if bias is not None:
        if bias.dtype != out.dtype:
            raise RuntimeError(f"cuBLASLt adds a bias of {out.dtype} to it, not of {bias.dtype}")
        pointers = {**pointers, _BIAS: bias}
    handle, stream = torch.cuda.current_blas_handle(), torch.cuda.current_stream(a.device).cuda_stream
    whole = not any(t.data_ptr() % ALIGNMENT for t in (a, b, out))
    sizes, layouts = (len(a), len(b), a.shape[1]), [_layout_of(t) for t in (a, b, out)]
    alignment = ALIGNMENT if whole else LEAST_ALIGNMENT
    plan = _plan(handle, sizes, *layouts, scales, fast, bias is not None, alignment)
    chosen = plan.algorithms[algorithm if whole and algorithm < len(plan.algorithms) else 0]
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a.device)
    with _lock:
        for attribute, pointed in pointers.items():
            plan.set(attribute, c_void_p(pointed.data_ptr()))
        of_b, of_a, of_out, of_workspace = (c_void_p(t.data_ptr()) for t in (b, a, out, workspace))
        _call(
            cublas_lt().cublasLtMatmul, c_void_p(handle), plan.description, byref(_ONE), of_b, plan.b, of_a, plan.a,
            byref(_ONE if add else _ZERO), of_out, plan.out, of_out, plan.out,
            byref(chosen.algorithm), of_workspace, c_size_t(WORKSPACE_BYTES), c_void_p(stream),
        )  # fmt: skip
    return out
