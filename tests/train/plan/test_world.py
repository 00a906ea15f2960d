"""The plan of a world that is not the one that runs: against measured steps, against the bytes that ranks really send,
and the messages for worlds that cannot be."""

import json
import re

import numpy as np
import pytest
import torch

import llm_finetune
import llm_pretrain
import timm_finetune
from qtrain.bench.mesh_equality import MIXTURE, train
from qtrain.bench.results import RESULTS
from qtrain.data import Batch
from qtrain.distributed.gradient_wire import GRADIENT_WIRES
from qtrain.distributed.mesh import Mesh, make_mesh
from qtrain.distributed.wire import sent
from qtrain.models import (
    Decoder,
    Lora,
    ModelConfig,
    ModelSource,
    add_lora,
    apply_activation_checkpointing,
    build_model,
    read_model_source,
)
from qtrain.models.cost import count_parameters
from qtrain.models.tensor_parallel import planned_config
from qtrain.models.trained_cost import only_adapters
from qtrain.optim import parameter_groups
from qtrain.quant import SCHEMES, base_scheme, quantize_linears
from qtrain.train.language import language_forward
from qtrain.train.parallel import DataParallel
from qtrain.train.plan.cluster import Cluster, Ranks
from qtrain.train.plan.language_plan import plan_language_run
from qtrain.train.plan.wires import IN_NODE, START_SECONDS, WIRES
from qtrain.train.plan.world import WorldPlan
from qtrain.train.planned_machine import planned_hardware
from qtrain.train.settings import LanguageSettings
from qtrain.train.step import compute_gradients
from tests.data.corpora import write_raw
from tests.system import Outcome, call, flags, write_model
from tests.train.plan.test_plan import checked_of, linears_of
from tests.worlds import run_ranks

FP8 = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "compile": True}
GIB = 2**30


def world_of(model: str | dict, world: int, **options) -> WorldPlan:
    """A plan of 32 sequences of 1,024 tokens a GPU, on H200s."""
    config = read_model_source(model).model_config() if isinstance(model, str) else ModelConfig.from_hf(model)
    chosen = {"seq_len": 1024, "batch_size": 32 * world, "gpu": "h200", "dry_run": True, "world_size": world}
    checked = checked_of(LanguageSettings(**{**chosen, **options}))
    hardware = planned_hardware(checked.settings, checked.device)
    linears = linears_of(checked, planned_config(config, checked.settings.tp, 1))
    return plan_language_run(checked, config, linears, hardware, ()).world


# ---- against measurements --------------------------------------------------------------------------------------------


SEVEN = {"optim": "adamw_8bit", "micro_batch_size": 8}
ZERO3 = {"reshard_after_forward": "always"}


def measured(model: str) -> dict[str, float]:
    """tok/s by column of docs/results/distributed.json."""
    table, _ = json.loads((RESULTS / "distributed.json").read_text())["tables"]
    row = next(row for row in table["rows"] if row["name"].lower() == model)
    return {column: cell["value"] for column, cell in row["cells"].items() if "value" in cell}


@pytest.mark.parametrize(
    ("model", "column", "world", "options"),
    [
        ("qwen2.5-0.5b", "1 GPU", 1, {}),
        ("qwen2.5-0.5b", "2 GPUs, ZeRO-2", 2, {}),
        ("qwen2.5-0.5b", "2 GPUs, DDP", 2, {"dp_replicate": 2}),
        ("qwen2.5-7b", "1 GPU", 1, SEVEN),
        ("qwen2.5-7b", "2 GPUs, ZeRO-2", 2, SEVEN),
        ("qwen2.5-7b", "2 GPUs, ZeRO-3", 2, SEVEN | {"reshard_after_forward": "always", "batch_size": 128}),
        ("qwen2.5-7b", "2 GPUs, --tp 2", 2, SEVEN | {"tp": 2, "micro_batch_size": 16, "batch_size": 32}),
    ],
)
def test_the_planned_step_is_the_measured_one(model, column, world, options):
    """To 5%; 10% is asked for. The constants of the plan were fitted to these rows."""
    plan = world_of(model, world, **{**FP8, "batch_size": 128 * world, "micro_batch_size": 32, **options})
    assert plan.step(plan.mesh).rate == pytest.approx(measured(model)[column], rel=0.05)


