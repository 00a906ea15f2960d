"""The machine of a run: its device and dtype, its processes, and the GPUs and wires of one that is only planned.

A plan may be for processes that are not here: those that --gpus starts after the plan's checks, and those that the
flags of --dry_run name (--gpu, --world_size, --wire).

Bandwidths of WIRES are per GPU and direction. NVLink and PCIe: of the datasheets (NVLink 3, 4, 5: 12 x 25, 18 x 25,
18 x 50 GB/s, H800 8 x 25; PCIe: 16 lanes), of which collectives reach ACHIEVED_IN_NODE: NCCL on four H200s moved 305 to
328 GB/s a GPU of NVLink 4's 450 in all-gathers of 256 MiB to 1 GiB, 323 to 339 in all-to-alls. Networks: the line rate
of one adapter per GPU, of which ACHIEVED_BETWEEN is assumed, not measured.
"""

from dataclasses import dataclass, replace

import torch

from qtrain.comm.ranks import launched_world, local_rank
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hardware.datasheets import DATASHEET, product_of
from qtrain.core.hardware.device import Hardware, datasheet_hardware, describe_hardware, describe_software
from qtrain.parallel.mesh import Mesh, mesh_shape, planned_mesh
from qtrain.quant import LowBitScheme, Scheme
from qtrain.quant.scheme_map import spec_of, spec_text
from qtrain.train.settings.settings import TrainSettings

# ---- device and dtype -----------------------------------------------------------------------------------------------


def choose_device(name: str) -> torch.device:
    """The device that --device names on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda was asked for, but torch sees no GPU. Use --device cpu or auto.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
    # torch would fail at the rank's first kernel, without naming a flag.
    if local_rank() and local_rank() >= torch.cuda.device_count():
        raise UserError(
            f"--gpus: process {local_rank()} of this machine has no GPU of its own; torch sees "
            f"{torch.cuda.device_count()}. Start as many processes as there are GPUs."
        )
    return torch.device(name, local_rank())


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype that --dtype names on this device."""
    if name == "auto":
        name = "fp32" if device.type == "cpu" else "bf16"
    return {"bf16": torch.bfloat16, "fp32": torch.float32}[name]


# ---- links between GPUs ---------------------------------------------------------------------------------------------

ACHIEVED_IN_NODE, ACHIEVED_BETWEEN = 0.75, 0.9
START_SECONDS = 40e-6
"""Of a collective, however small: NCCL's 1 MiB on four H200s takes 37 us to 58 us."""


@dataclass(frozen=True)
class Wire:
    """A link of one GPU, in one direction."""

    name: str
    line_rate: float
    """Bytes per second."""
    achieved: float
    """The fraction of the line rate that large collectives reach."""
    message_seconds: float
    """Latency of each further message of a collective, to another rank."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of a large collective."""
        return self.line_rate * self.achieved


# (GB/s, microseconds per message). The latter are assumed of the kind of link: NCCL sends to several peers at once, so
# that they are less than a round trip.
_IN_NODE = {"nvlink3": (300, 1), "nvlink": (450, 1), "nvlink5": (900, 1), "nvlink_h800": (200, 1)}
_IN_NODE |= {"pcie4": (31.5, 3), "pcie": (63, 3)}
# Networks are named by Gbit/s: 8 of them are a GB/s.
_BETWEEN = {f"ib{gbit}": (gbit / 8, 2) for gbit in (200, 400, 800)}
_BETWEEN |= {f"ethernet{gbit}": (gbit / 8, 10) for gbit in (10, 25, 100, 200, 400)}
WIRES = {
    name: Wire(name, rate * 1e9, achieved, us * 1e-6)
    for wires, achieved in ((_IN_NODE, ACHIEVED_IN_NODE), (_BETWEEN, ACHIEVED_BETWEEN))
    for name, (rate, us) in wires.items()
}
"""The choices of --wire. nvlink: of Hopper; pcie: of the fifth generation."""


def find_wire(name: str) -> Wire:
    """The wire of --wire. Raises UserError."""
    if name.lower() not in WIRES:
        raise unknown_name("--wire", "wire", name, WIRES)
    return WIRES[name.lower()]


