"""The plan's time of a step beside measured ones, and what it is made of."""

import pytest
import torch

from qtrain.core.hardware.device import datasheet_hardware
from qtrain.models import Lora, read_model_source
from qtrain.quant import SCHEMES
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.train.assembly.assemble import trained_part
from qtrain.train.log.metrics import TOKENS
from qtrain.train.plan.plan import Plan
from qtrain.train.plan.scheme_bytes import adapter_passes, quantizer_bytes
from qtrain.train.plan.step_time import BLOCKS_RATE, MEASURED, compute_seconds, offload_seconds
from qtrain.train.settings.settings import LanguageSettings
from tests.train.plan.test_plan import checked_of, plan_for

H100, H200 = datasheet_hardware("h100"), datasheet_hardware("h200")
FP8 = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "quantize_lm_head": True}
INT8 = {"quantize": "int8", "quantize_lm_head": True}
LOW_BIT_HEAD = {"quantize_lm_head": True, "optim": "adamw_8bit"}


def plan_of(model: str, sequences: int, base: str | None = None, hardware=H100, **changes) -> Plan:
    settings = LanguageSettings(
        **{"model": model, "seq_len": 1024, "batch_size": sequences, "compile": True, "quantize": "bf16"} | changes
    )
    config, lora = read_model_source(model).model_config(), base and Lora(base=base)
    scheme = base_scheme(base, settings.quantize) if lora and base != "none" else None
    trained = trained_part(config, lora, False, torch.bfloat16) if lora else None
    return plan_for(checked_of(settings, scheme), config, trained, hardware)


@pytest.mark.parametrize(
    ("model", "sequences", "milliseconds", "changes"),
    [
        ("qwen2.5-7b", 16, 2704, {"base": "fp8", "seq_len": 4096, "micro_batch_size": 2, "hardware": H200}),
        ("qwen2.5-7b", 128, 7999, {"base": "nf4", "micro_batch_size": 16}),
        ("qwen2.5-7b", 128, 8884, {"base": "nf4", "micro_batch_size": 4, "recompute": ("swiglu",)}),
        ("qwen2.5-3b", 19, 670.6, {"optim": "adamw_8bit"}),
        ("qwen2.5-1.5b", 35, 442, FP8),
        ("qwen2.5-7b", 10, 498, {**FP8, "optim": "adamw_8bit", "recompute": ("norm", "swiglu")}),
        ("qwen2.5-7b", 64, 2708, {**INT8, "micro_batch_size": 8, "hardware": H200}),
        ("qwen2.5-3b", 16, 351, {**INT8, "hardware": H200}),
        ("qwen2.5-1.5b", 16, 198, {**INT8, "hardware": H200}),
        ("qwen2.5-0.5b", 32, 165, {**INT8, "hardware": H200}),
        ("qwen2.5-7b", 18, 1067, {"quantize": "fp8_rowwise", "quantize_lm_head": True, "recompute": ("block",)}),
        ("qwen2.5-3b", 25, 695, {**LOW_BIT_HEAD, "quantize": "fp8_blockwise", "recompute": ("norm", "swiglu")}),
    ],
    ids=str,
)
def test_steps_take_what_they_were_measured_to(model, sequences, milliseconds, changes):
    """On an H100 where no other is named."""
    found = plan_of(model, sequences, **changes).step_seconds
    assert found == pytest.approx(milliseconds / 1000, rel=0.1)


def test_the_measured_fraction_is_that_of_its_own_runs():
    """On an H200, with everything trained and nothing recomputed; what micro-batches move comes on top."""
    found = plan_of("qwen2.5-7b", 64, hardware=H200, micro_batch_size=8, **FP8)
    once = found.step_seconds - plan_of("qwen2.5-7b", 32, hardware=H200, micro_batch_size=8, **FP8).step_seconds
    shortest = sum(found.seconds.values()) * found.tokens_per_step / 2  # without the optimizer's step
    sol = MEASURED[TOKENS].fractions["fp8_tensorwise"][7616e6]
    assert shortest / once == pytest.approx(sol, rel=0.04)
    slower = plan_of("qwen2.5-7b", 64, hardware=H100, micro_batch_size=8, **FP8)
    assert slower.seconds == found.seconds and slower.step_seconds > 1.02 * found.step_seconds


def test_adapters_do_not_save_a_third_of_a_step():
    """They save one product of three, and read inputs and gradients again."""
    full, adapted = (plan_of("qwen2.5-7b", 8, base) for base in (None, "none"))
    assert sum(adapted.seconds.values()) < 0.7 * sum(full.seconds.values())
    assert 0.75 * full.step_seconds < adapted.step_seconds < full.step_seconds
    assert plan_of("qwen2.5-7b", 8, "fp8").step_seconds < adapted.step_seconds


