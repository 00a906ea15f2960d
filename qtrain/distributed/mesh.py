"""The mesh of a run: `replicate` x `shard` ranks. Every rank reads its own micro-batches (data parallelism).

    replicate   groups that hold the same shards (DDP where shard is 1, HSDP where both are more than 1)
    shard       ranks that divide optimizer states and master weights among them (ZeRO-2), and with full sharding the
                weights of layers that do not run (ZeRO-3)

A run without a launcher is a mesh of one rank and needs no process group.
"""

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from qtrain.distributed.ranks import launched_world, rank
from qtrain.errors import UserError


@dataclass(frozen=True)
class Mesh:
    """The ranks by dimension. device_mesh: dimensions "replicate" and "shard"; None for one rank."""

    replicate: int = 1
    shard: int = 1
    device_mesh: DeviceMesh | None = None

    @property
    def world(self) -> int:
        return self.replicate * self.shard

    @property
    def rank(self) -> int:
        """replicate rank * shard + shard rank, which also numbers the micro-batches that are read at once."""
        return rank() if self.device_mesh is not None else 0

    @property
    def shard_rank(self) -> int:
        return self.rank % self.shard

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that divide one copy of the states among them."""
        return self.device_mesh.get_group("shard") if self.device_mesh is not None else None

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard as this one."""
        return self.device_mesh.get_group("replicate") if self.device_mesh is not None else None

    def describe(self, reshards: bool) -> str:
        kind = "DDP" if self.shard == 1 else "ZeRO-3: layers are gathered when they run" if reshards else "ZeRO-2"
        hybrid = "HSDP, " if self.replicate > 1 and self.shard > 1 else ""
        return f"{self.replicate} x {self.shard} (replicate x shard, {hybrid}{kind})"


def mesh_shape(dp_replicate: int, dp_shard: int, world: int) -> tuple[int, int]:
    """(replicate, shard) of --dp_replicate and --dp_shard, 0 for whatever the world leaves. Raises UserError."""
    for flag, size in (("--dp_replicate", dp_replicate), ("--dp_shard", dp_shard)):
        if size and world % size:
            raise UserError(
                f"{flag}: {size} does not divide the {world} process{'es' * (world > 1)} of the run; "
                f"allowed: {', '.join(str(d) for d in range(1, world + 1) if world % d == 0)}, or 0 for automatic."
            )
    if dp_replicate and dp_shard and dp_replicate * dp_shard != world:
        raise UserError(
            f"--dp_replicate, --dp_shard: {dp_replicate} x {dp_shard} is not the {world} process{'es' * (world > 1)} "
            "of the run; leave one of them 0."
        )
    shard = dp_shard or world // (dp_replicate or 1)
    return world // shard, shard


def make_mesh(dp_replicate: int, dp_shard: int, device_type: str) -> Mesh:
    """The mesh of this run; the process group must exist where there are several ranks."""
    replicate, shard = mesh_shape(dp_replicate, dp_shard, launched_world())
    if replicate * shard == 1:
        return Mesh()
    device_mesh = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    return Mesh(replicate, shard, device_mesh)
