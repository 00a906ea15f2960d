"""The settings of a run, and what follows from them: device, dtype, batch, scheme, optimizer."""

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from qtrain.core.errors import unknown_name
from qtrain.models import ExportFormat, Lora, as_lora, read_formats
from qtrain.optim import OPTIMIZERS, LRSchedule, OptimizerSpec, make_schedule
from qtrain.quant import SCHEMES, Scheme
from qtrain.quant.scheme_map import SchemeMap, with_overrides
from qtrain.quant.scheme_schedule import Phase, built_scheme, read_phases
from qtrain.train.settings.machine import choose_dtype, planned_device, run_world
from qtrain.train.settings.settings import OFFLOAD_NAMES, BatchGeometry, TrainSettings, batch_geometry


@dataclass(frozen=True)
class Options:
    """The settings of a run, and what follows from them, each worked out when it is first asked. A property raises
    UserError where its flags cannot be used."""

    settings: TrainSettings
    script: str = ""
    base_scheme: Scheme | None = None
    """The scheme in place of --quantize's: that of a frozen base; a map has --quantize_overrides already."""

    @cached_property
    def device(self) -> torch.device:
        return planned_device(self.settings)

    @cached_property
    def dtype(self) -> torch.dtype:
        return choose_dtype(self.settings.dtype, self.device)

    @cached_property
    def geometry(self) -> BatchGeometry:
        return batch_geometry(self.settings, run_world(self.settings))

    @cached_property
    def scheme(self) -> Scheme:
        settings = self.settings
        if isinstance(self.base_scheme, SchemeMap):
            return self.base_scheme
        if self.phases and self.base_scheme is None:
            return built_scheme(self.phases, settings.quantize_overrides)
        default = self.base_scheme or SCHEMES.make(
            settings.quantize, settings.quantize_kwargs or {}, "--quantize", "--quantize_kwargs"
        )
        return with_overrides(settings.quantize_overrides, default)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Of --quantize_schedule; none without."""
        given = self.settings.quantize_schedule
        return () if given is None else read_phases(given)

    @cached_property
    def optimizer(self) -> OptimizerSpec:
        return self._named_optimizer.with_offload(self.offload)

    @cached_property
    def _named_optimizer(self) -> OptimizerSpec:
        return OPTIMIZERS.make(self.settings.optim, self.settings.optim_kwargs or {}, "--optim", "--optim_kwargs")

    @cached_property
    def offload(self) -> frozenset[str]:
        """What is asked to be in host memory, by --offload or --optim_kwargs."""
        for name in self.settings.offload or ():
            if name not in OFFLOAD_NAMES:
                raise unknown_name("--offload", "name", name, OFFLOAD_NAMES)
        return self._named_optimizer.offloaded if self.settings.offload is None else frozenset(self.settings.offload)

    def offload_on(self, device: torch.device) -> frozenset[str]:
        """What is in host memory, and so not in the GPU's: nothing on a CPU."""
        return frozenset() if device.type == "cpu" else self.offload

    @cached_property
    def schedule(self) -> LRSchedule:
        return make_schedule(self.settings.lr_schedule_kwargs)

    @cached_property
    def lora(self) -> Lora | None:
        given = getattr(self.settings, "lora", None)
        return None if given is None else as_lora(given)

    @cached_property
    def low_bit_exports(self) -> dict[str, ExportFormat]:
        """The formats of --export_format that are not dense weights of a Hugging Face folder, by name."""
        given = self.get("export_format")
        if given is None or not self.settings.export:
            return {}
        return {name: fmt for name, fmt in read_formats(given, "--export_format").items() if name != "hf"}

    def has(self, name: str) -> bool:
        """Whether the script has the flag `name` and its value is not the default."""
        field = type(self.settings).__dataclass_fields__.get(name)
        return field is not None and getattr(self.settings, name) != field.default

    def get(self, name: str) -> Any:
        """The value of the flag `name`; None where the script has no such flag."""
        return getattr(self.settings, name, None)

    def key(self, name: str, key: str) -> Any:
        """The value of a key in a flag's JSON object; None where it is not given."""
        return (self.get(name) or {}).get(key)


def phase_settings(settings: TrainSettings, phase: Phase) -> TrainSettings:
    """The settings with the scheme of a phase of --quantize_schedule as that of the whole run."""
    options = {"scheme": phase.spec} if isinstance(phase.spec, str) else dict(phase.spec)
    name = options.pop("scheme")
    return dataclasses.replace(settings, quantize_schedule=None, quantize=name, quantize_kwargs=options or None)
