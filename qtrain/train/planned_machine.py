"""Plans for processes that are not here: those that --gpus starts after the plan's checks, and the flags of --dry_run
that name a GPU and a number of them."""

import torch

from qtrain.comm.mesh import Mesh, mesh_shape, planned_mesh
from qtrain.comm.ranks import launched_world
from qtrain.core.errors import UserError
from qtrain.core.hardware import Hardware, datasheet_hardware, describe_hardware
from qtrain.quant import LowBitScheme, Scheme
from qtrain.quant.schemes.auto import Auto
from qtrain.train.device import choose_device
from qtrain.train.plan.wires import find_wire, wire_in_node
from qtrain.train.settings import TrainSettings

ONLY_IN_PLANS = ("gpu", "world_size")
NEED_WORLD_SIZE = ("gpus_per_node", "wire", "sol")


def check_plan_flags(settings: TrainSettings) -> None:
    """UserError for flags of a plan where nothing is planned, and for a world that machines cannot make up."""
    for name in ONLY_IN_PLANS:
        if getattr(settings, name) is not None and not settings.dry_run:
            raise UserError(f"--{name}: it plans for other machines than this run's; add --dry_run, or leave it out.")
    if settings.gpu is not None:
        datasheet_hardware(settings.gpu)
        if settings.device == "cpu":
            raise UserError("--gpu: it names the GPU to plan for, and --device cpu none; leave one of them out.")
    if settings.world_size is None:
        defaults = TrainSettings()
        for name in NEED_WORLD_SIZE:
            if getattr(settings, name) != getattr(defaults, name):
                raise UserError(f"--{name}: it needs --world_size, the number of GPUs to plan for; or leave it out.")
        return
    if launched_world() > 1 or settings.gpus > 1:
        raise UserError("--world_size: one process plans for any world; start it without torchrun and --gpus.")
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
    return settings.world_size or max(launched_world(), settings.gpus)


def mesh_of_world(settings: TrainSettings) -> Mesh | None:
    """The mesh of --world_size, or in the process that starts the ranks of --gpus, without its processes; None
    elsewhere. UserError for flags that do not fit."""
    world = run_world(settings)
    if world == launched_world():
        return None
    shape = mesh_shape(settings.dp_replicate, settings.dp_shard, world, settings.tp)
    return planned_mesh(*shape, settings.ep, settings.tp)


def planned_hardware(settings: TrainSettings, device: torch.device) -> Hardware:
    """The GPU of --gpu, else the hardware of this machine. UserError where a world of it cannot be planned."""
    hardware = datasheet_hardware(settings.gpu) if settings.gpu is not None else describe_hardware(device)
    if settings.world_size is not None:
        wire_in_node(hardware)
    return hardware


def check_planned_scheme(settings: TrainSettings, scheme: Scheme) -> None:
    """UserError for a scheme that cannot be planned for --gpu, or that this GPU cannot run."""
    if settings.gpu is None:
        return
    if isinstance(scheme, Auto):
        raise UserError("--gpu: --quantize auto times the GPU that is here; name a scheme instead.")
    hardware = datasheet_hardware(settings.gpu)
    needs = isinstance(scheme, LowBitScheme) and {"fp8", "mxfp8", "nvfp4"} & set(scheme.gemm_dtypes().values())
    if needs and hardware.emulates("fp8"):
        raise UserError(
            f"--gpu: {hardware.name} has no FP8 arithmetic, which {settings.quantize} needs; plan with --quantize int8."
        )
