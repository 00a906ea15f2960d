"""Products of packed INT4 codes: exact integers at every K, odd ones too, and one scale a row."""

import pytest
import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_int4
from qtrain.kernels.gemm.int4_cores import CORES, INT4_MMA, INT8_MMA, launch_int4_cores_mm, with_int4_mma
from qtrain.kernels.gemm.int4_mm import (
    FUSED,
    LONGEST_FUSED_K,
    int4_mm,
    launch_int4_mm,
    launch_unpack_halves,
    scaled_int4_mm,
    unpack_halves_ref,
)
from qtrain.kernels.gemm.persistent import Tiling
from qtrain.kernels.numerics.formats import pack

SHAPES = [(1, 1, 1), (1, 8, 32), (5, 7, 3), (17, 130, 257), (64, 48, 1000), (0, 8, 8)]


def codes(rows: int, columns: int, seed: int) -> Tensor:
    """int8 in -8..7: no quantizer returns -8, but a nibble can hold it."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (rows, columns), dtype=torch.int8, generator=generator)


def case(m: int, n: int, k: int, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """Packed operands on the device, and their exact product."""
    a, b = codes(m, k, m + k), codes(n, k, n + k + 1)
    return pack(a, "int4").to(device), pack(b, "int4").to(device), (a.double() @ b.double().t()).int()


@pytest.mark.parametrize("m,n,k", SHAPES)
def test_exact_at_every_shape(m, n, k):
    a, b, expected = case(m, n, k)
    out = int4_mm(a, b, k)
    assert out.dtype == torch.int32 and torch.equal(out, expected)


def test_spread_holds_the_low_codes_then_the_high_ones():
    x = codes(5, 12, 0)
    assert torch.equal(unpack_halves_ref(pack(x, "int4")), torch.cat([x[:, 0::2], x[:, 1::2]], dim=1))


@pytest.mark.parametrize("rowwise", [True, False])
def test_scaled_against_fp64(rowwise):
    a, b, total = case(33, 20, 301)
    scale_a, scale_b = (torch.rand(size) for size in ((33, 20) if rowwise else (1, 1)))
    truth = total.double() * scale_a.double()[:, None] * scale_b.double()[None, :]
    out = scaled_int4_mm(a, b, scale_a, scale_b, 301, torch.float32)
    assert ((out.double() - truth).abs() <= 3 * 2**-24 * truth.abs()).all()
    assert scaled_int4_mm(a, b, scale_a, scale_b, 301, torch.bfloat16).dtype == torch.bfloat16


def test_a_wrong_k_is_refused():
    a, b, _ = case(3, 4, 10)
    with pytest.raises(AssertionError, match="K = 12 is 6 packed bytes"):
        int4_mm(a, b, 12)


def check_kernels(device: str, shapes: list[tuple[int, int, int]], tilings: list[Tiling]) -> None:
    """The fused kernel bitwise, plain and scaled; scales are powers of two, so that every rounding is known."""
    for m, n, k in shapes:
        a, b, expected = case(m, n, k, device)
        assert torch.equal(launch_unpack_halves(a).cpu(), unpack_halves_ref(a.cpu()))
        scales = 2.0 ** torch.randint(-4, 4, (m,)), 2.0 ** torch.randint(-4, 4, (n,))
        scaled = expected.float() * scales[0][:, None] * scales[1][None, :]
        scales = tuple(scale.to(device) for scale in scales)
        for tiling in tilings:
            assert torch.equal(launch_int4_mm(a, b, None, torch.int32, tiling).cpu(), expected), (m, n, k, tiling.name)
            out = launch_int4_mm(a, b, scales, torch.float32, tiling).cpu()
            assert torch.equal(out, scaled), (m, n, k, tiling.name)


@pytest.mark.interpreter
def test_kernels_in_the_interpreter():
    small = [Tiling(32, 64, 32, 4, 2), Tiling(64, 32, 16, 4, 2, subtiles=1)]
    check_kernels("cpu", [(1, 16, 32), (70, 100, 160)], small)


@pytest.mark.gpu
def test_kernels():
    random = torch.Generator().manual_seed(0)
    sizes = (torch.randint(1, 30, (3,), generator=random).tolist() for _ in range(200))
    shapes = [(13 * m, 4 * n, 32 * k) for m, n, k in sizes] + [(4096, 4096, 1024), (8192, 896, 4864)]
    check_kernels("cuda", shapes, list(FUSED.values()))


SMALL_CORES = Tiling(32, 64, 64, 2, 3)
"""Hopper multiplies such a tile by `mma` too, and has INT4's instruction, on INT8 cores."""


