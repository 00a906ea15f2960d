"""Codes of a gated MLP's activation and of its gradient: bitwise those of the activation, made and then quantized."""

import pytest
import torch

from qtrain.kernels.absmax import absmax_ref, launch_absmax_gated
from qtrain.kernels.quantize import (
    quantize_dual,
    quantize_dual_given,
    quantize_ref,
    quantize_transposed_ref,
)
from qtrain.kernels.quantize_blocks import launch_quantize_blocks
from qtrain.kernels.quantize_gated import activation, quantize_gated, quantize_gated_given, takes_gated
from qtrain.kernels.silu_mul import launch_silu_mul, launch_silu_mul_backward
from tests.cases import KINDS, matrix
from tests.kernels.test_quantize_blocks import STOCHASTIC, drawing
from tests.kernels.test_quantize_kernels import hostile, same

CASES = [(fmt, granularity) for fmt in ("int8", "e4m3", "e5m2") for granularity in ("128x128", "1x128", "rowwise")]


def gate_and_gradient(m, width, seed, kind, device):
    """x [M, 2 * width] with what `kind` says, and dy [M, width]."""
    x = hostile(m, 2 * width, seed, kind, torch.bfloat16, device).contiguous()
    return x, hostile(m, width, seed + 50, "outlier" if kind == "bad" else kind, torch.bfloat16, device).contiguous()


def made(x, dy):
    """The activation, or the gradient of x, in bf16; the interpreter does not round to it."""
    wide = torch.float32 if x.device.type == "cpu" else torch.bfloat16
    y = launch_silu_mul(x.to(wide)) if dy is None else launch_silu_mul_backward(dy.to(wide), x.to(wide))
    return y.bfloat16()


def check(x, dy, fmt, granularity, power_of_two=False, stochastic=""):
    y, (options, bits) = made(x, dy), drawing(x.device, stochastic)
    row_bits, column_bits = bits(y.shape)
    expected = quantize_ref(y, fmt, granularity, row_bits, power_of_two)
    expected += quantize_transposed_ref(y, fmt, granularity, column_bits, power_of_two)
    found = launch_quantize_blocks(x, fmt, granularity, power_of_two, of_gate=True, dy=dy, **options)
    same(found, expected, (tuple(x.shape), fmt, granularity, dy is None, stochastic))


def check_given(x, dy, fmt, value, stochastic=""):
    y, scale = made(x, dy), torch.tensor([value], device=x.device)
    most = torch.zeros(1, dtype=torch.int32, device=x.device)
    options, bits = drawing(x.device, stochastic)
    row_bits, column_bits = bits(y.shape)
    found = launch_quantize_blocks(x, fmt, "tensorwise", False, scale, most, True, dy, **options)
    expected = quantize_ref(y, fmt, "tensorwise", row_bits, scale=scale)
    expected += quantize_transposed_ref(y, fmt, "tensorwise", column_bits, scale=scale)
    same([*found, most.view(torch.float32)], [*expected, absmax_ref(y)], (tuple(x.shape), fmt, dy is None, stochastic))


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity", CASES)
def test_codes_in_the_interpreter(fmt, granularity):
    for seed, (m, width, kind) in enumerate([(144, 128, "outlier"), (128, 256, "bad"), (16, 128, "zero_row")]):
        x, dy = gate_and_gradient(m, width, seed, kind, "cpu")
        check(x, None, fmt, granularity, kind == "outlier")
        check(x, dy, fmt, granularity, kind == "outlier")


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_given_scale_in_the_interpreter(fmt):
    x, dy = gate_and_gradient(144, 128, 3, "bad", "cpu")
    for value in (1e-3, 0.3):
        check_given(x, None, fmt, value)
        check_given(x, dy, fmt, value)


@pytest.mark.interpreter
@pytest.mark.parametrize("fmt,granularity", CASES)
def test_stochastic_rounding_in_the_interpreter(fmt, granularity):
    for seed, (m, width, stochastic) in enumerate([(144, 128, "columns"), (16, 256, "both")]):
        x, dy = gate_and_gradient(m, width, seed, "bad", "cpu")
        check(x, None, fmt, granularity, False, stochastic)
        check(x, dy, fmt, granularity, False, stochastic)
    if granularity == "128x128" and fmt != "int8":
        check_given(x, None, fmt, 1e-3, "columns")
        check_given(x, dy, fmt, 1e-3, "both")


@pytest.mark.interpreter
def test_absmax_in_the_interpreter():
    x, dy = gate_and_gradient(48, 128, 5, "bad", "cpu")
    for d in (None, dy):
        y = made(x, d)
        rows, columns = launch_absmax_gated(x, d)
        expected = [absmax_ref(row).nan_to_num(nan=-1.0) for row in y]
        assert torch.equal(rows.view(torch.float32).nan_to_num(nan=-1.0), torch.cat(expected))
        expected = [absmax_ref(column).nan_to_num(nan=-1.0) for column in y.t().contiguous()]
        assert torch.equal(columns.view(torch.float32).nan_to_num(nan=-1.0), torch.cat(expected))


