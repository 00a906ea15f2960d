"""The plan's bytes of weights, codes and optimizer states against those of real tensors after a step, for every
registered scheme and optimizer."""

from dataclasses import replace
from itertools import chain

import pytest
import torch

from qtrain.models import Decoder, Lora, ModelConfig, ModelSource, add_lora, build_model
from qtrain.models.cost.trained import only_adapters
from qtrain.models.native.lora_experts import EXPERT_TARGETS
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.optim.state_layout import local
from qtrain.parallel.layers.local_config import local_config
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import make_mesh, planned_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.parallel.sharding.shards import Sharded, local_tensors
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.quant.weight_codes import WeightCodes
from qtrain.tensors.lazy import plain_tensors
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.settings.settings import LanguageSettings
from tests.cases import sampled
from tests.train.plan.test_plan import checked_of, linears_of
from tests.worlds import run_ranks

SHAPE = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
SHAPE |= {"num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
MIXTURE = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
MIXTURE |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "head_dim": 64}
ON_HOST = ("step", "refresh", "cosines")

CASES = {
    "other schemes by name": {
        "quantize": "int8",
        "quantize_overrides": {"*.down_proj": "int8_weight", "layers.0.*": "bf16", "lm_head": "fp8_blockwise"},
    },
    "other schemes on some layers": {
        "quantize": "fp8_tensorwise",
        "quantize_overrides": {"layers.1.*": "int4_weight", "layers.2.mlp.*": "nvfp4", "layers.2.attn.*": "bf16"},
        "weight_codes": "one",
    },
}
CASES |= {name: {"optim": name} for name in OPTIMIZERS.names()}
CASES |= {name: {"quantize": name} for name in SCHEMES.names() if name != "auto"}  # auto is one of the others
CASES |= {
    "a master copy": {"optim_kwargs": {"master": "fp32"}},
    "no master copy of a stored weight": {"optim_kwargs": {"master": "fp32"}, "quantize": "int8_weight"},
    "states of several formats": {"optim_kwargs": {"m": "int4", "v": "int8", "block": 64}},
    "schedule-free states in bf16": {"optim": "adamw_schedule_free", "optim_kwargs": {"z": "bf16", "v": "bf16"}},
    "stored codes and INT8 ones": {"quantize": "int4_weight", "quantize_kwargs": {"activations": "int8"}},
    "ternary codes in both layouts": {"quantize": "bitnet", "quantize_kwargs": {"backward": "int8"}},
    "INT4 codes times INT8 ones": {"quantize": "qat", "quantize_kwargs": {"activations": "int8"}},
    "factored states": {"optim": "torch.Adafactor"},
    "one layout of codes": {"quantize": "fp8_blockwise", "weight_codes": "one"},
    "one layout of stored codes": {
        "quantize": "int8_weight",
        "quantize_kwargs": {"activations": "int8"},
        "weight_codes": "one",
    },
}


def held(tensors) -> int:
    """Bytes of tensors, each storage once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


@pytest.mark.parametrize("case", CASES)
def test_planned_bytes_are_those_of_the_tensors(case):
    """To 1% of each, or 1% of the weights where a library's states are next to nothing."""
    checked = checked_of(LanguageSettings(batch_size=1, seq_len=8, **CASES[case]))
    config = ModelConfig.from_hf(SHAPE | {"num_hidden_layers": 3 if checked.settings.quantize_overrides else 1})
    linears = linears_of(checked, config)
    model = Decoder(config).to(torch.bfloat16)
    one = checked.settings.weight_codes == "one"
    quantized = quantize_linears(model, checked.scheme, seed=0, head=model.lm_head, one_weight_layout=one)
    planned = LanguageRun(checked, model.config, linears, None).memory()
    optimizer = checked.optimizer.build(parameter_groups(model, 0.1), 0.01)
    for p in model.parameters():
        p.grad = torch.full(p.shape, 0.01, dtype=p.dtype)
    optimizer.step()
    quantized.refresh()
    weights = [t for p in model.parameters() for t in (p.inner.values() if isinstance(p, StoredWeight) else [p])]
    codes = chain.from_iterable(m.buffers() for m in model.modules() if isinstance(m, WeightCodes))
    assert planned.weights == pytest.approx(held([*weights, *codes]), rel=0.01)
    states = [t for state in optimizer.state.values() for key, t in state.items() if key not in ON_HOST]
    assert planned.optimizer == pytest.approx(held(states), rel=0.01, abs=0.01 * planned.weights)


