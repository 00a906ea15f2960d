"""The plan of a world that is not the one that runs: against measured steps, what crosses between machines, and the
messages for worlds that cannot be."""

import json
import re

import numpy as np
import pytest

import llm_finetune
import llm_pretrain
import timm_finetune
from benchmarks.results import RESULTS
from qtrain.models import (
    ModelConfig,
    read_model_source,
)
from qtrain.models.cost.linear_bytes import rows_per_token
from qtrain.models.cost.parameters import count_parameters
from qtrain.parallel.layers.local_config import local_config
from qtrain.parallel.mesh import Mesh
from qtrain.train.plan.cluster import Cluster, Ranks
from qtrain.train.plan.language_plan import plan_language_run
from qtrain.train.plan.world import WorldPlan
from qtrain.train.settings.machine import START_SECONDS, WIRES, planned_hardware, reserves_every_routing
from qtrain.train.settings.settings import LanguageSettings
from tests.data.corpora import write_raw
from tests.system import Outcome, call, flags, write_model
from tests.train.plan.test_plan import checked_of, linears_of

FP8 = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "compile": True}
GIB = 2**30


def world_of(model: str | dict, world: int, **options) -> WorldPlan:
    """A plan of 32 sequences of 1,024 tokens a GPU, on H200s."""
    config = read_model_source(model).model_config() if isinstance(model, str) else ModelConfig.from_hf(model)
    chosen = {"seq_len": 1024, "batch_size": 32 * world, "gpu": "h200", "dry_run": True, "world_size": world}
    checked = checked_of(LanguageSettings(**{**chosen, **options}))
    hardware = planned_hardware(checked.settings, checked.device)
    linears = linears_of(checked, local_config(config, checked.settings.tp, 1))
    return plan_language_run(checked, config, linears, hardware).world


# ---- against measurements --------------------------------------------------------------------------------------------


SEVEN = {"optim": "adamw_8bit", "micro_batch_size": 8}
ZERO3 = {"reshard_after_forward": "always"}


def measured(model: str) -> dict[str, float]:
    """tok/s by column of docs/results/distributed.json."""
    table, _ = json.loads((RESULTS / "distributed.json").read_text())["tables"]
    row = next(row for row in table["rows"] if row["name"].lower() == model)
    return {column: cell["value"] for column, cell in row["cells"].items() if "value" in cell}


@pytest.mark.parametrize(
    ("model", "world", "options", "rate"),
    [
        ("qwen2.5-1.5b", 1, {"batch_size": 128, "micro_batch_size": 16}, 90960),
        ("qwen2.5-1.5b", 2, {"batch_size": 256, "micro_batch_size": 16}, 179983),
        ("qwen2.5-7b", 1, SEVEN | {"batch_size": 64, "micro_batch_size": 16}, 24211),
        ("qwen2.5-7b", 2, SEVEN | ZERO3 | {"batch_size": 128, "micro_batch_size": 16}, 46052),
    ],
)
def test_the_planned_step_is_the_measured_one(model, world, options, rate):
    """To 5%; 10% is asked for. H200s with a low-bit head: docs/distributed.md, to which nothing was fitted."""
    plan = world_of(model, world, **{**FP8, "quantize_lm_head": True, **options})
    assert plan.step(plan.mesh).rate == pytest.approx(rate, rel=0.05)


@pytest.mark.parametrize(
    ("model", "column", "options"),
    [
        ("qwen2.5-0.5b", "2 GPUs, ZeRO-2", {}),
        ("qwen2.5-0.5b", "2 GPUs, DDP", {"dp_replicate": 2}),
        ("qwen2.5-7b", "2 GPUs, ZeRO-2", SEVEN),
        ("qwen2.5-7b", "2 GPUs, --tp 2", SEVEN | {"tp": 2, "micro_batch_size": 16, "batch_size": 32}),
    ],
)
def test_two_gpus_take_the_share_that_they_were_measured_to(model, column, options):
    """Of twice one GPU. The constants of the exchange were fitted to these rows; products are faster since."""
    two, one = (
        world_of(model, n, **{**FP8, "batch_size": 128 * n, "micro_batch_size": 32, **chosen})
        for n, chosen in ((2, options), (1, SEVEN if "7b" in model else {}))
    )
    rates = measured(model)
    share = two.step(two.mesh).rate / (2 * one.step(one.mesh).rate)
    assert share == pytest.approx(rates[column] / (2 * rates["1 GPU"]), abs=0.025)


