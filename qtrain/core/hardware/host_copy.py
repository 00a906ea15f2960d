"""Numbers on their way from a device to the host."""

import torch
from torch import Tensor


class HostCopy:
    """A copy of a tensor as it is now. `read` waits until the device has come to it, not for what is launched later."""

    def __init__(self, tensor: Tensor):
        self._copied: torch.cuda.Event | None = None
        if not tensor.is_cuda:
            self._on_host = tensor.clone()
            return
        self._on_host = tensor.to("cpu", non_blocking=True)  # to pinned memory: the host goes on
        self._copied = torch.cuda.Event()
        self._copied.record()

    def read(self) -> Tensor:
        """The copy, on the host."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._on_host
