"""FP8 products by cuBLASLt that are added to what is in memory, which PyTorch does not offer: total += A · Bᵀ.

`torch._scaled_mm` calls the same library without a sum to add to. The library is the one that torch has loaded, its
handle torch's (a cuBLAS handle holds one of cuBLASLt). The calls, enumerations and structures are those of cublasLt.h,
which have been the same since CUDA 11.8: https://docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api
"""

import ctypes
import functools
import threading
from collections.abc import Callable
from ctypes import byref, c_float, c_int, c_int8, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

MOST_ALGORITHMS = 4
"""Of those that the library's heuristic offers, the best first."""
WORKSPACE_BYTES = 2**25
"""What NVIDIA advises for Hopper, and PyTorch gives."""

# cudaDataType_t.
_TYPES = {torch.bfloat16: 14, torch.float32: 0, torch.float8_e4m3fn: 28, torch.float8_e5m2: 29}
_FLOAT, _COMPUTE_FLOAT = 0, 68
# cublasLtMatmulDescAttributes_t.
_TRANSPOSE_A, _SCALE_A, _SCALE_B, _FAST_ACCUM, _MODE_A, _MODE_B = 3, 17, 18, 25, 31, 32
_ROWS = 3  # cublasLtMatmulMatrixScale_t: a scale for each row
_WORKSPACE = 1  # cublasLtMatmulPreferenceAttributes_t

_ONE = c_float(1.0)
_lock = threading.Lock()
"""A plan holds the addresses of scales between two calls."""


class _Found(ctypes.Structure):
    """cublasLtMatmulHeuristicResult_t."""

    _fields_ = (
        ("algorithm", c_uint64 * 8), ("workspace", c_size_t), ("state", c_int), ("waves", c_float),
        ("reserved", c_int * 4),
    )  # fmt: skip


@functools.cache
def library() -> Any:
    """libcublasLt as torch has loaded it, or None."""
    if torch.version.cuda is None:
        return None
    try:
        return ctypes.CDLL(f"libcublasLt.so.{torch.version.cuda.split('.')[0]}")
    except OSError:  # not by that name: another platform
        return None


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


class Plan:
    """A product of one shape: its description, and the algorithms for it.

    The library's matrices are column-major: total [M, N] is one of N x M, B [N, K] one of K x N that is transposed, and
    A [M, K] one of K x M. So its first operand is B.
    """

    def __init__(self, handle: int, m: int, n: int, k: int, types: tuple[torch.dtype, ...], rows: bool, fast: bool):
        """types: of A, B and total."""
        lt, (of_a, of_b, of_total) = library(), (_TYPES[t] for t in types)
        self.description = _created(lt.cublasLtMatmulDescCreate, _COMPUTE_FLOAT, _FLOAT)
        self.set(_TRANSPOSE_A, c_int(1))
        self.set(_FAST_ACCUM, c_int8(fast))
        if rows:
            self.set(_MODE_A, c_int(_ROWS))
            self.set(_MODE_B, c_int(_ROWS))
        layout = lt.cublasLtMatrixLayoutCreate
        self.b = _created(layout, of_b, c_uint64(k), c_uint64(n), c_int64(k))
        self.a = _created(layout, of_a, c_uint64(k), c_uint64(m), c_int64(k))
        self.total = _created(layout, of_total, c_uint64(n), c_uint64(m), c_int64(n))
        preference, size, count = _created(lt.cublasLtMatmulPreferenceCreate), c_size_t(WORKSPACE_BYTES), c_int()
        _call(lt.cublasLtMatmulPreferenceSetAttribute, preference, _WORKSPACE, byref(size), c_size_t(8))
        found = (_Found * MOST_ALGORITHMS)()
        _call(
            lt.cublasLtMatmulAlgoGetHeuristic, c_void_p(handle), self.description, self.b, self.a, self.total,
            self.total, preference, MOST_ALGORITHMS, found, byref(count),
        )  # fmt: skip
        self.algorithms = [found[i] for i in range(count.value) if found[i].state == 0]

    def set(self, attribute: int, value: Any) -> None:
        """Of the description. value: a ctypes object."""
        size = c_size_t(ctypes.sizeof(value))
        _call(library().cublasLtMatmulDescSetAttribute, self.description, attribute, byref(value), size)


@functools.cache
def _plan(*arguments: Any) -> Plan:
    return Plan(*arguments)


def add_fp8_mm(
    total: Tensor, a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, *, fast_accum: bool, algorithm: int
) -> None:
    """total [M, N] += (A [M, K] · B [N, K]ᵀ) * scale_a * scale_b: bf16 or fp32, contiguous, rows at multiples of 16
    bytes; FP8, K-major; fp32 scales, [M] and [N], or [1] both. algorithm: below MOST_ALGORITHMS.

    RuntimeError where the library takes no such product, or has fewer algorithms for it."""
    (m, k), n, rows = a.shape, b.shape[0], scale_a.numel() > 1 or scale_b.numel() > 1
    if rows:
        scale_a, scale_b = scale_a.expand(m).contiguous(), scale_b.expand(n).contiguous()
    handle, stream = torch.cuda.current_blas_handle(), torch.cuda.current_stream(a.device).cuda_stream
    plan = _plan(handle, m, n, k, (a.dtype, b.dtype, total.dtype), rows, fast_accum)
    if algorithm >= len(plan.algorithms):
        raise RuntimeError(f"cuBLASLt has {len(plan.algorithms)} algorithms for this product")
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=a.device)
    with _lock:
        plan.set(_SCALE_A, c_void_p(scale_b.data_ptr()))
        plan.set(_SCALE_B, c_void_p(scale_a.data_ptr()))
        pointers = [c_void_p(t.data_ptr()) for t in (b, a, total, workspace)]
        _call(
            library().cublasLtMatmul, c_void_p(handle), plan.description, byref(_ONE), pointers[0], plan.b, pointers[1],
            plan.a, byref(_ONE), pointers[2], plan.total, pointers[2], plan.total,
            byref(plan.algorithms[algorithm].algorithm), pointers[3], c_size_t(WORKSPACE_BYTES), c_void_p(stream),
        )  # fmt: skip
