"""The bytes that a plan of several GPUs says a step sends: those that ranks really send."""

from collections.abc import Mapping, Sequence

import numpy as np
import pytest
import torch

from benchmarks.mesh_equality import MIXTURE, TWO_HEADS, train
from qtrain.comm.wire import sent
from qtrain.data.batch import Batch
from qtrain.models import (
    RECOMPUTE_SETS,
    Decoder,
    Lora,
    ModelConfig,
    ModelSource,
    add_lora,
    apply_recompute,
    build_model,
)
from qtrain.models.cost.parameters import layer_linears
from qtrain.models.cost.trained import only_adapters
from qtrain.models.native.lora_experts import EXPERT_TARGETS
from qtrain.optim import parameter_groups
from qtrain.parallel.layers.context_parallel import ContextParallel
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.parallel.sharding.gradient_wire import GRADIENT_WIRES
from qtrain.quant import SCHEMES, QuantizedModel, quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.train.plan.language_plan import plan_language_run
from qtrain.train.plan.traffic import weight_bytes_on_wire
from qtrain.train.settings.machine import planned_hardware
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import compute_gradients
from tests.train.plan.test_plan import checked_of, linears_of
from tests.train.plan.test_world import ZERO3, world_of
from tests.worlds import run_ranks

SHAPE = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
LATENT = {"model_type": "deepseek_v3", "num_key_value_heads": 4, "n_routed_experts": 4, "moe_intermediate_size": 64}
LATENT |= {"num_experts_per_tok": 2, "first_k_dense_replace": 2, "kv_lora_rank": 32, "q_lora_rank": None}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "n_group": 1, "topk_group": 1}


def _sent(replicate: int, options: dict, batches: int = 1) -> dict[str, int]:
    """Bytes that this rank sends in a step of so many micro-batches, gradients and weights."""
    checked = checked_of(LanguageSettings(batch_size=4, seq_len=8, **options))
    torch.manual_seed(0)
    model = Decoder(ModelConfig.from_hf(SHAPE)).to(torch.bfloat16)
    quantized = quantize_linears(model, checked.scheme, seed=0, head=model.lm_head)
    hidden = {id(p) for group in parameter_groups(model, 0.1) if group["hidden"] for p in group["params"]}
    wire = GRADIENT_WIRES[checked.settings.gradient_wire]
    needs_whole = checked.optimizer.needs_whole
    mesh = make_mesh(replicate, 0, "cpu")
    parallel = DataParallel(
        model,
        quantized,
        mesh,
        lambda p: needs_whole(id(p) in hidden),
        wire=wire,
        deterministic=checked.settings.deterministic,
    )
    sent.clear()
    parallel.begin_step(0, batches)
    for index in range(batches):
        for p in model.parameters():
            p.grad = torch.full(p.shape, 0.01, dtype=torch.bfloat16)
        parallel.end_micro_batch(index)
    parallel.refresh()
    return dict(sent)


@pytest.mark.parametrize(
    ("replicate", "options"),
    [
        (1, {}),
        (1, {"quantize": "int8", "gradient_wire": "int8"}),
        (2, {"quantize": "fp8_tensorwise", "gradient_wire": "int4"}),
        (1, {"quantize": "bitnet", "quantize_kwargs": {"sub_norm": False}}),
        (1, {"quantize": "qat"}),
        (2, {"quantize": "int4_weight"}),
        (4, {"quantize": "fp8_blockwise"}),
    ],
    ids=str,
)
def test_the_planned_bytes_are_those_that_ranks_send(replicate, options):
    found = run_ranks(4, _sent, replicate, options)
    plan = world_of(SHAPE, 4, dp_replicate=replicate, **options)
    costs = plan.step(plan.mesh).costs
    gradients = [of_rank["gradients"] for of_rank in found]
    weights = [of_rank.get("weights", 0) + of_rank.get("codes", 0) for of_rank in found]
    assert costs["gradients"].bytes == pytest.approx(np.mean(gradients), rel=0.02)
    assert costs["weights"].bytes == pytest.approx(np.mean(weights), rel=0.02)
    assert (costs["weights"].bytes == 0) == (replicate == 4)