def _on_mesh(
    options: dict, full_shard: bool = False, lora: Lora | None = None, ranks: int = 2, ep: int = 1, tp: int = 1
) -> tuple[int, int, int, int]:
    """Planned and held bytes of weights, and of states, on this rank of so many, each of which is `tp`."""
    scheme = base_scheme(lora.base, "bf16") if lora is not None and lora.base != "none" else None
    checked = checked_of(LanguageSettings(batch_size=ranks, seq_len=8, ep=ep, tp=tp, **options), scheme)
    geometry = replace(checked.geometry, world=ranks)
    checked = replace(checked, geometry=geometry, mesh=planned_mesh(1, ranks, ep, tp), reshards=full_shard)
    shape = SHAPE | {"num_hidden_layers": 4} if full_shard else SHAPE
    shape = shape | MIXTURE if ep > 1 else shape
    config = ModelConfig.from_hf(shape)
    trained = only_adapters(config, lora) if lora else None
    trained = trained.on_rank(ep) if trained else None
    own, linears = local_config(config, tp, ep), linears_of(checked, local_config(config, tp, 1))
    planned = LanguageRun(checked, own, linears, trained).memory()
    mesh = make_mesh(1, ranks, "cpu", tp, ep)
    place = parts.place if (parts := ModelParallel.on(config, mesh)) else None
    model = build_model(ModelSource("small", shape, "--model"), dtype=torch.bfloat16, place=place)
    one = checked.settings.weight_codes == "one"
    quantized = quantize_linears(model, checked.scheme, seed=0, head=model.lm_head, one_weight_layout=one)
    if lora:
        add_lora(model, lora, seed=0)
    groups = parameter_groups(model, 0.1)
    hidden = {id(p) for group in groups if group["hidden"] for p in group["params"]}
    needs_whole = checked.optimizer.needs_whole
    units = decoder_units(model) if full_shard else ()
    parallel = DataParallel(model, quantized, mesh, lambda p: needs_whole(id(p) in hidden), units=units)
    for group in groups:
        group["params"] = [parallel.master(p) for p in group["params"]]
    optimizer = checked.optimizer.build(groups, 0.01)
    optimizer.place(parallel.placements)
    for sharded in parallel.parameters:
        elements, dtype = sum(t.numel() for t in masters(sharded)), sharded.parameter.dtype
        sharded.set_gradient(torch.full((elements,), 0.01, dtype=dtype))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    parallel.refresh()
    # As in the backward pass: a layer runs, and the next one is prefetched.
    if parallel.full_shard is not None:
        parallel.full_shard.gather(i for i, unit in enumerate(units) if unit.called in list(model.layers)[:2])
    weights = [t for p in model.parameters() for t in plain_tensors(p)]
    weights += parallel.weights.kept_codes
    weights += [t for sharded in parallel.parameters + parallel.frozen for t in masters(sharded, stored=True)]
    codes = chain.from_iterable(m.buffers() for m in model.modules() if isinstance(m, WeightCodes))
    states = [local(t) for state in optimizer.state.values() for key, t in state.items() if key not in ON_HOST]
    return planned.weights, held([*weights, *codes]), planned.optimizer, held(states)


def masters(sharded: Sharded, stored: bool = False) -> list[torch.Tensor]:
    """This rank's part of a master; of one that is stored in low bits its codes, or something of its elements."""
    found = local_tensors(sharded.master)
    return found if stored or len(found) < 2 else [sharded.master]


ON_TWO = (
    {},
    {"quantize": "int8"},
    {"quantize": "fp8_tensorwise", "optim": "adamw_8bit"},
    {"quantize": "int8_weight"},
    {"quantize": "fp8_tensorwise", "quantize_kwargs": {"grad_input": "bf16"}},
    {"optim": "muon"},
    {"quantize": "fp8_tensorwise", "weight_codes": "one"},
    {"quantize": "fp8_tensorwise", "quantize_overrides": {"layers.0.attn.*": "bf16", "layers.0.mlp.*": "int8_weight"}},
)


@pytest.mark.parametrize(
    ("options", "lora"),
    [
        ({}, Lora(r=32, base="nf4")),
        ({"quantize": "fp8_tensorwise"}, Lora(r=4)),
        ({"quantize": "int8"}, Lora(r=4, dora=True)),
    ],
    ids=str,
)
def test_planned_bytes_of_frozen_layers_on_a_rank_of_two(options, lora):
    found = run_ranks(2, _on_mesh, options, True, lora)
    assert found[0][0] == pytest.approx(max(row[1] for row in found), rel=0.02)


