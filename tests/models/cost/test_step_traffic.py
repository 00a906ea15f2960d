"""Bytes that a step moves between products, by hand for a layer of known sizes."""

import dataclasses

import pytest

from qtrain.models import Lora, ModelConfig, read_model_source
from qtrain.models.cost.linear_bytes import LinearBytes, LowBitBytes
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.step_traffic import (
    CODES_READS,
    RECOMPUTED_PASSES,
    between_products,
    moved_bytes,
    requantized_bytes,
)
from qtrain.models.cost.trained import all_of, only_adapters

STEP = StepShape(micro_batch_size=2, seq_len=512, element=2, compiled=True)
NAMES = ("qkv", "o_proj", "gate_up", "down_proj")


def config_of(name: str = "qwen2.5-0.5b") -> ModelConfig:
    return read_model_source(name).model_config()


def low_bit(**linear: float) -> LowBitBytes:
    return LowBitBytes({name: LinearBytes(2, **linear) for name in NAMES})


def test_a_plain_layer_moves_norms_rotary_positions_and_swiglu():
    config = config_of()
    c, qkv, inner = config.hidden_size, config.qkv_size, config.intermediate_size
    layer = 2 * (16 * c + 4 * qkv + 8 * inner)
    expected = config.num_hidden_layers * layer + 3 * 2 * config.vocab_size
    assert between_products(config, STEP, low_bit()) == expected


def test_quantizers_read_inputs_and_gradients_and_fused_swiglu_writes_codes_alone():
    config = config_of()
    c, q, qkv, inner = config.hidden_size, config.q_size, config.qkv_size, config.intermediate_size
    plain, coded = (between_products(config, STEP, low_bit(**n)) for n in ({}, {"x_quantizer": 4, "dy_quantizer": 3}))
    inputs, outputs = c + q + c + inner, qkv + c + 2 * inner + c
    assert coded - plain == config.num_hidden_layers * (4 * inputs + 3 * outputs)
    fused = dataclasses.replace(low_bit(), swiglu_codes=True)
    # The activation and the gradient of gate and up: neither written nor read.
    assert plain - between_products(config, STEP, fused) == config.num_hidden_layers * 2 * 2 * 3 * inner


def test_the_gradient_of_logits_is_not_in_memory_where_the_heads_quantizer_computes_it():
    config, head = config_of(), LinearBytes(2, x_quantizer=4, dy_quantizer=4)
    values, codes = (dataclasses.replace(low_bit(), head=head, softmax_codes=known) for known in (False, True))
    assert between_products(config, STEP, values) - between_products(config, STEP, codes) == 4 * config.vocab_size


def test_weights_are_read_and_their_codes_written_once_a_step():
    config = config_of()
    linears = dataclasses.replace(low_bit(codes=2), head=LinearBytes(2, codes=1))
    sizes = sum(size for size, _ in linears.sizes(config))
    assert requantized_bytes(config, STEP, linears) == 4 * sizes + 3 * config.vocab_size * config.hidden_size
    assert requantized_bytes(config, STEP, low_bit()) == 0


@pytest.mark.parametrize("passes", [0, 2, 4])
@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"block"})], ids=["kept", "block"])
def test_adapters_read_inputs_and_gradients_twice(passes, recompute):
    """x for z and da, dy for dz and db; recomputed layers read x for z again, and add z · bᵀ again."""
    config, step = config_of(), dataclasses.replace(STEP, recompute=recompute)
    adapters = only_adapters(config, Lora(targets=("o_proj", "down_proj"))).adapters
    linears = low_bit(adapter_passes=passes)
    found = between_products(config, step, linears, adapters) - between_products(config, step, linears)
    again = bool(recompute)
    inputs, outputs = config.q_size + config.intermediate_size, 2 * config.hidden_size
    each = inputs * (2 + again + passes) + outputs * (2 + (1 + again) * passes)
    assert found == config.num_hidden_layers * 2 * each


def test_adapters_that_read_codes_read_a_byte():
    """As many times as their products take longer than one read would; dy itself where that has no codes."""
    config, adapters = config_of(), only_adapters(config_of(), Lora(targets=("o_proj",))).adapters
    for of_dy, read in ((1.0, CODES_READS), (0.0, 2.0)):
        linears = LowBitBytes({name: LinearBytes(2, kept_input=1.0, dy_codes=of_dy) for name in NAMES})
        found = between_products(config, STEP, linears, adapters) - between_products(config, STEP, linears)
        each = 2 * CODES_READS * config.q_size + 2 * read * config.hidden_size
        assert found == pytest.approx(config.num_hidden_layers * each)


def test_what_is_not_kept_is_computed_again():
    config = config_of()
    step = dataclasses.replace(STEP, recompute=frozenset({"swiglu"}))
    added = between_products(config, step, low_bit()) - between_products(config, STEP, low_bit())
    assert added == config.num_hidden_layers * RECOMPUTED_PASSES * 2 * config.intermediate_size


def test_a_weight_that_is_dequantized_is_written_and_read_by_each_product():
    config = config_of()
    trained = only_adapters(config, Lora())
    weights = sum(n * size for _, n, size, _ in low_bit().linears(config))
    nf4 = LowBitBytes({name: LinearBytes(0.5625, temporary=2.0) for name in NAMES})
    for recompute, products in ((frozenset(), 2), (frozenset({"block"}), 3)):
        step = dataclasses.replace(STEP, recompute=recompute)
        found = moved_bytes(config, step, 3, nf4, trained) - moved_bytes(config, step, 3, low_bit(), trained)
        assert found == pytest.approx(3 * weights * (products * (0.5625 + 4) - 4))


def test_sums_of_gradients_and_codes_of_weights_that_come_from_the_host_move_on_the_device():
    config = config_of()
    trained, linears = all_of(config, 2), low_bit(codes=2.0, codes_only=True)
    weights = sum(n * size for _, n, size, _ in linears.linears(config))
    on_host = dataclasses.replace(STEP, weights_on_host=True)
    found = [
        moved_bytes(config, step, 1, linears, trained)
        for step in (STEP, on_host, dataclasses.replace(on_host, gradients_on_host=True))
    ]
    # In both passes: written, read for codes, and these written. The embedding is tied and stays.
    assert found[1] - found[0] == 2 * weights * (2 + 2 + 2)
    assert found[2] - found[1] == 5 * 2 * weights
