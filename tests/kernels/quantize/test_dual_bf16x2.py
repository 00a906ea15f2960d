"""The quantizer of both layouts from bf16, to nearest and stochastic: bitwise equal to the definition."""

import itertools

import pytest
import torch

from qtrain.kernels.column_sums import empty_column_sums
from qtrain.kernels.numerics.formats import FORMATS
from qtrain.kernels.numerics.philox import NEAREST, Rounding
from qtrain.kernels.quantize import operators
from qtrain.kernels.quantize.absmax import absmax_ref
from qtrain.kernels.quantize.dual_bf16x2 import launch_dual_bf16x2, supports_dual_bf16x2
from qtrain.kernels.quantize.gather_rows import RowIndex
from qtrain.kernels.quantize.operators import quantize_dual, quantize_dual_delayed
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref, scale_ref
from tests.cases import KINDS, sampled, without_e5m2
from tests.kernels.quantize.test_kernels import KEY, ROLE, check_rows, check_tiles, same, stress_matrix

PAIRS = [
    ("128x128", "128x128"),
    ("1x128", "1x128"),
    ("1x128", "128x128"),
    ("rowwise", "rowwise"),
    ("tensorwise", "tensorwise"),
]
"""Granularities of row codes and of transposed codes."""
CASES = [(fmt, *pair) for fmt in ("int8", "e4m3", "e5m2") for pair in PAIRS]

STOCHASTIC = ("rows", "columns", "both")


def rounding_of(stochastic, device):
    """The request that rounds these layouts stochastically; "": none."""
    if not stochastic:
        return NEAREST
    return Rounding(KEY.to(device), ROLE, rows=stochastic != "columns", columns=stochastic != "rows")


def check(x, fmt, granularity, granularity_t, power_of_two=False, stochastic=""):
    assert supports_dual_bf16x2(x, fmt, granularity, granularity_t=granularity_t)
    rounding = rounding_of(stochastic, x.device)
    row_bits, column_bits = rounding.bits(x.shape)
    expected = quantize_ref(x, fmt, granularity, row_bits, power_of_two)
    expected += quantize_transposed_ref(x, fmt, granularity_t, column_bits, power_of_two)
    found = launch_dual_bf16x2(x, fmt, granularity, rounding, power_of_two, granularity_t=granularity_t)
    same(found, expected, (tuple(x.shape), fmt, granularity, granularity_t, power_of_two, stochastic))
    assert [t.stride() for t in found] == [t.stride() for t in expected]
    if granularity == "tensorwise":  # with an absmax that is known, into memory that is there
        out, amax = tuple(torch.empty_like(t) for t in found), absmax_ref(x).view(torch.int32) & 0x7FFFFFFF
        again = launch_dual_bf16x2(x, fmt, granularity, rounding, power_of_two, out=out, tensor_amax=amax)
        same(again, expected, (tuple(x.shape), fmt, power_of_two, stochastic))
        assert all(a is b for a, b in zip(again, out, strict=True))


def check_given(x, fmt, scale, stochastic=""):
    """Under a given scale, whose range x may exceed; a NaN keeps its code."""
    assert supports_dual_bf16x2(x, fmt, "tensorwise", True)
    scale, amax = torch.tensor([scale], device=x.device), torch.zeros(1, dtype=torch.int32, device=x.device)
    rounding = rounding_of(stochastic, x.device)
    row_bits, column_bits = rounding.bits(x.shape)
    expected = quantize_ref(x, fmt, "tensorwise", row_bits, scale=scale)
    expected += quantize_transposed_ref(x, fmt, "tensorwise", column_bits, scale=scale)
    note = (tuple(x.shape), fmt, stochastic)
    same(launch_dual_bf16x2(x, fmt, "tensorwise", rounding, False, scale), expected, note)
    same(launch_dual_bf16x2(x, fmt, "tensorwise", rounding, False, scale, amax), expected, note)
    same([amax.view(torch.float32)], [absmax_ref(x)], tuple(x.shape))
    sums = empty_column_sums(x, x.shape[1])
    same(launch_dual_bf16x2(x, fmt, "tensorwise", rounding, False, scale, column_sums=sums), expected, note)
    check_column_sums(sums, x)


def check_column_sums(sums, x):
    """Within fp32's rounding of the sum in fp64; NaN and Inf where that has them."""
    true, finite = x.double().sum(0), x.isfinite().all(0)
    assert sums.dtype == torch.float32 and sums.shape == true.shape
    assert torch.equal(sums[~finite].double().nan_to_num(nan=-1.0), true[~finite].nan_to_num(nan=-1.0))
    assert ((sums - true).abs() <= 1e-6 * x.double().abs().sum(0))[finite].all()


