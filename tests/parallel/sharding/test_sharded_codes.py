"""Gathered codes are those of the whole weight, bit for bit, however its rows are divided, at one byte or less."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import nn

from qtrain.comm.wire import sent
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding import sharded_codes
from qtrain.parallel.sharding.sharded_codes import ShardedCodes, gather_codes, share_codes, update_codes
from qtrain.parallel.sharding.shards import local_tensors, shard_parameters
from qtrain.quant import SCHEMES
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.weight_codes import wire_format
from tests.parallel.sharding.mapped_files import MappedFiles
from tests.worlds import run_ranks

CASES = {
    "int8": ("int8", {"granularity": "tensorwise"}, 1.0),
    "fp8_tensorwise": ("fp8_tensorwise", {}, 1.0),
    "fp8_tensorwise powers of two": ("fp8_tensorwise", {"power_of_two": True}, 1.0),
    "fp8_blockwise": ("fp8_blockwise", {}, 1.0),
    "int8_blockwise 32x32": ("int8_blockwise", {}, 1.0),
    "int8_blockwise 128x128": ("int8_blockwise", {"block": "128x128"}, 1.0),
    "switchback": ("switchback", {}, 1.0),
    "bitnet": ("bitnet", {}, 0.25),
    "bitnet int8": ("bitnet", {"backward": "int8"}, 0.25),
    "binary": ("binary", {}, 0.125),
    "binary int8": ("binary", {"backward": "int8"}, 0.125),
    "qat int4": ("qat", {}, 0.5),
    "qat int8": ("qat", {"weight": "int8", "activations": "int8"}, 1.0),
    "qat fp8": ("qat", {"weight": "fp8_row"}, 1.0),
}
ODD = ((1, 8), (130, 64), (300, 192), (260, 257), (256, 512))
"""[N, K]: fewer rows than ranks, rows that cut blocks, weights that one rank owns, whole blocks."""
EVEN = ((130, 64), (300, 192), (256, 512))


def _linears(name: str, shapes: tuple) -> list[LowBitLinear]:
    scheme, options, _ = CASES[name]
    made = SCHEMES.make(scheme, options, "--quantize")
    generator, linears = torch.Generator().manual_seed(0), []
    for n, k in shapes:
        linear = nn.Linear(k, n, bias=False).bfloat16()
        values = torch.randn(n, k, generator=generator) * torch.randn(n, 1, generator=generator).exp()
        values[n // 2] = 0  # a row of zeros
        linear.weight.data.copy_(values)
        linears.append(LowBitLinear(linear, made, torch.zeros(3, dtype=torch.int64)))
    return linears


def _digests(linears: list[LowBitLinear]) -> list[dict[str, str]]:
    def digest(t: torch.Tensor) -> str:
        return hashlib.sha256(t.contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()

    return [{name: digest(t) for name, t in linear.weight_codes.named_buffers()} for linear in linears]


def _gathered(name: str, shapes: tuple, replicate: int, shard: int, whole: bool) -> tuple:
    mesh, linears = make_mesh(replicate, shard, "cpu"), _linears(name, shapes)
    sharded = shard_parameters([(str(i), linear.weight) for i, linear in enumerate(linears)], mesh, lambda p: whole)
    for linear in linears:
        linear.keep_codes_only()
        for _, buffer in linear.weight_codes.named_buffers():
            buffer.zero_()
    weights = [ShardedCodes(s, linear) for s, linear in zip(sharded, linears, strict=True)]
    sent.clear()
    update_codes(weights)
    return _digests(linears), sent["codes"], sent["weights"]


def _gathered_in_all_cases(shapes: tuple, replicate: int, shard: int, whole: bool) -> dict[str, tuple]:
    return {name: _gathered(name, shapes, replicate, shard, whole) for name in CASES}


@pytest.mark.parametrize(("replicate", "shard", "whole"), [(1, 2, False), (1, 3, False), (2, 2, True)])
def test_gathered_codes_are_those_of_the_whole_weight(replicate, shard, whole):
    found = run_ranks(replicate * shard, _gathered_in_all_cases, ODD, replicate, shard, whole)
    for name in CASES:
        expected = _digests(_linears(name, ODD))
        assert all(of_rank[name][0] == expected for of_rank in found), name


def test_bytes_per_weight():
    """Between two ranks that hold the same number of rows."""
    elements = sum(n * k for n, k in EVEN)
    found, _ = run_ranks(2, _gathered_in_all_cases, EVEN, 1, 2, False)
    for name, (_, codes, weights) in found.items():
        assert weights == 0 and 0 < codes <= CASES[name][2] * elements / 2 * 1.01, name  # rows divide unevenly


@pytest.mark.parametrize(
    ("scheme", "options"),
    [
        ("int8", {}),
        ("fp8_rowwise", {}),
        ("int4", {}),
        ("mxfp8", {}),
        ("nvfp4", {}),
        ("qat", {"weight": "nvfp4"}),
        ("int8_blockwise", {"block": "1x128"}),
        ("int8", {"granularity": "tensorwise", "stochastic_rounding": True}),
        ("fp8_tensorwise", {"output": "bf16"}),
        ("fp8_tensorwise", {"grad_input": "bf16"}),
        ("switchback", {"weight_granularity": "rowwise"}),
    ],
)
def test_two_sets_of_codes_are_not_gathered(scheme, options):
    assert wire_format(SCHEMES.make(scheme, options, "--quantize")) is None


def _read(folder: Path) -> dict[str, tuple]:
    """Of every case the codes after a first and a second update, and how many weights were read from other ranks."""
    made = []

    def peer_memory(size: int, group: object, device: torch.device) -> MappedFiles:
        made.append(folder / str(len(made)))
        return MappedFiles(made[-1], size)

    sharded_codes.peer_memory, mesh, found = peer_memory, make_mesh(1, 2, "cpu"), {}  # in this process, a fork
    for name in CASES:
        linears = _linears(name, ODD)
        sharded = shard_parameters([(str(i), x.weight) for i, x in enumerate(linears)], mesh, lambda p: False)
        for linear in linears:
            linear.keep_codes_only()
        weights = [ShardedCodes(s, linear, keeps=True) for s, linear in zip(sharded, linears, strict=True)]
        share_codes(weights)
        digests = []
        for factor in (0.5, 2):  # then 1 again
            for weight in weights:
                for rows in local_tensors(weight.sharded.master):
                    rows.mul_(factor)
            update_codes(weights)
            for linear in linears:
                for _, buffer in linear.weight_codes.named_buffers():
                    buffer.zero_()
            gather_codes(weights, second_layout=True)
            digests.append(_digests(linears))
            torch.distributed.barrier()  # as a step does before it updates: nobody reads any more
        found[name] = *digests, sum(weight.memory is not None for weight in weights)
    return found


def test_codes_that_are_read_from_other_ranks_are_those_of_the_whole_weight(tmp_path):
    for of_rank in run_ranks(2, _read, tmp_path):
        for name in CASES:
            halved = _linears(name, ODD)
            for linear in halved:
                linear.weight.data.mul_(0.5)
                linear.refresh()
            first, second, shared = of_rank[name]
            assert (first, second) == (_digests(halved), _digests(_linears(name, ODD))), name
            assert shared == 3, name  # of (1, 8) one rank has the row, of (260, 257) all: those are sent
