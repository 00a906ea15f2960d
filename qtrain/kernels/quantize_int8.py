"""INT8 quantization with one scale a row, and with one scale a column.

Symmetric codes in [-127, 127], value = code * scale, scale = absmax / 127 kept in fp32. The code is made with the
reciprocal of the very scale that is stored. Rounding is to nearest even, or stochastic: floor(x / scale + u) with u
uniform in (0, 1), which is right on average. A row of zeros gets the eps scale and codes of zero. A row that holds a
NaN or an Inf gets that scale and codes of zero, so that the row of the product is NaN: bad values are never hidden.

A linear's operand is read by two GEMMs, once along its rows and once along its columns, and 8-bit tensor cores
take both operands K-major only: so column codes come transposed. `quantize_int8_dual` makes both. A column's absmax
needs the whole matrix, so there are two passes: one reads x for the absmax of rows and columns, one reads it again and
writes both codes; 6 bytes an element for bf16, where two separate quantizers and a transposition move 12.
"""

import torch
from torch import Tensor

from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.philox import ROLES, philox_uniform, uniform_ref

INT8_MAX = 127
SCALE_EPS = 1e-12


# ---- definition ------------------------------------------------------------------------------------------------------


def quantize_int8_rowwise_ref(x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] fp32/bf16 -> codes int8 [M, K], scale fp32 [M]. With `noise` [M, K] in (0, 1): stochastic rounding."""
    scale = _scale(x, dim=1)
    return _codes(x.float() * scale.reciprocal()[:, None], noise), scale


def quantize_int8_columnwise_ref(x: Tensor, noise: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] -> transposed codes int8 [K, M], scale fp32 [K] of its columns; `noise` is [M, K], as x."""
    scale = _scale(x, dim=0)
    return _codes(x.float() * scale.reciprocal(), noise).t().contiguous(), scale


def dequantize_int8_rowwise_ref(codes: Tensor, scale: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """codes int8 [M, K], scale fp32 [M] -> values [M, K]."""
    return (codes.float() * scale[:, None]).to(dtype)


def _scale(x: Tensor, dim: int) -> Tensor:
    if not x.shape[dim]:
        return x.new_full((x.shape[1 - dim],), SCALE_EPS, dtype=torch.float32)
    absmax = torch.linalg.vector_norm(x, ord=torch.inf, dim=dim)  # one read, no copy of |x|; NaN comes through
    return (absmax.float() * (1 / INT8_MAX)).clamp(min=SCALE_EPS)  # times: CUDA does not divide by a number anyway


def _codes(scaled: Tensor, noise: Tensor | None) -> Tensor:
    """Round x / scale, fp32, in place; a bad value's code is 0, for its scale is bad already."""
    rounded = scaled.round_() if noise is None else scaled.add_(noise).floor_()
    return rounded.nan_to_num_(nan=0.0).clamp_(-INT8_MAX, INT8_MAX).to(torch.int8)


# ---- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _scale_of(absmax_bits):
    """fp32 bits of an absmax, as int32 -> its scale."""
    scale = absmax_bits.to(tl.float32, bitcast=True) * (1.0 / 127.0)
    return tl.where(scale < 1e-12, 1e-12, scale)  # a comparison, not a maximum: NaN stays


# Launched with enable_fp_fusion=False: x * reciprocal + 1.5 * 2**23 rounded once would not be the code as defined.
@triton.jit
def _code_of(scaled, noise, STOCHASTIC: tl.constexpr):
    if STOCHASTIC:
        rounded = tl.floor(scaled + noise)
    else:
        rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2**23: nearest even, for |scaled| < 2**22
    rounded = tl.where(rounded != rounded, 0.0, rounded)
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)


@triton.jit
def _absmax_bits(x):
    """|x| as int32 bits: they order as the numbers do, Inf above all numbers and NaN above Inf."""
    return x.to(tl.float32).to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _rowwise_kernel(
    x_ptr, codes_ptr, scale_ptr, key_ptr, role, k, stride,
    N_ROLES: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_K)[None, :]
    x = tl.load(x_ptr + row * stride + columns, columns < k, 0.0).to(tl.float32)
    scale = _scale_of(tl.max(_absmax_bits(x), 1))  # [1]
    noise = 0.0
    if STOCHASTIC:  # k is a multiple of 8 here, so that the eight elements of a draw share a row
        block = row * (k // 8) + tl.arange(0, BLOCK_K // 8)[None, :].to(tl.int64)
        noise = philox_uniform(block, key_ptr, role, N_ROLES)
    codes = _code_of(x * tl.div_rn(1.0, scale)[:, None], noise, STOCHASTIC)
    tl.store(codes_ptr + row * k + columns, codes, columns < k)
    tl.store(scale_ptr + row + tl.arange(0, 1), scale)


@triton.jit
def _absmax_kernel(x_ptr, row_ptr, column_ptr, m, k, stride, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], inside, 0.0)
    bits = _absmax_bits(x)
    tl.atomic_max(row_ptr + rows, tl.max(bits, 1), rows < m, sem="relaxed")
    tl.atomic_max(column_ptr + columns, tl.max(bits, 0), columns < k, sem="relaxed")


