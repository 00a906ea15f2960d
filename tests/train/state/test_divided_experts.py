"""Checkpoints of divided experts: whole tensors, the same bit for bit on any number of processes that divide them."""

import pytest
import torch

from qtrain.comm.rank_group import RankGroup
from qtrain.models import ModelSource, empty_model
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.sharding.checkpoint_layout import ModelParallelState
from tests.parallel.sharding.test_checkpoint_layout import _run, _saved, _settings
from tests.system import TINY
from tests.test_mixture_runs import QWEN
from tests.worlds import run_ranks

MODEL = {**QWEN, "num_hidden_layers": 2, "moe_intermediate_size": 64, "hidden_size": 128, "head_dim": 128}
"""Heads of two tensor ranks, with whole blocks of columns."""
DIVIDED = [(2, 1, 2), (1, 1, 1), (4, 1, 4), (4, 1, 2)]
GROUPS = [(4, 2, 2), (1, 1, 1), (4, 2, 2), (2, 1, 2), (4, 2, 2), (2, 2, 1)]
CHAINS = [
    ("adamw_8bit", "int8", DIVIDED),
    ("muon", "int8_weight", DIVIDED),
    ("adamw", "fp8_tensorwise", DIVIDED),
    ("muon", "bf16", DIVIDED),
    ("adamw_8bit", "int8", GROUPS),
    ("adamw_4bit", "int4_weight", GROUPS),
]
"""Processes, --tp and --ep of the run that begins and of those that resume it."""


@pytest.mark.sweep
@pytest.mark.parametrize(("optim", "scheme", "degrees"), CHAINS)
def test_any_number_of_processes_resumes_what_others_saved(optim, scheme, degrees, tmp_path):
    """What each saves is what the first did."""
    settings = {"optim": optim, "quantize": scheme, "model": MODEL, "batch_size": 8}
    (world, tp, ep), *others = degrees
    path = run_ranks(world, _run, _settings(tmp_path, **settings, tp=tp, ep=ep, run_name="first"), 2)[0]
    expected = _saved(path)
    assert len(expected) > 30
    for number, (world, tp, ep) in enumerate(others):
        resumed = _settings(tmp_path, **settings, tp=tp, ep=ep, resume=path, runs_dir=str(tmp_path / f"{number}"))
        path = run_ranks(world, _run, resumed, 0)[0]
        found = _saved(path)
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}
        assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_states_of_projections_have_the_numbers_of_the_whole():
    """Muon's momenta: rank 1 of 2 has the third and fourth of two experts' gate and up."""
    source = ModelSource("m", {**TINY, **MODEL, "num_experts": 2, "num_hidden_layers": 1}, "--model")
    parts = ModelParallel(source.model_config(), None, RankGroup("", 2, 1))
    divided = ModelParallelState(empty_model(source, place=parts.place))
    name, step = "layers.0.mlp.experts.gate_up.weight", {"value": 3}
    own = {"momentum_0": {"shape": [64, 128]}, "momentum_1": {"shape": [64, 128]}, "step": step}
    meta = {"states": {name: own}, "groups": [{"params": [name], "options": {"parts": [64] * 4}}]}
    whole = divided.whole_meta(meta)
    assert list(whole["states"][name]) == ["momentum_0", "momentum_2", "momentum_1", "momentum_3", "step"]
    assert divided.own_meta(whole) == meta == {**whole, "states": meta["states"]}
    first, second = torch.zeros(64, 128), torch.ones(64, 128)
    tensors = divided.states({name: {"momentum_0": first, "momentum_1.int8.codes": second}})[name]
    assert tensors["momentum_2"] is first and tensors["momentum_3.int8.codes"] is second
