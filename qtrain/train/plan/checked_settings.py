"""Settings checked against each other and this machine, with the registry entries that they name."""

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import TypeVar

import torch

from qtrain.comm.launch import check_gpus, count_gpus
from qtrain.comm.ranks import check_launcher, first_difference, from_rank_0, join_world, launched_world
from qtrain.core.checks import shown
from qtrain.core.config import as_dict, source_digest
from qtrain.core.errors import UserError
from qtrain.optim import LRSchedule, OptimizerSpec
from qtrain.parallel.mesh import Mesh, check_readers, expert_mesh_shape, make_mesh, mesh_shape
from qtrain.quant import Scheme
from qtrain.quant.scheme_map import with_overrides
from qtrain.quant.scheme_schedule import Phase
from qtrain.train.log.trackers import check_trackers
from qtrain.train.settings.exclusions import PLAN_EXCLUSIONS, check_exclusions
from qtrain.train.settings.machine import check_plan_flags, check_planned_scheme, mesh_of_world, run_world
from qtrain.train.settings.options import Options, phase_settings
from qtrain.train.settings.recompute import kept_8bit, recompute_kinds
from qtrain.train.settings.settings import BatchGeometry, LanguageSettings, TrainSettings
from qtrain.train.state.run_folder import RunFolder, find_run_folder

DEFAULT_STEPS = 1000
"""Of a run of a language model with neither --n_steps nor --n_epochs."""


S = TypeVar("S", bound=TrainSettings)


@dataclass(frozen=True, kw_only=True)
class CheckedSettings:
    """`settings` and what follows from them alone. `n_steps` is None until the epochs of --n_epochs are counted."""

    settings: TrainSettings
    script: str
    """Name of the script, without .py."""
    device: torch.device
    dtype: torch.dtype
    geometry: BatchGeometry
    scheme: Scheme
    optimizer: OptimizerSpec
    schedule: LRSchedule
    folder: RunFolder
    mesh: Mesh
    reshards: bool = False
    """Whether layers are gathered when they run, from ranks or from host memory (`plan/sharding.py`)."""
    offload: frozenset[str] = frozenset()
    """What is in host memory, by the names of --offload."""
    notes: tuple[str, ...] = ()
    """Lines for the plan: settings that have no effect."""
    phases: tuple[Phase, ...] = ()
    """Of --quantize_schedule; none without. `scheme` is what the model is built with."""

    def at(self, phase: Phase) -> "CheckedSettings":
        """The settings with the scheme of a phase as that of the whole run."""
        settings = phase_settings(self.settings, phase)
        scheme = with_overrides(settings.quantize_overrides, phase.scheme)
        return dataclasses.replace(self, settings=settings, scheme=scheme, phases=())

    @property
    def language(self) -> LanguageSettings:
        """`settings` of a run of a language model."""
        return self.settings_as(LanguageSettings)

    def settings_as(self, kind: type[S]) -> S:
        """`settings`, which are of this kind."""
        assert isinstance(self.settings, kind)
        return self.settings


def count_steps(checked: CheckedSettings, by_epochs: int, default: int = 0) -> CheckedSettings:
    """The settings with `n_steps` in force. by_epochs: the steps of --n_epochs, 0 without. UserError where --n_steps
    says something else, or is less than the schedule needs."""
    settings = checked.settings
    if settings.n_steps and by_epochs and settings.n_steps != by_epochs:
        raise UserError(
            f"--n_steps, --n_epochs: {settings.n_epochs} epochs are {by_epochs:,} steps, not {settings.n_steps:,}; "
            f"give one of them; --n_epochs 0 and --n_steps {type(settings).n_steps} leave a recipe's out."
        )
    settings = dataclasses.replace(settings, n_steps=settings.n_steps or by_epochs or default)
    checked.schedule.check(settings.steps)
    return dataclasses.replace(checked, settings=settings)


def _check_alike(settings: TrainSettings) -> None:
    """UserError naming a rank that was started with other settings than rank 0, or with another version."""
    if launched_world() == 1:
        return
    versions = {"torch": torch.__version__, "qtrain": source_digest()}
    if found := first_difference({**as_dict(settings), **versions}):
        number, name, its, first = found
        if name in versions:
            raise UserError(
                f"WORLD_SIZE: rank {number} runs {name} {its} and rank 0 {first}; install the same version for all "
                "processes."
            )
        raise UserError(
            f"--{name}: it is {shown(its)} on rank {number} and {shown(first)} on rank 0; start all processes with the "
            "same flags."
        )


def check_settings(settings: TrainSettings, script: str, scheme: Scheme | None = None) -> CheckedSettings:
    """Check everything that needs neither the model nor the data; creates nothing. Raises UserError.

    scheme: replaces the one that --quantize names.
    """
    if settings.n_steps is None and not settings.n_epochs:
        settings = dataclasses.replace(settings, n_steps=DEFAULT_STEPS)
    check_launcher()
    settings = dataclasses.replace(settings, gpus=count_gpus(settings.gpus, settings.device))
    options = Options(settings, script, scheme)
    check_exclusions(options, PLAN_EXCLUSIONS)
    check_plan_flags(settings)
    check_gpus(settings.gpu_count, settings.device)
    # Each of these refuses what its flags cannot be; the device comes first, which others depend on.
    device, dtype = options.device, options.dtype
    world = run_world(settings)
    shape = mesh_shape(settings.dp_replicate, settings.dp_shard, world, settings.tp)
    expert_mesh_shape(*shape, settings.ep)
    check_exclusions(options, option="--cp")  # first: not another number of processes mends what it does not go with
    check_readers(*shape, settings.cp)
    recompute_kinds(settings), kept_8bit(settings)
    geometry, scheme, optimizer, schedule = options.geometry, options.scheme, options.optimizer, options.schedule
    notes = check_exclusions(options)
    check_planned_scheme(settings, scheme)
    for phase in options.phases:  # each as if it were the scheme of the whole run
        alone = Options(phase_settings(settings, phase), script)
        check_exclusions(alone)
        check_planned_scheme(alone.settings, alone.scheme)
    check_trackers(settings.trackers)
    # Every process refuses its own mistakes before it joins; from here on they talk to each other.
    join_world(device, settings.rank_timeout)
    _check_alike(settings)
    # None where this process is a rank of the run itself.
    planned = mesh_of_world(settings)
    # The process that starts the ranks of --gpus leaves what --resume finds to rank 0, which prints it.
    with contextlib.redirect_stdout(None) if planned and not settings.dry_run else contextlib.nullcontext():
        folder = from_rank_0(lambda: find_run_folder(settings, script))
    sizes = settings.dp_replicate, settings.dp_shard
    mesh = planned or make_mesh(*sizes, device.type, settings.tp, settings.ep, settings.cp)
    offload = options.offload_on(device)
    return CheckedSettings(
        settings=settings,
        script=script,
        device=device,
        dtype=dtype,
        geometry=geometry,
        scheme=scheme,
        optimizer=optimizer.with_offload(offload),
        schedule=schedule,
        folder=folder,
        mesh=mesh,
        offload=offload,
        notes=notes,
        phases=options.phases,
    )
