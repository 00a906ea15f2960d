"""The device and the dtype that a run's settings mean on this machine."""

import torch

from qtrain.comm.ranks import local_rank
from qtrain.core.errors import UserError


def choose_device(name: str) -> torch.device:
    """The device that --device names on this machine."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device: cuda was asked for, but torch sees no GPU. Use --device cpu or auto.")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name != "cuda":
        return torch.device(name)
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
