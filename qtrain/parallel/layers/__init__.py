"""Tensor, sequence and expert parallelism of the native decoder: its modules on one of several ranks."""

from torch import nn


def become(new: nn.Module, module: nn.Module) -> None:
    """Give `new` the submodules, parameters and attributes of `module`, whose place it takes."""
    nn.Module.__init__(new)
    new.__dict__.update(module.__dict__)