@pytest.mark.parametrize(
    ("replicate", "options", "batches"),
    [(1, {"gradient_wire": "int4"}, 1), (2, {}, 3), (1, {"deterministic": True}, 3)],
    ids=str,
)
def test_the_planned_bytes_between_machines_are_those_that_ranks_send(replicate, options, batches):
    """Two machines of two ranks. A single exchange does not count what leaves the machine: by hand it is two thirds."""
    found = run_ranks(4, _sent, replicate, options, batches, on_machine=2)
    plan = world_of(
        SHAPE, 4, dp_replicate=replicate, gpus_per_node=2, batch_size=4 * batches, micro_batch_size=1, **options
    )
    cost = plan.step(plan.mesh).costs["gradients"]
    gradients, of_machines = (np.mean([f.get(k, 0) for f in found]) for k in ("gradients", "gradients of machines"))
    assert cost.bytes == pytest.approx(gradients + of_machines, rel=0.02)
    if options.get("deterministic"):
        assert of_machines == 0 and cost.between == pytest.approx(2 / 3 * gradients, rel=0.02)
    elif replicate == 1:
        assert cost.between == pytest.approx(of_machines, rel=0.02)


def _sent_with_experts(scheme: str, replicate: int, shard: int, ep: int, full_shard: bool) -> dict[str, int]:
    """Bytes that this rank sends in a step of one micro-batch."""
    mesh, device = make_mesh(replicate, shard, "cpu", ep=ep), torch.device("cpu")
    return train(scheme, "adamw", mesh, device, 1, False, mesh.dp_size, full_shard, MIXTURE)["sent"]