@pytest.mark.parametrize(
    ("model", "world", "options", "rate"),
    [
        ("qwen2.5-1.5b", 1, {"batch_size": 128, "micro_batch_size": 16}, 78275),
        ("qwen2.5-1.5b", 2, {"batch_size": 256, "micro_batch_size": 16}, 154829),
        ("qwen2.5-7b", 2, {**SEVEN, "micro_batch_size": 16, "batch_size": 128, **ZERO3}, 38191),
        ("qwen2.5-14b", 2, {**SEVEN, "batch_size": 64, **ZERO3}, 18620),
    ],
)
def test_the_planned_step_is_one_that_was_measured_afterwards(model, world, options, rate):
    """Rows of the second table, to which nothing was fitted."""
    plan = world_of(model, world, **{**FP8, **options})
    assert plan.step(plan.mesh).rate == pytest.approx(rate, rel=0.05)


def test_computation_is_slower_than_light_by_the_given_fraction_and_recomputes():
    plan = world_of("qwen2.5-7b", 8, sol=0.5, **FP8)
    assert plan.sol == 0.5 and plan.sol_source == "--sol"
    assert world_of("qwen2.5-7b", 8, sol=0.25, **FP8).compute == pytest.approx(2 * plan.compute)
    again = world_of("qwen2.5-7b", 8, sol=0.5, activation_checkpointing="full", **FP8).compute / plan.compute
    assert 1.25 < again < 4 / 3  # all but the head


# ---- against what ranks send -----------------------------------------------------------------------------------------

SHAPE = {"model_type": "qwen2", "vocab_size": 512, "hidden_size": 256, "intermediate_size": 512}
SHAPE |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}


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


def _sent_with_experts(scheme: str, replicate: int, shard: int, ep: int) -> dict[str, int]:
    """Bytes that this rank sends in a step of one micro-batch."""
    mesh, device = make_mesh(replicate, shard, "cpu", ep=ep), torch.device("cpu")
    return train(scheme, "adamw", mesh, device, 1, False, mesh.data_world, config=MIXTURE)["sent"]


@pytest.mark.parametrize(
    ("scheme", "mesh", "ep"), [("fp8_tensorwise", (1, 4), 2), ("int8", (2, 2), 4), ("bf16", (4, 1), 2)], ids=str
)
def test_the_planned_bytes_of_divided_experts_are_those_that_ranks_send(scheme, mesh, ep):
    found = run_ranks(4, _sent_with_experts, scheme, *mesh, ep)
    options = {"quantize": scheme, "dp_replicate": mesh[0], "ep": ep, "batch_size": 8, "seq_len": 24}
    plan = world_of(MIXTURE, 4, **options)
    costs = plan.step(plan.mesh).costs
    kinds = {
        "gradients": ("gradients",),
        "weights": ("weights", "codes"),
        "tokens of experts": ("activations", "activation codes", "routes"),
    }
    for what, names in kinds.items():
        sent_by_ranks = [sum(of_rank.get(name, 0) for name in names) for of_rank in found]
        assert costs[what].bytes == pytest.approx(np.mean(sent_by_ranks), rel=0.02), what


def _sent_with_divided_layers(scheme: str, sequence: bool, checkpointing: str, shape: dict) -> dict[str, int]:
    """Bytes that this rank sends in a step of two micro-batches."""
    mesh = make_mesh(0, 0, "cpu", 2)
    source = ModelSource("small", shape, "--model")
    model = build_model(source, dtype=torch.bfloat16, tensor=mesh.tensor_group, sequence=sequence)
    apply_activation_checkpointing(model, checkpointing)
    quantized = quantize_linears(model, SCHEMES.make(scheme, {}, "-"), seed=0, head=model.lm_head)
    parallel, forward = DataParallel(model, quantized, mesh), language_forward(model, None)
    tokens = torch.arange(2 * 25).view(2, 25)
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for _ in range(2)]
    sent.clear()
    compute_gradients(model, forward, quantized, batches, 0, parallel=parallel)
    parallel.refresh()
    return dict(sent)