def wire_in_node(hardware: Hardware) -> Wire:
    """The wire inside a machine of this kind of GPU. Raises UserError for one whose links are not known."""
    product = product_of(hardware.name)
    if product not in DATASHEET:
        raise UserError(
            f"--world_size: how machines link a {hardware.name} is not known; plan for one of {', '.join(DATASHEET)} "
            "with --gpu."
        )
    return WIRES[DATASHEET[product].link]


# ---- planned worlds -------------------------------------------------------------------------------------------------


def check_plan_flags(settings: TrainSettings) -> None:
    """UserError for a GPU that is not known, and for a world that machines cannot make up."""
    if settings.gpu is not None:
        datasheet_hardware(settings.gpu)
    if settings.world_size is None:
        return
    world, node = settings.world_size, settings.gpus_per_node
    if world > node and world % node:
        raise UserError(
            f"--gpus_per_node: {node} does not divide --world_size {world}; give the GPUs of each machine, such that "
            "all machines have as many."
        )
    find_wire(settings.wire)
    mesh_of_world(settings)


def planned_device(settings: TrainSettings) -> torch.device:
    """The device of --device, or of the plan: meta for a GPU that is not here. UserError for a world of CPUs."""
    if settings.gpu is not None:
        return torch.device("meta")
    device = choose_device(settings.device)
    if settings.world_size is not None and device.type != "cuda":
        raise UserError("--world_size: there is no GPU here to plan for; name one, such as --gpu h200.")
    return device


def run_world(settings: TrainSettings) -> int:
    """Processes of the run: of --world_size, of --gpus, or of the launcher that started this one."""
    return settings.world_size or max(launched_world(), settings.gpu_count)


def records_steps(settings: TrainSettings) -> bool:
    """Whether the settings let micro-batches be recorded as CUDA graphs. Hooks do not run in a replay."""
    return settings.compile and settings.cuda_graphs and not settings.optimizer_in_backward


def reserves_every_routing(settings: TrainSettings) -> bool:
    """Whether a rank of --ep has rows for any routing: where the step is recorded as CUDA graphs, whose shapes are
    fixed, or rows are in the order of one process. Else it reads how many a routing needs."""
    return settings.deterministic or (settings.compile and settings.cuda_graphs)


def mesh_of_world(settings: TrainSettings) -> Mesh | None:
    """The mesh of --world_size, or in the process that starts the ranks of --gpus, without its processes; None
    elsewhere. UserError for flags that do not fit."""
    world = run_world(settings)
    if world == launched_world():
        return None
    shape = mesh_shape(settings.dp_replicate, settings.dp_shard, world, settings.tp)
    return planned_mesh(*shape, settings.ep, settings.tp, settings.cp)


def planned_hardware(settings: TrainSettings, device: torch.device) -> Hardware:
    """The GPU of --gpu, else the hardware of this machine. UserError where a world of it cannot be planned."""
    if settings.gpu is not None:
        hardware = datasheet_hardware(settings.gpu)
    else:
        hardware = replace(describe_hardware(device), software=describe_software(device))
    if settings.memory_limit is not None:
        limit, have = round(settings.memory_limit * 2**30), hardware.memory_bytes
        if have is not None and limit > have:
            raise UserError(
                f"--memory_limit: {settings.memory_limit:g} GiB are more than the {have / 2**30:.1f} of "
                f"{hardware.name}; give less, or leave it out."
            )
        hardware = replace(hardware, memory_bytes=limit)
    if settings.world_size is not None:
        wire_in_node(hardware)
    return hardware


def check_planned_scheme(settings: TrainSettings, scheme: Scheme) -> None:
    """UserError for a scheme that the GPU of --gpu cannot run."""
    if settings.gpu is None:
        return
    hardware = datasheet_hardware(settings.gpu)
    for part in scheme.parts():
        needs = isinstance(part, LowBitScheme) and {"fp8", "mxfp8", "nvfp4"} & set(part.gemm_dtypes().values())
        if needs and hardware.emulates("fp8"):
            name = settings.quantize if part is scheme.root else f"{spec_text(spec_of(part))} (--quantize_overrides)"
            raise UserError(
                f"--gpu: {hardware.name} has no FP8 arithmetic, which {name} needs; plan with --quantize int8."
            )