def test_full_sharding_takes_the_share_that_it_was_measured_to():
    """94% of twice one GPU: docs/distributed.md."""
    plan = world_of("qwen2.5-7b", 2, **{**FP8, **SEVEN, "micro_batch_size": 16, "batch_size": 128, **ZERO3})
    assert plan.step(plan.mesh).rate / (2 * plan.step(Mesh()).rate) == pytest.approx(0.94, abs=0.01)


def test_computation_is_slower_than_light_by_the_given_fraction_and_recomputes():
    plan = world_of("qwen2.5-7b", 8, sol=0.5, **FP8)
    assert plan.work.sol == 0.5 and plan.work.sol_source == "--sol"
    # The fraction that a log tells is of the whole step.
    assert plan.work.update == 0 < world_of("qwen2.5-7b", 8, **FP8).work.update
    assert world_of("qwen2.5-7b", 8, sol=0.25, **FP8).compute == pytest.approx(2 * plan.compute)
    again = world_of("qwen2.5-7b", 8, sol=0.5, activation_checkpointing="full", **FP8).compute / plan.compute
    assert 1.25 < again < 4 / 3  # all but the head


def test_worlds_of_divided_layers():
    """The table has what --tp divides: shard groups of the data ranks, memory of a rank's part."""
    plan = world_of("qwen2.5-7b", 16, tp=4, batch_size=64, optim="adamw_8bit", **FP8)
    worlds = {mesh.world: mesh for mesh in plan.meshes()}
    assert min(worlds) == 4 and (worlds[16].shard, worlds[16].tp) == (4, 4)
    assert "1 x 4 x 4" in plan.table()[4]
    whole = world_of("qwen2.5-7b", 4, batch_size=64, optim="adamw_8bit", **FP8)
    assert plan.step(plan.mesh).memory < 0.5 * whole.step(whole.mesh).memory
    assert plan.step(plan.mesh).compute == pytest.approx(whole.step(whole.mesh).compute / 4)


def test_worlds_of_shared_sequences():
    """The table has what --cp divides; a GPU computes and keeps its part of each sequence."""
    long = {"seq_len": 32768, "batch_size": 4, "micro_batch_size": 1, "optim": "adamw_8bit", **FP8, "dp_shard": 4}
    whole, plan = world_of("qwen2.5-7b", 4, **long), world_of("qwen2.5-7b", 16, cp=4, **long)
    assert [mesh.world for mesh in plan.meshes()][:2] == [4, 8] and plan.mesh.readers == 4
    one, many = (p.step(p.mesh) for p in (whole, plan))
    assert plan.compute == pytest.approx(whole.compute / 4) and many.seconds < 0.4 * one.seconds
    kinds = [p.memory_on(p.mesh, False).kinds for p in (whole, plan)]
    assert kinds[1]["activations"] == pytest.approx(kinds[0]["activations"] / 4, rel=0.05)
    assert kinds[1]["weights"] == kinds[0]["weights"]
    # Of 8,192 tokens (2 x 28 + 2 x 4) heads of 128, forward and backward, 3/4 to other GPUs.
    assert many.costs["heads of attention"].bytes == 28 * 2 * 8192 * 64 * 128 * 2 * 3 / 4
    assert many.costs["gradients"].bytes > one.costs["gradients"].bytes


def test_worlds_of_divided_experts():
    """The table has what --ep divides, and a GPU of more of them holds fewer experts."""
    plan = world_of("qwen3-30b-a3b", 8, ep=4, batch_size=64, optim="adamw_8bit", **FP8)
    worlds = {mesh.world: mesh for mesh in plan.meshes()}
    assert min(worlds) == 4 and worlds[8].expert_mesh == Mesh(1, 2, tp=4)
    more = world_of("qwen3-30b-a3b", 8, ep=8, batch_size=64, optim="adamw_8bit", **FP8)
    weights = [p.memory_on(p.mesh, False).kinds["weights"] for p in (plan, more)]
    assert weights[1] < 0.75 * weights[0]
    exchanged = [p.step(p.mesh).costs["tokens of experts"].bytes for p in (plan, more)]
    assert exchanged[1] == pytest.approx(7 / 3 * exchanged[0])  # a token reaches all other ranks


