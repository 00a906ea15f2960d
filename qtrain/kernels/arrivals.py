"""CTAs that share a result: each stores its part, and the last to arrive merges them all."""

import torch
from torch import Tensor

from qtrain.kernels.compiler import cached_per_device, tl, triton

RESULTS = 65536
"""Results of a launch, at most."""


@cached_per_device
def arrival_counters(device: torch.device) -> Tensor:
    """int32 zeros, one a result, as every launch leaves them; launches of one stream share them."""
    return torch.zeros(RESULTS, dtype=torch.int32, device=device)


@triton.jit
def arrives_last(counter_ptr, ctas):
    """Whether this CTA is the last of `ctas` that have stored their parts of a result; its counter is then zero
    again."""
    tl.debug_barrier()  # all of the CTA's stores come before its arrival
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel") == ctas - 1
    if last:
        tl.store(counter_ptr, 0)
    return last