@pytest.mark.parametrize(
    ("options", "full_shard"),
    sampled(
        [(options, full) for options in ON_TWO for full in (False, True)],
        lambda options, full: options.get("quantize", "") not in (("fp8_tensorwise", "int8_weight") if full else ("",)),
    ),
)
def test_planned_bytes_of_a_rank_of_two(options, full_shard):
    """Those of the fuller one: whole matrices do not divide evenly. Of layers that differ the two largest are planned
    to be gathered at once, which these two are not."""
    found = run_ranks(2, _on_mesh, options, full_shard)
    (planned, _, states, _), weights, of_states = found[0], [row[1] for row in found], [row[3] for row in found]
    if full_shard and "quantize_overrides" in options:
        assert max(weights) <= planned <= 1.08 * max(weights)
    else:
        assert planned == pytest.approx(max(weights), rel=0.02 if full_shard else 0.01)  # scales of small layers
    assert states == pytest.approx(max(of_states), rel=0.01)


@pytest.mark.parametrize(
    ("lora", "full_shard", "ranks", "ep"),
    [
        (Lora(r=16, base="int8", targets=("all-linear", *EXPERT_TARGETS.values())), False, 2, 2),
        (Lora(r=16, base="nf4", targets=tuple(EXPERT_TARGETS.values())), False, 4, 2),
        (Lora(r=16, base="nf4", targets=tuple(EXPERT_TARGETS.values())), True, 4, 2),
        (Lora(r=16, base="int8", targets=("all-linear", *EXPERT_TARGETS.values())), True, 2, 2),
    ],
    ids=str,
)
def test_planned_bytes_of_adapters_of_divided_experts(lora, full_shard, ranks, ep):
    """A rank has adapters of its own experts, and shares their states with the ranks that hold the same ones."""
    found = run_ranks(ranks, _on_mesh, {}, full_shard, lora, ranks, ep)
    (planned, _, states, _), weights, of_states = found[0], [row[1] for row in found], [row[3] for row in found]
    assert planned == pytest.approx(max(weights), rel=0.02)
    assert states == pytest.approx(max(of_states), rel=0.01)


@pytest.mark.parametrize(
    ("options", "ranks", "ep", "tp"),
    [
        ({"quantize": "fp8_tensorwise", "optim": "adamw_8bit"}, 4, 2, 1),
        ({"quantize": "int8"}, 2, 2, 1),
        ({"optim": "muon"}, 4, 2, 1),
        ({"quantize": "fp8_tensorwise", "optim": "adamw_8bit"}, 2, 2, 2),
        ({"quantize": "int8"}, 4, 2, 2),
    ],
    ids=str,
)
def test_planned_bytes_of_divided_experts_in_fully_sharded_layers(options, ranks, ep, tp):
    """Experts that two ranks hold are divided over these; those that one holds stay in full."""
    found = run_ranks(ranks * tp, _on_mesh, options, True, None, ranks, ep, tp)
    (planned, _, states, _), weights, of_states = found[0], [row[1] for row in found], [row[3] for row in found]
    assert planned == pytest.approx(max(weights), rel=0.02)
    assert states == pytest.approx(max(of_states), rel=0.01)


@pytest.mark.parametrize(
    ("shape", "targets", "kept", "codes"),
    [
        ({}, "all-linear", {"qkv": 1.0, "gate_up": 1.0, "down_proj": 1.0}, True),
        ({}, ("q_proj", "down_proj"), {"qkv": 1.0, "gate_up": None, "down_proj": 1.0}, False),
        # Rows of the gradient of gate_up's output that no CTA holds.
        ({"intermediate_size": 28672}, "all-linear", {"qkv": 1.0, "gate_up": 1.0, "down_proj": 1.0}, False),
        # Adapters of experts read the rows themselves.
        (MIXTURE, ("q_proj", *EXPERT_TARGETS.values()), {"qkv": 1.0, "experts.gate_up": None}, False),
    ],
    ids=str,
)
def test_whose_adapters_keep_codes_of_their_input(shape, targets, kept, codes):
    lora = Lora(base="fp8", targets=targets)
    checked = checked_of(LanguageSettings(batch_size=1, seq_len=8), base_scheme("fp8", "bf16"))
    config = ModelConfig.from_hf(SHAPE | shape | {"num_hidden_layers": 1})
    low_bit = LanguageRun(checked, config, linears_of(checked, config), only_adapters(config, lora)).low_bit
    assert {name: low_bit.layer[name].kept_input for name in kept} == kept and low_bit.swiglu_codes == codes


