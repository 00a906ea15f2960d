"""Quantizing kernels bitwise equal to their definition, nearest and stochastic, along rows, columns and both."""

import pytest
import torch

from qtrain.kernels.numerics.formats import LINEAR_FORMATS, empty_codes
from qtrain.kernels.numerics.philox import Rounding, random_bits_ref
from qtrain.kernels.quantize import operators
from qtrain.kernels.quantize.absmax import absmax_ref
from qtrain.kernels.quantize.operators import (
    quantize,
    quantize_dual,
    quantize_dual_delayed,
    quantize_into,
    quantize_transposed,
)
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref, scale_ref
from qtrain.kernels.quantize.rowwise import launch_rowwise, launch_rowwise_bf16x2, row_blocks, supports_rowwise_bf16x2
from qtrain.kernels.quantize.tiled import Tile, launch_tiled
from tests.cases import KINDS, SHAPES, matrix, without_e5m2

ROLE = 2
ROWS = ["rowwise", "1x128", "1x32"]
TILES = [
    ("rowwise", "rowwise"),
    ("1x128", "1x128"),
    ("128x128", "128x128"),
    ("32x32", "32x32"),
    ("tensorwise", "tensorwise"),
    ("1x32", "rowwise"),
    ("1x128", "128x128"),
    (None, "rowwise"),
    (None, "1x128"),
    ("tensorwise", None),
    ("128x128", None),
]


def same(found, expected, note):
    """Equal bit for bit; a NaN equals a NaN."""
    for got, true in zip(found, expected, strict=True):
        if got.dtype.itemsize == 1:
            assert torch.equal(got.view(torch.uint8), true.view(torch.uint8)), note
        else:
            assert torch.equal(got.nan_to_num(nan=-1.0), true.nan_to_num(nan=-1.0)), note


