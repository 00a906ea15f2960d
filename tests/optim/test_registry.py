"""Which parameters are decayed, which are matrices of hidden layers, and which projections are fused in them."""

import torch
from torch import nn

from qtrain.models import ModelSource, build_model
from qtrain.models.cost.parameters import parameter_shapes
from qtrain.optim import parameter_groups
from qtrain.optim.registry import hidden_matrices
from qtrain.quant import SCHEMES, quantize_linears
from tests.system import TINY


def test_groups_of_the_native_decoder():
    """Before and after linears are swapped; the tied head is an embedding."""
    source = ModelSource("tiny", TINY, "--model")
    model = build_model(source, seed=0)
    for _ in range(2):
        names = {p: name.split(".")[-2] for name, p in model.named_parameters()}
        found = {}
        for group in parameter_groups(model, 0.1):
            for p in group["params"]:
                found.setdefault(names[p], (group["weight_decay"], group["hidden"], group["parts"]))
        assert found == {
            "embed_tokens": (0.1, False, ()),
            "attn_norm": (0.0, False, ()),
            "qkv": (0.1, True, (32, 16, 16)),
            "o_proj": (0.1, True, ()),
            "mlp_norm": (0.0, False, ()),
            "gate_up": (0.1, True, (64, 64)),
            "down_proj": (0.1, True, ()),
            "norm": (0.0, False, ()),
        }
        quantize_linears(model, SCHEMES.make("int8", {}, "--quantize"), seed=0, head=model.lm_head)

    known = {(g.shape, g.parts): g.count for g in parameter_shapes(source.model_config()) if g.hidden}
    built: dict = {}
    for group in parameter_groups(model, 0.1):
        for p in group["params"] if group["hidden"] else ():
            key = (tuple(p.shape), group["parts"])
            built[key] = built.get(key, 0) + 1
    assert known == built
    assert sum(
        torch.Size(shape).numel() * count for shape, count, *_ in parameter_shapes(source.model_config())
    ) == sum(p.numel() for p in model.parameters())


def test_classifiers_and_frozen_matrices_are_not_hidden():
    class Vision(nn.Module):
        def __init__(self):
            super().__init__()
            self.patch, self.block, self.head = nn.Conv2d(3, 4, 2), nn.Linear(4, 4), nn.Linear(4, 2)
            self.frozen = nn.Linear(4, 4).requires_grad_(False)

        def get_classifier(self):
            return self.head

    model = Vision()
    assert hidden_matrices(model) == {id(model.block.weight): ()}
