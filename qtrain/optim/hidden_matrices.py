"""Which parameters are matrices of hidden layers, what parts a fused one has, and how many are worked on at once."""

from collections.abc import Iterator, Sequence

from torch import Tensor, nn

BATCH_ELEMENTS = 1 << 26
"""Most elements of a batch: 256 MiB in fp32. Launches grow with the size of a model, not with its layers."""


def hidden_matrices(model: nn.Module) -> dict[int, tuple[int, ...]]:
    """id of every trainable 2-D parameter that is neither an embedding's nor the output head's -> rows of its parts,
    or nothing where it is one projection.

    A module whose linears hold several projections says so: `fused_rows` maps a child's name to the rows of each.
    """
    spared = {id(p) for m in model.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    head = getattr(model, "lm_head", None)
    if head is None and hasattr(model, "get_classifier"):  # timm
        head = model.get_classifier()
    if isinstance(head, nn.Module):
        spared |= {id(p) for p in head.parameters()}
    fused = {
        id(getattr(module, child).weight): tuple(rows)
        for module in model.modules()
        for child, rows in getattr(module, "fused_rows", {}).items()
    }
    hidden = [p for p in model.parameters() if p.requires_grad and p.ndim == 2 and id(p) not in spared]
    return {id(p): fused.get(id(p), ()) for p in hidden}


def batches_by_shape(tensors: Sequence[Tensor]) -> Iterator[list[int]]:
    """Indices of tensors of one shape and kind at a time, at most BATCH_ELEMENTS together."""
    kinds: dict[tuple, list[int]] = {}
    for i, tensor in enumerate(tensors):
        kinds.setdefault((tensor.shape, tensor.dtype, tensor.device, type(tensor)), []).append(i)
    for indices in kinds.values():
        most = max(1, BATCH_ELEMENTS // max(tensors[indices[0]].numel(), 1))
        for start in range(0, len(indices), most):
            yield indices[start : start + most]


def equal_parts(parts: Sequence[int]) -> dict[int, list[tuple[int, int]]]:
    """Rows of a part -> (number, first row) of every part that has as many: what can be worked on as one batch."""
    found: dict[int, list[tuple[int, int]]] = {}
    first = 0
    for number, rows in enumerate(parts):
        found.setdefault(rows, []).append((number, first))
        first += rows
    return found
