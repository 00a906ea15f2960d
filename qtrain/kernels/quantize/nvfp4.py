"""NVFP4: e2m1 codes, an e4m3 scale per 16 elements along a row, and one fp32 scale per tensor.

    tensor_scale = absmax of the tensor / (6 * 448)
    scale = e4m3(absmax of the group / 6 / tensor_scale), at least e4m3's smallest number
    code  = e2m1(x / (scale * tensor_scale)),   value = code * scale * tensor_scale

Two codes per byte, 4.5 bits per element. A group with a NaN or an Inf has a NaN scale and codes of zero; the tensor
scale is that of the finite values. Rounding is to nearest even, or stochastic.

With `hadamard` each 16 consecutive rows of x are replaced by H · diag(signs) times them, where H is the orthonormal
Hadamard matrix: an outlier is spread over 16 elements of the dimension that `grad_weight` sums over. Both operands of
that product are rotated alike, so the product does not change.

The kernels read x twice, first for the tensor's scale. Products are emulated, as Hopper has no FP4 tensor cores.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv:2509.25149.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from qtrain.kernels.compiler import operator, tl, triton
from qtrain.kernels.numerics.encode import abs_bits, encode, encoding, pack_codes
from qtrain.kernels.numerics.formats import FORMATS, SCALE_EPS, pack
from qtrain.kernels.numerics.philox import philox_bits, random_bits_ref
from qtrain.kernels.quantize.reference import encode_minifloat

GROUP = 16
E2M1, E4M3 = FORMATS["e2m1"], FORMATS["e4m3"]
SMALLEST_SCALE = 2.0**-9
"""e4m3's smallest number above zero."""
_SMALLEST_SCALE = tl.constexpr(SMALLEST_SCALE)

SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)
"""A fixed random sign vector for all linears, as in the paper."""
NEGATIVE = sum(1 << i for i, sign in enumerate(SIGNS) if sign < 0)
"""Bit i is set where SIGNS[i] is -1."""

TILE_ROWS, TILE_COLUMNS = 32, 128