@pytest.mark.parametrize("lora", [Lora(r=32, base="nf4"), Lora(r=4)], ids=str)
def test_planned_bytes_of_frozen_layers_in_host_memory(lora):
    """On one process, of which the device holds the two layers that run, and the host all others besides."""
    scheme = base_scheme(lora.base, "bf16") if lora.base != "none" else None
    checked = checked_of(LanguageSettings(batch_size=1, seq_len=8), scheme)
    checked = replace(checked, reshards=True, offload=frozenset({"weights"}))
    config = ModelConfig.from_hf(SHAPE | {"num_hidden_layers": 4})
    trained = only_adapters(config, lora)
    planned = LanguageRun(checked, config, linears_of(checked, config), trained).memory()
    model = build_model(
        ModelSource("small", SHAPE | {"num_hidden_layers": 4}, "--model"), dtype=torch.bfloat16, lazy=True
    )
    quantized = quantize_linears(model, checked.scheme, seed=0, head=model.lm_head, realize=False)
    add_lora(model, lora, seed=0)
    units = decoder_units(model)
    parallel = DataParallel(model, quantized, make_mesh(1, 1, "cpu"), units=units)
    if parallel.full_shard is not None:
        parallel.full_shard.gather(i for i, unit in enumerate(units) if unit.called in list(model.layers)[:2])
    codes = chain.from_iterable(m.buffers() for m in model.modules() if isinstance(m, WeightCodes))
    on_device = held([*(t for p in model.parameters() for t in plain_tensors(p)), *codes])
    assert planned.weights == pytest.approx(on_device, rel=0.02)
    on_host = held(t for sharded in parallel.frozen for t in masters(sharded, stored=True))
    assert planned.host == {"weights": pytest.approx(on_host, rel=0.01)}


@pytest.mark.parametrize(
    ("options", "changes"),
    [
        ({}, {}),
        ({"quantize": "fp8_tensorwise", "quantize_lm_head": True}, {}),
        ({"quantize": "int8", "optim": "adamw_8bit"}, {"tie_word_embeddings": True}),
        ({"quantize": "fp8_tensorwise", "quantize_kwargs": {"grad_input": "bf16"}}, {}),
    ],
    ids=str,
)
def test_planned_bytes_of_trained_layers_in_host_memory(options, changes):
    """Weights and states at a layer's backward pass; gradients as they wait for the next micro-batch."""
    names = frozenset({"v", "weights", "gradients"})
    checked = checked_of(LanguageSettings(batch_size=2, micro_batch_size=1, seq_len=8, **options))
    optimizer = checked.optimizer.with_offload(names)
    checked = replace(checked, reshards=True, offload=names, optimizer=optimizer)
    shape = SHAPE | {"num_hidden_layers": 4} | changes
    config = ModelConfig.from_hf(shape)
    planned = LanguageRun(checked, config, linears_of(checked, config), None).memory()
    model = build_model(ModelSource("small", shape, "--model"), dtype=torch.bfloat16, lazy=True)
    quantize_head = checked.settings.quantize_lm_head
    head = {"head": model.lm_head, "quantize_head": quantize_head}
    quantized = quantize_linears(model, checked.scheme, seed=0, realize=False, **head)
    units, groups = decoder_units(model), parameter_groups(model, 0.1)
    parallel = DataParallel(model, quantized, make_mesh(1, 1, "cpu"), units=units, host_gradients=True)
    for group in groups:
        group["params"] = [parallel.master(p) for p in group["params"]]
    built = optimizer.build(groups, 0.01)
    built.__class__ = type("Moving", (type(built),), {"states_on_host": True})
    built.place(parallel.placements)
    ids = torch.randint(0, 512, (1, 9))
    for index in range(2):
        parallel.begin_micro_batch(index)
        model(ids[:, :-1], ids[:, 1:].contiguous()).loss.backward()
        parallel.end_backward()
        if not index:
            waiting = [p.grad for p in model.parameters() if p.grad is not None] + [parallel._host._buffer]
            assert planned.held == pytest.approx(held(waiting), rel=0.01)
    parallel._host.finish()
    built.step()
    update = built._updates[0].update
    states = [t for p, state in built.state.items() for key, t in state.items() if key not in ON_HOST]
    on_host = held([bucket.transfers[0][0] for bucket in update._buckets])
    assert planned.optimizer == pytest.approx(held([*states, *update._stages]) - on_host, rel=0.01)
    if parallel.full_shard is not None:
        parallel.full_shard.gather(i for i, unit in enumerate(units) if unit.called in list(model.layers)[:2])
    codes = chain.from_iterable(m.buffers() for m in model.modules() if isinstance(m, WeightCodes))
    on_device = held([*(t for p in model.parameters() for t in plain_tensors(p)), *codes])
    # A third layer's come in while one runs.
    on_device += max(b._staging_bytes for b in parallel.full_shard._blocks if b.called in list(model.layers))
    assert planned.weights == pytest.approx(on_device, rel=0.02)
    weights = held(sharded.master for sharded in parallel.parameters if sharded.on_host)
    assert planned.host == {
        "v": pytest.approx(on_host, rel=0.01),
        "weights": pytest.approx(weights, rel=0.01),
        "gradients": pytest.approx(held(parallel._host.tensors), rel=0.01),
    }
