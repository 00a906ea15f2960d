"""A model's parameters in torch parameter groups: which are decayed, and which are matrices of hidden layers."""

from typing import Any

from torch import nn


def hidden_matrices(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """id of each trainable 2-D parameter outside the embeddings and the output head -> rows of its fused projections.

    The rows are () for a single projection. A module whose linears hold several projections has an attribute
    `fused_rows`: name of the linear -> rows of each projection.
    """
    excluded = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = getattr(model, "lm_head", None)
    if head is None and hasattr(model, "get_classifier"):  # timm
        head = model.get_classifier()
    if isinstance(head, nn.Module):
        excluded |= {id(p) for p in head.parameters()}
    fused = {
        id(getattr(module, child).weight): tuple(rows)
        for module in model.modules()
        for child, rows in getattr(module, "fused_rows", {}).items()
    }
    hidden = [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in excluded]
    return {id(p): fused.get(id(p), ()) for p in hidden}


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """The trainable parameters in groups. Matrices are decayed; norms and biases (one dimension) are not.

    Group options: `hidden`, whether its parameters are matrices of hidden layers; `parts`, the rows of the projections
    fused in each of them, () for a single one. Both are saved in checkpoints.
    """
    hidden = hidden_matrices(model)
    groups: dict[tuple[float, bool, tuple[int, ...]], list[nn.Parameter]] = {}
    for p in model.parameters():
        if p.requires_grad:
            kind = (weight_decay if p.ndim >= 2 else 0.0, id(p) in hidden, hidden.get(id(p), ()))
            groups.setdefault(kind, []).append(p)
    return [
        {"params": params, "weight_decay": decay, "hidden": is_hidden, "parts": parts}
        for (decay, is_hidden, parts), params in groups.items()
    ]
