"""A product of 8-bit codes that is added to what is in memory: rounded once, by every implementation."""

import pytest
import torch
from torch import Tensor

from qtrain.kernels.gemm import add_scaled_mm as module
from qtrain.kernels.gemm.add_scaled_mm import TILINGS, TWO_PASSES, add_scaled_mm, add_scaled_mm_names
from qtrain.kernels.gemm.cublas_lt import ALGORITHMS
from qtrain.kernels.gemm.persistent import Tiling, launch_persistent_mm
from qtrain.kernels.gemm.scaled_wgmma import SCALED_TILINGS
from tests.kernels.gemm.test_scaled_mm import DTYPES, E4M3, operands, truth

SMALL = Tiling(64, 64, 64, 4, 3)


def total_of(m: int, n: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """With an outlier and a row of zeros."""
    total = torch.randn(m, n, generator=torch.Generator(device).manual_seed(7), device=device) * 10
    total[0, 0] = 1000
    total[m // 2] = 0
    return total.to(dtype)


def check(out: Tensor, total: Tensor, codes: tuple[Tensor, ...], slack: float = 0.0, roundings: int = 1) -> None:
    """out against total plus the product, in fp64. slack: of FP8's accumulators, relative to the sum of magnitudes."""
    product, size = truth(*codes)
    expected = total.double() + product
    rounding = 2**-23 if out.dtype == torch.float32 else 2**-8
    allowed = rounding * (expected.abs() + (roundings - 1) * product.abs()) + (2**-21 + slack) * (size + total.abs())
    assert out.dtype == total.dtype and ((out.double() - expected).abs() <= allowed).all()


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("tensorwise", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("m,n,k", [(33, 20, 300), (1, 8, 64), (40, 16, 1)])
def test_against_fp64(dtypes, tensorwise, dtype, m, n, k):
    codes, total = operands(m, n, k, dtypes, tensorwise=tensorwise), total_of(m, n, dtype)
    out = total.clone()
    assert add_scaled_mm(out, *codes) is None
    check(out, total, codes)


def test_the_sum_is_rounded_once():
    """1 + 2^-9 + ... : a product below half of the total's last place counts once it is added before rounding."""
    codes = torch.ones(1, 3, dtype=torch.int8), torch.ones(1, 3, dtype=torch.int8)
    total = torch.full((1, 1), 256.0, dtype=torch.bfloat16)  # the next one is 258
    add_scaled_mm(total, *codes, torch.full((1,), 0.35), torch.ones(1))  # 1.05, which bf16 rounds to 1.05
    assert total.item() == 258.0


def test_nonfinite_values_show():
    codes, total = operands(5, 8, 16, DTYPES[0]), torch.zeros(5, 8)
    codes[2][3], total[1, 2] = float("nan"), float("inf")
    add_scaled_mm(total, *codes)
    assert total[3].isnan().all() and total[1, 2].isinf() and total.isfinite().sum() == 5 * 8 - 9


@pytest.mark.parametrize("m,n,k", [(0, 8, 16), (8, 0, 16), (8, 8, 0)])
def test_empty(m, n, k):
    a, b, total = torch.zeros(m, k, dtype=torch.int8), torch.zeros(n, k, dtype=torch.int8), torch.ones(m, n)
    add_scaled_mm(total, a, b, torch.ones(1), torch.ones(1))
    assert torch.equal(total, torch.ones(m, n))


def test_what_the_kernels_cannot_take_has_two_passes(monkeypatch):
    monkeypatch.setattr(module, "has_fp8", lambda device: True)
    monkeypatch.setattr(module, "algorithm_names", list)

    def names(n: int = 64, k: int = 64, dtype: torch.dtype = torch.bfloat16) -> list[str]:
        a, b = torch.zeros(8, k, dtype=E4M3), torch.zeros(n, k, dtype=E4M3)
        return add_scaled_mm_names(torch.zeros(8, n, dtype=dtype), a, b, True)

    assert names() == [*TILINGS, TWO_PASSES]
    for refused in ({"n": 20}, {"k": 40}, {"dtype": torch.float32}):
        assert names(**refused) == [TWO_PASSES], refused


@pytest.mark.interpreter
@pytest.mark.parametrize("dtypes", DTYPES[:2])
@pytest.mark.parametrize("m,n,k", [(130, 72, 208), (1, 128, 64), (65, 64, 144)])
def test_kernel_in_the_interpreter(dtypes, m, n, k):
    """In fp32, whose products the interpreter computes as they are."""
    for tensorwise in (False, True):
        codes, total = operands(m, n, k, dtypes, tensorwise=tensorwise), total_of(m, n, torch.float32)
        out = total.clone()
        launch_persistent_mm(codes[0], codes[1], out, SMALL, codes[2:], add=True)
        check(out, total, codes, slack=2**-20)


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize("name", [*ALGORITHMS, *SCALED_TILINGS, *TILINGS, TWO_PASSES])
@pytest.mark.parametrize("tensorwise", [False, True])
@pytest.mark.parametrize("fast_accum", [False, True])
def test_every_implementation(dtypes, name, tensorwise, fast_accum, monkeypatch):
    monkeypatch.setattr(module, "choose", lambda op, key, names, run: name)
    ran = 0
    for m, n, k in [(1, 64, 64), (300, 264, 1040), (128, 256, 208), (1152, 896, 8192), (3584, 2560, 4104)]:
        codes = operands(m, n, k, dtypes, tensorwise=tensorwise, device="cuda")
        total = total_of(m, n, torch.bfloat16, "cuda")
        if name not in add_scaled_mm_names(total, codes[0], codes[1], fast_accum):
            continue
        out = total.clone()
        try:
            add_scaled_mm(out, *codes, fast_accum)
        except RuntimeError as error:  # scales of rows, which cuBLASLt does not have on every GPU
            assert name in ALGORITHMS and not tensorwise and "cuBLASLt" in str(error)
            continue
        # FP8 as in `test_fp8_kernel`.
        check(out, total, codes, 2**-12 if dtypes[0] == torch.int8 else 2**-9, 1 + (name == TWO_PASSES))
        again = total.clone()
        add_scaled_mm(again, *codes, fast_accum)
        assert torch.equal(again, out)
        ran += 1
    assert ran or name in SCALED_TILINGS or (name in ALGORITHMS and (dtypes[0] == torch.int8 or not tensorwise))


@pytest.mark.gpu
def test_timing_the_implementations_adds_nothing():
    codes, total = operands(256, 512, 384, DTYPES[0], device="cuda"), total_of(256, 512, torch.bfloat16, "cuda")
    out = total.clone()
    add_scaled_mm(out, *codes)
    check(out, total, codes, 2**-12, 2)


def test_operator():
    codes = operands(5, 16, 32, DTYPES[0])
    torch.library.opcheck(add_scaled_mm, (total_of(5, 16, torch.float32), *codes))
