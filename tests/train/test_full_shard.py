"""Full sharding trains as one process does, bit for bit, and frees the weights of blocks that do not run."""

import math

import pytest

from qtrain.bench.mesh_equality import SCHEMES_COMPARED, differences
from tests.cases import sampled
from tests.train.test_mesh_equality import _of_one, _results

CASES = [(scheme, "adamw_8bit", "1x2") for scheme in SCHEMES_COMPARED] + [
    ("int8", "muon", "1x3"),
    ("bitnet", "adamw_4bit", "2x2"),
]


SAMPLE = ("fp8_tensorwise delayed", "int8", "int4_weight")


@pytest.mark.parametrize(
    ("scheme", "optimizer", "mesh"), sampled(CASES, lambda scheme, _, mesh: scheme not in SAMPLE or mesh == "1x3")
)
def test_full_sharding_trains_as_one_process(scheme, optimizer, mesh):
    """With two micro-batches on every rank."""
    micro_batches = 2 * math.prod(map(int, mesh.split("x")))
    one = _of_one(scheme, optimizer, micro_batches)
    for of_rank in _results(scheme, optimizer, mesh, micro_batches, full_shard=True):
        assert differences(one, of_rank) == ""