def random_shapes(seed, count):
    """Full and partial blocks."""
    generator = torch.Generator().manual_seed(seed)
    for number in range(count):
        m, k = (16 * torch.randint(1, 40, (2,), generator=generator)).tolist()
        yield number, (-(-m // 128) * 128, -(-k // 128) * 128) if number % 3 == 0 else (m, k)


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity,granularity_t", without_e5m2(CASES))
def test_dual_in_the_interpreter(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    for kind in ("outlier", "nonfinite"):
        check(stress_matrix(144, 272, 2, kind, torch.bfloat16, "cpu"), fmt, *pair, kind == "outlier")
    x = stress_matrix(128, 256, 3, "zero_row", torch.bfloat16, "cpu")
    x[:, :128] = 0  # a whole tile
    check(x, fmt, *pair)


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt", without_e5m2(["e4m3", "e5m2"]))
def test_a_given_scale_in_the_interpreter(fmt):
    check_given(stress_matrix(144, 272, 2, "nonfinite", torch.bfloat16, "cpu"), fmt, 1e-4)
    check_given(stress_matrix(128, 256, 3, "zero_row", torch.bfloat16, "cpu"), fmt, 0.3)


ROUNDED = [("int8", "rowwise"), ("int8", "128x128"), ("e4m3", "1x128")]
"""The cases of stochastic rounding outside of the full sweep."""


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity,granularity_t", sampled(CASES, lambda *case: case[:2] not in ROUNDED))
def test_stochastic_rounding_in_the_interpreter(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    for stochastic, kind in (("columns", "nonfinite"), ("both", "outlier"), ("rows", "zero_row")):
        check(stress_matrix(144, 272, 2, kind, torch.bfloat16, "cpu"), fmt, *pair, kind == "outlier", stochastic)


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt", without_e5m2(["e4m3", "e5m2"]))
def test_stochastic_rounding_under_a_given_scale_in_the_interpreter(fmt):
    check_given(stress_matrix(144, 272, 2, "nonfinite", torch.bfloat16, "cpu"), fmt, 1e-4, "both")
    check_given(stress_matrix(16, 144, 2, "nonfinite", torch.bfloat16, "cpu"), fmt, 1e-4, "columns")
    check_given(stress_matrix(128, 256, 3, "normal", torch.bfloat16, "cpu"), fmt, 0.3, "rows")


@pytest.mark.parametrize("fmt", ["int8", "int4", "e4m3", "e5m2"])
def test_no_number_exceeds_the_largest_code(fmt):
    """Codes under a scale of their own absmax are not clamped: of every bf16 absmax the scaled one rounds to it."""
    x = (torch.arange(1, 0x7F80, dtype=torch.int32) << 16).view(torch.float32)
    scaled = x * scale_ref(x[:, None], fmt, "rowwise").reciprocal()
    if not FORMATS[fmt].is_float:
        scaled = (scaled + 384.0) - 384.0  # what is left of it in fixed point
    assert scaled.max() == FORMATS[fmt].max


def test_other_inputs_are_not_supported():
    x = torch.zeros(32, 48, dtype=torch.bfloat16)
    assert supports_dual_bf16x2(x, "e4m3", "1x128")
    assert not supports_dual_bf16x2(x.float(), "e4m3", "1x128") and not supports_dual_bf16x2(x[:, :40], "e4m3", "1x128")
    assert not supports_dual_bf16x2(x.view(-1)[1 : 1 + 16 * 48].view(16, 48), "e4m3", "1x128")  # starts within a word
    assert not supports_dual_bf16x2(x, "int4", "1x128") and not supports_dual_bf16x2(x, "e4m3", "32x32")
    assert not supports_dual_bf16x2(x, "int8", "tensorwise", True)
    for rows, columns in itertools.product(set(itertools.chain(*PAIRS)), repeat=2):
        assert supports_dual_bf16x2(x, "e4m3", rows, granularity_t=columns) == ((rows, columns) in PAIRS)
        tensorwise = rows == columns == "tensorwise"
        assert supports_dual_bf16x2(x, "e4m3", rows, True, granularity_t=columns) == tensorwise


@pytest.mark.parametrize("granularity,granularity_t", PAIRS)
def test_the_operator_takes_this_kernel(granularity, granularity_t, monkeypatch):
    """From one read, of gathered rows too, wherever the kernel has the pair; both layouts are in one format."""
    taken, codes = [], tuple(torch.zeros(1) for _ in range(4))
    monkeypatch.setattr(operators, "_kernel_takes", lambda *_: True)
    monkeypatch.setattr(operators, "launch_tiled", lambda *_, **__: codes)
    monkeypatch.setattr(operators, "launch_dual_bf16x2", lambda *_, **options: taken.append(options) or codes)
    x, rows = torch.zeros(32, 48, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)
    for token_of_row in (None, rows):
        quantize_dual(x, "e4m3", granularity, granularity_t, token_of_row=token_of_row)
        assert taken.pop() == {"granularity_t": granularity_t, "groups": None, "index": RowIndex(token_of_row)}
    quantize_dual(x, "e4m3", granularity, granularity_t, fmt_t="e5m2")
    assert not taken


@pytest.mark.gpu
@pytest.mark.parametrize("fmt,granularity,granularity_t", CASES)
def test_dual_on_gpu(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    for number, (m, k) in random_shapes(7, 120):
        x = stress_matrix(m, k, number, [*KINDS, "nonfinite"][number % 6], torch.bfloat16, "cuda").contiguous()
        check(x, fmt, *pair, number % 4 == 1)
        found = launch_dual_bf16x2(x, fmt, granularity, granularity_t=granularity_t)
        same(quantize_dual(x, fmt, *pair), found, (m, k))
    for shape in [(16, 16), (4096, 14336), (16384, 4096)]:
        check(stress_matrix(*shape, 0, "outlier", torch.bfloat16, "cuda"), fmt, *pair)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_given_scale_on_gpu(fmt):
    for number, (m, k) in random_shapes(8, 120):
        x = stress_matrix(m, k, number, [*KINDS, "nonfinite"][number % 6], torch.bfloat16, "cuda").contiguous()
        value = (1e-4, 0.3, 1.0, 300.0)[number % 4]
        check_given(x, fmt, value)
        scale, amax = torch.tensor([value], device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        codes, scale_out, codes_t, _ = launch_dual_bf16x2(x, fmt, "tensorwise", NEAREST, False, scale, amax)
        same(quantize_dual_delayed(x, fmt, scale)[:4], [codes, codes_t, scale, amax.view(torch.float32)], (m, k))
        dual = quantize_dual(x, fmt, "tensorwise", "tensorwise", scale=scale)
        same(dual, [codes, scale_out, codes_t, scale_out], (m, k))
        check_column_sums(quantize_dual_delayed(x, fmt, scale, sums=True)[-1], x)
    for shape in [(16, 16), (4096, 14336), (16384, 4096)]:
        check_given(stress_matrix(*shape, 0, "outlier", torch.bfloat16, "cuda"), fmt, 0.01)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_fp8_instructions")
@pytest.mark.parametrize("pair", [*PAIRS, None])
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_fp8_without_its_instructions_on_gpu(fmt, pair):
    """The conversions of GPUs before sm_89, in every kernel that has them; pair: of granularities in this one."""
    for number, (m, k) in random_shapes(11, 24):
        x = stress_matrix(m, k, number, [*KINDS, "nonfinite"][number % 6], torch.bfloat16, "cuda").contiguous()
        if pair is not None:
            check(x, fmt, *pair, number % 4 == 1, ("", *STOCHASTIC)[number % 4])
            continue
        check_given(x, fmt, (1e-4, 0.3, 1.0, 300.0)[number % 4], ("", *STOCHASTIC)[number % 4])
        check_rows(x, fmt, ("rowwise", "1x128")[number % 2], None)
        check_tiles(x, fmt, "rowwise", "1x128", None)


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", STOCHASTIC)
@pytest.mark.parametrize("fmt,granularity,granularity_t", CASES)
def test_stochastic_rounding_on_gpu(fmt, granularity, granularity_t, stochastic):
    pair, rounding = (granularity, granularity_t), rounding_of(stochastic, "cuda")
    for number, (m, k) in random_shapes(9, 60):
        x = stress_matrix(m, k, number, [*KINDS, "nonfinite"][number % 6], torch.bfloat16, "cuda").contiguous()
        check(x, fmt, *pair, False, stochastic)
        found = launch_dual_bf16x2(x, fmt, granularity, rounding, granularity_t=granularity_t)
        same(quantize_dual(x, fmt, *pair, *rounding), found, (m, k))
    for shape in [(16, 16), (4096, 14336), (16384, 4096)]:
        check(stress_matrix(*shape, 0, "outlier", torch.bfloat16, "cuda"), fmt, *pair, False, stochastic)


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", STOCHASTIC)
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_stochastic_rounding_under_a_given_scale_on_gpu(fmt, stochastic):
    rounding = rounding_of(stochastic, "cuda")
    for number, (m, k) in random_shapes(10, 60):
        x = stress_matrix(m, k, number, [*KINDS, "nonfinite"][number % 6], torch.bfloat16, "cuda").contiguous()
        value = (1e-4, 0.3, 1.0, 300.0)[number % 4]
        check_given(x, fmt, value, stochastic)
        scale, amax = torch.tensor([value], device="cuda"), torch.zeros(1, dtype=torch.int32, device="cuda")
        codes, _, codes_t, _ = launch_dual_bf16x2(x, fmt, "tensorwise", rounding, False, scale, amax)
        expected = [codes, codes_t, scale, amax.view(torch.float32)]
        same(quantize_dual_delayed(x, fmt, scale, *rounding)[:4], expected, (m, k))
    check_given(stress_matrix(4096, 14336, 0, "outlier", torch.bfloat16, "cuda"), fmt, 0.01, stochastic)
