"""Products of a few rows with codes: by every tile, with all that is fused, against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from qtrain.kernels.decode import operands
from qtrain.kernels.decode.gemv import GEMV
from qtrain.kernels.decode.operands import Fused, Weight, multiplies_codes
from qtrain.kernels.decode.quantize_normed import launch_normed, launch_quantize_normed, quantize_normed_ref
from qtrain.kernels.decode.row_tiles import TILES
from qtrain.kernels.decode.weight_only_mm import (
    PLAIN,
    launch_weight_only_mm,
    weight_only_mm,
    weight_only_mm_ref,
)
from qtrain.kernels.numerics.formats import dequantize
from qtrain.kernels.quantize.reference import quantize_ref

FORMATS = [
    (None, "tensorwise"), ("int8", "rowwise"), ("int8", "tensorwise"), ("int8", "32x32"), ("e4m3", "rowwise"),
    ("e4m3", "128x128"), ("e4m3", "1x32"), ("e5m2", "tensorwise"), ("int4", "1x32"), ("int4", "rowwise"),
    ("ternary", "tensorwise"),
]  # fmt: skip
N, K = 40, 400  # no multiples of the tiles; K of a unit of each format


def case(fmt: str | None, granularity: str, m: int, swiglu: bool, dtype=torch.float32, device: str = "cpu"):
    """x with an outlier, a weight with large rows and a row of zeros, and everything that can be fused."""
    generator = torch.Generator().manual_seed(m)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    x, w = draw(m, K), draw(N, K)
    x[:, 7] *= 100
    w[3] *= 50
    w[5] = 0
    weight = Weight(w) if fmt is None else Weight(*quantize_ref(w, fmt, granularity), fmt, granularity)
    residual = draw(m, N // 2 if swiglu else N)
    return x, weight, Fused(1 + 0.3 * draw(K), 1e-6, draw(N), swiglu, residual)


def truth(x: Tensor, weight: Weight, fused: Fused, in_codes: bool | None = None) -> tuple[Tensor, Tensor]:
    """y in fp64, and the sum of magnitudes that its rounding is relative to. in_codes: whether x is codes; None: as the
    kernel decides."""
    if multiplies_codes(x, weight) if in_codes is None else in_codes:
        granularity = "1x128" if weight.granularity == "128x128" else "rowwise"
        codes = quantize_normed_ref(x, fused.norm, fused.eps, weight.fmt, granularity)
        value = dequantize(*codes, weight.fmt, granularity, x.shape).double()
    else:
        value = F.rms_norm(x.double(), (K,), fused.norm.double(), fused.eps)
    w, bias = weight.values(torch.float32).double(), fused.bias.double()
    y, size = F.linear(value, w, bias), F.linear(value.abs(), w.abs(), bias.abs())
    if fused.swiglu:
        (gate, up), (gate_size, up_size) = y.chunk(2, dim=-1), size.chunk(2, dim=-1)
        # |silu'| is at most 1.1; both factors are off at once.
        y = F.silu(gate) * up
        size = 1.1 * gate_size * (up.abs() + 2**-7 * up_size) + F.silu(gate).abs() * up_size
    return y + fused.residual.double(), size + fused.residual.double().abs()


def check(y: Tensor, expected: tuple[Tensor, Tensor], bound: float) -> None:
    """bound: of the error, relative to the sum of magnitudes; y itself is rounded to its dtype."""
    (value, size), rounding = expected, 2**-8 if y.dtype == torch.bfloat16 else 2**-22
    assert y.isfinite().all()
    error = (y.double() - value).abs() - rounding * value.abs()
    assert (error <= bound * size).all(), f"{(error / size).max():.2e} exceeds {bound:.2e}"


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("fmt,granularity", FORMATS)
def test_reference_against_fp64(fmt, granularity, m, swiglu):
    x, weight, fused = case(fmt, granularity, m, swiglu)
    check(weight_only_mm_ref(x, weight, fused), truth(x, weight, fused, in_codes=False), 1e-6)


def tiles_of(m: int, swiglu: bool) -> list[str]:
    return list(GEMV) if m == 1 else [name for name, tile in TILES.items() if not (tile.per_sm and swiglu)]


@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("m", [1, 5])
@pytest.mark.parametrize("fmt,granularity", FORMATS)
def test_kernel(fmt, granularity, m, swiglu, monkeypatch):
    monkeypatch.setattr(operands, "has_fp8", lambda device: True)
    x, weight, fused = case(fmt, granularity, m, swiglu)
    names = tiles_of(m, swiglu)
    # Interpreted tiles are slow: each format takes two, which rotate.
    turn = FORMATS.index((fmt, granularity))
    for name in {names[turn % len(names)], names[(turn + 3) % len(names)]}:
        check(launch_weight_only_mm(x, weight, fused, name), truth(x, weight, fused), 1e-6)


@pytest.mark.parametrize("granularity", ["rowwise", "1x128"])
@pytest.mark.parametrize("fmt", ["int8", "e4m3"])
@pytest.mark.parametrize("normed", [False, True])
def test_quantize_normed(fmt, granularity, normed):
    x, _, fused = case("int8", "rowwise", 5, False)
    x[2] = 0
    norm = fused.norm if normed else None
    codes, scale = launch_quantize_normed(x, norm, 1e-6, fmt, granularity)
    expected, expected_scale = quantize_normed_ref(x, norm, 1e-6, fmt, granularity)
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    # Sums over a row are added in another order: a code may fall to the other side of a tie.
    assert (codes.float() != expected.float()).float().mean() < 0.002
    assert not codes[2].float().any()


def test_normed():
    x, _, fused = case("int8", "rowwise", 5, False)
    x[2] = 0
    expected = F.rms_norm(x.double(), (K,), fused.norm.double(), fused.eps)
    torch.testing.assert_close(launch_normed(x, fused.norm, fused.eps).double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("m", [1, 3])
def test_nonfinite_rows_show_and_stay_apart(m):
    x, weight, _ = case("int8", "rowwise", m, False)
    x[0, 9] = torch.nan
    y = launch_weight_only_mm(x, weight, PLAIN, tiles_of(m, False)[0])
    assert not y[0].isfinite().any() and y[1:].isfinite().all()


GPU_FORMATS = [*FORMATS, ("int4", "1x128")]


@pytest.mark.gpu
@pytest.mark.parametrize("m", [1, 2, 33, 64])
@pytest.mark.parametrize("fmt,granularity", GPU_FORMATS)
def test_every_tile_on_the_gpu(fmt, granularity, m):
    for swiglu in (False, True):
        x, weight, fused = case(fmt, granularity, m, swiglu, torch.bfloat16, "cuda")
        expected = truth(x, weight, fused)
        for name in tiles_of(m, swiglu):
            try:
                y = launch_weight_only_mm(x, weight, fused, name)
            except Exception as error:
                assert "shared memory" in str(error)  # the dispatch passes over such a tile
                continue
            # The normed x is rounded to bf16, and values with the scales of groups are.
            check(y, expected, 2**-7)
            assert torch.equal(y, launch_weight_only_mm(x, weight, fused, name))


@pytest.mark.gpu
def test_long_prompts_take_cublas():
    x, weight, fused = case("int8", "rowwise", 100, True, torch.bfloat16, "cuda")
    check(weight_only_mm(x, weight, fused), truth(x, weight, fused, in_codes=False), 2**-6)
