"""What a GPU can run, by its compute capability."""

import functools

import torch

PTX_CAPABILITY, FP8_CAPABILITY, DEPENDENT_LAUNCH_CAPABILITY, MX_CAPABILITY = (8, 0), (8, 9), (9, 0), (10, 0)
"""Compute capability of the first GPUs that run the inline PTX of the kernels (Ampere: bf16x2 instructions), that
convert to and multiply FP8 (Ada), whose kernels can start before the last one has ended (Hopper), and that multiply FP8
with a scale per 32 elements (Blackwell)."""

WGMMA_CAPABILITY = (9, 0)
"""Compute capability of the only GPUs with `wgmma` (Hopper)."""

SHARED_MEMORY, LEAST_SHARED_MEMORY = {(8, 0): 166912, (9, 0): 232448, (10, 0): 232448}, 101376
"""Of a CTA by compute capability, in bytes, and of those not listed (8.6, 8.9, 12.0)."""


def compute_capability(device: torch.device) -> tuple[int, int]:
    """CUDA compute capability (major, minor); (0, 0) of any other device, where kernels are only interpreted."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def has_ptx(device: torch.device) -> bool:
    """Whether kernels may use inline PTX; Triton's interpreter may not."""
    return compute_capability(device) >= PTX_CAPABILITY


def has_fp8(device: torch.device) -> bool:
    """Whether the device converts to FP8 in one instruction and multiplies it on tensor cores."""
    return compute_capability(device) >= FP8_CAPABILITY


def has_int4(device: torch.device) -> bool:
    """Whether the device has INT4 tensor cores: Ampere and Ada. Later ones run their instruction on INT8 cores."""
    return PTX_CAPABILITY <= compute_capability(device) < WGMMA_CAPABILITY


def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel can start while the one before it still runs, and wait for it."""
    return compute_capability(device) >= DEPENDENT_LAUNCH_CAPABILITY


def has_mx(device: torch.device) -> bool:
    """Whether the device's tensor cores multiply MX operands: FP8 with a scale per 32 elements."""
    return compute_capability(device) >= MX_CAPABILITY


def has_wgmma(device: torch.device) -> bool:
    """Whether a warpgroup multiplies operands in shared memory, asynchronously: Hopper alone."""
    return compute_capability(device) == WGMMA_CAPABILITY


def shared_memory(device: torch.device) -> int:
    """Bytes that a CTA can have."""
    return SHARED_MEMORY.get(compute_capability(device), LEAST_SHARED_MEMORY)


@functools.cache  # asked at each launch of a persistent kernel
def sm_count(device: torch.device) -> int:
    """Streaming multiprocessors of a GPU; 2 elsewhere, so that an interpreted persistent kernel loops over tiles."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def lacks_fp8(device: torch.device) -> str | None:
    """Why FP8 codes cannot be produced or multiplied on this device; None where they can."""
    if device.type == "cuda" and not has_fp8(device):
        return f"{torch.cuda.get_device_name(device)} has no FP8 arithmetic, which needs Ada, Hopper or later"
    return None
