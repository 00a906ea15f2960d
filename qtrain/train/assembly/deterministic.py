"""--deterministic on one device: kernels that give the same bits in every run.

On a GPU the backward of attention (cuDNN's, and flash attention's by default) and scattered additions add with atomics,
in the order in which CTAs end. In the order of the micro-batches gradients are added elsewhere
(`parallel/sharding/data_parallel.py`).
"""

import os
import re

import torch

from qtrain.core.errors import TrainingStopped, explains


def use_deterministic_kernels() -> None:
    """Have PyTorch take such kernels, and refuse an operation that has none."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # PyTorch asks for it before cuBLAS starts
    torch.use_deterministic_algorithms(True)  # with warn_only flash attention's backward keeps its atomics
    # pyrefly: ignore[missing-attribute]  # a property of the module's own class
    torch.utils.deterministic.fill_uninitialized_memory = False  # every torch.empty, for programs that read it


@explains
def no_deterministic_kernel(error: Exception) -> TrainingStopped | None:
    """What it means that PyTorch refuses an operation; None for other errors."""
    found = re.match(r"(\S+) does not have a deterministic implementation", str(error))
    if found is None:
        return None
    return TrainingStopped(
        f"--deterministic: PyTorch's {found[1]}, which this model calls, adds in another order in every run and has no "
        "other kernel; start without --deterministic."
    )
