"""The whole model of ranks that hold its parts, in host memory, for the export."""

import dataclasses

import torch
from torch import nn

from qtrain.models import Decoder
from qtrain.parallel.mesh import Mesh
from qtrain.quant import exported_tensors


@torch.no_grad()
def gather_whole_model(model: Decoder, mesh: Mesh) -> nn.Module | None:
    """On rank 0 the decoder of which `model` is a part, dense and in its dtype, one parameter gathered at a time; None
    on the others. Every rank calls it."""
    if (mesh.expert_mesh or mesh).dp_rank:
        return None
    config, group, device = model.config, mesh.model_group, model.norm.weight.device
    parts = [dataclasses.replace(model.parts, group=dataclasses.replace(group, rank=r)) for r in range(group.ranks)]
    whole = None
    if mesh.rank == 0:
        with torch.device("meta"):
            whole = Decoder(config)
        whole = whole.to(model.norm.weight.dtype).to_empty(device="cpu")
        whole.tie()
    targets = whole.state_dict() if whole is not None else {}
    for name, exported in exported_tensors(model).items():
        splits = [part.partition(name) for part in parts]
        if splits[0] is None:  # which only rank 0 may have, after full sharding
            if whole is not None:
                targets[name].copy_(exported())
            continue
        own = exported()
        shapes = [[*own.shape[: s.dim], s.length, *own.shape[s.dim + 1 :]] for s in splits]
        sizes = [torch.Size(shape).numel() for shape in shapes]
        flat = group.all_gather_ragged(own.to(device).contiguous().flatten(), sizes, "exported weights")
        if whole is not None:
            for split, row, shape in zip(splits, flat, shapes, strict=True):
                split.put(targets[name], row.view(shape))
    return whole
