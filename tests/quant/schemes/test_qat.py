"""Quantization-aware training: its products against the straight-through estimator in fp64, what its exports hold."""

import pytest
import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError
from qtrain.models.hf.formats.format import EXPORT_FORMATS
from qtrain.models.hf.formats.table import kept
from qtrain.models.hf.quantized_export import export_quantized
from qtrain.quant import SCHEMES, LowBitLinear, quantize_linears
from qtrain.quant.export import exported_weight
from qtrain.quant.export_codes import new_codes, trained_codes
from qtrain.quant.schemes.qat import SERVED, WEIGHTS, Qat
from tests.cases import matrix
from tests.models.hf.test_quantized_export import compare, left_as_trained, source_of, trained
from tests.quant.emulation import fake_quantize

CASES = [(weight, activations) for weight, allowed in SERVED.items() for activations in allowed]
READINGS = {
    "int4_g32": ("int4", "1x32"),
    "int4_g128": ("int4", "1x128"),
    "int8": ("int8", "rowwise"),
    "fp8_row": ("e4m3", "rowwise"),
    "nvfp4": ("nvfp4", "1x16"),
    "fp8": ("e4m3", "rowwise"),
}
"""Format and granularity of weights and activations, as the emulation has them."""
HOLDS = {
    "int4_g32": {"ct_int4_g32", "gguf_q8_0"},
    "int4_g128": {"ct_int4_g128", "ct_int4_g32", "gguf_q8_0"},
    "int8": {"ct_int8", "torchao_int8", "gguf_q8_0"},
    "fp8_row": {"ct_fp8_row", "torchao_fp8"},
    "nvfp4": {"ct_nvfp4"},
}
"""The formats whose exports hold the codes; repeated scales included."""


def qat(weight: str, activations: str = "none"):
    return SCHEMES.make("qat", {"weight": weight, "activations": activations}, "--quantize")


def swapped(weight: str, activations: str, n: int, k: int, kind: str = "normal", dtype=torch.float32) -> LowBitLinear:
    model = nn.Sequential(nn.Linear(k, n)).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(matrix(n, k, 50, kind))
    quantize_linears(model, qat(weight, activations), seed=0)
    assert isinstance(model[0], LowBitLinear)
    return model[0]


def rounded(t: Tensor, name: str) -> Tensor:
    return t.double() if name == "none" else fake_quantize(t.detach(), READINGS[name])


@pytest.mark.parametrize(("weight", "activations"), CASES)
@pytest.mark.parametrize("kind", ["normal", "outlier", "zero_row"])
def test_products_are_those_of_the_straight_through_estimator(weight, activations, kind):
    """y, dx, dw and the bias's gradient, with M = 1, and N a multiple of nothing."""
    for m, k, n in [(1, 128, 48), (37, 256, 65), (144, 384, 8)]:
        linear = swapped(weight, activations, n, k, kind)
        x, dy = matrix(m, k, 0, kind).requires_grad_(), matrix(m, n, 1, kind)
        y = linear(x)
        y.backward(dy)
        qx, qw, dy = rounded(x, activations), rounded(linear.weight, weight), dy.double()
        truth = [qx @ qw.t() + linear.bias.double(), dy @ qw, dy.t() @ qx, dy.sum(0)]
        for found, true in zip((y, x.grad, linear.weight.grad, linear.bias.grad), truth, strict=True):
            assert (found.double() - true).norm() <= 2e-4 * true.norm(), f"{m}x{k}x{n}"


@pytest.mark.parametrize(("weight", "size"), [("int8", 37), ("fp8_row", 37)])
def test_scales_of_rows_take_any_width(weight, size):
    linear = swapped(weight, "none", 5, size)
    assert linear(torch.randn(3, size)).shape == (3, 5)


@pytest.mark.parametrize(("weight", "group"), [("int4_g32", 32), ("int4_g128", 128), ("nvfp4", 16)])
def test_part_of_a_group_is_left_in_high_precision(weight, group):
    model = nn.Sequential(nn.Linear(group + 8, 16), nn.Linear(group, 16))
    choices = quantize_linears(model, qat(weight), seed=0).choices
    assert [c.reason for c in choices] == [f"{weight} takes in-features in multiples of {group}", None]
    assert type(model[0]) is nn.Linear


