"""The plan's memory against the tensors of a world of any size, on a laptop: `python -m benchmarks.fake_world`.

A fake process group has as many ranks as it is told, and its collectives do nothing. On it the assembly of
llm_pretrain.py builds mesh, swap, shards and optimizer from tensors without memory, once for every rank looked at, and
their bytes are counted: of weights, codes and masters, and of optimizer states. (The plan leaves out the scales of
schemes that have one per row: 5 MiB of a 7B.)

    python -m benchmarks.fake_world                                    7B and 70B on 1,024 GPUs
    python -m benchmarks.fake_world --models qwen2.5-32b --world_size 256 --dp_shard 8 --optim adamw_4bit
    python -m benchmarks.fake_world --full_shard                       with two layers gathered
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain

import torch
import torch.distributed as dist
from torch import Tensor, nn

from qtrain.core.process import run_script
from qtrain.models import Decoder, read_model_source
from qtrain.optim.state_layout import local
from qtrain.parallel.mesh import make_mesh
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.parallel.sharding.shards import local_tensors
from qtrain.quant.linear import WeightCodes
from qtrain.tensors.lazy import plain_tensors
from qtrain.train.assembly.assemble import assemble, build_quantized
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import Prepared, prepare
from qtrain.train.plan.checked_settings import CheckedSettings, check_settings
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.settings.settings import LanguageSettings

GIB = 2**30
TOLERANCE = 0.01


@dataclass(frozen=True)
class Bytes:
    """Of a rank. weights: with codes and masters; masters: those alone, if known; states: of the optimizer."""

    weights: int
    states: int
    masters: int = 0


@contextlib.contextmanager
def fake_world(rank: int, world: int) -> Iterator[None]:
    """This process as one of `world` ranks whose collectives do nothing."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(world)
    dist.init_process_group("fake", rank=rank, world_size=world, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        os.environ.pop("WORLD_SIZE")
        if before is not None:
            os.environ["WORLD_SIZE"] = before


class EmptyArchitecture(LanguageArchitecture):
    """A native decoder whose weights have shapes and no memory."""

    def build(self, checked: CheckedSettings) -> nn.Module:
        with torch.device("meta"):
            return Decoder(self.config).to(checked.dtype)


def held_bytes(prepared: Prepared) -> Bytes:
    """What this rank of the prepared run's mesh holds, for an optimizer that updates element by element."""
    run = assemble(prepared, *build_quantized(prepared))
    model, parallel, mesh = run.model, run.parallel, prepared.mesh
    for sharded in parallel.parameters:
        elements = sharded.bounds[mesh.shard_rank + 1] - sharded.bounds[mesh.shard_rank]
        sharded.set_gradient(torch.empty(elements, dtype=prepared.dtype, device="meta"))
    with contextlib.suppress(NotImplementedError):  # the states come first; then there are no values to update
        run.optimizer.step()
    # As in the backward pass: a layer runs, and the next one is prefetched.
    assert isinstance(model, Decoder)
    units = decoder_units(model) if prepared.reshards else ()
    if parallel.full_shard is not None:
        parallel.full_shard.gather(i for i, unit in enumerate(units) if unit.called in list(model.layers)[:2])
    codes = chain.from_iterable(m.buffers() for m in model.modules() if isinstance(m, WeightCodes))
    weights = chain.from_iterable(plain_tensors(p) for p in model.parameters())
    masters = [t for sharded in parallel.parameters for t in local_tensors(sharded.master)]
    states = (t for state in run.optimizer.state.values() for key, t in state.items() if key != "step")
    return Bytes(
        _size([*weights, *codes, *masters, *parallel.weights.kept_codes]),
        _size(local(t) for t in states),
        _size(masters),
    )


def _size(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors, each storage once."""
    return sum({t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}.values())


def compare(settings: LanguageSettings, ranks: Iterable[int]) -> Iterator[tuple[int, Bytes, Bytes]]:
    """(rank, its planned bytes, its held ones) of `ranks` of the world that `settings` plan."""
    checked = check_settings(settings, "fake_world")
    source = read_model_source(settings.model)
    architecture = EmptyArchitecture(source, "native", settings.seq_len, source.model_config())
    prepared = prepare(checked, architecture, data=())
    memory = LanguageRun(prepared, architecture.config, prepared.linears, None).memory()
    planned = Bytes(memory.weights, memory.optimizer)
    for rank in ranks:
        with fake_world(rank, settings.world_size or 1):
            mesh = make_mesh(settings.dp_replicate, settings.dp_shard, "cpu")
            yield rank, planned, held_bytes(replace(prepared, mesh=mesh))


def difference(planned: Bytes, held: Bytes, fullest: bool) -> str:
    """Which kind the plan misses by more than TOLERANCE of a rank's masters and states; '' if none. Ranks that are not
    the fullest may hold less."""
    allowed = TOLERANCE * (held.masters + held.states)
    for kind in ("weights", "states"):
        off = getattr(held, kind) - getattr(planned, kind)
        if off > allowed or (fullest and off < -allowed):
            return f"{kind} differ by {off / 2**20:.2f} MiB"
    return ""


def main(argv: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.fake_world", description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", default=["qwen2.5-7b", "llama3.1-70b"])
    parser.add_argument("--world_size", type=int, default=1024)
    parser.add_argument("--dp_shard", type=int, default=0)
    parser.add_argument("--full_shard", action="store_true", help="ZeRO-3 instead of ZeRO-2")
    parser.add_argument("--quantize", default="fp8_tensorwise")
    parser.add_argument("--optim", default="adamw_8bit", help="one that updates element by element")
    parser.add_argument("--ranks", type=int, nargs="+", help="default: the first, the second, the middle and the last")
    given = parser.parse_args(argv)
    world, failures = given.world_size, 0
    for model in given.models:
        settings = LanguageSettings(
            model=model,
            quantize=given.quantize,
            optim=given.optim,
            batch_size=world,
            dp_shard=given.dp_shard,
            reshard_after_forward="always" if given.full_shard else "never",
            gpu="h200",
            dry_run=True,
            world_size=world,
            gpus_per_node=1,
        )
        started = time.perf_counter()
        ranks = sorted({r for r in given.ranks or (0, 1, world // 2, world - 1) if r < world})
        for rank, planned, held in compare(settings, ranks):
            wrong = difference(planned, held, fullest=rank == 0)
            failures += bool(wrong)
            print(
                f"{model} rank {rank} of {world}: weights, codes, masters {held.weights / GIB:.4f} GiB "
                f"(planned {planned.weights / GIB:.4f}), states {held.states / GIB:.4f} GiB "
                f"(planned {planned.states / GIB:.4f}){wrong and ': ' + wrong}",
                flush=True,
            )
        print(f"{model}: {time.perf_counter() - started:.1f} s", flush=True)
    sys.exit(1 if failures else 0)


if __name__ == "__main__":
    run_script(main)