def test_the_forward_pass_of_frozen_linears_is_half_of_their_products():
    seconds, again = {"blocks": 6.0, "head": 3.0, "adapters": 0.3}, {"blocks": 1.0, "adapters": 1.0}
    assert compute_seconds(seconds, 2, 0.5, again) == pytest.approx((4 * 3.1, 4 * (6.2 + 2.1)))
    assert compute_seconds(seconds, 2, 0.5, again, frozen=True) == pytest.approx((4 * 4.6, 4 * (4.7 + 3.1)))


def test_scales_of_blocks_make_products_slower():
    tensors = plan_of("qwen2.5-3b", 8, **{**FP8, "quantize_lm_head": False})
    blocks = plan_of("qwen2.5-3b", 8, quantize="fp8_blockwise")
    assert blocks.seconds == tensors.seconds  # the speed of light is the same
    assert min(BLOCKS_RATE.values()) < tensors.step_seconds / blocks.step_seconds < 0.9


def test_what_quantizers_read_twice_takes_time():
    """Fractions were measured with scales that are known before tensors are read: of the logits' gradient too, which
    is in memory otherwise."""
    delayed, dynamic = (
        plan_of("qwen2.5-0.5b", 32, **{**FP8, "quantize_kwargs": {"scaling": scaling}})
        for scaling in ("delayed", "dynamic")
    )
    assert dynamic.seconds == delayed.seconds  # the speed of light is the same
    assert 1.1 < dynamic.step_seconds / delayed.step_seconds < 1.25


@pytest.mark.parametrize(
    "changes", [{"quantize_lm_head": False}, {"quantize_kwargs": {"grad_weight": "bf16"}}], ids=str
)
def test_what_stays_in_high_precision_reaches_its_own_fraction(changes):
    """More of its speed of light than products in low bits reach of theirs."""
    low, mixed, plain = (
        plan_of("qwen2.5-0.5b", 32, hardware=H200, **found) for found in (FP8, {**FP8, **changes}, {"quantize": "bf16"})
    )
    reached = [sum(p.seconds.values()) * p.tokens_per_step / p.step_seconds for p in (low, mixed, plain)]
    assert reached[0] < reached[1] < reached[2]


def test_an_optimizers_states_take_time_once_a_step():
    """Read and written: 4 bytes of each parameter by AdamW in bf16, 2.03 with 8 bits, whatever the tokens of a step."""
    for sequences in (4, 8):
        bf16, low = (
            plan_of("qwen2.5-7b", sequences, hardware=H200, optim=optim, **FP8) for optim in ("adamw", "adamw_8bit")
        )
        seconds = 7.616e9 * 2 * (4 - 2.03) / (0.88 * 4.8e12)
        assert bf16.step_seconds - low.step_seconds == pytest.approx(seconds, rel=0.02)


def test_norms_before_projections_take_time():
    """Each of a layer's 896 + 4,864 inputs of them is read or written five times, at 88% of 4.8 TB/s."""
    plain, normed = (
        plan_of("qwen2.5-0.5b", 16, hardware=H200, quantize="bitnet", quantize_kwargs={"sub_norm": chosen})
        for chosen in (False, True)
    )
    seconds = 24 * 16384 * 5 * 2 * (896 + 4864) / (0.88 * 4.8e12)
    assert normed.step_seconds - plain.step_seconds == pytest.approx(seconds, rel=0.01)


def test_bytes_of_quantizers():
    delayed, dynamic = (SCHEMES.make("fp8_tensorwise", {"scaling": s}, "") for s in ("delayed", "dynamic"))
    assert quantizer_bytes(delayed, "x", 2, frozen=False) == 2 + 1 + 1
    assert quantizer_bytes(dynamic, "x", 2, frozen=False) == 2 + 2 + 1 + 1  # read for its absmax before
    rowwise = SCHEMES.make("int8", {}, "")
    assert quantizer_bytes(rowwise, "dy", 2, frozen=False) == 2 + 2 + 1 + 1
    assert quantizer_bytes(rowwise, "dy", 2, frozen=True) == 2 + 1
    assert quantizer_bytes(base_scheme("nf4", "bf16"), "x", 2, frozen=True) == 0


def test_passes_in_which_the_product_of_adapters_is_added():
    assert adapter_passes(None, 16) == 4
    assert adapter_passes(base_scheme("nf4", "bf16"), 16) == 2
    assert [adapter_passes(base_scheme("fp8", "bf16"), columns) for columns in (48, 192)] == [0, 2]


def test_nothing_overlaps_with_the_embeddings_copies():
    host = {"weights": 30, "gradients": 30}
    waits = offload_seconds(host, 10.0, 4, 8, 2, embedding=5)
    assert waits == pytest.approx(6 + 2 * 2 * 0.5)
    assert offload_seconds({"weights": 50}, 10.0, 2, 4, 2, embedding=5) == pytest.approx(2 * (0.5 + 2.5 + 0.5))
