"""Full sharding trains as one process does, bit for bit, and frees the weights of blocks that do not run."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from benchmarks.fake_world import fake_world
from benchmarks.mesh_equality import SCHEMES_COMPARED, UNTIED, differences, train
from qtrain.models import ModelSource, ResidualOffload, build_model
from qtrain.models.cost.parameters import count_parameters
from qtrain.optim import parameter_groups
from qtrain.parallel.mesh import Mesh, make_mesh
from qtrain.parallel.sharding import weights
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.parallel.sharding.gradients import GradientReduction
from qtrain.quant import quantize_linears
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.settings.settings import LanguageSettings
from tests.cases import sampled
from tests.peak_bytes import PeakBytes
from tests.train.plan.test_plan import checked_of, linears_of
from tests.train.test_mesh_equality import _of_one, _results
from tests.worlds import run_ranks

CASES = [(scheme, "adamw_8bit", "1x2") for scheme in SCHEMES_COMPARED] + [
    ("int8", "muon", "1x3"),
    ("bitnet", "adamw_4bit", "2x2"),
]


SAMPLE = ("fp8_tensorwise delayed", "int8", "int4_weight")


@pytest.mark.parametrize(
    ("scheme", "optimizer", "mesh"), sampled(CASES, lambda scheme, _, mesh: scheme not in SAMPLE or mesh == "1x3")
)
def test_full_sharding_trains_as_one_process(scheme, optimizer, mesh):
    """With two micro-batches on every rank; an embedding and a head of their own are divided too."""
    micro_batches, tied = 2 * math.prod(map(int, mesh.split("x"))), scheme == "int8"
    one = _of_one(scheme, optimizer, micro_batches, tied=tied)
    for of_rank in _results(scheme, optimizer, mesh, micro_batches, full_shard=True, tied=tied):
        assert differences(one, of_rank) == ""


def _of_rank(moved: str) -> dict[str, Any]:
    """moved: to host memory, which a run on a CPU does not do by itself."""
    build, place = LanguageArchitecture.build, DataParallel.__init__

    def built(architecture: LanguageArchitecture, checked: CheckedSettings) -> torch.nn.Module:
        model = build(architecture, checked)
        model.residual_offload = ResidualOffload(len(model.layers)) if moved == "residuals" else None
        return model

    def placed(parallel: DataParallel, *args: Any, **options: Any) -> None:
        place(parallel, *args, **{**options, "host_gradients": moved == "gradients"})
        reduction.append(parallel._reduction)

    reduction: list[GradientReduction] = []
    LanguageArchitecture.build, DataParallel.__init__ = built, placed  # in this process, a fork
    mesh, config = make_mesh(1, 2, "cpu"), {**UNTIED, "num_hidden_layers": 4}
    found = train("int8", "adamw_8bit", mesh, torch.device("cpu"), 2, True, 4, True, config)
    on_host = reduction[0]._device is not None
    return {**found, "host": on_host * sum(bucket.sums.nbytes for bucket in reduction[0]._buckets)}


@pytest.mark.parametrize("kind", ["residuals", "gradients"])
def test_what_is_in_host_memory_changes_no_bits(kind):
    """Both come and go: a layer's weights, and its input or the sums of its gradients."""
    for without, moved in zip(*(run_ranks(2, _of_rank, moved) for moved in ("", kind)), strict=True):
        assert without.pop("host") == 0 and (moved.pop("host") > 0) == (kind == "gradients")
        assert differences(without, moved) == ""


SHAPE = {"model_type": "qwen2", "vocab_size": 128, "hidden_size": 128, "intermediate_size": 256}
SHAPE |= {"num_hidden_layers": 12, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.mark.parametrize(
    ("full_shard", "options"),
    [
        (True, {}),
        (True, {"quantize": "fp8_tensorwise"}),
        (True, {"quantize": "int4_weight"}),
        (True, {"quantize": "bitnet", "optim": "muon"}),
        (False, {"quantize": "fp8_tensorwise"}),
        (False, {"quantize": "int8"}),
        (False, {"quantize": "int4_weight"}),
    ],
    ids=str,
)
def test_a_build_takes_what_a_rank_keeps_and_one_matrix(full_shard, options, monkeypatch):
    """At its peak, on the first of eight ranks, as the plan says: with full sharding about a quarter of this model,
    without it the codes and a shard, never all weights besides."""
    monkeypatch.setattr(weights, "ALONE_BYTES", 1 << 14)  # matrices are sent alone, as large ones are
    checked = checked_of(LanguageSettings(batch_size=8, seq_len=8, **options))
    checked = replace(checked, mesh=Mesh(1, 8), reshards=full_shard)
    source = ModelSource("many layers", SHAPE, "--model")
    config = source.model_config()
    planned = sum(LanguageRun(checked, config, linears_of(checked, config), None).memory().build.values())
    with fake_world(0, 8), PeakBytes() as counted:
        mesh = make_mesh(1, 8, "cpu")
        model = build_model(source, dtype=torch.bfloat16, lazy=True)
        quantized = quantize_linears(model, checked.scheme, seed=0, head=model.lm_head, realize=False)
        hidden = {id(p) for group in parameter_groups(model, 0.1) if group["hidden"] for p in group["params"]}
        needs_whole = checked.optimizer.needs_whole
        units = decoder_units(model) if full_shard else ()
        DataParallel(model, quantized, mesh, lambda p: needs_whole(id(p) in hidden), units=units)
    assert 0.85 * planned < counted.peak < planned
    assert not full_shard or planned < 0.3 * 2 * count_parameters(config).total
