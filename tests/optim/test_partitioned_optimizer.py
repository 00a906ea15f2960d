"""A step partition by partition gives the bits of a whole step: any optimizer, any order, from any step on."""

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
def test_partitions_in_any_order_are_one_step(name):
    """Partitioned in the middle of a run: states are kept."""
    models = [Small(torch.bfloat16) for _ in range(2)]
    whole, partitioned = (make(name, model, 0.01, seed=4, **OPTIONS.get(name, {})) for model in models)
    for step in range(5):
        for model in models:
            give_gradients(model, step)
        whole.step()
        if step == 2:
            layers = [list(layer.parameters()) for layer in models[1].layers]
            inside = {id(p) for layer in layers for p in layer}
            rest = [p for p in models[1].parameters() if id(p) not in inside]
            partitioned.partition([rest, [], *layers])
        if step < 2:
            partitioned.step()
        else:
            partitioned.begin_step()
            for number in (3, 1, 0, 2):
                partitioned.step_partition(number)
    for (name_, p), q in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        assert torch.equal(p, q), name_


def test_every_parameter_is_in_one_partition():
    model = Small()
    optimizer, parameters = make("adamw", model, 0.01), list(model.parameters())
    for partitions in ([parameters[1:]], [parameters, parameters[:1]], [[*parameters, torch.ones(2)]]):
        with pytest.raises(AssertionError, match="not a partition"):
            optimizer.partition(partitions)
