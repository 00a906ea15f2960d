"""Page-locked memory has the size that was asked for, and is locked for as long as a tensor has it."""

import gc
import mmap
from pathlib import Path

import pytest
import torch

from qtrain.core.errors import TrainingStopped
from qtrain.core.hardware.host_memory import PIECE_BYTES, fault_pages, host_memory_for, host_tensor_like, locked_memory

GPU = torch.device("cuda")


class Cudart:
    """Stands for CUDA's runtime: remembers what it was asked to lock."""

    def __init__(self, code: int = 0):
        self.code, self.locked = code, {}

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
        if not self.code:
            self.locked[address] = size
        return self.code

    def cudaHostUnregister(self, address: int) -> int:
        del self.locked[address]
        return 0


def runtime(monkeypatch, code: int = 0) -> Cudart:
    found = Cudart(code)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: found)
    return found


def test_it_is_locked_as_long_as_a_view_of_it_lives(monkeypatch):
    cudart = runtime(monkeypatch)
    tensor = locked_memory(5000)
    assert tensor.dtype == torch.uint8 and list(cudart.locked.values()) == [5000]
    tensor.fill_(3)
    view = tensor[100:200]
    del tensor
    gc.collect()
    assert int(view.sum()) == 300 and cudart.locked
    del view
    gc.collect()
    assert not cudart.locked
    assert locked_memory(0).shape == (0,)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="only Linux tells which pages are resident")
def test_pages_are_there_before_they_are_locked():
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE

    size = 2 * PIECE_BYTES + 5000  # the last piece is a small one
    memory = torch.frombuffer(mmap.mmap(-1, size), dtype=torch.uint8)
    before = resident()
    fault_pages(memory)
    assert resident() - before >= size - 2 * mmap.PAGESIZE and not memory.any()


def test_a_refusal_is_told_with_the_fix(monkeypatch):
    runtime(monkeypatch, code=2)
    assert locked_memory(4096) is None
    with pytest.raises(TrainingStopped, match=r"--offload: the system refuses to lock 0.00 GiB .* \(ulimit -l\)"):
        host_memory_for(GPU, 4096)


def test_more_than_is_free_is_not_even_tried(monkeypatch):
    runtime(monkeypatch)
    monkeypatch.setattr("qtrain.core.hardware.host_memory.available_memory", lambda: 2**20)
    assert locked_memory(2**20) is not None and locked_memory(2**20 + 1) is None
    with pytest.raises(TrainingStopped, match=r"lock 0\.25 GiB more .* of 0\.00 that are free"):
        host_memory_for(GPU, 2**28)


def test_a_tensor_on_the_host_is_like_its_original():
    found = host_tensor_like(torch.empty(4, 6, dtype=torch.bfloat16).t(), torch.device("cpu"))
    assert (found.shape, found.dtype, found.is_contiguous()) == ((6, 4), torch.bfloat16, True)


@pytest.mark.gpu
def test_a_gpu_takes_it_as_pinned():
    host = host_tensor_like(torch.empty(3, 5000), GPU)
    assert host.is_pinned() and host[1].is_pinned()
    host.copy_(torch.randn(3, 5000))
    on_device = torch.empty_like(host, device=GPU)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        on_device.copy_(host, non_blocking=True)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(on_device.cpu(), host)
