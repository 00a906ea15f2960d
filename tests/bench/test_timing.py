"""Timing: medians of enough calls, inputs that rotate, and honest clocks."""

import time

import pytest
import torch

from qtrain.bench.timing import Clocks, copy_bandwidth, measure, rotated, watching_clocks

CPU = torch.device("cpu")


def test_a_call_of_known_length():
    timing = measure(lambda x: time.sleep(0.002), (torch.zeros(1),), CPU, budget_ms=10)
    assert 2.0 <= timing.low <= timing.ms <= timing.high
    assert timing.runs >= 5


def test_inputs_rotate_and_keep_their_layout():
    """On a GPU, copies at other addresses, together three times the cache; on a CPU the inputs themselves."""
    x = torch.randn(4, 6).t()
    assert [same[0] is x for same in rotated((x,), CPU)] == [True]
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        x = torch.zeros(2**20, device=device, dtype=torch.int8).view(1024, 1024).t()
        sets = rotated((x,), device)
        assert len({s[0].data_ptr() for s in sets}) == len(sets)
        assert sum(s[0].nbytes for s in sets) >= 3 * torch.cuda.get_device_properties(device).L2_cache_size
        assert all(s[0].stride() == x.stride() for s in sets)


def test_copy_bandwidth_is_that_of_a_memory():
    assert 1e-4 < copy_bandwidth(CPU) < 10


def test_clocks():
    with watching_clocks(CPU) as clocks:
        pass
    assert clocks.record() is None and "unknown" in clocks.line()
    clocks = Clocks([1000.0, 1980.0, 1755.0], [300.0, 650.0, 500.0])
    assert clocks.line() == "clocks: SM 1755 MHz (1000 to 1980), power up to 650 W"


@pytest.mark.gpu
def test_a_gpu_is_timed_without_the_launch():
    """A product of 2048 cubed takes tens of microseconds: between its peak rate and a tenth of it."""
    device = torch.device("cuda", 0)
    a, b = (torch.randn(2048, 2048, device=device, dtype=torch.bfloat16) for _ in range(2))
    timing = measure(lambda a, b: a @ b, (a, b), device, budget_ms=50)
    assert timing.low <= timing.ms <= timing.high and timing.runs >= 50
    slow = measure(lambda a, b: (time.sleep(2e-4), a @ b), (a, b), device, budget_ms=50)
    # Lower quartiles, not medians: other tests may share the GPU.
    assert slow.low < 1.5 * timing.low, "the time to launch was counted"
    with watching_clocks(device, seconds=0.05) as clocks:
        measure(lambda a, b: a @ b, (a, b), device, budget_ms=500)
    assert clocks.record() is None or 100 < clocks.record()["sm_mhz_max"] < 5000
