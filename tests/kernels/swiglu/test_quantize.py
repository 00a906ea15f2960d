"""Codes of a SwiGLU's output and of its gradient: bitwise those of the two operations, one after the other."""

import pytest
import torch

from qtrain.kernels.numerics.philox import NEAREST, ROUNDED_TENSORS, Rounding
from qtrain.kernels.quantize.absmax import absmax_ref, column_absmax_ref
from qtrain.kernels.quantize.dual_bf16x2 import launch_dual_bf16x2
from qtrain.kernels.quantize.operators import quantize, quantize_dual, quantize_dual_delayed, quantize_transposed
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref
from qtrain.kernels.swiglu.backward import launch_quantize_swiglu_backward
from qtrain.kernels.swiglu.quantize import (
    activation,
    quantize_swiglu,
    quantize_swiglu_backward,
    quantize_swiglu_delayed,
    quantize_swiglu_rowwise,
    supports_swiglu_dual,
    supports_swiglu_rowwise,
)
from qtrain.kernels.swiglu.rowwise import launch_quantize_swiglu_rowwise
from qtrain.kernels.swiglu.swiglu import (
    empty_router_dots,
    launch_swiglu,
    launch_swiglu_backward,
    router_dots_ref,
    swiglu,
    swiglu_backward_dots,
)
from tests.cases import KINDS, matrix, sampled, without_e5m2
from tests.kernels.quantize.test_dual_bf16x2 import STOCHASTIC, rounding_of
from tests.kernels.quantize.test_kernels import KEY, same, stress_matrix

FORMATS = ("int8", "e4m3", "e5m2")
PAIRS = (("128x128", "128x128"), ("1x128", "1x128"), ("1x128", "128x128"))
CASES = [(fmt, *pair) for fmt in FORMATS for pair in PAIRS]
INTERPRETED = sampled(CASES, lambda *case: case[:2] not in (("int8", "128x128"), ("e4m3", "1x128")))


def gate_and_gradient(m, width, seed, kind, device):
    """x [M, 2 * width] of a kind, and dy [M, width]."""
    x = stress_matrix(m, 2 * width, seed, kind, torch.bfloat16, device).contiguous()
    return x, stress_matrix(
        m, width, seed + 50, "outlier" if kind == "nonfinite" else kind, torch.bfloat16, device
    ).contiguous()


def reference_output(x, dy):
    """The output, or the gradient of x, in bf16; the interpreter does not round to it correctly."""
    wide = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    y = launch_swiglu(x.to(wide)) if dy is None else launch_swiglu_backward(dy.to(wide), x.to(wide))
    return y.bfloat16()


def check(x, dy, fmt, granularity, granularity_t, power_of_two=False, stochastic=""):
    y, rounding = reference_output(x, dy), rounding_of(stochastic, x.device)
    row_bits, column_bits = rounding.bits(y.shape)
    expected = quantize_ref(y, fmt, granularity, row_bits, power_of_two)
    expected += quantize_transposed_ref(y, fmt, granularity_t, column_bits, power_of_two)
    dots = None if dy is None else empty_router_dots(x)
    found = launch_dual_bf16x2(
        x, fmt, granularity, rounding, power_of_two, granularity_t=granularity_t, swiglu=True, dy=dy, router_dots=dots
    )
    same(found, expected, (tuple(x.shape), fmt, granularity, granularity_t, dy is None, stochastic))
    if dy is not None:
        check_dots(dots, dy, x)


def check_dots(dots, dy, x):
    """Within fp32's rounding, the same bits from each kernel, and NaN only in the rows that have one."""
    expected, size = router_dots_ref(dy, x), router_dots_ref(dy.abs(), x.abs())
    finite, plain, wide = expected.isfinite(), empty_router_dots(x), x.dtype if x.is_cuda else torch.float32
    assert torch.equal(dots.isfinite(), finite)
    assert ((dots - expected).abs() <= 1e-5 * size)[finite].all()
    launch_swiglu_backward(dy.to(wide), x.to(wide), plain)
    assert torch.equal(dots[finite], plain[finite])