@pytest.mark.parametrize(
    ("scheme", "sequence", "checkpointing", "shape"),
    [
        ("fp8_tensorwise", True, "none", SHAPE),
        ("int8", True, "full", SHAPE),
        ("int4", True, "none", SHAPE),
        ("fp8_blockwise", True, "none", SHAPE),
        ("bitnet", False, "full", SHAPE),
        ("fp8_tensorwise", True, "full", MIXTURE | {"num_key_value_heads": 2}),
        ("fp8_rowwise", True, "none", MIXTURE | {"num_key_value_heads": 2}),
    ],
)
def test_the_planned_bytes_of_divided_layers_are_those_that_ranks_send(scheme, sequence, checkpointing, shape):
    found = run_ranks(4, _sent_with_divided_layers, scheme, sequence, checkpointing, shape)
    options = {"quantize": scheme, "sequence_parallel": sequence, "activation_checkpointing": checkpointing}
    plan = world_of(shape, 4, tp=2, batch_size=8, gradient_accumulation=2, seq_len=24, **options)
    costs = plan.step(plan.mesh).costs
    kinds = ("activations", "activation codes", "routes")
    activations = [sum(r.get(kind, 0) for kind in kinds) for r in found]
    assert costs["activations"].bytes == pytest.approx(np.mean(activations), rel=0.03)
    assert costs["gradients"].bytes == pytest.approx(np.mean([r["gradients"] for r in found]), rel=0.02)
    weights = [r.get("weights", 0) + r.get("codes", 0) for r in found]
    assert costs["weights"].bytes == pytest.approx(np.mean(weights), rel=0.02)


def _sent_with_frozen_layers(lora: Lora, quantize: str) -> dict[str, int]:
    """Bytes that this rank sends in a step of two micro-batches, layers fully sharded."""
    model = build_model(ModelSource("small", SHAPE, "--model"), dtype=torch.bfloat16, defer_layers=True)
    scheme = SCHEMES.make(quantize, {}, "-") if lora.base == "none" else base_scheme(lora.base, quantize)
    quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head)
    add_lora(model, lora, seed=0)
    parallel = DataParallel(model, quantized, make_mesh(0, 0, "cpu"), units=model.units())
    tokens = torch.arange(2 * 25).view(2, 25)
    batches = [Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()) for _ in range(2)]
    sent.clear()
    compute_gradients(model, language_forward(model, None), quantized, batches, 0, parallel=parallel)
    parallel.refresh()
    return dict(sent)


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
    plan = plan_language_run(checked, config, linears, hardware, (), only_adapters(config, lora)).world
    costs = plan.step(plan.mesh).costs
    assert plan.step(plan.mesh).reshards
    assert costs["gradients"].bytes == pytest.approx(np.mean([r["gradients"] for r in found]), rel=0.02)
    layers = [r.get("weights", 0) + r.get("codes", 0) for r in found]
    ends = 2 * 2 * 2 * config.vocab_size * config.hidden_size / 2  # embedding and head in bf16, twice, of two ranks
    # The last layer stays gathered between its forward and its backward pass.
    planned = (costs["weights of layers"].bytes - ends) * 3 / 4 + ends
    assert planned == pytest.approx(np.mean(layers), rel=0.03)


def test_worlds_of_divided_layers():
    """The table has what --tp divides: shard groups of the data ranks, memory of a rank's part."""
    plan = world_of("qwen2.5-7b", 16, tp=4, batch_size=64, optim="adamw_8bit", **FP8)
    worlds = {mesh.world: mesh for mesh in plan.meshes()}
    assert min(worlds) == 4 and (worlds[16].shard, worlds[16].tensor) == (4, 4)
    assert "1 x 4 x 4" in plan.table()[4]
    whole = world_of("qwen2.5-7b", 4, batch_size=64, optim="adamw_8bit", **FP8)
    assert plan.step(plan.mesh).memory < 0.5 * whole.step(whole.mesh).memory
    assert plan.step(plan.mesh).compute == pytest.approx(whole.step(whole.mesh).compute / 4)


def test_worlds_of_divided_experts():
    """The table has what --ep divides, and a GPU of more of them holds fewer experts."""
    plan = world_of("qwen3-30b-a3b", 8, ep=4, batch_size=64, optim="adamw_8bit", **FP8)
    worlds = {mesh.world: mesh for mesh in plan.meshes()}
    assert min(worlds) == 4 and worlds[8].of_experts == Mesh(1, 2, tensor=4)
    more = world_of("qwen3-30b-a3b", 8, ep=8, batch_size=64, optim="adamw_8bit", **FP8)
    weights = [p.memory_on(p.mesh, False)["weights"] for p in (plan, more)]
    assert weights[1] < 0.75 * weights[0]
    exchanged = [p.step(p.mesh).costs["tokens of experts"].bytes for p in (plan, more)]
    assert exchanged[1] == pytest.approx(7 / 3 * exchanged[0])  # a token reaches all other ranks


