"""The memory that a step of an optimizer takes beside weights, gradients and states, as planned and counted."""

import itertools

import pytest
import torch

from qtrain.kernels.optim.fused_update import FusedUpdate
from qtrain.models import ModelSource, build_model
from qtrain.models.cost.parameters import parameter_shapes
from qtrain.optim import OPTIMIZERS, ParameterShape, muon, parameter_groups
from tests.cases import sampled
from tests.peak_bytes import PeakBytes
from tests.system import TINY

WIDE = {**TINY, "hidden_size": 448, "intermediate_size": 2368, "num_attention_heads": 7, "num_key_value_heads": 1}
SOURCE = ModelSource("wide", {**WIDE, "tie_word_embeddings": False}, "--model")


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Fused updates take no memory, and Newton-Schulz runs in bf16: two iterations, of which the second takes as much
    as all later ones."""
    original = muon.newton_schulz
    monkeypatch.setattr(FusedUpdate, "step", lambda *_: None)
    monkeypatch.setattr(muon, "newton_schulz", lambda x, steps: original(x.bfloat16(), 2))


NAMES = ["galore_adamw", "q_galore_adamw", "apollo_mini", "muon", "adamw_schedule_free"]


@pytest.mark.parametrize(
    ("name", "partitioned", "dtype"),
    sampled(
        list(itertools.product(NAMES, [False, True], [torch.bfloat16, torch.float32])),
        lambda name, partitioned, dtype: partitioned != (dtype == torch.bfloat16),
    ),
)
def test_a_steps_temporaries_are_planned(name, partitioned, dtype, as_on_a_gpu):
    """GaLore's in a step that refreshes every subspace."""
    model = build_model(SOURCE, dtype=dtype)
    spec = OPTIMIZERS.make(name, {"rank": 8} if "galore" in name else {}, "--optim")
    optimizer = spec.build(parameter_groups(model, 0.1), 1e-3)
    if partitioned:
        layers = [[p for p in layer.parameters()] for layer in model.layers]
        inside = {p for layer in layers for p in layer}
        optimizer.partition([*layers, [p for p in model.parameters() if p not in inside]])
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.01)
    with PeakBytes(model.parameters()) as counted:
        optimizer.step()
    shapes = [ParameterShape(*shape) for shape in parameter_shapes(SOURCE.model_config())]
    states = sum(t.nbytes for state in optimizer.state.values() for t in state.values() if torch.is_tensor(t))
    planned = spec.step_bytes(shapes, dtype.itemsize, partitioned=partitioned)
    assert planned == pytest.approx(counted.peak - states, rel=0.2)
    assert OPTIMIZERS.make("adamw", {}, "").step_bytes(shapes, dtype.itemsize, partitioned=partitioned) == 0
