"""`qtrain.quantize`: the linears and convolutions of any nn.Module in low bits, for a training loop of one's own.

    qtrain.quantize(model, "fp8_rowwise")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    loss = model(x).sum(); loss.backward(); optimizer.step(); optimizer.zero_grad()

A weight's codes follow from its value. Whatever optimizer has changed weights, a hook computes their codes again after
its step, once for all forward passes until the next; values that were changed by hand or loaded are found at the start
of the next forward pass, by torch's version counters. Each forward pass that trains draws its own random bits.
"""

import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from qtrain.core.errors import UserError
from qtrain.quant.choices import LinearChoice, describe_choices, find_layers
from qtrain.quant.quantized_model import QuantizedModel
from qtrain.quant.scheme import SCHEMES
from qtrain.quant.scheme_map import Spec, with_overrides
from qtrain.quant.swap import quantize_linears


@dataclass(frozen=True)
class Quantized:
    """What `quantize` did; printed, it lists the linears by kind and shape."""

    choices: tuple[LinearChoice, ...]
    """The decision on each linear of the model."""

    @property
    def schemes(self) -> dict[str, Spec]:
        """Linear -> the scheme that it runs in, as `overrides` has it; "bf16": it was left as it is."""
        return {choice.name: choice.spec for choice in self.choices}

    @property
    def left(self) -> dict[str, str]:
        """Linear -> why it stays in high precision."""
        return {choice.name: choice.reason for choice in self.choices if choice.reason is not None}

    def __str__(self) -> str:
        return "\n".join(describe_choices(list(self.choices)))


def quantize(
    model: nn.Module,
    scheme: str,
    *,
    overrides: Mapping[str, Any] | None = None,
    quantize_head: bool = False,
    min_size: int = 0,
    seed: int = 0,
    **options: Any,
) -> Quantized:
    """Replace the nn.Linear and nn.Conv2d modules of `model` in place by ones whose three GEMMs run as `scheme` says.

    scheme: a name of `--quantize` (`python llm_pretrain.py --list`), with its `options`, such as
    `scaling="delayed"`. overrides: as `--quantize_overrides`, {"a glob over names": "a scheme" or {"scheme": NAME, ...
    options}}; "bf16" leaves a linear as it is. quantize_head: the output head too, as `get_output_embeddings` or
    `get_classifier` of the model names it. min_size: leave linears with fewer in- or out-features. seed: of stochastic
    rounding.

    Weights stay the parameters that they were, but for schemes that store them in low bits: build the optimizer
    afterwards. One process, or DDP; sharded models are the scripts' (`docs/distributed.md`). Raises UserError
    for an unknown scheme or option, and where no linear can be quantized.
    """
    chosen = with_overrides(overrides, SCHEMES.make(scheme, options, "scheme"))
    if not find_layers(model):
        raise UserError(f"{scheme}: {type(model).__name__} has no nn.Linear or nn.Conv2d to quantize.")
    quantized = quantize_linears(
        model, chosen, seed=seed, head=output_head(model), quantize_head=quantize_head, min_size=min_size
    )
    if not quantized.linears:
        what = "linear or convolution" if any(choice.kernel for choice in quantized.choices) else "linear"
        reasons = sorted({choice.reason for choice in quantized.choices if choice.reason is not None})
        raise UserError(f"{scheme}: no {what} of this {type(model).__name__} is quantized: {'; '.join(reasons)}.")
    _keep_fresh(model, quantized)
    return Quantized(tuple(quantized.choices))


def output_head(model: nn.Module) -> nn.Module | None:
    """The module that computes logits, of a transformers or timm model; None: the model does not say."""
    for method in ("get_output_embeddings", "get_classifier"):
        if callable(getattr(model, method, None)):
            head = getattr(model, method)()
            return head if isinstance(head, nn.Module) else None
    return None


def _keep_fresh(model: nn.Module, quantized: QuantizedModel) -> None:
    """Compute codes again after each step of an optimizer that has any of the weights, and before a forward pass that
    would read old ones. The model's hook is what keeps `quantized` alive."""

    # The check must run in every pass, not once while torch.compile traces the model.
    @torch.compiler.disable
    def before_forward(module: nn.Module, _: object) -> None:
        if any(linear.stale for linear in quantized.linears):
            quantized.refresh_weights()
        # Evaluation leaves the random bits of training as they are.
        if module.training and torch.is_grad_enabled():
            quantized.set_step(quantized.step + 1)

    model.register_forward_pre_hook(before_forward)
    # The optimizer hook is global: a strong reference in it would keep the model alive for ever.
    found = weakref.ref(quantized)

    def after_step(optimizer: torch.optim.Optimizer, *_: object) -> None:
        if (here := found()) is None:
            return
        # By identity: `in` on tensors would compare elements.
        updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
        weights = [linear.weight for linear in here.linears if id(linear.weight) in updated]
        if weights:
            # torch's fused optimizers do not count: equal counters would say that the codes are fresh.
            torch.autograd.graph.increment_version(weights)
            here.refresh()

    handle = register_optimizer_step_post_hook(after_step)
    # The hook goes when the model does.
    weakref.finalize(quantized, handle.remove)
