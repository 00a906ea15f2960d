"""The mesh of a run: `replicate` x `shard` x `tp` ranks, a DeviceMesh of PyTorch and the groups that it lacks.

    replicate   groups that hold the same shards (DDP where shard is 1, HSDP where both are more than 1)
    shard       ranks that shard optimizer states and master weights (ZeRO-2), and with full sharding the weights of
                layers that do not run (ZeRO-3, FSDP)
    tp          ranks that split every layer and read the same micro-batches (tensor parallelism); consecutive ones,
                as they send most

The first two are the data dimensions: `dp_rank` numbers the micro-batches that are read at once. A run without a
launcher is a mesh of one rank and needs no process group.

Context parallelism (CP) makes groups of consecutive data-parallel ranks, each of which computes a part of every
sequence of one micro-batch: such a group is one `reader`. To gradients, ZeRO and full sharding its ranks are
data-parallel ranks as all others.

Expert parallelism (EP) is a second mesh of the same ranks, for the parameters of experts alone (`expert_mesh`): its
`tp` ranks are consecutive, hold different experts and compute all of their micro-batches together. These are N
data-parallel ranks with --ep N, and with tensor parallelism the tensor groups of N.
"""

from dataclasses import dataclass, replace

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from qtrain.comm.rank_group import RankGroup
from qtrain.comm.ranks import all_gather, launched_on_machine, launched_world, rank
from qtrain.core.errors import UserError
from qtrain.core.maybe_none import MaybeNone


@dataclass(frozen=True)
class Machines:
    """The data-parallel ranks of a mesh by machine."""

    ranks: int
    """On each machine, which are consecutive."""
    intra_node_group: dist.ProcessGroup
    """Those of this rank's machine."""
    inter_node_group: dist.ProcessGroup
    """One of each machine: those with the same number on theirs as this rank."""


@dataclass(frozen=True)
class Mesh:
    """The ranks by dimension. A run of one process is a mesh of one rank."""

    replicate: int = 1
    shard: int = 1
    device_mesh: DeviceMesh | None = None
    """The data dimensions "replicate" and "shard", of this rank's TP rank; None for one process."""
    tp: int = 1
    tp_group: RankGroup | MaybeNone = None
    """The ranks that compute every layer together; None where one rank computes whole layers."""
    dp_group: dist.ProcessGroup | None = None
    """The ranks that read other micro-batches with the same part of every layer; None: all ranks."""
    cp: int = 1
    cp_group: RankGroup | MaybeNone = None
    """The ranks that compute the same sequences, a part of each; None where one rank computes whole ones."""
    expert_mesh: "Mesh | MaybeNone" = None
    """Of the experts' parameters, with --ep; None: they are sharded as all others are."""
    machines: Machines | None = None
    """None where the data-parallel ranks share one machine, or each has its own."""

    @property
    def world(self) -> int:
        """All processes."""
        return self.dp_size * self.tp

    @property
    def rank(self) -> int:
        """Among all processes."""
        return self.dp_rank * self.tp + self.tp_rank

    @property
    def dp_size(self) -> int:
        """Ranks with gradients of their own."""
        return self.replicate * self.shard

    @property
    def ep(self) -> int:
        """The expert-parallel degree: data-parallel ranks that compute experts together."""
        return 1 if self.expert_mesh is None else self.expert_mesh.tp // self.tp

    @property
    def readers(self) -> int:
        """How many micro-batches are read at once."""
        return self.dp_size // self.cp

    @property
    def reader(self) -> int:
        """The number of this rank's micro-batch among those that are read at once."""
        return self.dp_rank // self.cp

    @property
    def cp_rank(self) -> int:
        """The number of this rank's part of a sequence."""
        return self.cp_group.rank if self.cp_group is not None else 0

    @property
    def dp_rank(self) -> int:
        """replicate rank * shard + shard rank."""
        # Tensor ranks are neighbors: NVLink carries most bytes.
        return rank() // self.tp if self.device_mesh is not None else 0

    @property
    def tp_rank(self) -> int:
        return self.tp_group.rank if self.tp_group is not None else 0

    @property
    def shard_rank(self) -> int:
        return self.dp_rank % self.shard  # the inner data dimension

    @property
    def model_group(self) -> RankGroup | None:
        """The ranks that hold the parts of one model, several the same part of what --ep does not split; None where
        each holds all of it."""
        expert_tp_group = self.expert_mesh.tp_group if self.expert_mesh is not None else None
        return expert_tp_group or self.tp_group  # a plan has no group of experts

    @property
    def shard_group(self) -> dist.ProcessGroup | None:
        """The ranks that shard one copy of the optimizer states."""
        return self.device_mesh.get_group("shard") if self.device_mesh is not None else None

    @property
    def replicate_group(self) -> dist.ProcessGroup | None:
        """The ranks that hold the same shard as this one."""
        return self.device_mesh.get_group("replicate") if self.device_mesh is not None else None

    def describe(self, reshards: bool) -> str:
        kind = "DDP" if self.shard == 1 else "ZeRO-3: layers are gathered when they run" if reshards else "ZeRO-2"
        kind = f"HSDP, {kind}" if self.replicate > 1 and self.shard > 1 else kind
        kind += f" of {self.dp_size}" * (self.tp > 1)
        if self.expert_mesh is not None:
            kind += f"; experts over groups of {self.expert_mesh.tp}, their states over {self.expert_mesh.shard}"
        if self.cp > 1:
            kind += f"; sequences over groups of {self.cp}"
        if self.machines is not None:
            kind += f"; {self.dp_size // self.machines.ranks} machines of {self.machines.ranks}"
        if self.tp == 1:
            return f"{self.replicate} x {self.shard} (replicate x shard, {kind})"
        kind = f"{kind}, " if self.dp_size > 1 else ""
        return (
            f"{self.replicate} x {self.shard} x {self.tp} (replicate x shard x tensor, {kind}every layer on "
            f"{self.tp} ranks)"
        )