@pytest.mark.gpu
def test_kernels_on_int4_cores():
    tilings = [SMALL_CORES, *(CORES.values() if has_int4(torch.device("cuda")) else ())]
    for m, n, k in [*SHAPES[:-1], (300, 200, 4864), (1000, 72, 1022)]:
        a, b, expected = case(m, n, k, "cuda")
        scales = 2.0 ** torch.randint(-4, 4, (m,)), 2.0 ** torch.randint(-4, 4, (n,))
        scaled = expected.float() * scales[0][:, None] * scales[1][None, :]
        scales = tuple(scale.cuda() for scale in scales)
        for tiling in tilings:
            out = launch_int4_cores_mm(a, b, None, torch.int32, tiling)
            assert torch.equal(out.cpu(), expected), (m, n, k, tiling.name)
            out = launch_int4_cores_mm(a, b, scales, torch.float32, tiling)
            assert torch.equal(out.cpu(), scaled), (m, n, k, tiling.name)


@pytest.mark.interpreter
@pytest.mark.parametrize("m,n,k", [(1, 1, 1), (17, 130, 257), (70, 100, 160)])
def test_kernel_on_int4_cores_in_the_interpreter(m, n, k):
    """Interpreted, its instruction is not exchanged: it multiplies the bytes."""
    a, b, _ = case(m, n, k)
    total = (a.view(torch.int8).double() @ b.view(torch.int8).double().t()).int()
    assert torch.equal(launch_int4_cores_mm(a, b, None, torch.int32, SMALL_CORES), total)
    scales = 2.0 ** torch.randint(-4, 4, (m,)), 2.0 ** torch.randint(-4, 4, (n,))
    scaled = total.float() * scales[0][:, None] * scales[1][None, :]
    assert torch.equal(launch_int4_cores_mm(a, b, scales, torch.float32, SMALL_CORES), scaled)


def test_instructions_are_exchanged_or_missed():
    assert with_int4_mma(f"a; {INT8_MMA} x; {INT8_MMA} y;") == f"a; {INT4_MMA} x; {INT4_MMA} y;"
    with pytest.raises(RuntimeError, match=r"no mma\.sync"):
        with_int4_mma("wgmma.mma_async.sync.aligned.m64n128k32.s32.s8.s8")


@pytest.mark.gpu
def test_longest_fused_sum_does_not_overflow():
    k = LONGEST_FUSED_K // 32 * 32
    lowest = pack(torch.full((16, k), -8, dtype=torch.int8), "int4").cuda()
    out = launch_int4_mm(lowest, lowest, None, torch.int32, next(iter(FUSED.values())))
    assert (out == 64 * k).all()


@pytest.mark.gpu
@pytest.mark.parametrize("m,n,k", SHAPES)
def test_operators_take_every_shape_on_gpu(m, n, k):
    a, b, expected = case(m, n, k, "cuda")
    assert torch.equal(int4_mm(a, b, k).cpu(), expected)
    ones = torch.ones(1, device="cuda")
    assert torch.equal(scaled_int4_mm(a, b, ones, ones, k, torch.float32).cpu(), expected.float())


def test_operators():
    a, b, _ = case(3, 8, 16)
    torch.library.opcheck(int4_mm, (a, b, 16))
    torch.library.opcheck(scaled_int4_mm, (a, b, torch.rand(3), torch.rand(8), 16, torch.bfloat16))
