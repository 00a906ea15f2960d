"""Every optimizer on a GPU: what it computes is what a CPU computes, it waits for nothing, and launches stay few."""

import pytest
import torch

from qtrain.optim import OPTIMIZERS
from tests.optim.problems import Small, make

pytestmark = pytest.mark.gpu

OPTIONS = {"galore_adamw": {"rank": 3}, "q_galore_adamw": {"rank": 3}}
HIDDEN = ["muon", "galore_adamw", "q_galore_adamw", "apollo_mini"]


def gradients(model: torch.nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator).to(p)


@pytest.mark.parametrize("name", OPTIMIZERS.names())
def test_is_what_a_cpu_computes(name):
    models = {}
    for device in ("cpu", "cuda"):
        models[device] = Small().to(device)
        optimizer = make(name, models[device], 0.01, **OPTIONS.get(name, {}))
        for step in range(4):
            gradients(models[device], step)
            optimizer.step()
    near = 0.02 if name in ("muon", "q_galore_adamw") else 1e-3  # bf16 Newton-Schulz; codes at the edge
    start = Small()
    for (key, a), b in zip(models["cpu"].named_parameters(), models["cuda"].parameters(), strict=True):
        moved = (a - start.get_parameter(key)).norm()
        assert (a - b.cpu()).norm() <= near * moved, key


@pytest.mark.parametrize("name", OPTIMIZERS.names())
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_waits_for_nothing(name, dtype):
    model = Small(dtype).cuda()
    optimizer = make(name, model, 0.01, **OPTIONS.get(name, {}))
    for step in range(3):
        gradients(model, step)
        optimizer.grad_scale = torch.ones((), device="cuda")
        if step:
            torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(p.isfinite().all() for p in model.parameters())


class Deep(torch.nn.Module):
    """Layers of two shapes and one fused weight each."""

    def __init__(self, layers: int):
        super().__init__()
        self.embed = torch.nn.Embedding(64, 32)
        self.layers = torch.nn.ModuleList(Small().layers[0] for _ in range(layers))


@pytest.mark.parametrize("name", HIDDEN)
def test_launches_do_not_grow_with_layers(name):
    counts = []
    for layers in (2, 12):
        model = Deep(layers).cuda()
        optimizer = make(name, model, 0.01, **OPTIONS.get(name, {}))
        for step in range(3):
            gradients(model, step)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
                optimizer.step()
                torch.cuda.synchronize()
        counts.append(sum(event.count for event in profile.key_averages()))
    assert counts[1] <= 1.2 * counts[0] + 10, counts
