"""Codes of the gradient of logits: bit for bit those of the gradient in fp32, which is never in memory."""

import itertools

import numpy as np
import pytest
import torch

from qtrain.kernels.cross_entropy import launch_cross_entropy_statistics
from qtrain.kernels.numerics.philox import NEAREST, Rounding
from qtrain.kernels.quantize.absmax import absmax_ref
from qtrain.kernels.quantize.dual_bf16x2 import GRADIENT_PAIRS, launch_dual_bf16x2
from qtrain.kernels.quantize.logit_rows import LogitRows
from qtrain.kernels.quantize.operators import quantize_dual
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref, scale_ref
from qtrain.kernels.quantize.softmax_grad import (
    has_softmax_codes,
    launch_quantize_softmax_grad,
    launch_softmax_grad_scale,
    quantize_softmax_grad,
    quantize_softmax_grad_delayed,
    reads_logits,
    softmax_grad_ref,
)
from tests.cases import sampled
from tests.kernels.quantize.test_kernels import same

SMALL = [(16, 16), (128, 128), (48, 272), (272, 144)]
"""One tile, whole tiles, and parts of tiles in both directions."""
Z_LOSS = (0.0, 0.01)


def logits_and_labels(m, k, seed, device="cpu", kind="masked"):
    """bf16 [m, k], int64 [m]: labels in the first and the last column, a large logit, -inf. kind: "masked" has ignored
    rows; "trained" has none, and labels in the first 16 columns alone, of probabilities above all gradients;
    "nonfinite" is masked, with NaN and Inf."""
    drawn = {"generator": torch.Generator(device).manual_seed(seed), "device": device}
    logits = torch.randn(m, k, **drawn) * 4
    labels = torch.randint(0, k, (m,), **drawn)
    labels[0], labels[1], labels[2::5] = 0, k - 1, -100
    if kind == "trained":
        rows = torch.arange(m, device=device)
        labels = rows % 16
        logits[rows, labels] = 20.0
        return logits.bfloat16(), labels
    logits[3, k // 2] += 60
    logits[4, ::2] = float("-inf")
    logits[4, labels[4]] = 1.0
    if kind == "nonfinite":
        logits[2, 5], logits[6, 7] = float("nan"), float("nan")  # of an ignored row, of a trained one
        logits[9, 3] = float("inf")
    return logits.bfloat16(), labels


def fp32_gradient(logits, labels, z_loss):
    """The gradient before it is rounded, bit for bit that of the kernel, and L of the rows."""
    log_total = launch_cross_entropy_statistics(logits.float(), labels, z_loss)[2]
    log2_e, trained = torch.tensor(1.4426950408889634, device=logits.device), labels != -100
    known = torch.where(trained, log_total, 0.0)[:, None]
    # An FMA: the product of a bf16 and an fp32 number is exact in fp64.
    exponent = (logits.double() * log2_e.double() - (known * log2_e).double()).float()
    if logits.is_cuda:
        grad = exponent.exp2()  # ex2.approx, as in Triton
        grad[grad < 2.0**-126] = 0.0
    else:
        # The interpreter computes in NumPy, without FMA.
        exponent = logits.float() * log2_e - known * log2_e
        grad = torch.from_numpy(np.exp2(exponent.numpy()))
    grad *= 1.0 + torch.tensor(2.0 * z_loss, device=logits.device) * known
    rows = trained.nonzero().squeeze(1)
    grad[rows, labels[rows]] -= 1.0
    return grad.masked_fill_(~trained[:, None], 0.0), log_total


def check(m, k, fmt, z_loss, device, kind="masked", columns=True):
    logits, labels = logits_and_labels(m, k, m + k, device, kind)
    grad, log_total = fp32_gradient(logits, labels, z_loss)
    kept = logits.clone()
    for scale in (absmax_ref(grad) / 448, torch.tensor([0.003], device=device)):  # its own, and one that saturates
        if not scale.isfinite().all():
            continue
        amax = torch.zeros(1, dtype=torch.int32, device=device)
        codes, codes_t = launch_quantize_softmax_grad(logits, log_total, labels, z_loss, fmt, scale, amax, columns)
        expected = quantize_ref(grad, fmt, "tensorwise", scale=scale)[0]
        expected_t = quantize_transposed_ref(grad, fmt, "tensorwise", scale=scale)[0] if columns else codes_t[:0]
        same((codes, codes_t), (expected, expected_t), (m, k, fmt, z_loss, kind))
        same((amax.view(torch.float32),), (absmax_ref(grad),), (m, k, z_loss))
    assert torch.equal(logits.view(torch.int16), kept.view(torch.int16)), "the logits stay"
    nan_rows = grad.isnan().any(dim=1)
    assert nan_rows.tolist() == [kind == "nonfinite" and row in (6, 9) for row in range(m)]
    assert not codes.float()[labels == -100].any()


def check_scale(device):
    """The known scale as it is; where none is known, the one of the gradient itself."""
    for z_loss, kind in itertools.product(Z_LOSS, ("masked", "nonfinite")):
        logits, labels = logits_and_labels(33, 300, 0, device, kind)
        grad, log_total = fp32_gradient(logits, labels, z_loss)
        for known in (0.37, 0.0):
            scale = torch.tensor([known], device=device)
            # fp32 logits, as the interpreter converts no bf16.
            source = logits.float(), log_total, labels, z_loss
            found, amax = launch_softmax_grad_scale(*source, scale, "e4m3", False)
            same((found,), (scale if known else scale_ref(grad, "e4m3", "tensorwise"),), (z_loss, kind, known))
            assert amax.tolist() == [0]


def check_finer_scales(m, k, fmt, pair, device, rounding):
    """Under scales of rows and of blocks, bit for bit the codes of the gradient in bf16."""
    for z_loss, kind in itertools.product(Z_LOSS, ("trained", "masked", "nonfinite")):
        logits, labels = logits_and_labels(m, k, m + k, device, kind)
        grad, log_total = fp32_gradient(logits, labels, z_loss)
        kept, grad = logits.clone(), grad.bfloat16()
        found = launch_dual_bf16x2(
            logits, fmt, pair[0], rounding, granularity_t=pair[1], logit_rows=LogitRows(log_total, labels, z_loss)
        )
        row_bits, column_bits = rounding.bits(grad.shape)
        expected = quantize_ref(grad, fmt, pair[0], row_bits), quantize_transposed_ref(grad, fmt, pair[1], column_bits)
        same(found, (*expected[0], *expected[1]), (m, k, fmt, pair, z_loss, kind))
        assert torch.equal(logits.view(torch.int16), kept.view(torch.int16)), "the logits stay"


@pytest.mark.parametrize("z_loss", Z_LOSS)
def test_reference(z_loss):
    """Against fp64; the operator's codes are those of the reference in fp32, whatever the logits' dtype."""
    logits, labels = logits_and_labels(37, 301, 1)
    leaf = logits.double().requires_grad_()
    log_total = leaf.logsumexp(dim=-1)
    nll = torch.nn.functional.cross_entropy(leaf, labels, reduction="sum", ignore_index=-100)
    (nll + z_loss * log_total[labels != -100].square().sum()).backward()
    log_total = log_total.detach().float()
    grad = softmax_grad_ref(logits, log_total, labels, z_loss)
    # L is rounded to fp32: a relative error of its own absolute one.
    torch.testing.assert_close(grad.double(), leaf.grad, rtol=1e-5, atol=1e-7)
    for dtype, known in itertools.product((torch.bfloat16, torch.float32), (0.0, 0.002)):
        known = torch.tensor([known])
        codes, codes_t, scale, amax = quantize_softmax_grad_delayed(
            logits.to(dtype), log_total, labels, z_loss, "e4m3", known
        )
        assert torch.equal(scale, known if known else scale_ref(grad, "e4m3", "tensorwise"))
        assert torch.equal(amax, absmax_ref(grad))
        same((codes, codes_t.t()), (quantize_ref(grad, "e4m3", "tensorwise", scale=scale)[0],) * 2, dtype)


def test_operator():
    logits, labels = logits_and_labels(16, 48, 2)
    log_total, known = logits.float().logsumexp(dim=-1), torch.zeros(1)
    for columns in (True, False):
        arguments = logits, log_total, labels, 0.01, "e4m3", known, False, columns
        torch.library.opcheck(quantize_softmax_grad_delayed, arguments)
    assert quantize_softmax_grad_delayed(*arguments)[1].shape == (0, 16)
    for pair in GRADIENT_PAIRS:
        arguments = logits, log_total, labels, 0.01, "int8", *pair, torch.tensor([1, 2, 3]), 2
        torch.library.opcheck(quantize_softmax_grad, arguments)
        grad = softmax_grad_ref(logits, log_total, labels, 0.01).bfloat16()
        expected = quantize_dual(grad, "int8", *pair, torch.tensor([1, 2, 3]), 2)
        same(quantize_softmax_grad(*arguments), expected, pair)


def test_what_no_kernel_takes():
    assert reads_logits(torch.zeros(3, 5)) and not reads_logits(torch.zeros(0, 5))
    assert has_softmax_codes("e4m3", "tensorwise", "tensorwise", True)
    assert not has_softmax_codes("int8", "tensorwise", "tensorwise", True)
    assert not has_softmax_codes("e4m3", "tensorwise", "tensorwise", False)
    assert not has_softmax_codes("int4", "rowwise", "rowwise", False)


@pytest.mark.interpreter
@pytest.mark.parametrize(("m", "k"), sampled(SMALL, lambda m, k: (m, k) != (48, 272)))
def test_kernel_in_the_interpreter(m, k):
    check(m, k, "e4m3", 0.0, "cpu", "trained")
    check(m, k, "e4m3", 0.01, "cpu", "nonfinite")
    check(m, k, "e5m2", 0.0, "cpu", "masked", columns=False)


@pytest.mark.interpreter
@pytest.mark.parametrize("pair", GRADIENT_PAIRS)
@pytest.mark.parametrize(("m", "k"), sampled(SMALL, lambda m, k: (m, k) != (48, 272)))
def test_finer_scales_in_the_interpreter(m, k, pair):
    check_finer_scales(m, k, "e4m3", pair, "cpu", NEAREST)
    check_finer_scales(m, k, "int8", pair, "cpu", Rounding(torch.tensor([5, 6, 7]), 1, False, True))


@pytest.mark.interpreter
def test_scale_in_the_interpreter():
    check_scale("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("fmt", ["e4m3", "e5m2"])
@pytest.mark.parametrize(("m", "k"), [*SMALL, (1024, 32000), (2048, 151936)])
def test_kernel(m, k, fmt):
    for z_loss, kind in itertools.product(Z_LOSS, ("trained", "masked", "nonfinite")):
        check(m, k, fmt, z_loss, "cuda", kind, columns=kind != "masked" or m > 1000)
    check_scale("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("pair", GRADIENT_PAIRS)
@pytest.mark.parametrize("fmt", ["int8", "e4m3", "e5m2"])
@pytest.mark.parametrize(("m", "k"), [*SMALL, (1024, 32000), (2048, 151936)])
def test_finer_scales(m, k, fmt, pair):
    key = torch.tensor([5, 6, 7], device="cuda")
    for rounding in (NEAREST, Rounding(key, 1, False, True), Rounding(key, 2)):
        check_finer_scales(m, k, fmt, pair, "cuda", rounding)


@pytest.mark.gpu
def test_the_operator_does_not_wait_for_the_gpu():
    logits, labels = logits_and_labels(256, 4000, 0, "cuda")
    log_total = launch_cross_entropy_statistics(logits, labels, 0.01)[2]
    arguments = logits, log_total, labels, 0.01, "e4m3", torch.zeros(1, device="cuda")
    expected = quantize_softmax_grad_delayed(*arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = quantize_softmax_grad_delayed(*arguments)
    graph.replay()
    same(found, expected, "graph")
