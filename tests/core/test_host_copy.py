"""Numbers on their way to the host are those of when they were sent."""

import pytest
import torch

from qtrain.core.hardware.host_copy import HostCopy


def check(device: str) -> None:
    numbers = torch.arange(1000, device=device, dtype=torch.float64)
    copy = HostCopy(numbers)
    numbers.zero_()
    found = copy.read()
    assert found.device.type == "cpu" and torch.equal(found, torch.arange(1000, dtype=torch.float64))
    assert copy.read() is found


def test_on_a_cpu():
    check("cpu")


@pytest.mark.gpu
def test_on_gpu():
    check("cuda")
    x = torch.randn(8192, 8192, device="cuda")
    first = HostCopy(x[0, :1])
    torch.cuda.synchronize()
    for _ in range(20):
        x = x @ x * 1e-4  # some 10 ms each in fp32
    end = torch.cuda.Event()
    end.record()
    first.read()
    assert not end.query(), "it has waited for what was launched later"