def rotate_rows(x: Tensor) -> Tensor:
    """x [M, K] -> fp32 [M rounded up to 16, K]: H · diag(SIGNS) times each 16 rows.

    The fast Hadamard transform: four passes of sums and differences of rows whose numbers differ in one bit.
    """
    groups = F.pad(x.float(), (0, 0, 0, -x.shape[0] % GROUP)).unflatten(0, (-1, GROUP))  # [groups, 16, K]
    numbers = torch.arange(GROUP, device=x.device)  # made on the device: a copy from the host would wait for it
    groups = torch.where((NEGATIVE >> numbers & 1).bool()[:, None], -groups, groups)
    for _ in range(4):
        first, second = groups.unflatten(1, (GROUP // 2, 2)).unbind(2)
        # The lowest bit of a row's number becomes its highest: after four passes the rows are in order again.
        groups = torch.cat([first + second, first - second], 1)
    return (groups * 0.25).flatten(0, 1)  # 1 / sqrt(16): orthonormal


def _tensor_scale(largest: Tensor) -> Tensor:
    # Puts the largest group's scale at e4m3's largest number: small groups keep the most of its range.
    return (largest * (1 / (E2M1.max * E4M3.max))).clamp(min=SCALE_EPS)


def quantize_nvfp4_ref(x: Tensor, bits: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, K] -> codes uint8 [M, ceil(K / 2)], scale e4m3 [M, ceil(K / 16)], tensor_scale fp32 [1].

    bits: 16 random bits per element, int32 [M, K], for stochastic rounding.
    """
    columns = x.shape[1]
    groups = F.pad(x.float(), (0, -columns % GROUP)).unflatten(1, (-1, GROUP))  # fp32 [M, groups, 16]
    finite = groups.isfinite().all(dim=2)
    groups = torch.where(finite[..., None], groups, 0.0)
    absmax = groups.abs().amax(dim=2)  # [M, groups]
    tensor_scale = _tensor_scale(absmax.amax().view(1) if absmax.numel() else x.new_zeros(1, dtype=torch.float32))
    scale = (absmax / E2M1.max / tensor_scale).clamp(SMALLEST_SCALE, E4M3.max).to(E4M3.dtype)
    # Divided by the scale that is stored, e4m3-rounded, not by the exact one.
    scaled = (groups / (scale.float() * tensor_scale)[..., None]).flatten(1)[:, :columns]
    codes = encode_minifloat(scaled, E2M1, bits)
    scale = torch.where(finite, scale.float(), float("nan")).to(E4M3.dtype)
    return pack(codes.view(torch.int8), "int4"), scale, tensor_scale  # two 4-bit fields a byte, as int4


@triton.jit
def _load_groups(
    # fp32 or bf16 [m, k]; numbers of the rows and columns of what is quantized: x, or its transpose.
    x_ptr, row, column, m, k, TRANSPOSED: tl.constexpr, NEGATIVE: tl.constexpr,
):  # fmt: skip
    """A tile as groups fp32 [R * C / 16, 16], rotated unless NEGATIVE is 0, and bits of the absmax of each, of finite
    groups; others become 0."""
    ROWS: tl.constexpr = row.shape[0]
    COLUMNS: tl.constexpr = column.shape[0]
    if TRANSPOSED:
        pointers = x_ptr + column.to(tl.int64)[None, :] * k + row[:, None]
        inside = (row < k)[:, None] & (column < m)[None, :]
    else:
        pointers = x_ptr + row.to(tl.int64)[:, None] * k + column[None, :]
        inside = (row < m)[:, None] & (column < k)[None, :]
    x = tl.reshape(tl.load(pointers, inside, 0.0).to(tl.float32), (ROWS * COLUMNS // 16, 16))
    if NEGATIVE:  # as `rotate_rows`
        x = tl.where(((NEGATIVE >> tl.arange(0, 16)) & 1)[None, :] != 0, -x, x)
        for _ in tl.static_range(4):
            first, second = tl.split(tl.reshape(x, (ROWS * COLUMNS // 16, 8, 2)))
            both = tl.permute(tl.join(first + second, first - second), (0, 2, 1))
            x = tl.reshape(both, (ROWS * COLUMNS // 16, 16))
        x *= 0.25
    amax = tl.max(abs_bits(x), 1)
    finite = amax < 0x7F800000
    return tl.where(finite[:, None], x, 0.0), tl.where(finite, amax, 0), finite


@triton.jit
def _nvfp4_absmax_kernel(
    x_ptr, amax_ptr, m, k,
    TRANSPOSED: tl.constexpr, NEGATIVE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Bits of the absmax of all finite groups, into int32 [1] of zeros."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    _, amax, _ = _load_groups(x_ptr, row, column, m, k, TRANSPOSED, NEGATIVE)
    tl.atomic_max(amax_ptr, tl.max(amax, 0), sem="relaxed")


@triton.jit(do_not_specialize=["role"])
def _quantize_nvfp4_kernel(
    # fp32 or bf16 [m, k]; uint8 [rows, ceil(columns / 2)]; uint8 bits of e4m3 [rows, ceil(columns / 16)]; fp32 [1];
    # int64 [3].
    x_ptr, codes_ptr, scale_ptr, tensor_scale_ptr, key_ptr, role, m, k, rows, columns,
    STOCHASTIC: tl.constexpr, TRANSPOSED: tl.constexpr, NEGATIVE: tl.constexpr,
    CODE: tl.constexpr, SCALE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    GROUPS: tl.constexpr = COLUMNS // 16
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    x, amax, finite = _load_groups(x_ptr, row, column, m, k, TRANSPOSED, NEGATIVE)
    tensor_scale = tl.load(tensor_scale_ptr)
    scale = tl.div_rn(tl.div_rn(amax.to(tl.float32, bitcast=True), CODE.fmt.max), tensor_scale)
    scale_codes = encode(tl.clamp(scale, _SMALLEST_SCALE, SCALE.fmt.max), 1.0, 0, False, False, SCALE)
    # Divided by the scale that is stored: the value of its code, by its bits. fp32's bias is 120 above that of e4m3.
    UP: tl.constexpr = 2.0 ** (127 - SCALE.fmt.exponent_bias)
    stored = (scale_codes.to(tl.int32) << (23 - SCALE.fmt.mantissa_bits)).to(tl.float32, bitcast=True) * UP
    scaled = tl.reshape(tl.div_rn(x, (stored * tensor_scale)[:, None]), (ROWS, COLUMNS))
    noise = 0
    if STOCHASTIC:  # k is a multiple of 8: the eight elements of a draw share a row of x
        if TRANSPOSED:
            first = tl.program_id(0) * ROWS // 8 + tl.arange(0, ROWS // 8)
            block = column.to(tl.int64)[:, None] * (k // 8) + first[None, :]
            noise = tl.trans(philox_bits(block, key_ptr, role, CODE.ptx))
        else:
            first = tl.program_id(1) * COLUMNS // 8 + tl.arange(0, COLUMNS // 8)
            noise = philox_bits(row.to(tl.int64)[:, None] * (k // 8) + first[None, :], key_ptr, role, CODE.ptx)
    codes = pack_codes(encode(scaled, 1.0, noise, STOCHASTIC, False, CODE), 2)
    byte = tl.program_id(1) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
    width, groups = tl.cdiv(columns, 2), tl.cdiv(columns, 16)
    inside = (row < rows)[:, None] & (byte < width)[None, :]
    tl.store(codes_ptr + row.to(tl.int64)[:, None] * width + byte[None, :], codes, inside)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    scale_codes = tl.reshape(tl.where(finite, scale_codes, 0x7F), (ROWS, GROUPS))  # 0x7F: NaN
    inside = (row < rows)[:, None] & (group < groups)[None, :]
    tl.store(scale_ptr + row.to(tl.int64)[:, None] * groups + group[None, :], scale_codes, inside)


def _shape(x: Tensor, transposed: bool, hadamard: bool) -> tuple[int, int]:
    """Rows and columns of what is quantized."""
    m = x.shape[0] + (-x.shape[0] % GROUP if hadamard else 0)
    return (x.shape[1], m) if transposed else (m, x.shape[1])


def _empty_quantize_nvfp4(x, transposed, hadamard):
    rows, columns = _shape(x, transposed, hadamard)
    codes = x.new_empty(rows, -(-columns // 2), dtype=torch.uint8)
    scale = x.new_empty(rows, -(-columns // GROUP), dtype=E4M3.dtype)
    return codes, scale, x.new_empty(1, dtype=torch.float32)


def launch_quantize_nvfp4(
    x: Tensor, key: Tensor | None, role: int, transposed: bool, hadamard: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The kernels for `quantize_nvfp4`. x contiguous, not empty; K % 8 == 0 with a key; hadamard: transposed."""
    (m, k), (codes, scale, _) = x.shape, _empty_quantize_nvfp4(x, transposed, hadamard)
    amax = torch.zeros(1, dtype=torch.int32, device=x.device)
    rows, columns = _shape(x, transposed, hadamard)
    grid = triton.cdiv(rows, TILE_ROWS), triton.cdiv(columns, TILE_COLUMNS)
    layout = dict(
        TRANSPOSED=transposed, NEGATIVE=NEGATIVE if hadamard else 0, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    _nvfp4_absmax_kernel[grid](x, amax, m, k, **layout)
    tensor_scale = _tensor_scale(amax.view(torch.float32))
    _quantize_nvfp4_kernel[grid](
        x, codes.view(torch.int8), scale.view(torch.int8), tensor_scale, key, role, m, k, rows, columns,
        STOCHASTIC=key is not None, CODE=encoding("e2m1", x.device), SCALE=encoding("e4m3", x.device), **layout,
    )  # fmt: skip
    return codes, scale, tensor_scale


@operator("quantize_nvfp4", fake=_empty_quantize_nvfp4)
def quantize_nvfp4(
    x: Tensor, key: Tensor | None = None, role: int = 0, transposed: bool = False, hadamard: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """`quantize_nvfp4_ref` of x [M, K], or of its transpose; hadamard: of x with its rows rotated by `rotate_rows`.

    key, role: stochastic rounding (`random_bits_ref`), whose bits belong to the elements of x; None: nearest even.
    """
    if x.is_cuda and x.numel() and (key is None or x.shape[1] % 8 == 0):
        if hadamard and not transposed:  # the kernel rotates along the groups that it loads
            x, hadamard = rotate_rows(x), False
        return launch_quantize_nvfp4(x.contiguous(), key, role, transposed, hadamard)
    if hadamard:
        x = rotate_rows(x)  # fp32, M rounded up to 16: rows of zeros add nothing to the product
    bits = None if key is None else random_bits_ref(x.shape, key, role)
    if transposed:
        x, bits = x.t(), None if bits is None else bits.t()
    return quantize_nvfp4_ref(x, bits)