def divisors(number: int) -> str:
    """Of a positive number, for messages."""
    return ", ".join(str(d) for d in range(1, number + 1) if number % d == 0)


def _check_divides(flag: str, size: int, world: int, what: str = "", or_else: str = "") -> None:
    """UserError where a degree does not divide `world` ranks. what: these are, if they are not all of the run."""
    if world % size:
        what = what or f"{world} process{'es' * (world > 1)} of the run"
        raise UserError(f"{flag}: {size} does not divide the {what}; allowed: {divisors(world)}{or_else}.")


def mesh_shape(dp_replicate: int, dp_shard: int, world: int, tp: int = 1) -> tuple[int, int]:
    """(replicate, shard) of --dp_replicate and --dp_shard, 0: what the other one and --tp leave of the world. Raises
    UserError."""
    for flag, size in (("--tp", tp), ("--dp_replicate", dp_replicate), ("--dp_shard", dp_shard)):
        _check_divides(flag, size or 1, world, or_else="" if flag == "--tp" else ", or 0 for automatic")
    data = world // tp  # ranks that read data of their own
    given = {"--dp_replicate": dp_replicate, "--dp_shard": dp_shard} | ({"--tp": tp} if tp > 1 else {})
    product = (dp_replicate or 1) * (dp_shard or 1)
    if data % product or (dp_replicate and dp_shard and product != data):
        named = {flag: size for flag, size in given.items() if size}
        raise UserError(
            f"{', '.join(named)}: {' x '.join(map(str, named.values()))} is not the {world} "
            f"process{'es' * (world > 1)} of the run; leave --dp_replicate or --dp_shard 0."
        )
    shard = dp_shard or data // (dp_replicate or 1)
    return data // shard, shard


