"""--deterministic: the same bits in every run of one device."""

import pytest
import torch

from qtrain.core.errors import TrainingStopped, explained
from qtrain.models.native.attention import attend
from qtrain.train.assembly.deterministic import use_deterministic_kernels


def test_an_operation_without_a_deterministic_kernel_is_named():
    use_deterministic_kernels()
    error = RuntimeError(
        "upsample_bicubic2d_backward_out_cuda does not have a deterministic implementation, but you set "
        "'torch.use_deterministic_algorithms(True)'."
    )
    message = explained(error)
    assert isinstance(message, TrainingStopped) and "upsample_bicubic2d_backward_out_cuda" in str(message)
    assert explained(RuntimeError("something else")) is None


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(8, 14, 1024, 64), (2, 16, 2048, 128)])
def test_gradients_of_attention_repeat(shape):
    use_deterministic_kernels()
    q, k, v, dy = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(4))

    def gradients() -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(attend(q, k, v, None), (q, k, v), dy)

    first = gradients()
    for _ in range(20):  # in most of 50 calls cuDNN's dQ differs from the first one's
        for before, now in zip(first, gradients(), strict=True):
            assert torch.equal(before, now)
