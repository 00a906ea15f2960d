"""Other libraries' optimizers by name, to compare with: `torch.NAME`, `bnb.NAME`, `torchao.NAME`.

A name is looked up among the optimizer classes of one module, its options are checked against the signature and by
making one over a tiny parameter: nothing that is given is evaluated.
"""

import importlib
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from qtrain.errors import UserError, missing_package, unknown_name
from qtrain.optim.optimizer import OptimizerSpec

LIBRARIES = {
    "torch": ("torch.optim", "torch"),
    "bnb": ("bitsandbytes.optim", "bitsandbytes"),
    "torchao": ("torchao.optim", "torchao"),
}
"""Prefix of a name -> the module that holds the classes, the package to install."""
_REFUSED = {"LBFGS": "it calls the model several times a step", "SparseAdam": "gradients here are dense"}
_FLAGS = {"lr": "--lr", "weight_decay": "--weight_decay"}
_BY_WORD = {"8bit": 2 * (1 + 4 / 256), "fp8": 2 * (1 + 4 / 256), "4bit": 2 * (0.5 + 4 / 128)}


@dataclass(frozen=True)
class LibraryOptimizer(OptimizerSpec):
    """An optimizer class of another library"""

    name: str
    cls: type[torch.optim.Optimizer]
    options: Mapping[str, Any]

    def build(self, groups: list[dict[str, Any]], lr: float, seed: int = 0) -> torch.optim.Optimizer:
        try:
            return self.cls(groups, lr=lr, **self.options)
        except Exception as error:  # what a library finds wrong with the model's parameters
            raise UserError(f"--optim: {self.name} does not take this model's parameters: {error}.") from None

    def refuses_parts(self) -> str | None:
        return (
            f"{self.name} is another library's and updates all parameters at once; give an --optim that --list shows."
        )

    def state_bytes(self, weight_bytes: int) -> float:
        """By a step over a tiny parameter; of other libraries, which may need a GPU for it, by the name."""
        for word, size in _BY_WORD.items():
            if word in self.name.lower():
                return size
        if not self.name.startswith("torch."):
            return 2.0 * weight_bytes
        parameter = torch.nn.Parameter(torch.zeros(4, 4))
        parameter.grad = torch.ones(4, 4)
        optimizer = self.cls([parameter], lr=1e-3, **self.options)
        optimizer.step()
        values = [v for v in optimizer.state[parameter].values() if isinstance(v, torch.Tensor) and v.ndim]
        return weight_bytes * sum(v.numel() for v in values) / parameter.numel()


def library_optimizer(name: str, options: Mapping[str, Any], flag: str) -> LibraryOptimizer:
    """The optimizer called `<library>.<class>`, its options checked. UserError, naming `flag`, where it cannot be."""
    prefix, _, class_name = name.partition(".")
    module_name, package = LIBRARIES[prefix]
    try:
        module = importlib.import_module(module_name)
    except Exception:  # not installed, or not for this machine
        raise missing_package(package, f"{flag} {name}") from None
    classes = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, type) and issubclass(value, torch.optim.Optimizer) and value is not torch.optim.Optimizer
    }
    if class_name not in classes:
        known = [f"{prefix}.{key}" for key in classes if key not in _REFUSED]
        raise unknown_name(flag, "optimizer", name, known)
    if class_name in _REFUSED:
        raise UserError(f"{flag}: {name} cannot train here: {_REFUSED[class_name]}.")
    cls, where = classes[class_name], f"{flag} ({name})"
    signature = inspect.signature(cls).parameters
    allowed = [key for key in signature if key not in ("params", *_FLAGS)]
    given = {}
    for key, value in options.items():
        if key in _FLAGS:
            raise UserError(f"{where}.{key}: it is set by {_FLAGS[key]}.")
        if key not in allowed:
            raise unknown_name(where, "key", key, allowed)
        given[key] = tuple(value) if isinstance(signature[key].default, tuple) and isinstance(value, list) else value
    try:
        cls([torch.nn.Parameter(torch.zeros(4, 4))], lr=1e-3, **given)
    except Exception as error:
        raise UserError(f"{where}: these options are not allowed: {error}.") from None
    return LibraryOptimizer(name, cls, given)