# ---- what crosses between machines -----------------------------------------------------------------------------------

CLUSTER = Cluster(8, WIRES["nvlink"], WIRES["ib400"])


def test_collectives_by_hand():
    """Bytes of 64 ranks on 8 machines of 8: of an all-to-all 56 parts leave the machine, of an all-gather 56 parts
    enter it and its 8 GPUs share them."""
    ranks, volume, wire = Ranks(64, 8), 64e9, WIRES["ib400"]
    a2a, gather = CLUSTER.all_to_all(ranks, volume, calls=3), CLUSTER.all_gather(ranks, volume, calls=3)
    assert (a2a.inside, a2a.between) == (7e9, 56e9)
    assert a2a.seconds == pytest.approx(56e9 / 45e9 + 3 * (56 * wire.message_seconds + START_SECONDS))
    assert (gather.inside, gather.between) == (56e9, 7e9)
    inside = 56e9 / 337.5e9 + 3 * 7 * WIRES["nvlink"].message_seconds
    assert gather.seconds == pytest.approx(inside + 3 * START_SECONDS)
    assert CLUSTER.all_gather(Ranks(1, 1), volume, 1) == CLUSTER.all_to_all(Ranks(1, 1), volume, 1)
    assert CLUSTER.all_to_all(Ranks(8, 8), volume, 1).between == 0
    sums = CLUSTER.reduction(ranks, volume, 3, by_machine=True)  # 7 parts of 8 to neighbors, 7 of 8 of an eighth
    assert (sums.inside, sums.between) == (56e9, 7e9)
    assert CLUSTER.reduction(ranks, volume, 3, by_machine=False) == a2a


def test_groups_of_ranks_on_machines():
    hsdp = Mesh(16, 4)
    assert CLUSTER.shard_group(hsdp) == Ranks(4, 4) and CLUSTER.replicate_group(hsdp) == Ranks(16, 2)
    wide = Mesh(4, 16)
    assert CLUSTER.shard_group(wide) == Ranks(16, 8) and CLUSTER.replicate_group(wide) == Ranks(4, 1)
    assert CLUSTER.shard_group(Mesh(1, 6)) == Ranks(6, 6) and CLUSTER.world(Mesh(1, 6)) == Ranks(6, 6)


def test_weights_stay_in_the_machine_that_holds_the_shard_group():
    hsdp, zero2 = (world_of("qwen2.5-7b", 64, dp_shard=shard, **FP8) for shard in (8, 0))
    assert hsdp.step(hsdp.mesh).costs["weights"].between == 0 < zero2.step(zero2.mesh).costs["weights"].between
    assert [m.shard for m in hsdp.meshes()] == [1, 2, 4, *([8] * 10)]
    assert [m.shard for m in zero2.meshes()] == [2**n for n in range(13)]


def test_the_table_keeps_the_work_of_a_gpu():
    plan = world_of("qwen2.5-7b", 48, gpus_per_node=4, micro_batch_size=8, **FP8)
    assert plan.samples == 32 * 1024
    assert [mesh.world for mesh in plan.meshes()] == [1, 2, 4, 8, 16, 32, 48, 64, *(2**n for n in range(7, 13))]
    steps = [plan.step(mesh) for mesh in plan.meshes()]
    assert {step.compute for step in steps} == {plan.compute} and steps[0].efficiency == 1
    seconds, memory = [step.seconds for step in steps], [step.memory for step in steps]
    assert seconds == sorted(seconds) and memory == sorted(memory, reverse=True)
    lines = plan.table()
    assert "32,768 tokens a GPU and step at every size (weak scaling)" in lines[0] and len(lines) == 2 + len(steps)
    assert re.search(rf"^ *48 +1 x 48 +{steps[6].memory / GIB:.1f} ", lines[8])


def test_what_does_not_fit_is_marked():
    plan = world_of("llama3.1-70b", 8, **FP8)
    assert plan.table()[-1] == "* does not fit: H200 has 139.8 GiB" and "*" in plan.table()[2]
    assert "*" not in "".join(world_of("qwen2.5-0.5b", 8, **FP8).table())


