"""From a model source to a model with weights: built on the meta device, then given memory and values, one parameter
after the other, or ready to be: then matrices are lazy (`tensors/lazy.py`)."""

import functools
from collections.abc import Callable

import torch
from torch import nn

from qtrain.core.errors import UserError, unknown_name
from qtrain.models.hf.impl import HfModel, build_hf_model
from qtrain.models.hf.initial_values import DrawnValues, LoadedValues
from qtrain.models.hf.source import ModelSource
from qtrain.models.native.decoder import Decoder
from qtrain.tensors.lazy import is_lazy, make_lazy

MODEL_IMPLS = {
    "native": "qtrain's own decoder",
    "hf": "any causal language model of transformers",
}


def build_model(
    source: ModelSource,
    *,
    impl: str = "native",
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    pretrained: bool = False,
    seed: int = 0,
    place: Callable[[Decoder], None] | None = None,
    lazy: bool = False,
) -> Decoder | HfModel:
    """A model on `device` in `dtype`, with weights: drawn from `seed` or, with `pretrained`, loaded from the source.

    place: replaces modules of an empty native model by parallel kinds of them, with the sizes of this process; values
    are then parts of those of the full model. lazy: the matrices of a native model have no memory yet; they get their
    values one by one where they are quantized (`quantize_linears`) or sharded.

    Raises UserError for an architecture that is not covered, and for weights that are missing or do not fit.
    """
    if impl not in MODEL_IMPLS:
        raise unknown_name("--model_impl", "implementation", impl, MODEL_IMPLS)
    if pretrained and not source.has_weights:
        raise UserError(
            f"--pretrained: {source.name} is a shape without weights. Give --model a hub id or a folder, "
            "or train from scratch with --no_pretrained."
        )
    if impl == "hf":
        return build_hf_model(source, device, dtype, pretrained, seed)
    model = empty_decoder(source, place).to(dtype)
    values = LoadedValues(model, source) if pretrained else DrawnValues(model, seed)
    for name, module in model.named_modules():
        module.to_empty(device=device, recurse=False)
        # Module by module: what becomes lazy gives its memory back before the next module takes its own.
        if lazy:
            _make_matrices_lazy(name, module, values)
    model.tie()  # again: `to_empty` has untied them
    model.reset_buffers()
    for name, parameter in model.named_parameters():
        if not is_lazy(parameter):
            values.fill(name, parameter)
    if pretrained:
        for name, buffer in model.named_buffers():
            values.fill(name, buffer)
    return model


def _make_matrices_lazy(name: str, module: nn.Module, values: DrawnValues | LoadedValues) -> None:
    """Leave the matrices that `module` holds itself to be made from `values`."""

    def make(own: str, shape: torch.Size, like: dict) -> torch.Tensor:
        value = torch.empty(shape, **like)
        values.fill(f"{name}.{own}", value)
        return value

    for own, p in module.named_parameters(recurse=False):
        if p.ndim > 1:
            like = {"dtype": p.dtype, "device": p.device}
            stored = None
            if isinstance(values, LoadedValues):
                stored = functools.partial(values.codes, f"{name}.{own}", shape=p.shape, **like)
            make_lazy(p, functools.partial(make, own, p.shape, like), stored)


def empty_model(
    source: ModelSource, impl: str = "native", place: Callable[[Decoder], None] | None = None
) -> Decoder | HfModel:
    """The model on the meta device: modules and shapes without memory."""
    if impl == "hf":
        return build_hf_model(source, "meta", torch.float32, pretrained=False, seed=0)
    return empty_decoder(source, place)


def empty_decoder(source: ModelSource, place: Callable[[Decoder], None] | None = None) -> Decoder:
    """As `empty_model`, of the native one."""
    with torch.device("meta"):
        decoder = Decoder(source.model_config())
        if place is not None:
            place(decoder)
    return decoder
