"""Time of a call on a device: medians, with inputs that are not in the L2 cache, and the GPU's clocks meanwhile.

On a GPU a batch of calls is timed by CUDA events and issued behind a kernel that waits, so that launch overhead of
Python is not included, as in a CUDA graph. On a CPU each call is timed by the wall clock.
"""

import contextlib
import itertools
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

GPU_CYCLES_PER_S = 2e9  # an upper bound of the GPU clock: the waiting kernel counts cycles
COPY_ELEMENTS = {"cuda": 2**29, "cpu": 2**22}


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call: the median over batches of calls and the quartiles; and the number of calls."""

    ms: float
    low: float
    high: float
    runs: int


def rotated(inputs: Sequence[Tensor], device: torch.device) -> list[tuple[Tensor, ...]]:
    """`inputs` and copies of them, strides included, of three times the size of the L2 cache together."""
    size = sum(x.untyped_storage().nbytes() for x in inputs)
    cache = torch.cuda.get_device_properties(device).L2_cache_size if device.type == "cuda" else 0
    # Three times the cache: an input is evicted before its turn comes again. 256 bounds tiny inputs.
    copies = min(-(-3 * cache // max(size, 1)), 256)
    # Clones keep strides: a column-major operand stays one.
    return [tuple(inputs), *(tuple(x.clone() for x in inputs) for _ in range(copies - 1))]


def measure(
    run: Callable[..., object], inputs: Sequence[Tensor], device: torch.device, budget_ms: float = 150.0
) -> Timing:
    """Time run(*inputs) after one warm-up call, for about `budget_ms` and at least five batches."""
    sets = itertools.cycle(rotated(inputs, device))

    def issue(count: int) -> None:
        for own in itertools.islice(sets, count):
            run(*own)

    issue(1)
    return (_measure_cpu if device.type == "cpu" else _measure_gpu)(issue, budget_ms)


def _measure_cpu(issue: Callable[[int], None], budget_ms: float) -> Timing:
    times, end = [], time.perf_counter() + budget_ms / 1000
    while len(times) < 5 or (time.perf_counter() < end and len(times) < 1000):
        start = time.perf_counter()
        issue(1)
        times.append(1000 * (time.perf_counter() - start))
    return _timing(times, 1)


def _measure_gpu(issue: Callable[[int], None], budget_ms: float) -> Timing:
    # Two measurements of five calls: how long Python needs to issue them, and about how long they run.
    torch.cuda.synchronize()
    issue_s, first = _gpu_batch(issue, 5, 0.0)
    count = min(max(int(10 / max(first / 5, 1e-3)), 1), 100)  # about 10 ms; the launch queue holds about 1,000
    wait_s = 3 * count * issue_s / 5  # the CPU may be busy with other programs
    _gpu_batch(issue, count, wait_s)  # raises the clocks
    repeats = max(5, min(int(budget_ms / max(count * first / 5, 1e-3)), 30))  # quartiles need a few
    return _timing([_gpu_batch(issue, count, wait_s)[1] / count for _ in range(repeats)], count)


def _gpu_batch(issue: Callable[[int], None], count: int, wait_s: float) -> tuple[float, float]:
    """Issue `count` calls while the GPU waits; returns (seconds to issue them, milliseconds that they ran)."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    # The stream is held until all calls are queued, so that gaps between launches are not timed.
    torch.cuda._sleep(int(wait_s * GPU_CYCLES_PER_S))
    start.record()
    began = time.perf_counter()
    issue(count)
    issue_s = time.perf_counter() - began
    end.record()
    end.synchronize()
    return issue_s, start.elapsed_time(end)


def _timing(times: list[float], runs_each: int) -> Timing:
    low, middle, high = statistics.quantiles(times, n=4)  # quartiles; n=4 needs two values at least
    return Timing(middle, low, high, runs_each * len(times))


def copy_bandwidth(device: torch.device) -> float:
    """TB/s of a copy within device memory, bytes read plus bytes written."""
    x = torch.ones(COPY_ELEMENTS[device.type], dtype=torch.bfloat16, device=device)
    # 1 GiB on a GPU: far above any L2 cache, so both directions reach device memory.
    y = torch.empty_like(x)
    timing = measure(lambda source: y.copy_(source), (x,), device)
    return 2 * x.numel() * x.element_size() / timing.ms / 1e9


# ---- clocks ----------------------------------------------------------------------------------------------------------


@dataclass
class Clocks:
    """Samples of a GPU's clock and power during a benchmark; empty on a CPU and without NVIDIA's tools."""

    sm_mhz: list[float] = field(default_factory=list)
    power_w: list[float] = field(default_factory=list)

    def record(self) -> dict[str, float] | None:
        """Median and range, for the JSON file; None without samples."""
        if not self.sm_mhz:
            return None
        return {
            "sm_mhz_median": statistics.median(self.sm_mhz),
            "sm_mhz_min": min(self.sm_mhz),
            "sm_mhz_max": max(self.sm_mhz),
            "power_w_max": max(self.power_w),
        }

    def line(self) -> str:
        found = self.record()
        if found is None:
            return "clocks: unknown"
        return (
            f"clocks: SM {found['sm_mhz_median']:.0f} MHz ({found['sm_mhz_min']:.0f} to {found['sm_mhz_max']:.0f}), "
            f"power up to {found['power_w_max']:.0f} W"
        )


@contextlib.contextmanager
def watching_clocks(device: torch.device, seconds: float = 0.5) -> Iterator[Clocks]:
    """Sample the device's clocks from a thread while the block runs."""
    clocks, read = Clocks(), _clock_reader(device)
    if read is None:
        yield clocks
        return
    stop = threading.Event()

    def sample() -> None:
        # A failed sample is left out: a benchmark does not end for a clock that cannot be read.
        while not stop.wait(seconds):
            with contextlib.suppress(OSError, ValueError, subprocess.SubprocessError):
                mhz, watts = read()
                clocks.sm_mhz.append(mhz)
                clocks.power_w.append(watts)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        yield clocks
    finally:
        stop.set()
        thread.join()  # no sample after the block: the tables have the clocks of their own figures


def _clock_reader(device: torch.device) -> Callable[[], tuple[float, float]] | None:
    """A function that returns (SM clock in MHz, power in W), by torch, which needs pynvml, else by nvidia-smi."""
    if device.type != "cuda":
        return None
    with contextlib.suppress(Exception):  # not installed, or an NVML error
        torch.cuda.clock_rate(device)
        return lambda: (float(torch.cuda.clock_rate(device)), torch.cuda.power_draw(device) / 1000)
    uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # indices differ under CUDA_VISIBLE_DEVICES
    query = ["nvidia-smi", "-i", uuid, "--query-gpu=clocks.sm,power.draw", "--format=csv,noheader,nounits"]

    def read() -> tuple[float, float]:
        out = subprocess.run(query, capture_output=True, text=True, timeout=10, check=True).stdout
        mhz, watts = out.split(",")[:2]
        return float(mhz), float(watts)

    return read