def test_full_sharding_gathers_layers_twice_a_micro_batch_beside_the_computation():
    options = {"micro_batch_size": 8, **FP8}
    always, never = (world_of("qwen2.5-7b", 8, reshard_after_forward=mode, **options) for mode in ("always", "never"))
    full, zero2 = (plan.step(plan.mesh) for plan in (always, never))
    assert full.reshards and not zero2.reshards and full.memory < zero2.memory
    config = read_model_source("qwen2.5-7b").model_config()
    linears = count_parameters(config).linear  # a byte each
    ends = 2 * 2 * config.vocab_size * config.hidden_size  # embedding and head: once a micro-batch
    assert full.costs["weights of layers"].bytes == pytest.approx(4 * (2 * linears + ends) * 7 / 8)
    others = zero2.costs["weights"].bytes - (linears + ends) * 7 / 8
    assert full.costs["weights"].bytes == pytest.approx(others)
    assert full.costs["gradients"].bytes == pytest.approx(4 * zero2.costs["gradients"].bytes)
    assert zero2.exposed < full.exposed < full.sent.seconds
    one = always.step(Mesh())
    assert not one.reshards and one.exposed == 0


def test_auto_shards_fully_where_the_memory_does_not_suffice():
    plan = world_of("llama3.1-70b", 64, batch_size=64, activation_checkpointing="full", **FP8)
    assert plan.step(plan.mesh).reshards and "1 x 64, ZeRO-3" in plan.table()[8]
    small = world_of("qwen2.5-0.5b", 64, **FP8)
    assert not small.step(small.mesh).reshards


def test_a_slower_wire_takes_longer_and_low_bit_gradients_less():
    def exposed(**options) -> float:
        plan = world_of("qwen2.5-7b", 64, **FP8, **options)
        return plan.step(plan.mesh).exposed

    assert exposed(wire="ethernet100") > 1.6 * exposed(wire="ib200") > 1.6 * exposed()
    assert exposed(gradient_wire="int4") < 0.6 * exposed()


def test_every_gpu_has_its_links_and_every_link_a_rate():
    from qtrain.hardware import DATASHEET, MEMORY_GIB

    assert IN_NODE.keys() == DATASHEET.keys() == MEMORY_GIB.keys() and set(IN_NODE.values()) <= WIRES.keys()
    assert all(1e8 < wire.bandwidth < wire.line_rate and wire.message_seconds > 0 for wire in WIRES.values())


# ---- the scripts -----------------------------------------------------------------------------------------------------

TOKENS = {"type": "token", "dataset_dir": "tokens"}


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_model(tmp_path / "tiny.json")
    write_raw(tmp_path / "tokens/0.bin", np.arange(3201) % 200)
    return tmp_path


def dry(main, **options) -> Outcome:
    return call(main, flags(**{"dry_run": True, "gpu": "h200", "world_size": 16, **options}))


LANGUAGE = {"model": "tiny.json", "train_ds": TOKENS, "seq_len": 32, "batch_size": 32}


def test_pretraining_is_planned_for_a_gpu_that_is_not_here(here):
    done = dry(llm_pretrain.main, quantize="fp8_rowwise", **LANGUAGE)
    assert done.code == 0, done.err
    assert "(2 x 1 accumulated x 16 devices)" in done.out and "device  H200, datasheet" in done.out
    assert "mesh    1 x 16 (replicate x shard, ZeRO-2)" in done.out
    assert "world   16 GPUs, 2 machines of 8: nvlink (338 GB/s) inside and ib400 (45 GB/s) between" in done.out
    assert "none of it overlaps" in done.out and "sizes   64 tokens a GPU and step" in done.out
    assert not (here / "runs").exists()
    alone = call(llm_pretrain.main, flags(**LANGUAGE, dry_run=True, gpu="4090"))
    assert "device  RTX 4090" in alone.out and "world" not in alone.out