@pytest.mark.parametrize(
    ("scheme", "mesh", "ep", "full_shard"),
    [
        ("fp8_tensorwise", (1, 4), 2, False),
        ("int8", (2, 2), 4, False),
        ("bf16", (4, 1), 2, False),
        ("fp8_tensorwise", (1, 4), 2, True),
        ("bf16", (2, 2), 4, True),
    ],
    ids=str,
)
def test_the_planned_bytes_of_divided_experts_are_those_that_ranks_send(scheme, mesh, ep, full_shard):
    found = run_ranks(4, _sent_with_experts, scheme, *mesh, ep, full_shard)
    options = {"quantize": scheme, "dp_replicate": mesh[0], "ep": ep, "batch_size": 8, "seq_len": 24}
    plan = world_of(MIXTURE, 4, **options, reshard_after_forward="always" if full_shard else "never")
    costs = plan.step(plan.mesh).costs
    planned = {what: cost.bytes for what, cost in costs.items()}
    if full_shard:  # the last layer, the mixture, stays gathered between its forward and its backward pass
        linears = layer_linears(ModelConfig.from_hf(MIXTURE))
        element = weight_bytes_on_wire(SCHEMES.make(scheme, {}, "-"), 2) if scheme != "bf16" else 2
        of_last = {mesh[1]: ("qkv", "o_proj"), max(mesh[1] // ep, 1): ("experts.gate_up", "experts.down_proj")}
        for ranks, names in of_last.items():
            held = sum(linears[name].weights / (ep if "experts" in name else 1) for name in names)
            planned["weights of layers"] -= held * element * (ranks - 1) / ranks
        planned["weights"] += planned.pop("weights of layers")
    _compare_sent(planned, found)


SENT = {
    "gradients": ("gradients",),
    "weights": ("weights", "codes"),
    "tokens of experts": ("activations", "activation codes", "routes"),
}
"""Kinds of messages, by what the plan calls them."""


def _compare_sent(planned: Mapping[str, float], found: Sequence[Mapping[str, int]]) -> None:
    """Planned bytes and those that each rank has sent, by kind."""
    for what, names in SENT.items():
        sent_by_ranks = [sum(of_rank.get(name, 0) for name in names) for of_rank in found]
        assert planned[what] == pytest.approx(np.mean(sent_by_ranks), rel=0.02), what


def _sent_in_a_step(model: Decoder, quantized: QuantizedModel, parallel: DataParallel) -> dict[str, int]:
    """Bytes that this rank sends in a step of two micro-batches."""
    tokens = torch.arange(2 * 25).view(2, 25)
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for _ in range(2)]
    sent.clear()
    compute_gradients(model, language_forward(model, None), quantized, batches, 0, parallel=parallel)
    parallel.refresh()
    return dict(sent)


def _sent_with_divided_layers(scheme: str, sequence: bool, checkpointing: str, shape: dict, ep: int) -> dict[str, int]:
    """Bytes that this rank sends in a step of two micro-batches."""
    mesh = make_mesh(0, 0, "cpu", 2, ep)
    source = ModelSource("small", shape, "--model")
    parts = ModelParallel.on(source.model_config(), mesh, sequence=sequence)
    model = build_model(source, dtype=torch.bfloat16, place=parts.place)
    apply_recompute(model, RECOMPUTE_SETS[checkpointing])
    quantized = quantize_linears(model, SCHEMES.make(scheme, {}, "-"), seed=0, head=model.lm_head)
    return _sent_in_a_step(model, quantized, DataParallel(model, quantized, mesh))


@pytest.mark.parametrize(
    ("scheme", "sequence", "checkpointing", "shape", "ep"),
    [
        ("fp8_tensorwise", True, "none", SHAPE, 1),
        ("int8", True, "full", SHAPE, 1),
        ("int4", True, "none", SHAPE, 1),
        ("fp8_blockwise", True, "none", SHAPE, 1),
        ("bitnet", False, "full", SHAPE, 1),
        ("qat", True, "none", SHAPE, 1),
        ("fp8_tensorwise", True, "full", MIXTURE | TWO_HEADS, 1),
        ("fp8_rowwise", True, "none", MIXTURE | TWO_HEADS, 1),
        ("fp8_tensorwise", True, "full", MIXTURE | TWO_HEADS, 2),
        ("fp8_blockwise", True, "none", MIXTURE | TWO_HEADS, 2),
    ],
)
def test_the_planned_bytes_of_divided_layers_are_those_that_ranks_send(scheme, sequence, checkpointing, shape, ep):
    found = run_ranks(4, _sent_with_divided_layers, scheme, sequence, checkpointing, shape, ep)
    options = {"quantize": scheme, "sequence_parallel": sequence, "activation_checkpointing": checkpointing}
    plan = world_of(shape, 4, tp=2, ep=ep, batch_size=8, gradient_accumulation=2, seq_len=24, **options)
    costs = plan.step(plan.mesh).costs
    kinds = ("activations", "activation codes", "routes")
    activations = [sum(r.get(kind, 0) for kind in kinds) for r in found]
    planned = costs["activations"].bytes + (costs["tokens of experts"].bytes if ep > 1 else 0)
    assert planned == pytest.approx(np.mean(activations), rel=0.03)
    assert costs["gradients"].bytes == pytest.approx(np.mean([r["gradients"] for r in found]), rel=0.02)
    weights = [r.get("weights", 0) + r.get("codes", 0) for r in found]
    assert costs["weights"].bytes == pytest.approx(np.mean(weights), rel=0.02)


def _sent_with_shared_sequences(scheme: str, checkpointing: str, shape: dict) -> dict[str, int]:
    """Bytes that this rank sends in a step of two micro-batches."""
    mesh = make_mesh(0, 0, "cpu", cp=2)
    context = ContextParallel(mesh.cp_group)
    model = build_model(ModelSource("small", shape, "--model"), dtype=torch.bfloat16, place=context.place)
    apply_recompute(model, RECOMPUTE_SETS[checkpointing])
    made = SCHEMES.make(scheme, {}, "-")
    quantized = quantize_linears(model, made, seed=0, head=model.lm_head, shared=context.shared_linear)
    return _sent_in_a_step(model, quantized, DataParallel(model, quantized, mesh))


@pytest.mark.parametrize(
    ("scheme", "checkpointing", "shape"),
    [
        ("bf16", "none", SHAPE),
        ("fp8_rowwise", "full", SHAPE),
        ("int8", "selective", SHAPE | {"num_key_value_heads": 1}),
        ("bf16", "none", {**SHAPE, **LATENT}),
    ],
)
def test_the_planned_bytes_of_shared_sequences_are_those_that_ranks_send(scheme, checkpointing, shape):
    found = run_ranks(4, _sent_with_shared_sequences, scheme, checkpointing, shape)
    options = {"quantize": scheme, "activation_checkpointing": checkpointing}
    plan = world_of(shape, 4, cp=2, batch_size=8, gradient_accumulation=2, seq_len=24, **options)
    costs = plan.step(plan.mesh).costs
    assert {r["activations"] for r in found} == {costs["heads of attention"].bytes}
    assert costs["gradients"].bytes == pytest.approx(np.mean([r["gradients"] for r in found]), rel=0.02)
    weights = [r.get("weights", 0) + r.get("codes", 0) for r in found]
    assert costs["weights"].bytes == pytest.approx(np.mean(weights), rel=0.02)


def _sent_with_frozen_layers(lora: Lora, quantize: str) -> dict[str, int]:
    """Bytes that this rank sends in a step of two micro-batches, layers fully sharded."""
    model = build_model(ModelSource("small", SHAPE, "--model"), dtype=torch.bfloat16, lazy=True)
    scheme = SCHEMES.make(quantize, {}, "-") if lora.base == "none" else base_scheme(lora.base, quantize)
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head, realize=False)
    add_lora(model, lora, seed=0)
    parallel = DataParallel(model, quantized, make_mesh(0, 0, "cpu"), units=decoder_units(model))
    return _sent_in_a_step(model, quantized, parallel)


