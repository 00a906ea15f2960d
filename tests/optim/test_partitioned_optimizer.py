"""Steps in parts: of any optimizer, at any time, in any order, they come to the same bits."""

import pytest
import torch

from qtrain.optim import OPTIMIZERS
from tests.optim.problems import Small, make

OPTIONS = {name: {"rank": 3, "update_proj_gap": 2} for name in ("galore_adamw", "q_galore_adamw")}


def give_gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p.dtype)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_parts_in_any_order_are_one_step(name):
    """Split in the middle of a run: states go on."""
    models = [Small(torch.bfloat16) for _ in range(2)]
    whole, parted = (make(name, model, 0.01, seed=4, **OPTIONS.get(name, {})) for model in models)
    for step in range(5):
        for model in models:
            give_gradients(model, step)
        whole.step()
        if step == 2:
            layers = [list(layer.parameters()) for layer in models[1].layers]
            inside = {id(p) for layer in layers for p in layer}
            rest = [p for p in models[1].parameters() if id(p) not in inside]
            parted.split([rest, [], *layers])
        if step < 2:
            parted.step()
        else:
            parted.begin()
            for number in (3, 1, 0, 2):
                parted.step_part(number)
    for (name_, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name_


def test_every_parameter_is_in_one_part():
    model = Small()
    optimizer, parameters = make("adamw", model, 0.01), list(model.parameters())
    for parts in ([parameters[1:]], [parameters, parameters[:1]], [[*parameters, torch.ones(2)]]):
        with pytest.raises(AssertionError, match="not a partition"):
            optimizer.split(parts)
