"""From a model source to a model with weights: built on the meta device, materialized, then initialized or loaded."""

import hashlib

import torch
from torch import nn

from qtrain.distributed.tensor_group import TensorGroup
from qtrain.errors import UserError, unknown_name
from qtrain.models.decoder import Decoder
from qtrain.models.expert_parallel import ExpertParallel
from qtrain.models.hf import load_hf_weights
from qtrain.models.hf_impl import build_hf_model
from qtrain.models.source import ModelSource
from qtrain.models.tensor_parallel import TensorParallel

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
    tensor: TensorGroup | None = None,
    sequence: bool = True,
    experts: TensorGroup | None = None,
) -> nn.Module:
    """A model on `device` in `dtype`, its weights initialized from `seed` or, with `pretrained`, loaded from the
    source. tensor: this rank builds its part of a native model (`tensor_parallel.py`), whose values are those of the
    whole; sequence: with the stream divided along tokens. experts: the same of a mixture, of which it has some experts.

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
    model = empty_model(source, tensor=tensor, sequence=sequence, experts=experts).to(dtype)
    model.to_empty(device=device)
    model.tie()
    model.reset_buffers()
    if pretrained:
        load_hf_weights(model, source)
    else:
        init_weights(model, model.config.initializer_range, seed)
    return model


def empty_model(
    source: ModelSource,
    impl: str = "native",
    tensor: TensorGroup | None = None,
    sequence: bool = True,
    experts: TensorGroup | None = None,
) -> nn.Module:
    """The model on the meta device: modules and shapes without memory."""
    if impl == "hf":
        return build_hf_model(source, "meta", torch.float32, pretrained=False, seed=0)
    config = source.model_config()
    parallel = None if tensor is None else TensorParallel(config, tensor, sequence=sequence)
    divided = None if experts is None else ExpertParallel(config, experts)
    with torch.device("meta"):
        return Decoder(config, parallel, divided)


@torch.no_grad()
def init_weights(model: nn.Module, std: float, seed: int) -> None:
    """Initialize matrices from normal(0, std) as transformers does, biases to 0 and norms to 1.

    Every parameter has its own generator, on its device, seeded by (seed, name), so its values do not depend on the
    other parameters. They are drawn in fp32, so a bf16 model is the rounded fp32 model. A rank that holds a part of a
    parameter draws all of it, and keeps its part.
    """
    split_of = model.split if isinstance(model, Decoder) else lambda name: None
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)
            continue
        generator = named_generator(seed, name, parameter.device)
        if split := split_of(name):
            whole = torch.empty(split.whole_shape(parameter.shape), dtype=torch.float32, device=parameter.device)
            parameter.copy_(split.take(whole.normal_(0.0, std, generator=generator)))
            continue
        # No name holds the fp32 copy: it is freed before the next one is allocated.
        parameter.copy_(torch.empty_like(parameter, dtype=torch.float32).normal_(0.0, std, generator=generator))


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator on `device`, seeded by a hash of (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)