def test_worlds_of_tensor_groups_that_share_experts():
    """4 groups of 2 have the experts of 8 ranks and half of all else; each rank sends the others half the tokens."""
    groups = world_of("qwen3-30b-a3b", 16, tp=2, ep=4, batch_size=64, optim="adamw_8bit", **FP8)
    assert [mesh.world for mesh in groups.meshes()][:2] == [8, 16] and groups.mesh.expert_mesh == Mesh(1, 2, tp=8)
    experts, tensor = (
        world_of("qwen3-30b-a3b", 16, **degree, batch_size=64, optim="adamw_8bit", **FP8)
        for degree in ({"ep": 8}, {"tp": 2})
    )
    costs, of_experts, of_tensor = (p.step(p.mesh).costs for p in (groups, experts, tensor))
    # 8 sequences a group in place of 4 a rank.
    assert costs["tokens of experts"].bytes == pytest.approx(of_experts["tokens of experts"].bytes)
    assert costs["activations"].bytes < of_tensor["activations"].bytes
    # Half of a rank's experts' gradients, 1/8 of all, goes to its one peer; of all else, `dense` bytes of one model,
    # 7/8 of one half to other groups. With --ep alone 15/16 of all of it, with --tp alone 7/8 of half of everything.
    sent = costs["gradients"].bytes, of_experts["gradients"].bytes, of_tensor["gradients"].bytes
    dense = (sent[1] - sent[2] / 7) * 8 / 7
    assert sent[0] == pytest.approx(sent[1] - dense / 2, rel=0.01)
    weights = [p.memory_on(p.mesh, False).kinds["weights"] for p in (groups, experts, tensor)]
    assert weights[0] < weights[1] < weights[2]


@pytest.mark.parametrize(
    ("options", "loads"),
    [
        ({"compile": True}, 8),
        ({"compile": True, "cuda_graphs": False}, 2),
        ({}, 2),
        ({"deterministic": True, "micro_batch_size": 8}, 8),
    ],
)
def test_rows_of_divided_experts_are_for_twice_an_even_load_or_for_every_routing(options, loads):
    """--ep 8 of 128 experts, of which a token has 8: at most all tokens of 8 ranks have all of their routes to one."""
    config = read_model_source("qwen3-30b-a3b").model_config()
    settings = LanguageSettings(ep=8, batch_size=64, **options)
    own = local_config(config, 1, 8, reserves_every_routing(settings))
    assert rows_per_token(own, 2**16) == pytest.approx(loads * 8, rel=0.01)
    plan = world_of("qwen3-30b-a3b", 8, ep=8, batch_size=64, **options)
    assert (plan.step(plan.mesh).memory > 200 * GIB) == (loads == 8)


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
    assert plan.work.samples == 32 * 1024
    assert [mesh.world for mesh in plan.meshes()] == [1, 2, 4, 8, 16, 32, 48, 64, *(2**n for n in range(7, 13))]
    steps = [plan.step(mesh) for mesh in plan.meshes()]
    updates = [plan.work.update / step.mesh.shard for step in steps]  # ZeRO-2: each rank steps its shard
    assert [step.compute for step in steps] == pytest.approx([plan.compute + update for update in updates])
    assert updates[0] > 47 * updates[6] > 0 and steps[0].efficiency == 1
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
    assert 0 < full.exposed < 0.5 * full.sent.seconds
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
    from qtrain.core.hardware.datasheets import DATASHEET

    assert {gpu.link for gpu in DATASHEET.values()} <= WIRES.keys()
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
    alone = plan_language_run(checked, config, linears_of(checked, config), hardware)
    assert alone.world is None and plan.memory_on(Mesh(), False).kinds == alone.memory
    assert plan.memory_on(Mesh(1, 8), False).kinds != alone.memory
