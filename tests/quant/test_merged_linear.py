"""Adapters that train through the rounding of the merge: values, gradients, and the export's very codes."""

import json

import pytest
import torch
import torch.nn.functional as F

from qtrain.core.errors import UserError
from qtrain.models import (
    EXPORT_FORMATS,
    Lora,
    ModelSource,
    add_lora,
    build_model,
    check_merge_format,
    empty_model,
    merge_lora,
)
from qtrain.models.adapters.lora import LoraLinear, lora_linears
from qtrain.models.hf.quantized_export import export_quantized
from qtrain.quant import quantize_linears
from qtrain.quant.export_codes import new_codes, values_of
from qtrain.quant.merged_linear import Adapter, Merge, merge_key, merged_codes, merged_linear
from qtrain.quant.schemes.frozen_base import base_scheme
from tests.models.hf.codes_reader import load_tensors, read_matrix
from tests.models.hf.readers.coded import source_of

M, N, K, R = 48, 256, 128, 4
IDS = torch.arange(48).view(2, 24)
FORMATS = ["fp8_block", "mxfp8", "ct_fp8_row", "ct_fp8_block", "ct_int8", "ct_int4_g32", "ct_int4_g128", "ct_nvfp4"]


def tensors(seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shapes = [(3, M // 3, K), (R, K), (N, R), (N,), (N, K), (3, M // 3, N)]
    return [torch.randn(shape, generator=generator) * 0.3 for shape in shapes]


@pytest.mark.parametrize("fmt", FORMATS)
def test_forward_is_the_rounded_merge_and_gradients_are_plain_loras_at_it(fmt):
    x, a, b, bias, weight, dy = tensors()
    wanted = EXPORT_FORMATS.make(fmt, {}, "").weight
    merge = Merge(weight, (Adapter(0, N, a, b),), 0.5, wanted, merge_key(0))
    leaves = [t.clone().requires_grad_() for t in (x, a, 0.5 * b)]
    y = merged_linear(*leaves, bias, merge)
    y.backward(dy)
    rounded = merge.rounded()
    assert not torch.equal(rounded, weight + 0.5 * b @ a)
    # Straight through: the gradient of the merged weight is that of the rounded one, dyᵀ · x.
    plain = [t.clone().requires_grad_() for t in (x, a, 0.5 * b)]
    merged = plain[2] @ plain[1]
    through = rounded + merged - merged.detach()
    expected = F.linear(plain[0], through, bias)
    expected.backward(dy)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-4)
    for found, leaf in zip(leaves, plain, strict=True):
        torch.testing.assert_close(found.grad, leaf.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("base", ["none", "nf4", "fp8"])
@pytest.mark.parametrize("fmt", FORMATS)
def test_the_export_has_the_codes_that_were_trained(fmt, base, tmp_path):
    """Of fused projections, in bf16, with every adapter far from zero."""
    source = source_of("qwen3")
    model = build_model(source, seed=1, dtype=torch.bfloat16)
    if base != "none":
        quantize_linears(model, base_scheme(base, "bf16"), seed=0, head=model.lm_head)
    add_lora(model, Lora(r=4, merge_format=fmt), seed=0)
    values = {}
    for name, linear in lora_linears(model).items():
        assert isinstance(linear, LoraLinear)
        with torch.no_grad():
            for b in linear.lora_b:
                b.normal_(0, 0.05)
        for projection in linear.adapted:
            rounded = linear._merge(linear.merge_format).rounded()
            values[f"model.{projection.hf_name}".replace("model.model.", "model.")] = rounded[
                projection.start : projection.stop
            ]
        assert name
    merge_lora(model)
    held = export_quantized(model, source, tmp_path / "hf", EXPORT_FORMATS.make(fmt, {}, ""))
    assert held.equal == held.matrices == len(values) == 14
    config = json.loads((tmp_path / "hf" / "config.json").read_text())["quantization_config"]
    found = load_tensors(tmp_path / "hf")
    for module, value in values.items():
        theirs = read_matrix(found, module, config).value.bfloat16()
        # NVFP4's scale of the tensor is inverted twice, and may lose its last bit.
        close = {"rtol": 2**-7, "atol": 0} if fmt == "ct_nvfp4" else {"rtol": 0, "atol": 0}
        torch.testing.assert_close(theirs, value, **close)


@pytest.mark.parametrize("recompute", [False, True])
def test_a_model_learns_through_the_rounding(recompute):
    """The loss of the merged, rounded weights falls; adapters alone receive gradients."""
    model = build_model(source_of("llama"), seed=1)
    add_lora(model, Lora(r=4, merge_format="ct_int4_g32"), seed=0)
    if recompute:
        from qtrain.models import apply_recompute

        apply_recompute(model, frozenset({"block"}), frozenset())
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2)
    losses = []
    for _ in range(6):
        loss = model(IDS[:, :-1], IDS[:, 1:].contiguous()).loss / 46
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        assert all((p.grad is not None) is ("lora_" in name) for name, p in model.named_parameters())
        optimizer.zero_grad()
    assert losses[-1] < losses[0] - 0.1


def test_compiled_it_is_the_same():
    x, a, b, bias, weight, dy = tensors()
    merge = Merge(weight, (Adapter(0, N, a, b),), 0.5, EXPORT_FORMATS.make("ct_int8", {}, "").weight, merge_key(0))
    results = []
    for function in (merged_linear, torch.compile(merged_linear, fullgraph=True)):
        leaves = [t.clone().requires_grad_() for t in (x, a, b)]
        y = function(*leaves, bias, merge)
        y.backward(dy)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


MISTAKES = [
    ("fp8_blok", {}, r"unknown format 'fp8_blok'. Did you mean 'fp8_block'"),
    ("bitnet", {}, "unknown format 'bitnet'"),
    ("hf", {}, "unknown format 'hf'"),
    ("gguf_q8_0", {}, "unknown format 'gguf_q8_0'"),
    ("fp8_block", {"hidden_size": 192, "num_attention_heads": 3}, "'fp8_block' cannot hold .*q_proj: it takes"),
]  # fmt: skip


@pytest.mark.parametrize(("fmt", "sizes", "message"), MISTAKES)
def test_formats_that_hold_no_merged_weights(fmt, sizes, message):
    source = ModelSource("odd", {**source_of("llama").config, **sizes, "num_key_value_heads": 1}, "--model")
    with pytest.raises(UserError, match=r"--lora\.merge_format: " + message):
        check_merge_format(empty_model(source), Lora(merge_format=fmt))


@pytest.mark.parametrize("fmt", [fmt for fmt in FORMATS if fmt != "mxfp8"])  # which rounds to nearest
def test_an_update_below_half_a_code_is_there_on_average(fmt):
    """A weight that the format holds, of which small elements grow by 0.4%: to nearest nothing moves; dithered, as many
    codes as make up the update."""
    wanted = EXPORT_FORMATS.make(fmt, {}, "").weight
    weight = torch.randn(N, 8 * K, generator=torch.Generator().manual_seed(0))
    held = values_of(new_codes(weight, wanted), weight)
    groups = held.view(N, -1, 16).abs()
    small = (groups < 0.4 * groups.amax(2, keepdim=True)).view_as(held)  # no scale of any format follows from them
    step = torch.where(small, 0.004 * held, 0)
    found, again, other = (values_of(merged_codes(held + step, wanted, merge_key(n)), weight) for n in (3, 3, 4))
    assert torch.equal(found, again) and not torch.equal(found, other)
    torch.testing.assert_close(found[~small], held[~small], rtol=1e-5, atol=0)  # a scale may differ in its last bit
    moved = ((found - held) * held.sign()).double().sum() / (step * held.sign()).double().sum()
    assert moved == pytest.approx(1, abs=0.2)
    nearest = values_of(new_codes(held + step, wanted), weight)
    torch.testing.assert_close(nearest, held, rtol=1e-5, atol=0)