def check_given(x, dy, fmt, value, stochastic=""):
    y, scale = reference_output(x, dy), torch.tensor([value], device=x.device)
    amax = torch.zeros(1, dtype=torch.int32, device=x.device)
    rounding = rounding_of(stochastic, x.device)
    row_bits, column_bits = rounding.bits(y.shape)
    found = launch_dual_bf16x2(x, fmt, "tensorwise", rounding, False, scale, amax, swiglu=True, dy=dy)
    expected = quantize_ref(y, fmt, "tensorwise", row_bits, scale=scale)
    expected += quantize_transposed_ref(y, fmt, "tensorwise", column_bits, scale=scale)
    same([*found, amax.view(torch.float32)], [*expected, absmax_ref(y)], (tuple(x.shape), fmt, dy is None, stochastic))


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity,granularity_t", INTERPRETED)
def test_codes_in_the_interpreter(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    for seed, (m, width, kind) in enumerate([(144, 128, "outlier"), (128, 256, "nonfinite"), (16, 128, "zero_row")]):
        x, dy = gate_and_gradient(m, width, seed, kind, "cpu")
        check(x, None, fmt, *pair, kind == "outlier")
        check(x, dy, fmt, *pair, kind == "outlier")


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt", without_e5m2(["e4m3", "e5m2"]))
def test_a_given_scale_in_the_interpreter(fmt):
    x, dy = gate_and_gradient(144, 128, 3, "nonfinite", "cpu")
    for value in (1e-3, 0.3):
        check_given(x, None, fmt, value)
        check_given(x, dy, fmt, value)


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity,granularity_t", INTERPRETED)
def test_stochastic_rounding_in_the_interpreter(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    for seed, (m, width, stochastic) in enumerate([(144, 128, "columns"), (16, 256, "both")]):
        x, dy = gate_and_gradient(m, width, seed, "nonfinite", "cpu")
        check(x, None, fmt, *pair, False, stochastic)
        check(x, dy, fmt, *pair, False, stochastic)
    if granularity == "128x128" and fmt != "int8":
        check_given(x, None, fmt, 1e-3, "columns")
        check_given(x, dy, fmt, 1e-3, "both")


def bits_of(t):
    """int32 bits -> fp32, with every NaN as -1."""
    return t.view(torch.float32).nan_to_num(nan=-1.0)


def check_rows(x, fmt, power_of_two=False, stochastic=False):
    """Row codes, and the absmax of columns."""
    y, rounding = reference_output(x, None), Rounding(KEY.to(x.device), 2) if stochastic else NEAREST
    *found, columns = launch_quantize_swiglu_rowwise(x, fmt, rounding, power_of_two)
    note = (tuple(x.shape), fmt, stochastic)
    same(found, quantize_ref(y, fmt, "rowwise", rounding.bits(y.shape)[0], power_of_two), note)
    assert torch.equal(bits_of(columns), bits_of(column_absmax_ref(y))), note


def check_gradient(x, dy, fmt, power_of_two=False, stochastic=False):
    """Column codes of y, and dx with the absmax of its rows and columns."""
    y, dx, rounding = (
        reference_output(x, None),
        reference_output(x, dy),
        Rounding(KEY.to(x.device), 2) if stochastic else NEAREST,
    )
    dots = empty_router_dots(x)
    codes_t, scale_t, found, (rows, columns) = launch_quantize_swiglu_backward(
        x, dy, column_absmax_ref(y), fmt, rounding, power_of_two, router_dots=dots
    )
    check_dots(dots, dy, x)
    note = (tuple(x.shape), fmt, stochastic)
    same((codes_t, scale_t), quantize_transposed_ref(y, fmt, "rowwise", rounding.bits(y.shape)[1], power_of_two), note)
    assert torch.equal(found.nan_to_num(nan=-1.0), dx.nan_to_num(nan=-1.0)), note
    assert torch.equal(bits_of(columns), bits_of(column_absmax_ref(dx))), note
    assert torch.equal(bits_of(rows), bits_of(column_absmax_ref(dx.t()))), note


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt", sampled(list(FORMATS), lambda fmt: fmt != "e4m3"))
def test_rows_and_then_columns_in_the_interpreter(fmt):
    """A row of one block and of two; partial and full tiles."""
    for seed, (m, width, kind) in enumerate([(16, 144, "outlier"), (144, 80, "nonfinite"), (16, 336, "zero_row")]):
        x, dy = gate_and_gradient(m, width, seed, kind, "cpu")
        check_rows(x[:32], fmt, kind == "outlier", kind != "outlier")
        check_gradient(x, dy, fmt, kind == "outlier", kind != "outlier")


def check_rows_operators(x, dy, fmt, fmt_y, stochastic):
    """The operator of forward, then that of backward, which may differ in format and rounding."""
    dy_rounding = rounding_of(stochastic, x.device)._replace(role=ROUNDED_TENSORS.index("dy"))
    key, role = dy_rounding.key, ROUNDED_TENSORS.index("x")
    *rows, columns = quantize_swiglu_rowwise(x, fmt_y, dy_rounding.row_key, role, True)
    same(rows, quantize(swiglu(x), fmt_y, "rowwise", dy_rounding.row_key, role, True), (fmt_y, stochastic))
    found = quantize_swiglu_backward(x, dy, columns, fmt, *dy_rounding, False, fmt_y, key, role, True)[:6]
    expected = quantize_dual(activation(x, dy), fmt, "rowwise", "rowwise", *dy_rounding)
    expected += quantize_transposed(swiglu(x), fmt_y, "rowwise", key, role, True)
    same(found, expected, (tuple(x.shape), fmt, fmt_y, stochastic))


SHAPES_OF_OPERATORS = ((1, 8), (3, 33), (32, 128), (0, 128))


def check_operators(device, seed):
    """Any shape and dtype: the result of the two operations, one after the other."""
    m, width = SHAPES_OF_OPERATORS[seed]
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = (
            matrix(m, 2 * width, seed, "normal", dtype).to(device),
            matrix(m, width, 9, "normal", dtype).to(device),
        )
        for d in (None, dy):
            for fmt, *pair in (
                ("int8", "rowwise", "rowwise"),
                ("e4m3", "1x128", "1x128"),
                ("e4m3", "1x128", "128x128"),
                ("int4", "rowwise", "rowwise"),
                ("e4m3", "tensorwise", "tensorwise"),
            ):
                expected = quantize_dual(activation(x, d), fmt, *pair)
                same(quantize_swiglu(x, d, fmt, *pair)[:4], expected, (m, width, fmt, pair))
            known = [torch.tensor([value], device=device) for value in (0.1, 0.0)]
            for scale in known:
                expected = quantize_dual_delayed(activation(x, d), "e4m3", scale)[:4]
                same(quantize_swiglu_delayed(x, d, "e4m3", scale)[:4], expected, m)
            for stochastic in STOCHASTIC:
                rounding = rounding_of(stochastic, device)
                expected = quantize_dual(activation(x, d), "int8", "rowwise", "rowwise", *rounding)
                found = quantize_swiglu(x, d, "int8", "rowwise", "rowwise", *rounding)[:4]
                same(found, expected, (m, width, stochastic))
                expected = quantize_dual_delayed(activation(x, d), "e4m3", known[0], *rounding)[:4]
                found = quantize_swiglu_delayed(x, d, "e4m3", known[0], *rounding)[:4]
                same(found, expected, (m, width, stochastic))
        rows = (("int8", "int8", ""), ("e4m3", "int8", "columns"), ("int8", "e5m2", "both"))
        for fmt, fmt_y, stochastic in rows if dtype == torch.bfloat16 or m == 3 else ():
            check_rows_operators(x, dy, fmt, fmt_y, stochastic)


def check_registration(device):
    """The operators as PyTorch sees them, and the dots that each of them returns."""
    x, dy = (
        matrix(32, 256, 0, "normal", torch.bfloat16).to(device),
        matrix(32, 128, 1, "normal", torch.bfloat16).to(device),
    )
    rounding = rounding_of("columns", device)
    for d in (None, dy):
        for drawn in ((), rounding):
            wanted, ops = {"router_dots": d is not None}, torch.ops.qtrain
            sums = {"sums": d is not None}
            torch.library.opcheck(ops.quantize_swiglu.default, (x, d, "int8", "1x128", "128x128", *drawn), wanted)
            given = x, d, "e4m3", torch.ones(1, device=device), *drawn
            torch.library.opcheck(ops.quantize_swiglu_delayed.default, given, wanted | sums)
    columns = column_absmax_ref(swiglu(x))
    torch.library.opcheck(torch.ops.qtrain.quantize_swiglu_rowwise.default, (x, "int8", rounding.key, 0))
    arguments = x, dy, columns, "int8", *rounding, False, "e4m3", None, 0, False
    wanted = {"router_dots": True, "sums": True}
    torch.library.opcheck(torch.ops.qtrain.quantize_swiglu_backward.default, arguments, wanted)
    torch.library.opcheck(torch.ops.qtrain.swiglu_backward_dots.default, (dy, x))
    dots = router_dots_ref(dy, x)
    found = [
        swiglu_backward_dots(dy, x),
        quantize_swiglu(x, dy, "int8", "1x128", "1x128", router_dots=True),
        quantize_swiglu_delayed(x, dy, "e4m3", torch.ones(1, device=device), router_dots=True),
        quantize_swiglu_backward(*arguments, router_dots=True),
    ]
    found = [results[at] for results, at in zip(found, (1, 4, 4, 6), strict=True)]
    assert all(torch.allclose(results, dots, rtol=1e-5, atol=1e-4) for results in found)
    dx = activation(x, dy).double()
    for d, summed in ((None, swiglu(x).double()), (dy, dx)):
        sums = quantize_swiglu_delayed(x, d, "e4m3", torch.ones(1, device=device), sums=True)[-1]
        assert torch.allclose(sums.double(), summed.sum(0), rtol=0, atol=1e-6 * summed.abs().sum(0).max().item())
    sums = quantize_swiglu_backward(*arguments, sums=True)[-1]
    assert torch.allclose(sums.double(), dx.sum(0), rtol=0, atol=1e-6 * dx.abs().sum(0).max().item())
    assert quantize_swiglu(x, dy, "int8", "1x128", "1x128")[-1].numel() == 0


def test_operators():
    for seed in range(len(SHAPES_OF_OPERATORS)):
        check_operators("cpu", seed)
    check_registration("cpu")


def test_a_scale_of_more_than_a_block_has_no_kernel():
    """There is no absmax pass over a result that is never stored: the operator takes the two operations."""
    x, dy = gate_and_gradient(16, 128, 0, "normal", "cpu")
    for fmt, granularity in (("int8", "tensorwise"), ("e4m3", "tensorwise"), ("int8", "rowwise")):
        assert not supports_swiglu_dual(fmt, granularity, granularity)
        assert supports_swiglu_rowwise(fmt, granularity) == (granularity == "rowwise")
        with pytest.raises(AssertionError, match="no absmax pass"):
            launch_dual_bf16x2(x, fmt, granularity, swiglu=True, dy=dy)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(len(SHAPES_OF_OPERATORS)))
def test_operators_on_gpu(seed):
    check_operators("cuda", seed)


@pytest.mark.gpu
def test_registration_on_gpu():
    check_registration("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt,granularity,granularity_t", CASES)
def test_codes_on_gpu(fmt, granularity, granularity_t):
    pair = granularity, granularity_t
    generator = torch.Generator().manual_seed(11)
    for number in range(60):
        m, width = (
            16 * int(torch.randint(1, 40, (), generator=generator)),
            128 * int(torch.randint(1, 9, (), generator=generator)),
        )
        x, dy = gate_and_gradient(m, width, number, [*KINDS, "nonfinite"][number % 6], "cuda")
        check(x, None, fmt, *pair, number % 4 == 1)
        check(x, dy, fmt, *pair, number % 4 == 1)
    x, dy = gate_and_gradient(4096, 4864, 0, "outlier", "cuda")
    check(x, None, fmt, *pair)
    check(x, dy, fmt, *pair)


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", [False, True])
@pytest.mark.parametrize("fmt", FORMATS)
def test_rows_and_then_columns_on_gpu(fmt, stochastic):
    generator = torch.Generator().manual_seed(12)
    for number in range(30):  # few widths, for each has a kernel
        m, width = 16 * int(torch.randint(1, 60, (), generator=generator)), (48, 144, 336, 608, 1024)[number % 5]
        x, dy = gate_and_gradient(m, width, number, [*KINDS, "nonfinite"][number % 6], "cuda")
        check_rows(x, fmt, number % 4 == 1, stochastic)
        check_gradient(x, dy, fmt, number % 4 == 1, stochastic)
    for width in (4864, 8960, 14336, 18944, 28672):
        x, dy = gate_and_gradient(2064, width, 0, "outlier", "cuda")
        check_rows(x, fmt, False, stochastic)
        check_gradient(x, dy, fmt, False, stochastic)
    for width in (16, 896, 1536):  # several rows at once, and more of them than all CTAs
        check_rows(gate_and_gradient(20_016, width, 0, "nonfinite", "cuda")[0], fmt, False, stochastic)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_given_scale_on_gpu(fmt):
    for number in range(40):
        x, dy = gate_and_gradient(
            16 * (number + 1), 128 * (number % 5 + 1), number, [*KINDS, "nonfinite"][number % 6], "cuda"
        )
        for value in (1e-4, 0.3, 300.0):
            check_given(x, None, fmt, value)
            check_given(x, dy, fmt, value)


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", ["columns", "both"])
@pytest.mark.parametrize("fmt,granularity,granularity_t", [case for case in CASES if case[0] != "e5m2"])
def test_stochastic_rounding_on_gpu(fmt, granularity, granularity_t, stochastic):
    pair = granularity, granularity_t
    for number in range(20):
        x, dy = gate_and_gradient(
            16 * (3 * number + 1), 128 * (number % 5 + 1), number, [*KINDS, "nonfinite"][number % 6], "cuda"
        )
        for d in (None, dy):
            check(x, d, fmt, *pair, False, stochastic)
            if granularity == "128x128" and fmt != "int8":
                check_given(x, d, fmt, (1e-4, 0.3, 300.0)[number % 3], stochastic)
    x, dy = gate_and_gradient(4096, 4864, 0, "outlier", "cuda")
    check(x, None, fmt, *pair, False, stochastic)
    check(x, dy, fmt, *pair, False, stochastic)
