"""A classifier of timm as the scripts see it before it has weights."""

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from torch import nn

from qtrain.core.hardware.device import Hardware
from qtrain.models import (
    VisionCost,
    build_vision_model,
    compile_vision,
    constructor_kwargs,
    empty_vision_model,
    image_config,
    recompute_blocks,
    repeated_blocks,
)
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.cost.vision import vision_cost
from qtrain.quant import LinearChoice
from qtrain.quant.any_model import output_head
from qtrain.train.assembly.architecture import Architecture, refuse_absurd
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.plan import Plan
from qtrain.train.plan.vision_plan import plan_vision_run
from qtrain.train.settings.settings import TrainSettings

SLOW_CONVOLUTIONS = (
    "note    convolutions in low bits take about twice as long as in bf16 (docs/benchmarks.md, ResNet-50 on an H100); "
    "bf16 in --quantize_overrides leaves those that it names"
)


@dataclasses.dataclass(frozen=True)
class VisionArchitecture(Architecture[nn.Module, TrainSettings]):
    """A classifier of timm. name: timm's own spelling (`models.check_vision_model`); classes: how many."""

    name: str
    kwargs: Mapping[str, Any]
    classes: int

    def __post_init__(self) -> None:
        refuse_absurd(self.kwargs, "--model_kwargs")

    @cached_property
    def constructor_kwargs(self) -> Mapping[str, Any]:
        """`kwargs` without what is of the images alone (`models.constructor_kwargs`)."""
        return constructor_kwargs(self.name, self.kwargs)

    @cached_property
    def empty(self) -> nn.Module:
        return empty_vision_model(self.name, self.constructor_kwargs, self.classes)

    @cached_property
    def image(self) -> dict[str, Any]:
        """The format of the model's images (`models.image_config`)."""
        return image_config(self.empty, self.kwargs)

    @cached_property
    def cost(self) -> VisionCost | None:
        return vision_cost(self.empty, self.head(self.empty), self.image["input_size"])

    @property
    def rows(self) -> int:
        return self.cost.rows if self.cost else 1

    @property
    def linear_rows(self) -> Mapping[str, int] | None:
        return self.cost.linear_rows if self.cost else None

    def head(self, model: nn.Module) -> nn.Module | None:
        return output_head(model)

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return repeated_blocks(model)

    def build(self, checked: CheckedSettings) -> nn.Module:
        return build_vision_model(
            self.name,
            self.constructor_kwargs,
            self.classes,
            pretrained=checked.settings.pretrained,
            device=checked.device,
            dtype=checked.dtype,
        )

    def recompute(self, model: nn.Module, settings: TrainSettings) -> None:
        recompute_blocks(model, settings.activation_checkpointing)

    def compile(self, model: nn.Module, checked: CheckedSettings) -> None:
        compile_vision(model)

    def plan(
        self, checked: CheckedSettings, linears: Sequence[LinearChoice], hardware: Hardware, trained: TrainedPart | None
    ) -> Plan:
        assert trained is None, "every parameter of a vision model trains"
        return plan_vision_run(checked, self.empty, self.cost, linears, hardware)

    def notes(self, linears: Sequence[LinearChoice]) -> list[str]:
        lines = []
        if self.cost is not None and self.cost.bypassed and any(linear.scheme for linear in linears):
            lines += [
                f"{len(self.cost.bypassed):4d} of these run in high precision: the model reads their weights itself"
            ]
        if any(linear.scheme and linear.kernel for linear in linears):
            lines += [SLOW_CONVOLUTIONS]
        return lines