def stress_matrix(rows, columns, seed, kind, dtype, device):
    x = matrix(rows, columns, seed, "normal" if kind == "nonfinite" else kind, dtype).contiguous()
    if kind == "nonfinite":
        x[rows // 2, columns // 3] = float("nan")
        x[0, columns // 2] = -float("inf")
    return x.to(device)


def noise(x, key):
    return None if key is None else random_bits_ref(x.shape, key, ROLE)


def check_rows(x, fmt, granularity, key, power_of_two=False, **options):
    found = launch_rowwise(x, fmt, granularity, Rounding(key, ROLE), power_of_two, **options)
    note = (tuple(x.shape), fmt, granularity, key is not None, options)
    same(found, quantize_ref(x, fmt, granularity, noise(x, key), power_of_two), note)
    if supports_rowwise_bf16x2(x, fmt, granularity, key is not None):
        check_rowwise_bf16x2(x, fmt, granularity, key, power_of_two)


def check_rowwise_bf16x2(x, fmt, granularity, key, power_of_two=False):
    assert supports_rowwise_bf16x2(x, fmt, granularity, key is not None)
    found = launch_rowwise_bf16x2(x, fmt, granularity, Rounding(key, ROLE), power_of_two)
    expected = quantize_ref(x, fmt, granularity, noise(x, key), power_of_two)
    same(found, expected, (tuple(x.shape), fmt, granularity, key is not None))


def check_tiles(x, fmt, granularity, granularity_t, key, power_of_two=False, **options):
    bits, expected = noise(x, key), []
    if granularity:
        expected += quantize_ref(x, fmt, granularity, bits, power_of_two)
    if granularity_t:
        expected += quantize_transposed_ref(x, fmt, granularity_t, bits, power_of_two)
    found = launch_tiled(x, fmt, granularity, granularity_t, Rounding(key, ROLE), power_of_two, **options)
    same(found, expected, (tuple(x.shape), fmt, granularity, granularity_t, key is not None, options))


def check_given(x, fmt, fmt_t, key):
    scale, amax = torch.tensor([0.01], device=x.device), torch.zeros(1, dtype=torch.int32, device=x.device)
    tensorwise = ("tensorwise", noise(x, key), False, scale)
    expected = [*quantize_ref(x, fmt, *tensorwise), *quantize_transposed_ref(x, fmt_t, *tensorwise)]
    found = launch_tiled(
        x, fmt, "tensorwise", "tensorwise", Rounding(key, ROLE), scale=scale, fmt_t=fmt_t, scale_t=scale, amax=amax
    )
    same(found, expected, (tuple(x.shape), fmt, fmt_t, key is not None))
    same([amax.view(torch.float32)], [absmax_ref(x)], tuple(x.shape))


def check_ternary(x, granularity, key):
    scale, scale_t = scale_ref(x, "ternary", granularity), scale_ref(x.t(), "ternary", granularity)
    bits = noise(x, key)
    found = launch_tiled(
        x, "ternary", granularity, granularity, Rounding(key, ROLE), scale=scale, fmt_t="ternary", scale_t=scale_t
    )
    codes_t, _ = quantize_transposed_ref(x, "ternary", granularity, bits)
    same(found, [*quantize_ref(x, "ternary", granularity, bits), codes_t, scale_t], (tuple(x.shape), granularity))


KEY = torch.tensor([2**40 + 77, 9, 5])
# In the interpreter a launch takes a quarter of a second: every path once, not every combination.
SMALL = {"tile": Tile(32, 32, 4, True)}


@pytest.mark.interpreter
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", without_e5m2(["int8", "e4m3", "e5m2", "int4"]))
def test_kernels_in_the_interpreter(fmt, key):
    for kind in ("outlier", "nonfinite"):
        x = stress_matrix(34, 40, 0, kind, torch.float32, "cpu")
        check_rows(x, fmt, "1x32", key, kind == "outlier", elements=64)
        check_tiles(x, fmt, "rowwise", "rowwise", key, **SMALL)
        check_tiles(x, fmt, "32x32", "32x32", key, kind == "outlier", **SMALL)
    x = stress_matrix(3, 40, 1, "zero_row", torch.float32, "cpu")
    check_rows(x, fmt, "rowwise", key, elements=64)
    check_rows(x, fmt, "rowwise", key, longest=8, chunk=16)
    check_tiles(x, fmt, "tensorwise", "rowwise", key, **SMALL)


@pytest.mark.interpreter
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", without_e5m2(["int4", "int8", "e4m3", "e5m2"]))
def test_rowwise_bf16x2_in_the_interpreter(fmt, key):
    cases = [("outlier", 33, 320), ("nonfinite", 9, 264), ("zero_row", 3, 40), ("normal", 1, 8)]
    for number, (kind, m, k) in enumerate(cases):
        x = stress_matrix(m, k, number, kind, torch.bfloat16, "cpu")
        check_rowwise_bf16x2(x, fmt, "rowwise", key, number == 0)  # 320: two blocks
        check_rowwise_bf16x2(x, fmt, "1x128", key, number == 1)  # 264 and 40: a partial group


def test_blocks_of_a_row():
    """Powers of two that hold the row with little padding."""
    for words in range(8, 20_000, 8):
        blocks = row_blocks(words)
        assert words <= sum(blocks) <= max(words + 128, words * 4 // 3), (words, blocks)
        assert all(block & (block - 1) == 0 for block in blocks)


@pytest.mark.parametrize("stochastic,longest", [(False, 49152), (True, 16384)])
def test_which_rows_are_read_as_bf16x2(stochastic, longest):
    x = torch.zeros(4, 24, dtype=torch.bfloat16)

    def takes(x, fmt, granularity):
        return supports_rowwise_bf16x2(x, fmt, granularity, stochastic)

    assert takes(x, "int8", "1x128") and takes(x, "e5m2", "rowwise")
    assert not takes(x.float(), "int8", "1x128") and not takes(x[:, :20], "int8", "1x128")
    assert not takes(x.view(-1)[1:73].view(3, 24), "int8", "1x128")  # starts within a word
    assert takes(x, "int4", "1x128") and not takes(x, "ternary", "rowwise") and not takes(x, "e4m3", "1x32")
    rows = torch.zeros(1, longest + 8, dtype=torch.bfloat16)
    assert takes(rows[:, :longest], "int8", "rowwise") and not takes(rows, "int8", "rowwise")
    assert takes(rows, "int8", "1x128")


@pytest.mark.interpreter
def test_blocks_of_128_in_the_interpreter():
    x = stress_matrix(130, 136, 2, "outlier", torch.float32, "cpu")
    check_tiles(x, "int8", "1x128", "1x128", None)
    check_tiles(x, "e4m3", "128x128", "128x128", None)
    check_tiles(x, "e4m3", None, "1x128", None)
    check_tiles(x, "e4m3", "1x128", "128x128", None)
    check_rows(x, "e4m3", "1x128", None, elements=1024)


@pytest.mark.interpreter
def test_given_and_ternary_in_the_interpreter():
    x = stress_matrix(34, 40, 2, "nonfinite", torch.float32, "cpu")
    check_given(x, "e4m3", "e5m2", None)
    check_given(x, "int8", "int8", KEY)
    check_ternary(x, "rowwise", KEY)


def check_into(x, fmt, granularity, key):
    expected = quantize_ref(x, fmt, granularity, noise(x, key))
    out = empty_codes(x, fmt, granularity)
    out[0].view(torch.int8).fill_(7)
    out[1].fill_(-1)
    found = quantize_into(out, x, fmt, granularity, Rounding(key, ROLE), False)
    assert found[0] is out[0] and found[1] is out[1]
    same(found, expected, (tuple(x.shape), fmt, granularity, key is not None))
    wide = torch.full((*out[1].shape, 2), -1.0, device=x.device)[..., 0]  # of other strides: not written
    found = quantize_into((out[0], wide), x, fmt, granularity, Rounding(key, ROLE), False)
    same(found, expected, "strides")
    assert (wide == -1).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("granularity", ["rowwise", "tensorwise", "128x128", "32x32"])
def test_into_memory_in_the_interpreter(granularity, monkeypatch):
    monkeypatch.setattr(operators, "_kernel_takes", lambda x, rounding: True)
    for dtype in (torch.float32, torch.bfloat16) if granularity == "rowwise" else (torch.float32,):
        check_into(stress_matrix(34, 40, 3, "outlier", dtype, "cpu"), "e4m3", granularity, None)
    check_into(stress_matrix(34, 40, 4, "nonfinite", torch.float32, "cpu"), "int8", granularity, KEY)
    if granularity == "128x128":  # rows of scales are padded
        check_into(stress_matrix(130, 136, 3, "outlier", torch.float32, "cpu"), "e4m3", granularity, None)


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("granularity", ["rowwise", "tensorwise", "1x128", "128x128", "32x32"])
def test_into_memory_on_a_gpu(granularity, key):
    """Without memory besides, but for tensorwise's absmax; a view that a kernel cannot write is left alone."""
    key = None if key is None else key.cuda()
    for number, (m, k) in enumerate([(1024, 4096), (33, 264), (1, 8), (130, 136)]):
        for dtype in (torch.bfloat16, torch.float32):
            for fmt in ("e4m3", "int8"):
                check_into(stress_matrix(m, k, number, "outlier", dtype, "cuda"), fmt, granularity, key)
    x = stress_matrix(1024, 4096, 0, "normal", torch.bfloat16, "cuda")
    out = quantize(x, "e4m3", granularity)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    quantize_into(out, x, "e4m3", granularity, Rounding(key, ROLE), False)
    assert torch.cuda.max_memory_allocated() - before < 2**20


def random_shapes(seed, count):
    """Odd ones, and multiples of 16, for which Triton specializes kernels."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        m, k = torch.randint(1, 600, (2,), generator=generator).tolist()
        yield number, (m * 16 % 1009 // 16 * 16 + 16, k // 16 * 16 + 16) if number % 2 else (2 * m + 1, 2 * k + 1)


def x_dtype(fmt, number):
    return torch.float32 if fmt == "int8" and number % 4 == 0 else torch.bfloat16


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["int8", "e4m3", "int4"])
@pytest.mark.parametrize("granularity", ROWS)
def test_rows(granularity, fmt, key):
    key = key if key is None else key.cuda()
    for number, (m, k) in random_shapes(1, 200):
        kind = [*KINDS, "nonfinite"][number % 6]
        k = k if key is None or k % 8 == 0 else k // 2 * 8
        x = stress_matrix(m, k, number, kind, x_dtype(fmt, number), "cuda")
        check_rows(x, fmt, granularity, key, fmt == "e4m3" and number % 4 == 1)
    for shape in [(1, 16), (3, 14336), (1000, 4096), (5, 18944), (9, 37888), (2, 49152), (2, 151936)]:
        check_rows(stress_matrix(*shape, 0, "outlier", torch.bfloat16, "cuda"), fmt, granularity, key)


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["int8", "e4m3"])
@pytest.mark.parametrize("granularity,granularity_t", TILES)
def test_tiles(granularity, granularity_t, fmt, key):
    key = key if key is None else key.cuda()
    for number, (m, k) in random_shapes(2, 200):
        kind = [*KINDS, "nonfinite"][number % 6]
        k = k if key is None or k % 8 == 0 else k // 2 * 8
        x = stress_matrix(m, k, number, kind, x_dtype(fmt, number), "cuda")
        check_tiles(x, fmt, granularity, granularity_t, key, fmt == "e4m3" and number % 4 == 1)
    for shape in [(1, 16), (1000, 4096), (4100, 1000), (4096, 14336)]:
        check_tiles(stress_matrix(*shape, 0, "outlier", torch.bfloat16, "cuda"), fmt, granularity, granularity_t, key)


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt,fmt_t", [("e4m3", "e4m3"), ("e4m3", "e5m2"), ("int8", "int8"), ("int4", "int4")])
def test_given_scale_on_gpu(fmt, fmt_t, key):
    key = key if key is None else key.cuda()
    for number, (m, k) in random_shapes(3, 200):
        k = k if key is None or k % 8 == 0 else k // 2 * 8
        check_given(
            stress_matrix(m, k, number, [*KINDS, "nonfinite"][number % 6], torch.bfloat16, "cuda"), fmt, fmt_t, key
        )


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e5m2", "int4", "ternary"])
def test_other_formats_on_gpu(fmt):
    for number, (m, k) in random_shapes(4, 200):
        x = stress_matrix(m, k, number, [*KINDS, "nonfinite"][number % 6], torch.bfloat16, "cuda")
        for key in (None, KEY.cuda())[: 1 + (k % 8 == 0)]:
            if fmt == "ternary":
                check_ternary(x, ("rowwise", "tensorwise")[number % 3 == 0], key)
            else:
                check_rows(x, fmt, ROWS[number % 3], key)
                check_tiles(x, fmt, *[("rowwise", "rowwise"), ("1x128", "1x128")][number % 3 == 0], key)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_operators_on_gpu(fmt):
    """Every granularity, in both layouts, any shape and strides of the input: as on a CPU."""
    for shape in [(1, 256), (17, 33), (130, 257), (0, 16), (3, 0), (3, 49_184)]:
        for kind in ("normal", "strided"):
            x = matrix(*shape, 5, kind, torch.bfloat16).cuda()
            for granularity in ("tensorwise", "rowwise", "1x128", "32x32"):
                for key in (None, KEY.cuda()):
                    what = (shape, kind, fmt, granularity, key is not None)
                    rows, columns = (op(x, fmt, granularity, key, ROLE) for op in (quantize, quantize_transposed))
                    same(rows, quantize_ref(x, fmt, granularity, noise(x, key)), what)
                    same(quantize_dual(x, fmt, granularity, granularity, key, ROLE), [*rows, *columns], what)
                    nearest = quantize_ref(x, fmt, granularity)
                    one = quantize_dual(x, fmt, granularity, granularity, key, ROLE, rows=False)
                    same(one, [*nearest, *columns], what)


@pytest.mark.gpu
def test_dual_with_the_scale_given_on_gpu():
    one = torch.ones(1).cuda()
    for shape in [*SHAPES, (0, 16), (3, 0)]:
        x = matrix(*shape, 5, "strided", torch.bfloat16).cuda()
        codes, codes_t, _, amax, _ = quantize_dual_delayed(x, "e4m3", one)
        same([codes, amax], [quantize_ref(x, "e4m3", "tensorwise", scale=one)[0], absmax_ref(x)], shape)
        assert torch.equal(codes.float().t(), codes_t.float())
        codes, codes_t, _, amax, _ = quantize_dual_delayed(x, "e4m3", one, KEY.cuda(), ROLE, rows=False)
        drawn = quantize_transposed_ref(x, "e4m3", "tensorwise", noise(x, KEY.cuda()), scale=one)[0]
        same([codes, codes_t, amax], [quantize_ref(x, "e4m3", "tensorwise", scale=one)[0], drawn, absmax_ref(x)], shape)
