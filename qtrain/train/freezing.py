"""Which parameters train: frozen in the model, reported in the log, counted in the plan."""

import torch
from torch import nn

from qtrain.models import Lora, ModelConfig
from qtrain.models.cost.parameters import parameter_shapes
from qtrain.models.cost.trained import TrainedPart, all_but_embedding, only_adapters
from qtrain.train.log.status import short_number


def freeze_embedding(model: nn.Module) -> list[str]:
    """Freeze the embedding. Returns the line to print; none for a model without an embedding."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for embedding in embeddings:
        embedding.weight.requires_grad_(False)
    frozen = {id(e.weight) for e in embeddings}
    head = getattr(model, "lm_head", None)
    tied = head is not None and id(getattr(head, "weight", None)) in frozen
    return [f"frozen: the embedding{', which is the output head too' if tied else ''}"] if embeddings else []


def describe_trained(model: nn.Module) -> str:
    """How many of the model's parameters train."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"trained: {short_number(trained)} of {short_number(total)} parameters ({100 * trained / total:.3g}%)"


def trained_part(
    config: ModelConfig | None, lora: Lora | None, freeze_embedding: bool, dtype: torch.dtype
) -> TrainedPart | None:
    """What trains, for the plan; None: everything, or a model whose plan has no figures."""
    if config is None or (lora is None and not freeze_embedding):
        return None
    if lora is not None:
        return only_adapters(config, lora)
    return all_but_embedding(config, parameter_shapes(config), dtype.itemsize)
