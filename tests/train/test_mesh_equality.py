"""The reduced matrix of `python -m benchmarks.mesh_equality`: losses, norms, weights, codes and optimizer states are
those of one process, bit for bit. The full one is that command."""

import functools
import math
import subprocess
import sys
from typing import Any

import pytest
import torch

from benchmarks import mesh_equality
from benchmarks.mesh_equality import CONFIG, DTYPES, SCHEMES_COMPARED, UNTIED, differences, promised, train
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding import gradient_buckets, weights
from tests.cases import sampled
from tests.system import ROOT
from tests.worlds import run_ranks

STEPS = 2
CASES = [(scheme, "adamw_8bit", "1x2") for scheme in SCHEMES_COMPARED] + [
    ("bf16", "adamw", "1x3"),
    ("int8", "adamw_4bit", "1x3"),
    ("int8_weight", "adamw_8bit", "1x3"),
    ("fp8_tensorwise", "muon", "1x3"),
    ("fp8_blockwise", "q_galore_adamw", "1x3"),
    ("bitnet", "muon", "2x2"),
    ("fp8_rowwise", "adamw_8bit", "2x1"),
]


def _of_rank(
    scheme: str,
    optimizer: str,
    mesh: str,
    micro_batches: int,
    deterministic: bool,
    full_shard: bool,
    dtype: str,
    tied: bool,
) -> dict[str, Any]:
    # Matrices of this model are sent alone, as large ones are; its vectors together.
    gradient_buckets.ALONE_BYTES = weights.ALONE_BYTES = 1 << 14
    made = make_mesh(*map(int, mesh.split("x")), "cpu")
    cpu, config = torch.device("cpu"), CONFIG if tied else UNTIED
    return train(
        scheme, optimizer, made, cpu, STEPS, deterministic, micro_batches, full_shard, config, dtype=DTYPES[dtype]
    )


def _results(
    scheme: str,
    optimizer: str,
    mesh: str,
    micro_batches: int,
    deterministic: bool = True,
    full_shard: bool = False,
    dtype: str = "bf16",
    tied: bool = True,
) -> list[dict[str, Any]]:
    world = math.prod(map(int, mesh.split("x")))
    return run_ranks(world, _of_rank, scheme, optimizer, mesh, micro_batches, deterministic, full_shard, dtype, tied)


@functools.cache
def _of_one(
    scheme: str, optimizer: str, micro_batches: int, deterministic: bool = True, dtype: str = "bf16", tied: bool = True
) -> dict[str, Any]:
    return _results(scheme, optimizer, "1x1", micro_batches, deterministic, dtype=dtype, tied=tied)[0]


SWEPT = (
    "qat",
    "int8",
    "int4_weight",
    "int8_weight",
    "bitnet",
    "bf16",
    "int8 tensorwise",
    "fp8_tensorwise",
    "int8_blockwise",
    "bitnet int8 backward",
    "binary",
    "fp8_rowwise",
)


@pytest.mark.parametrize(
    ("scheme", "optimizer", "mesh"),
    sampled(
        CASES,
        lambda scheme, optimizer, mesh: (mesh == "1x2" and scheme in SWEPT)
        or (scheme, optimizer) in (("fp8_blockwise", "q_galore_adamw"), ("fp8_tensorwise", "muon")),
    ),
)
def test_a_mesh_trains_as_one_process(scheme, optimizer, mesh):
    """With two micro-batches on every rank."""
    micro_batches = 2 * math.prod(map(int, mesh.split("x")))
    one = _of_one(scheme, optimizer, micro_batches)
    for of_rank in _results(scheme, optimizer, mesh, micro_batches):
        assert differences(one, of_rank) == ""


@pytest.mark.parametrize(("scheme", "dtype"), [("bf16", "bf16"), ("fp8_tensorwise delayed", "bf16"), ("bf16", "fp32")])
def test_without_deterministic_losses_are_close(scheme, dtype):
    """To 1e-5 in fp32, to 1e-3 where sums are rounded to bf16 or values to codes."""
    one = _of_one(scheme, "adamw", 4, False, dtype)
    for of_rank in _results(scheme, "adamw", "1x2", 4, False, dtype=dtype):
        assert differences(one, of_rank, promised(scheme, "adamw", dtype)) == ""


@pytest.mark.gpu
@pytest.mark.parametrize("sharding", [[], ["--full_shard"]], ids=["zero2", "zero3"])
def test_two_processes_on_one_gpu(sharding):
    command = [sys.executable, "-m", "benchmarks.mesh_equality", "--device", "cuda", "--share_gpu", *sharding]
    command += ["--meshes", "1x2", "--schemes", "fp8_tensorwise", "--optimizers", "adamw_8bit", "--steps", "2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0 and "DIFFERS" not in done.stdout, done.stdout + done.stderr


def test_a_gpu_cannot_be_shared_on_a_cpu(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mesh_equality", "--share_gpu"])
    with pytest.raises(SystemExit):
        mesh_equality.main()
    assert "--share_gpu: give it with --device cuda" in capsys.readouterr().err


def test_a_difference_is_found():
    one = _of_one("int8", "adamw_8bit", 4)
    (loss, norm), digests = one["steps"][-1], one["digests"]
    off_by_an_ulp = {**one, "steps": [*one["steps"][:-1], (loss * (1 + 2**-50), norm)]}
    assert differences(one, off_by_an_ulp).startswith("step 2")
    other_codes = {**one, "digests": {**digests, next(name for name in digests if name.startswith("codes")): ""}}
    assert differences(one, other_codes).startswith("1 of")
