"""Peak rates of a device that is in no table, measured in under a second."""

import contextlib
import functools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from qtrain.core.hardware.capabilities import has_fp8, has_mx

MEASURE_SECONDS, ROUNDS = 0.3, 3
"""A CPU's arithmetics are measured in turns, ROUNDS times each, so that a short disturbance cannot hit all."""


def measured_peaks(device: torch.device) -> dict[str, float]:
    """TFLOP/s by arithmetic, of square products of random data."""
    if device.type != "cuda":
        return _cpu_peaks(torch.get_num_threads())
    # The fastest of four: the first call of each also selects and loads its kernel.
    rates = {name: max(product_rate(*product) for _ in range(4)) for name, product in _products(8192, device).items()}
    if has_fp8(device):
        a, one = torch.randn(8192, 8192, device=device).to(torch.float8_e4m3fn), torch.ones((), device=device)
        multiply = functools.partial(torch._scaled_mm, scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
        rates["fp8"] = max(product_rate(multiply, a) for _ in range(4))
    if has_mx(device):
        # The datasheets have one rate for both.
        rates["mxfp8"] = rates["fp8"]
    return rates


@functools.cache
def _cpu_peaks(threads: int) -> dict[str, float]:
    """`threads` times the peak of one thread, which other processes hardly disturb. Threads that share a product wait
    for the slowest of them: on a busy machine twenty times as long as the product takes."""
    if threads == 1:
        return _one_thread_peaks()
    with ThreadPoolExecutor(1) as pool:  # OpenMP's number of threads belongs to the calling thread
        rates = pool.submit(_one_thread_peaks).result()
    return {name: threads * rate for name, rate in rates.items()}


def _one_thread_peaks() -> dict[str, float]:
    """The best of many small products, in rounds over MEASURE_SECONDS."""
    with one_thread():
        products, rates = _products(512, torch.device("cpu")), {}
        for _ in range(ROUNDS):
            for name, product in products.items():
                end = time.perf_counter() + MEASURE_SECONDS / ROUNDS / len(products)
                while True:
                    rates[name] = max(rates.get(name, 0.0), product_rate(*product))
                    if time.perf_counter() >= end:
                        break
        rates["int8"] = max(rates["int8"], rates["fp32"])  # `int8_mm` multiplies in fp32 where that is faster
        return rates


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Operations on the CPU inside run in the calling thread alone. Where others use the cores, or there are fewer than
    OpenMP has threads, small ones that are split take 4 to 40 times as long."""
    threads = torch.get_num_threads()
    if threads > 1:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        if threads > 1:
            torch.set_num_threads(threads)


def _products(size: int, device: torch.device) -> dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]]:
    """By arithmetic, a product and its operand: a random matrix [size, size], multiplied by its transpose."""
    found = {}
    for name, dtype in {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.int8}.items():
        a = torch.randn(size, size, device=device).mul_(30).clamp_(-127, 127).to(dtype)
        found[name] = (torch._int_mm if dtype is torch.int8 else torch.mm, a)
    return found


def product_rate(multiply: Callable[..., torch.Tensor], a: torch.Tensor) -> float:
    """TFLOP/s of one call: a, square, times its transpose."""
    start = synchronized_time(a.device)
    multiply(a, a.t())
    return 2 * len(a) ** 3 / (synchronized_time(a.device) - start) / 1e12


def host_link_rate(device: torch.device) -> float:
    """Bytes per second between a GPU and pinned host memory, the slower way. In a tenth of a second."""
    on_host = torch.empty(128 * 2**20, dtype=torch.uint8, pin_memory=True)
    on_gpu = torch.empty_like(on_host, device=device)

    def seconds(to: torch.Tensor, source: torch.Tensor) -> float:
        start = synchronized_time(device)
        to.copy_(source, non_blocking=True)
        return synchronized_time(device) - start

    ways = ((on_gpu, on_host), (on_host, on_gpu))
    return len(on_host) / max(min(seconds(*way) for _ in range(3)) for way in ways)


def synchronized_time(device: torch.device) -> float:
    """`time.perf_counter()`, once the device has done what was launched on it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