def expert_mesh_shape(replicate: int, shard: int, ep: int) -> tuple[int, int]:
    """(replicate, shard) of the ranks that hold the same experts, where each group of `ep` neighbors among
    replicate x shard ranks holds all of them. UserError where groups cross the borders of shard groups."""
    world = replicate * shard
    readers = f"{world} processes that read data of their own" if world > 1 else "1 process that reads data"
    _check_divides("--ep", ep, world, readers)
    # A group of ranks with all experts lies inside a shard group, or consists of whole ones.
    if shard % ep and ep % shard:
        raise UserError(
            f"--ep: {ep} neither divides the {shard} processes of --dp_shard nor is a multiple of them; choose "
            "--dp_shard so."
        )
    return (replicate, shard // ep) if shard % ep == 0 else (world // ep, 1)


def check_readers(replicate: int, shard: int, cp: int) -> None:
    """UserError where groups of --cp `cp` neighbors do not make up replicate x shard ranks."""
    _check_divides("--cp", cp, replicate * shard)


def planned_mesh(replicate: int, shard: int, ep: int = 1, tp: int = 1, cp: int = 1) -> Mesh:
    """The mesh of the first rank, without any processes. UserError where --ep does not fit it."""
    tp_group, cp_group = (RankGroup("planned", ranks, 0) if ranks > 1 else None for ranks in (tp, cp))
    expert_mesh = Mesh(*expert_mesh_shape(replicate, shard, ep), tp=ep * tp) if ep > 1 else None
    return Mesh(replicate, shard, tp=tp, tp_group=tp_group, cp=cp, cp_group=cp_group, expert_mesh=expert_mesh)


def make_mesh(dp_replicate: int, dp_shard: int, device_type: str, tp: int = 1, ep: int = 1, cp: int = 1) -> Mesh:
    """The mesh of this run, once all ranks have theirs; the process group must exist where there are several."""
    replicate, shard = mesh_shape(dp_replicate, dp_shard, launched_world(), tp)
    if replicate * shard * tp == 1:
        return Mesh()
    made = _with_parts(replicate, shard, tp, device_type) if tp > 1 else _of_data(replicate, shard, cp, device_type)
    if ep > 1:
        experts = _with_parts(*expert_mesh_shape(replicate, shard, ep), ep * tp, device_type)
        made = replace(made, expert_mesh=experts)
    # A rank makes its groups without those that are not in them. One that then ended, as after a dry run, would take
    # the store and its connections from those that are still at theirs.
    all_gather(None)
    return made


def _of_data(replicate: int, shard: int, cp: int, device_type: str) -> Mesh:
    cp_group = None
    if cp > 1:
        groups = init_device_mesh(device_type, (replicate * shard // cp, cp), mesh_dim_names=("reader", "cp"))
        cp_group = RankGroup.of(groups.get_group("cp"))
    device_mesh = init_device_mesh(device_type, (replicate, shard), mesh_dim_names=("replicate", "shard"))
    machines = _machines(replicate * shard, 1, device_type)
    return Mesh(replicate, shard, device_mesh, cp=cp, cp_group=cp_group, machines=machines)


def _with_parts(replicate: int, shard: int, ranks: int, device_type: str) -> Mesh:
    """A mesh on which neighboring ranks hold different parts of the same parameters."""
    names = ("replicate", "shard", "tp")
    whole = init_device_mesh(device_type, (replicate, shard, ranks), mesh_dim_names=names)
    data = whole["replicate", "shard"]
    tp_group = RankGroup.of(whole.get_group("tp"))
    # Flattened: one group over both data dimensions, for sums of gradients and counts.
    dp_group, machines = data._flatten("data").get_group(), _machines(replicate * shard, ranks, device_type)
    return Mesh(replicate, shard, data, ranks, tp_group, dp_group, machines=machines)


def _machines(dp_size: int, tp: int, device_type: str) -> Machines | None:
    """Where the data ranks are, each of which is `tp` consecutive processes."""
    per_rank = set(all_gather(launched_on_machine()))
    processes = per_rank.pop() if len(per_rank) == 1 else None  # only some ranks may have been told
    if processes is None:
        return None
    ranks = processes // tp
    # One data rank a machine, one machine, unequal ones, or a tensor group across several: nothing to add first.
    if ranks <= 1 or processes % tp or ranks == dp_size or dp_size % ranks:
        return None
    shape, names = (dp_size // ranks, ranks, tp), ("machine", "neighbor", "part")
    groups = init_device_mesh(device_type, shape, mesh_dim_names=names)
    return Machines(ranks, groups.get_group("neighbor"), groups.get_group("machine"))