def test_adapters_send_themselves(here):
    options = {**LANGUAGE, "pretrained": False, "train_ds": {**TOKENS, "tokenizer": "byte"}}
    whole = dry(llm_finetune.main, **options)
    adapted = dry(llm_finetune.main, **options, lora={"r": 2, "targets": ["o_proj"]})
    assert whole.code == adapted.code == 0, (whole, adapted)
    bytes_sent = [
        float(re.search(r"sends [\d.]+ MiB a step \(gradients ([\d.]+)", done.out)[1]) for done in (whole, adapted)
    ]
    assert bytes_sent[1] == pytest.approx(2 * 2 * 32 * 2 * 4 * 15 / 16 / 2**20, abs=0.006)  # two layers, fp32
    assert bytes_sent[0] > 5 * bytes_sent[1]


def test_images_are_planned_too(here):
    options = {"model": "vit_tiny_patch16_224", "pretrained": False, "n_steps": 1, "batch_size": 64, "device": "auto"}
    done = dry(timm_finetune.main, **options, train_ds={"type": "sklearn:digits", "split": "train"})
    assert done.code == 0, done.err
    assert "sizes   4 images a GPU and step" in done.out and "img/s" in done.out
    assert "ViT-giant in bf16" in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dry_run": False}, "--gpu: it plans for other machines than this run's; add --dry_run"),
        ({"dry_run": False, "gpu": None}, "--world_size: it plans for other machines"),
        (
            {"gpu": None, "device": "cpu"},
            "--world_size: there is no GPU here to plan for; name one, such as --gpu h200",
        ),
        ({"gpu": "h20"}, "--gpu: unknown GPU 'h20'. Did you mean 'h200'?"),
        ({"gpu": "a100", "quantize": "fp8_rowwise"}, "--gpu: A100 has no FP8 arithmetic, which fp8_rowwise needs"),
        ({"quantize": "auto"}, "--gpu: --quantize auto times the GPU that is here"),
        ({"device": "cpu"}, "--gpu: it names the GPU to plan for, and --device cpu none"),
        ({"wire": "ib4000"}, "--wire: unknown wire 'ib4000'. Did you mean 'ib400'?"),
        ({"world_size": None, "wire": "ib200"}, "--wire: it needs --world_size"),
        ({"world_size": None, "sol": 0.5}, "--sol: it needs --world_size"),
        ({"world_size": None, "gpus_per_node": 4}, "--gpus_per_node: it needs --world_size"),
        ({"gpus_per_node": 5}, "--gpus_per_node: 5 does not divide --world_size 16"),
        ({"world_size": 0}, "--world_size: 0 is out of range; it must be a whole number from 1 to 100000 or null"),
        ({"gpus_per_node": 0}, "--gpus_per_node: 0 is out of range"),
        ({"sol": 1.5}, "--sol: 1.5 is out of range"),
        ({"dp_shard": 3}, "--dp_shard: 3 does not divide the 16 processes"),
        ({"ep": 3}, "--ep: 3 does not divide the 16 processes"),
        ({"batch_size": 24}, "--batch_size: 24 sequences cannot be shared equally by 16 devices"),
        ({"model_impl": "hf"}, "--world_size: what tiny.json computes and keeps is not known"),
    ],
    ids=str,
)
def test_worlds_that_cannot_be_planned_are_refused(here, options, message):
    chosen = {**LANGUAGE, "dry_run": True, "gpu": "h200", "world_size": 16, **options}
    done = call(llm_pretrain.main, flags(**{key: value for key, value in chosen.items() if value is not None}))
    assert done.code == 2 and done.out == "" and done.err.count("\n") == 1, done
    assert message in done.err and not (here / "runs").exists()


def test_several_processes_plan_no_other_world(here, monkeypatch):
    for name, value in {"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}.items():
        monkeypatch.setenv(name, value)
    done = dry(llm_pretrain.main, **LANGUAGE)
    assert done.code == 2 and "--world_size: one process plans for any world" in done.err


def test_one_gpu_of_a_world_is_the_plan_of_one_process():
    """The same memory, whether processes or --world_size say the mesh."""
    plan = world_of("qwen2.5-0.5b", 1, **FP8)
    checked = checked_of(LanguageSettings(seq_len=1024, batch_size=32, gpu="h200", dry_run=True, **FP8))
    config = read_model_source("qwen2.5-0.5b").model_config()
    hardware = planned_hardware(checked.settings, checked.device)
    alone = plan_language_run(checked, config, linears_of(checked, config), hardware, ())
    assert alone.world is None and plan.memory_on(Mesh(), False) == alone.memory
    assert plan.memory_on(Mesh(1, 8), False) != alone.memory
