"""The stops of a run: which tensor is named first, and which flags are advised in which order."""

import pytest
import torch
from torch import nn

from qtrain.core.errors import TrainingStopped, UserError
from qtrain.train.log.failures import (
    first_nonfinite_tensor,
    is_out_of_memory,
    nonfinite,
)


def small_model() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8), nn.Linear(8, 2))
    model(torch.randn(3, 4)).sum().backward()
    return model


def test_a_finite_model_has_no_nonfinite_tensor():
    assert first_nonfinite_tensor(small_model().named_parameters()) is None


def test_the_first_nonfinite_gradient_in_model_order_is_named_with_its_counts():
    model = small_model()
    model[2].bias.grad[0] = float("inf")
    model[1].weight.grad[2:5] = float("nan")
    assert (
        first_nonfinite_tensor(model.named_parameters()) == "the gradient of 1.weight (3 NaN and 0 Inf among 8 values)"
    )


def test_a_nonfinite_weight_is_named_before_the_gradients_that_it_makes_nonfinite():
    model = small_model()
    with torch.no_grad():
        model[1].weight[1] = -float("inf")
    model[0].weight.grad[0, 0] = float("nan")
    assert first_nonfinite_tensor(model.named_parameters()) == "the weight of 1.weight (0 NaN and 1 Inf among 8 values)"


def test_fp8_tensors_are_checked_too():
    model = nn.Linear(4, 4)
    codes = torch.zeros(4, 4)
    codes[0, 0] = float("nan")
    model.weight = nn.Parameter(codes.to(torch.float8_e4m3fn), requires_grad=False)
    assert "weight of weight (1 NaN" in first_nonfinite_tensor(model.named_parameters())


def test_the_message_of_a_non_finite_loss_has_step_tensor_and_checkpoint(tmp_path):
    stop = nonfinite(7, "loss", float("nan"), "the weight of w (1 NaN and 0 Inf among 2 values)", tmp_path / "00000004")
    assert isinstance(stop, TrainingStopped) and not isinstance(stop, UserError) and stop.exit_code == 1
    for part in ("step 7", "loss is nan", "the weight of w", f"--resume {tmp_path / '00000004'}"):
        assert part in str(stop)
    assert "No checkpoint yet" in str(nonfinite(7, "loss", float("inf"), None, None))


def test_out_of_memory_errors_are_recognized_and_others_are_not():
    with pytest.raises(RuntimeError) as raised:
        torch.empty(2**60)
    assert is_out_of_memory(raised.value)
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory"))
    with pytest.raises(RuntimeError) as raised:
        torch.ones(2, 3) @ torch.ones(2, 3)
    assert not is_out_of_memory(raised.value)
    assert not is_out_of_memory(ValueError("out of memory"))
