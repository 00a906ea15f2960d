"""What is compiled together is compiled in threads and not launched; launches then find it compiled."""

import threading

import pytest
import torch

pytest.importorskip("triton")

from qtrain.core.hardware import capabilities
from qtrain.kernels.compile_together import compile_together
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.gemm.scaled_mm import TILINGS, launch_scaled_mm
from tests.interpreter import run_compiled


@triton.jit
def _wrong_kernel(x):
    tl.store(x, undefined_name)  # pyrefly: ignore[unknown-name]  # noqa: F821


def test_compiles_in_threads_without_launching():
    run_compiled("tests.kernels.test_compile_together")


def compile_without_a_gpu() -> None:
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    from tests.kernels.compile_kernels import _Driver

    threads: list[threading.Thread] = []
    triton.knobs.compilation.listener = lambda **_: threads.append(threading.current_thread())
    driver.set_active(_Driver(90))  # it launches nothing
    capabilities.compute_capability = lambda device: (9, 0)
    a, scale = torch.zeros(256, 256).to(torch.float8_e4m3fn), torch.zeros(1)
    out = torch.zeros(256, 256, dtype=torch.bfloat16)
    right = [lambda name=name: launch_scaled_mm(a, a, scale, scale, out, TILINGS[name]) for name in list(TILINGS)[:2]]
    launcher = JITFunction.__getitem__
    compile_together([*right, lambda: _wrong_kernel[(1,)](out), lambda: 1 / 0])
    assert JITFunction.__getitem__ is launcher
    assert len(threads) == 2 and threading.main_thread() not in threads, threads
    for call in right:
        with pytest.raises(AttributeError, match="_Driver"):
            call()
    assert len(threads) == 2, "compiled again"


if __name__ == "__main__":
    compile_without_a_gpu()