@pytest.mark.parametrize(
    ("lora", "quantize"),
    [(Lora(r=4, base="nf4"), "bf16"), (Lora(r=4), "fp8_tensorwise"), (Lora(r=4, targets=("o_proj",)), "int8")],
    ids=str,
)
def test_the_planned_bytes_of_frozen_layers_are_those_that_ranks_send(lora, quantize):
    found = run_ranks(2, _sent_with_frozen_layers, lora, quantize)
    config = ModelConfig.from_hf(SHAPE)
    scheme = None if lora.base == "none" else base_scheme(lora.base, quantize)
    options = {"batch_size": 8, "micro_batch_size": 2, "seq_len": 24, "quantize": quantize, **ZERO3}
    settings = LanguageSettings(gpu="h200", dry_run=True, world_size=2, **options)
    checked = checked_of(settings, scheme)
    linears, hardware = linears_of(checked, config), planned_hardware(settings, checked.device)
    plan = plan_language_run(checked, config, linears, hardware, only_adapters(config, lora)).world
    costs = plan.step(plan.mesh).costs
    assert plan.step(plan.mesh).reshards
    assert costs["gradients"].bytes == pytest.approx(np.mean([r["gradients"] for r in found]), rel=0.02)
    layers = [r.get("weights", 0) + r.get("codes", 0) for r in found]
    ends = 2 * 2 * 2 * config.vocab_size * config.hidden_size / 2  # embedding and head in bf16, twice, of two ranks
    # The last layer stays gathered between its forward and its backward pass.
    planned = (costs["weights of layers"].bytes - ends) * 3 / 4 + ends
    assert planned == pytest.approx(np.mean(layers), rel=0.03)


def _sent_with_adapted_experts(lora: Lora, ep: int, checkpointing: str) -> dict[str, int]:
    """Bytes that this rank sends in a step of two micro-batches."""
    mesh, source = make_mesh(1, 4, "cpu", ep=ep), ModelSource("small", MIXTURE, "--model")
    parts = ModelParallel.on(source.model_config(), mesh)
    model = build_model(source, dtype=torch.bfloat16, place=parts.place)
    apply_recompute(model, RECOMPUTE_SETS[checkpointing])
    quantized = quantize_linears(model, base_scheme(lora.base, "bf16"), seed=0, head=model.lm_head)
    add_lora(model, lora, seed=0)
    return _sent_in_a_step(model, quantized, DataParallel(model, quantized, mesh))


@pytest.mark.parametrize(
    ("lora", "ep", "checkpointing"),
    [
        (Lora(r=16, base="int8", targets=("all-linear", *EXPERT_TARGETS.values())), 2, "none"),
        (Lora(r=16, base="nf4", targets=("q_proj", EXPERT_TARGETS["down_proj"])), 4, "full"),
    ],
    ids=str,
)
def test_the_planned_bytes_of_adapters_of_experts_are_those_that_ranks_send(lora, ep, checkpointing):
    found = run_ranks(4, _sent_with_adapted_experts, lora, ep, checkpointing)
    config, scheme = ModelConfig.from_hf(MIXTURE), base_scheme(lora.base, "bf16")
    options = {"batch_size": 16, "micro_batch_size": 2, "seq_len": 24, "activation_checkpointing": checkpointing}
    settings = LanguageSettings(gpu="h200", dry_run=True, world_size=4, ep=ep, **options)
    checked = checked_of(settings, scheme)
    linears, hardware = linears_of(checked, config), planned_hardware(settings, checked.device)
    plan = plan_language_run(checked, config, linears, hardware, only_adapters(config, lora)).world
    costs = plan.step(plan.mesh).costs
    _compare_sent({what: cost.bytes for what, cost in costs.items()}, found)
