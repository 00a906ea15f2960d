"""Which measures count as findings, and which scheme mends them."""

from typing import Any

import pytest
import torch

from qtrain.quant import SCHEMES
from qtrain.quant.choices import LinearChoice, decide
from qtrain.quant.execute import OperandRequest, quantize_operands
from qtrain.quant.health.findings import ALTERNATIVES, Finding, alternatives, expected, findings, remedy
from qtrain.quant.health.measures import NAMES, tensor_measures
from tests.cases import matrix

CPU = torch.device("cpu")
CHOICE = LinearChoice("layers.0.mlp.down_proj", 256, 128, None)


def scheme(name: str, **kwargs: Any):
    return SCHEMES.make(name, kwargs, "--quantize")


def measured(name: str, t: torch.Tensor, tensor: str = "x", **kwargs: Any) -> dict[str, float]:
    rows = quantize_operands(
        t, OperandRequest(scheme(name, **kwargs), tensor, key=torch.zeros(3, dtype=torch.int64))
    ).rows
    return dict(zip(NAMES, tensor_measures(t, rows).tolist(), strict=True))


def causes(name: str, tensors: dict[str, dict[str, float]], products: Any = None, **kwargs: Any) -> list[str]:
    return [finding.cause for finding in findings(scheme(name, **kwargs), tensors, products)]


@pytest.mark.parametrize("name", ["int8", "fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8", "nvfp4", "int4"])
def test_no_data_without_outliers_is_a_finding(name):
    normal = matrix(256, 512, 1)
    for t in (normal, normal.sign() * normal.square(), torch.rand(256, 512)):  # light and heavy tails
        assert not causes(name, {"x": measured(name, t), "dy": measured(name, t, "dy")})
    usual = expected(scheme(name), "x").rows["error"]
    assert not causes(name, {}, {"output": 3 * usual, "grad_weight": None})
    assert causes(name, {}, {"output": 20 * usual + 0.2}) == ["output product error"]


def test_only_delayed_scales_cut_off():
    bad = {"saturated": 0.01}
    assert causes("fp8_tensorwise", {"x": bad, "dy": bad}, scaling="delayed") == [
        "output x saturated",
        "grad_input dy saturated",
    ]
    assert not causes("fp8_tensorwise", {"x": bad}) and not causes("mxfp8", {"x": bad})


def test_zeros_count_where_operands_are_rounded_to_nearest():
    lost = {"dy": {"flushed_sum": 0.5, "error": 0.02}}
    assert causes("int8", lost) == ["grad_input dy flushed_sum"]
    assert not causes("int8", lost, stochastic_rounding=True)


def test_e5m2_is_for_gradients():
    coarse = {"error": 0.053}
    assert not causes("fp8_rowwise", {"dy": coarse}, grad_format="e5m2")
    assert causes("fp8_rowwise", {"x": coarse}) == ["output x error"]


def test_what_is_not_finite_is_no_finding():
    assert not causes("int8", {"x": dict.fromkeys(NAMES)}, {"output": None})


def test_alternatives_are_other_schemes_that_the_linear_can_run_in():
    assert list(alternatives(CHOICE, CPU)) == list(ALTERNATIVES)
    chosen = decide(CHOICE, scheme("int8"), False, CPU)
    assert list(alternatives(chosen, CPU)) == [name for name in ALTERNATIVES if name != "int8"]


def test_the_remedy_is_the_first_scheme_that_mends_all_and_breaks_nothing():
    others = alternatives(CHOICE, CPU)
    found = [Finding("output", "x", "flushed_sum", 0.9, 0.2)]
    good, bad = {"flushed_sum": 0.0, "error": 0.02}, {"flushed_sum": 0.0, "error": 0.3}
    assert remedy(found, {"fp8_rowwise": {"x": good}, "int8": {"x": good}}, others) == "fp8_rowwise"
    assert remedy(found, {"fp8_rowwise": {"x": bad}, "fp8_blockwise": {"x": good}}, others) == "fp8_blockwise"
    still = {"flushed_sum": 0.5, "error": 0.02}
    assert remedy(found, {"fp8_rowwise": {"x": bad}, "int8": {"x": still}}, others) == "bf16"
    assert remedy(found, {"mxfp8": {"x": good}}, others) == "bf16", "which is emulated on most GPUs"


@pytest.mark.parametrize(
    ("products", "scheme"),
    [
        ({"fp8_rowwise": 0.04, "fp8_blockwise": 0.03, "int8": 0.01}, "fp8_rowwise"),  # all as usual
        ({"fp8_rowwise": 0.09, "fp8_blockwise": 0.04, "int8": 0.5}, "fp8_blockwise"),  # an outlier within a row
        ({"fp8_rowwise": 0.2, "fp8_blockwise": 0.2, "int8": 0.9}, "bf16"),  # within bounds, and not well
        ({"fp8_rowwise": None, "fp8_blockwise": None, "int8": None}, "bf16"),  # not finite
        ({"fp8_rowwise": 0.9, "int8": 0.01}, "int8"),
    ],
)
@pytest.mark.parametrize("gemm", ["output", "grad_input", "grad_weight"])
def test_the_worst_product_decides_on_the_remedy(products, scheme, gemm):
    """Whichever of the three it is: the other two are as usual."""
    what_if = {
        name: {"products": {"output": 0.01, "grad_input": 0.01, "grad_weight": 0.01, gemm: error}}
        for name, error in products.items()
    }
    assert remedy([Finding(gemm, None, "error", 0.9, 0.15)], what_if, alternatives(CHOICE, CPU)) == scheme


def test_a_product_that_is_not_measured_mends_nothing():
    found = [Finding("output", None, "error", 0.9, 0.15)]
    assert remedy(found, {"fp8_rowwise": {"products": {"grad_weight": 0.03}}}, alternatives(CHOICE, CPU)) == "bf16"


def test_only_products_far_beyond_their_bounds_are_severe():
    assert Finding("output", None, "error", 0.9, 0.15).severe and not Finding("output", None, "error", 0.4, 0.15).severe
    assert not Finding("output", "x", "saturated", 0.9, 0.002).severe


def test_words_have_the_figure():
    assert Finding("output", "x", "saturated", 0.0414, 0.002).words() == "4.1% of x saturates"
    assert Finding("grad_input", "dy", "flushed_sum", 0.5, 0.2).words() == "50% of the sum of |dy| is flushed to zero"
    assert Finding("grad_weight", None, "error", 0.43, 0.2).words() == "the product is off by 43%"
