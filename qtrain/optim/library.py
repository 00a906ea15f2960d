"""Other libraries' optimizers by name, to compare with: `torch.NAME`, `bnb.NAME`, `torchao.NAME`.

A name is looked up among the optimizer classes of one module. Options are checked against the class's signature and by
constructing it over a tiny parameter. Nothing that a user gives is evaluated.
"""

import importlib
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from qtrain.core.errors import UserError, missing_package, unknown_name
from qtrain.optim.optimizer import Optimizer, adapted
from qtrain.optim.registry import OPTIMIZERS, OptimizerSpec, ParameterShape

_REFUSED = {"LBFGS": "it calls the model several times a step", "SparseAdam": "gradients here are dense"}
_FLAGS = {"lr": "--lr", "weight_decay": "--weight_decay"}
_STATE_BYTES = {"8bit": 2 * (1 + 4 / 256), "fp8": 2 * (1 + 4 / 256), "4bit": 2 * (0.5 + 4 / 128)}
"""Bytes of state per parameter by a word in a class's name."""


@dataclass(frozen=True)
class LibraryOptimizer(OptimizerSpec):
    """An optimizer class of another library, with checked options"""

    name: str
    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]

    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> Optimizer:
        try:
            return adapted(self.cls)(groups, lr=lr, **self.options)
        except Exception as error:  # what a library finds wrong with the model's parameters
            raise UserError(f"--optim: {self.name} does not take this model's parameters: {error}.") from None

    def refuses_partitions(self) -> str | None:
        return f"{self.name} comes from another library and updates all parameters at once; use one of qtrain's own."

    def state_bytes(self, shapes: Sequence[ParameterShape], weight_bytes: int) -> float:
        return self._bytes_per_parameter(weight_bytes) * sum(shape.elements for shape in shapes)

    def _bytes_per_parameter(self, weight_bytes: int) -> float:
        """Measured on a small parameter for torch; estimated from the name for libraries that may need a GPU."""
        for word, size in _STATE_BYTES.items():
            if word in self.name.lower():
                return size
        if not self.name.startswith("torch."):
            return 2.0 * weight_bytes
        parameter = torch.nn.Parameter(torch.zeros(256, 256))  # large enough for factored states to be small beside it
        parameter.grad = torch.ones(256, 256)  # states are created by the first step
        optimizer = self.cls([parameter], lr=1e-3, **self.options)
        optimizer.step()
        values = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.ndim]
        return weight_bytes * sum(v.numel() for v in values) / parameter.numel()


@dataclass(frozen=True)
class OptimizerLibrary:
    """The optimizer classes in the module `module` of the pip package `package`."""

    module: str
    package: str
    example: str

    def classes(self) -> dict[str, type[torch.optim.Optimizer]]:
        """Every optimizer class by name. Raises whatever the import raises."""
        base = torch.optim.Optimizer
        found = vars(importlib.import_module(self.module)).items()
        return {name: cls for name, cls in found if isinstance(cls, type) and issubclass(cls, base) and cls is not base}

    def describe(self) -> str:
        """The names that can be trained with, or how to install the library."""
        try:
            names = sorted(self.classes().keys() - _REFUSED.keys())
        except Exception:  # not installed, or not for this machine
            return f"the classes of {self.module}, such as {self.example}; needs: pip install {self.package}"
        return f"the classes of {self.module}: {', '.join(names)}"

    def make(
        self, name: str, options: Mapping[str, Any], flag: str, options_flag: str | None = None
    ) -> LibraryOptimizer:
        """The optimizer called `<prefix>.<class>`, its options checked. UserError naming `flag` where there is none."""
        prefix, _, class_name = name.partition(".")
        try:
            classes = self.classes()
        except Exception:  # as in `describe`
            raise missing_package(self.package, f"{flag} {name}") from None
        if class_name not in classes:
            raise unknown_name(flag, "optimizer", name, [f"{prefix}.{key}" for key in classes if key not in _REFUSED])
        if class_name in _REFUSED:
            raise UserError(f"{flag}: {name} cannot train here: {_REFUSED[class_name]}.")
        cls, where = classes[class_name], f"{options_flag or flag} ({name})"
        options = _checked_options(cls, options, where)
        try:
            # What the signature does not tell: ranges, combinations.
            cls([torch.nn.Parameter(torch.zeros(4, 4))], lr=1e-3, **options)
        except Exception as error:
            raise UserError(f"{where}: these options are not allowed: {error}.") from None
        return LibraryOptimizer(name, cls, options)


def _checked_options(cls: type, options: Mapping[str, Any], where: str) -> dict[str, Any]:
    """`options` as arguments of `cls`; JSON lists become tuples where the default is one."""
    signature = inspect.signature(cls).parameters
    allowed = [key for key in signature if key not in ("params", *_FLAGS)]  # these are set by their flags
    checked = {}
    for key, value in options.items():
        if key in _FLAGS:
            raise UserError(f"{where}.{key}: it is set by {_FLAGS[key]}.")
        if key not in allowed:
            raise unknown_name(where, "key", key, allowed)
        checked[key] = tuple(value) if isinstance(signature[key].default, tuple) and isinstance(value, list) else value
    return checked


OPTIMIZERS.libraries |= {
    "torch": OptimizerLibrary("torch.optim", "torch", "torch.AdamW"),
    "bnb": OptimizerLibrary("bitsandbytes.optim", "bitsandbytes", "bnb.AdamW8bit"),
    "torchao": OptimizerLibrary("torchao.optim", "torchao", "torchao.AdamW8bit"),
}