@pytest.mark.parametrize(("weight", "activations"), CASES)
def test_a_bad_value_is_not_hidden(weight, activations):
    for bad in (float("nan"), float("inf")):
        linear, x = swapped(weight, activations, 48, 128), matrix(40, 128, 1)
        x[3, 5] = bad
        assert not linear(x)[3].isfinite().any() and linear(x)[4].isfinite().all()
        with torch.no_grad():
            linear.weight[7, 9] = bad
        linear.refresh()
        y = linear(matrix(40, 128, 1))
        assert not y[:, 7].isfinite().any()


@pytest.mark.parametrize(("weight", "activations"), CASES)
def test_backward_keeps_codes_of_an_input_that_has_some(weight, activations):
    linear = swapped(weight, activations, 64, 128)
    own, kept_tensors = {t.data_ptr() for t in linear.buffers()}, []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept_tensors.append(t) or t, lambda t: t):
        linear(torch.randn(128, 128, requires_grad=True))
    found = [t.dtype for t in kept_tensors if t.data_ptr() not in own and t.numel() > 1000]
    assert found == [{"none": torch.float32, "int8": torch.int8, "fp8": torch.float8_e4m3fn}[activations]]


@pytest.mark.parametrize(("weight", "activations"), CASES)
def test_compiled_it_is_the_same(weight, activations):
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(2)))
    quantize_linears(model, qat(weight, activations), seed=0)
    results = []
    torch.compiler.reset()  # each case compiles the same functions again
    for run in (model, torch.compile(model, backend="aot_eager", fullgraph=True)):
        model.zero_grad()
        x = matrix(16, 128, 0).requires_grad_()
        run(x).square().sum().backward()
        results.append([x.grad, *(p.grad for p in model.parameters())])
    assert all(map(torch.equal, *results))


# ---- exports ---------------------------------------------------------------------------------------------------------


def test_the_formats_that_hold_the_codes_are_those_of_the_documentation():
    for weight, expected in HOLDS.items():
        formats = {name: EXPORT_FORMATS.make(name, {}, "") for name in EXPORT_FORMATS.names()}
        assert {name for name, fmt in formats.items() if kept(qat(weight), fmt).equal} == expected, weight
    assert HOLDS.keys() == WEIGHTS.keys()


@pytest.mark.parametrize("weight", WEIGHTS)
def test_exported_codes_are_those_of_training_and_of_the_formats_own_rule(weight, tmp_path):
    """Two steps of training first. The format's own rule makes the same codes of the latent weights: what training
    changes is the weights that are rounded, not the rounding."""
    fmt = EXPORT_FORMATS.make(next(name for name in sorted(HOLDS[weight]) if weight.split("_")[-1] in name), {}, "")
    model, quantized = trained(source_of("llama"), "qat", {"weight": weight})
    held = export_quantized(model, source_of("llama"), tmp_path / "hf", fmt, left_as_trained(quantized))
    equal, total, scales = compare(model, tmp_path / "hf")
    print(f"qat {weight}: {equal:,} of {total:,} codes equal")
    assert equal == total == 2 * 256 * (256 + 2 * 128 + 256 + 3 * 384) and scales < 2**-22
    assert held.equal == held.matrices == 14
    linear = model.layers[1].mlp.down_proj
    own, theirs = trained_codes(linear)[0], new_codes(linear.weight.detach(), fmt.weight)
    assert own.codes.view(torch.uint8).equal(theirs.codes.view(torch.uint8))


@pytest.mark.parametrize("weight", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_export_has_the_values_that_are_multiplied(weight, dtype):
    linear = swapped(weight, "none", 48, 128, dtype=dtype)
    value = exported_weight(linear)
    assert value.dtype == dtype and not torch.equal(value, linear.weight)
    with torch.no_grad():
        linear.bias.zero_()
    assert torch.equal(linear(torch.eye(128, dtype=dtype)), value.t())


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weight", "activations"), [(w, a) for w in SERVED for a in ("none", "int8", "fp8") if a not in SERVED[w]]
)
def test_activations_that_a_weight_is_not_served_with_are_refused(weight, activations):
    with pytest.raises(UserError, match=f"'{activations}' does not go with {weight} weights; allowed: none") as error:
        qat(weight, activations)
    assert "It goes with int4_g32, int4_g128" in str(error.value)


def test_eight_bit_products_run_on_eight_bit_tensor_cores():
    dtypes = {case: Qat(*case).gemm_dtypes()["output"] for case in CASES}
    assert {case: dtype for case, dtype in dtypes.items() if dtype != "bf16"} == {
        ("int8", "int8"): "int8",
        ("fp8_row", "fp8"): "fp8",
    }
