"""Rank and world size, with or without a process group, and actions that all ranks take or fail together."""

import os
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from qtrain.errors import UserError

T = TypeVar("T")


def refuse_many_processes() -> None:
    """UserError under torchrun with more than one process, each of which would train the whole model. Only rank 0
    raises it; the others exit with the same code."""
    world_size = os.environ.get("WORLD_SIZE", "1")
    if world_size == "1":
        return
    if os.environ.get("RANK", "0") != "0":
        sys.exit(UserError.exit_code)
    raise UserError(
        f"WORLD_SIZE: {world_size} processes were started, but a run trains on one device; start the script with "
        "python instead of torchrun."
    )


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_gather(value: T) -> list[T]:
    """`value` of every rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * world()
    dist.all_gather_object(values, value)
    return values


def on_all_ranks(action: Callable[[], T]) -> T:
    """Run `action` on every rank. An error of any rank is raised on all, so that none waits for a rank that failed."""
    result, error = None, None
    try:
        result = action()
    except (UserError, OSError) as raised:
        error = raised
    for raised in all_gather(error):
        if raised is not None:
            raise raised
    return result
