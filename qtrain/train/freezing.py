"""What of a model trains: said to the model, to the log and to the plan."""

import torch
from torch import nn

from qtrain.models import Lora, ModelConfig
from qtrain.models.cost import parameter_shapes
from qtrain.models.trained_cost import TrainedPart, all_but_embedding, only_adapters
from qtrain.train.log.status import short_number


def freeze_embedding(model: nn.Module) -> list[str]:
    """Freeze the embedding; returns the names of the parameters, each with why where it is more than one module's."""
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for embedding in embeddings:
        embedding.weight.requires_grad_(False)
    frozen = {id(e.weight) for e in embeddings}
    head = getattr(model, "lm_head", None)
    tied = head is not None and id(getattr(head, "weight", None)) in frozen
    return [f"frozen: the embedding{', which is the output head too' if tied else ''}"] if embeddings else []


def trained_parameters(model: nn.Module) -> tuple[int, int]:
    """(parameters that train, all of them)."""
    sizes = [(p.numel(), p.requires_grad) for p in model.parameters()]
    return sum(n for n, trains in sizes if trains), sum(n for n, _ in sizes)


def describe_trained(model: nn.Module) -> str:
    trained, whole = trained_parameters(model)
    return f"trained: {short_number(trained)} of {short_number(whole)} parameters ({100 * trained / whole:.3g}%)"


def trained_part(
    config: ModelConfig | None, lora: Lora | None, freeze_embedding: bool, dtype: torch.dtype
) -> TrainedPart | None:
    """What trains, for the plan; None: everything, or a model that has no figures in it."""
    if config is None or (lora is None and not freeze_embedding):
        return None
    if lora is not None:
        return only_adapters(config, lora)
    return all_but_embedding(config, parameter_shapes(config), dtype.itemsize)