@triton.jit
def _scales_kernel(absmax_ptr, scale_ptr, scale_t_ptr, reciprocal_ptr, m, k, BLOCK: tl.constexpr):
    """Rows' and columns' absmax, one after the other, to scales and their reciprocals. Once for all: in the kernel that
    uses them, every thread would divide for every row and column of its tile."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < m + k
    scale = _scale_of(tl.load(absmax_ptr + index, inside, 0))
    tl.store(scale_ptr + index, scale, index < m)
    tl.store(scale_t_ptr + index - m, scale, inside & (index >= m))
    tl.store(reciprocal_ptr + index, tl.div_rn(1.0, scale), inside)


@triton.jit
def _dual_kernel(
    x_ptr, row_reciprocal_ptr, column_reciprocal_ptr, codes_ptr, codes_t_ptr, key_ptr, role, role_t, m, k, stride,
    N_ROLES: tl.constexpr, STOCHASTIC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
    inside = (rows < m)[:, None] & (columns < k)[None, :]
    x = tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride + columns[None, :], inside, 0.0).to(tl.float32)
    row_reciprocal = tl.load(row_reciprocal_ptr + rows, rows < m, 0.0)
    column_reciprocal = tl.load(column_reciprocal_ptr + columns, columns < k, 0.0)
    noise = 0.0
    noise_t = 0.0
    if STOCHASTIC:
        first = tl.program_id(0) * (BLOCK_K // 8) + tl.arange(0, BLOCK_K // 8)
        block = rows.to(tl.int64)[:, None] * (k // 8) + first[None, :]
        noise = philox_uniform(block, key_ptr, role, N_ROLES)
        noise_t = philox_uniform(block, key_ptr, role_t, N_ROLES)
    codes = _code_of(x * row_reciprocal[:, None], noise, STOCHASTIC)
    codes_t = _code_of(x * column_reciprocal[None, :], noise_t, STOCHASTIC)
    tl.store(codes_ptr + rows.to(tl.int64)[:, None] * k + columns[None, :], codes, inside)
    tl.store(codes_t_ptr + columns.to(tl.int64)[:, None] * m + rows[None, :], tl.trans(codes_t), tl.trans(inside))


# ---- launchers -------------------------------------------------------------------------------------------------------


def launch_quantize_int8_rowwise(x: Tensor, key: Tensor | None, role: int) -> tuple[Tensor, Tensor]:
    """The kernel for `quantize_int8_rowwise_ref`: one program a row. With a key, K must be a multiple of 8."""
    m, k = x.shape
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    if m:
        block = max(triton.next_power_of_2(k), 16)
        warps = min(max(block // 1024, 1), 16)
        _rowwise_kernel[(m,)](
            x,
            codes,
            scale,
            key,
            role,
            k,
            x.stride(0),
            len(ROLES),
            key is not None,
            block,
            num_warps=warps,
            enable_fp_fusion=False,
        )
    return codes, scale


def launch_quantize_int8_dual(
    x: Tensor, key: Tensor | None, role: int, role_t: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The kernels for the rows of `quantize_int8_rowwise_ref` and the columns of `quantize_int8_columnwise_ref`."""
    m, k = x.shape
    absmax = torch.zeros(m + k, dtype=torch.int32, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    scale_t = torch.empty(k, dtype=torch.float32, device=x.device)
    reciprocal = torch.empty(m + k, dtype=torch.float32, device=x.device)
    codes = torch.empty(m, k, dtype=torch.int8, device=x.device)
    codes_t = torch.empty(k, m, dtype=torch.int8, device=x.device)
    grid = (triton.cdiv(k, 128), triton.cdiv(m, 128))
    if x.numel():
        _absmax_kernel[grid](x, absmax, absmax[m:], m, k, x.stride(0), 128, 128, num_warps=8)
    if m + k:
        _scales_kernel[(triton.cdiv(m + k, 1024),)](absmax, scale, scale_t, reciprocal, m, k, 1024)
    if x.numel():
        _dual_kernel[grid](
            x, reciprocal, reciprocal[m:], codes, codes_t, key, role, role_t, m, k, x.stride(0),
            len(ROLES), key is not None, 128, 128, num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return codes, scale, codes_t, scale_t


# ---- operators -------------------------------------------------------------------------------------------------------


def _kernel_takes(x: Tensor, key: Tensor | None) -> bool:
    """Stochastic rounding draws eight elements at a time, which must lie in one row."""
    return x.is_cuda and (key is None or x.shape[1] % 8 == 0)


def _noise(x: Tensor, key: Tensor | None, role: int) -> Tensor | None:
    return None if key is None else uniform_ref(x.shape, key, role)


@torch.library.custom_op("qtrain::quantize_int8_rowwise", mutates_args=())
def quantize_int8_rowwise(x: Tensor, key: Tensor | None, role: int) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes int8 [M, K], scale fp32 [M]. key, role: see `uniform_ref`; None rounds to nearest."""
    if _kernel_takes(x, key):
        return launch_quantize_int8_rowwise(x.contiguous(), key, role)
    return quantize_int8_rowwise_ref(x, _noise(x, key, role))


@quantize_int8_rowwise.register_fake
def _(x: Tensor, key: Tensor | None, role: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.custom_op("qtrain::quantize_int8_dual", mutates_args=())
def quantize_int8_dual(x: Tensor, key: Tensor | None, role: int, role_t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x [M, K] -> codes [M, K] and scale [M] of its rows, transposed codes [K, M] and scale [K] of its columns."""
    if _kernel_takes(x, key):
        return launch_quantize_int8_dual(x.contiguous(), key, role, role_t)
    rows = quantize_int8_rowwise_ref(x, _noise(x, key, role))
    return *rows, *quantize_int8_columnwise_ref(x, _noise(x, key, role_t))


@quantize_int8_dual.register_fake
def _(x: Tensor, key: Tensor | None, role: int, role_t: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, k = x.shape
    codes, codes_t = x.new_empty(m, k, dtype=torch.int8), x.new_empty(k, m, dtype=torch.int8)
    return codes, x.new_empty(m, dtype=torch.float32), codes_t, x.new_empty(k, dtype=torch.float32)
