"""Other libraries' optimizers: looked up by name, options checked, never evaluated."""

import pytest
import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.optim import OPTIMIZERS, ParameterShape


def test_a_class_of_torch_trains():
    spec = OPTIMIZERS.make("torch.NAdam", {"betas": [0.8, 0.9]}, "--optim")
    parameter = nn.Parameter(torch.ones(4, 4))
    optimizer = spec.build([{"params": [parameter], "weight_decay": 0.0}], 0.1)
    assert isinstance(optimizer, torch.optim.NAdam) and optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    parameter.grad = torch.ones(4, 4)
    optimizer.step()
    assert parameter.max() < 1


@pytest.mark.parametrize(
    ("name", "options", "size"),
    [("torch.AdamW", {}, 4.0), ("torch.SGD", {}, 0.0), ("torch.SGD", {"momentum": 0.9}, 2.0)],
)
def test_their_states_are_counted(name, options, size):
    assert OPTIMIZERS.make(name, options, "--optim").state_bytes([ParameterShape((4, 8))], 2) == 32 * size


@pytest.mark.parametrize(
    ("name", "options", "messages"),
    [
        ("torch.AdamX", {}, ["unknown optimizer 'torch.AdamX'", "Did you mean"]),
        ("torch.nn", {}, ["unknown optimizer"]),
        ("torch.__import__('os')", {}, ["unknown optimizer"]),
        ("torch.lr_scheduler.StepLR", {}, ["unknown optimizer"]),
        ("torch.Optimizer", {}, ["unknown optimizer"]),
        ("torch.LBFGS", {}, ["cannot train here"]),
        ("torch.AdamW", {"beta": 1}, ["(torch.AdamW): unknown key 'beta'", "'betas'"]),
        ("torch.AdamW", {"lr": 1}, [".lr: it is set by --lr"]),
        ("torch.AdamW", {"betas": "x"}, ["not allowed"]),
        ("torch.SGD", {"nesterov": True}, ["not allowed", "Nesterov"]),
        ("torchao.AdamW8bit", {}, ["pip install torchao"]),
        ("bnb.AdamW8bit", {}, ["pip install bitsandbytes"]),
    ],
)
def test_what_cannot_be_is_one_message(name, options, messages, monkeypatch):
    import sys

    for package in ("torchao", "bitsandbytes"):  # as if not installed
        monkeypatch.setitem(sys.modules, package, None)
        monkeypatch.setitem(sys.modules, f"{package}.optim", None)
    with pytest.raises(UserError) as raised:
        OPTIMIZERS.make(name, options, "--optim")
    assert all(part in str(raised.value) for part in ["--optim", *messages]) and "\n" not in str(raised.value)


def test_parameters_that_a_library_refuses_are_a_message():
    spec = OPTIMIZERS.make("torch.Muon", {}, "--optim") if hasattr(torch.optim, "Muon") else pytest.skip("older torch")
    with pytest.raises(UserError, match=r"torch\.Muon does not take this model's parameters"):
        spec.build([{"params": [nn.Parameter(torch.zeros(3))]}], 0.1)