def check_operators(device):
    """Of any shape and dtype: what the two operations one after the other give."""
    for seed, (m, width) in enumerate([(1, 8), (3, 33), (32, 128), (0, 128)]):
        for dtype in (torch.float32, torch.bfloat16):
            x, dy = (
                matrix(m, 2 * width, seed, "normal", dtype).to(device),
                matrix(m, width, 9, "normal", dtype).to(device),
            )
            for d in (None, dy):
                for fmt, granularity in (
                    ("int8", "rowwise"),
                    ("e4m3", "1x128"),
                    ("int4", "rowwise"),
                    ("e4m3", "tensorwise"),
                ):
                    expected = quantize_dual(activation(x, d), fmt, granularity, granularity)
                    same(quantize_gated(x, d, fmt, granularity), expected, (m, width, fmt))
                scale = torch.tensor([0.1], device=device)
                same(quantize_gated_given(x, d, "e4m3", scale), quantize_dual_given(activation(x, d), "e4m3", scale), m)
                for stochastic in STOCHASTIC[1:]:
                    options, _ = drawing(device, stochastic)
                    expected = quantize_dual(activation(x, d), "int8", "rowwise", "rowwise", **options)
                    same(quantize_gated(x, d, "int8", "rowwise", **options), expected, (m, width, stochastic))
                    expected = quantize_dual_given(activation(x, d), "e4m3", scale, **options)
                    same(quantize_gated_given(x, d, "e4m3", scale, **options), expected, (m, width, stochastic))
    x, dy = (
        matrix(32, 256, 0, "normal", torch.bfloat16).to(device),
        matrix(32, 128, 1, "normal", torch.bfloat16).to(device),
    )
    options, _ = drawing(device, "columns")
    for d in (None, dy):
        for drawn in ({}, options):
            torch.library.opcheck(torch.ops.qtrain.quantize_gated.default, (x, d, "int8", "rowwise"), drawn)
            torch.library.opcheck(
                torch.ops.qtrain.quantize_gated_given.default, (x, d, "e4m3", torch.ones(1, device=device)), drawn
            )


def test_operators():
    check_operators("cpu")


def test_a_scale_of_the_tensor_has_no_kernel():
    """Its pass would be over x, not over what is made of it: the operator takes the two operations."""
    x, dy = gate_and_gradient(16, 128, 0, "normal", "cpu")
    for fmt in ("int8", "e4m3"):
        assert not takes_gated(fmt, "tensorwise")
        with pytest.raises(AssertionError, match="no pass"):
            launch_quantize_blocks(x, fmt, "tensorwise", of_gate=True, dy=dy)


@pytest.mark.gpu
def test_operators_on_gpu():
    check_operators("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt,granularity", CASES)
def test_codes_on_gpu(fmt, granularity):
    generator = torch.Generator().manual_seed(11)
    for number in range(60):
        m, width = (
            16 * int(torch.randint(1, 40, (), generator=generator)),
            128 * int(torch.randint(1, 9, (), generator=generator)),
        )
        x, dy = gate_and_gradient(m, width, number, [*KINDS, "bad"][number % 6], "cuda")
        check(x, None, fmt, granularity, number % 4 == 1)
        check(x, dy, fmt, granularity, number % 4 == 1)
    x, dy = gate_and_gradient(4096, 4864, 0, "outlier", "cuda")
    check(x, None, fmt, granularity)
    check(x, dy, fmt, granularity)


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
def test_a_given_scale_on_gpu(fmt):
    for number in range(40):
        x, dy = gate_and_gradient(
            16 * (number + 1), 128 * (number % 5 + 1), number, [*KINDS, "bad"][number % 6], "cuda"
        )
        for value in (1e-4, 0.3, 300.0):
            check_given(x, None, fmt, value)
            check_given(x, dy, fmt, value)


@pytest.mark.gpu
@pytest.mark.parametrize("stochastic", ["columns", "both"])
@pytest.mark.parametrize("fmt,granularity", [case for case in CASES if case[0] != "e5m2"])
def test_stochastic_rounding_on_gpu(fmt, granularity, stochastic):
    for number in range(20):
        x, dy = gate_and_gradient(
            16 * (3 * number + 1), 128 * (number % 5 + 1), number, [*KINDS, "bad"][number % 6], "cuda"
        )
        for d in (None, dy):
            check(x, d, fmt, granularity, False, stochastic)
            if granularity == "128x128" and fmt != "int8":
                check_given(x, d, fmt, (1e-4, 0.3, 300.0)[number % 3], stochastic)
    x, dy = gate_and_gradient(4096, 4864, 0, "outlier", "cuda")
    check(x, None, fmt, granularity, False, stochastic)
    check(x, dy, fmt, granularity, False, stochastic)
