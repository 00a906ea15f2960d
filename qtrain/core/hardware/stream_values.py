"""A stream that waits for a number in memory, which the GPU's front end reads: no kernel spins, and no SM is held.

What one GPU writes so, another one may wait for, in its own memory that the first one maps. CUDA graphs record both.
CUDA does not see such an order: who waits must not be what the writer needs to get there.

Source: "Stream Memory Operations" of the CUDA driver API, which torch does not wrap.
"""

import ctypes
import functools

import torch

_EQUAL = 1
"""CU_STREAM_WAIT_VALUE_EQ."""


def write_value(address: int, value: int) -> None:
    """Write an int32 at this address of a GPU's memory once all that is queued on the current stream has run, and its
    writes are visible."""
    _call("cuStreamWriteValue32_v2", address, value, 0)


def wait_for_value(address: int, value: int) -> None:
    """Let the current stream wait until the int32 at this address has this value."""
    _call("cuStreamWaitValue32_v2", address, value, _EQUAL)


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _call(name: str, address: int, value: int, flags: int) -> None:
    stream = torch.cuda.current_stream().cuda_stream
    code = getattr(_driver(), name)(
        ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(value), ctypes.c_uint(flags)
    )
    if code:
        raise RuntimeError(f"{name} failed with CUDA error {code}")
