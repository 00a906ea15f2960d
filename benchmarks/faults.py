"""Faults of quantization that are put into the models that a process builds."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch

from qtrain.models.native.router import Router
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.schemes.fp8_rowwise import Fp8Rowwise
from qtrain.tensors.lazy import is_lazy, materialize
from qtrain.tensors.quantized_tensor import OperandFormat
from qtrain.train.assembly import assemble

READERS = {"attn_norm": "attn.qkv", "mlp_norm": "mlp.gate_up"}
"""The linear that reads a norm's output."""


@contextlib.contextmanager
def changed_model(change: Callable[[Any], None]) -> Iterator[None]:
    """Models are changed when they have been built."""
    build = assemble.build_quantized

    def changed(prepared: Any) -> Any:
        built = build(prepared)
        with torch.no_grad():
            change(built[0])
        if not any(is_lazy(p) for p in built[0].parameters()):  # else codes are made where the weights are sharded
            built[1].refresh_weights()
        return built

    with patch.object(assemble, "build_quantized", changed):
        yield


def outlier_channel(
    size: float | torch.Tensor = 1000.0, layers: Sequence[int] | None = None, norms: Sequence[str] = tuple(READERS)
) -> contextlib.AbstractContextManager[None]:
    """A channel of the inputs of these layers' linears (None: of all layers), whose root mean square is 1, is `size`.
    Nothing reads it: its weights are 0."""

    def add(model: Any) -> None:
        for layer in model.layers if layers is None else [model.layers[i] for i in layers]:
            for norm in norms:
                weight = layer.get_submodule(READERS[norm]).weight
                materialize(weight)
                mask = (torch.arange(weight.shape[1], device=weight.device) != 5).to(weight.dtype)
                getattr(layer, norm).register_forward_hook(
                    lambda _, inputs, out, mask=mask: (out[0], out[1] * mask + size * (1 - mask))
                )
                weight.mul_(mask)
                weight.register_hook(lambda gradient, mask=mask: gradient * mask)

    return changed_model(add)


@contextlib.contextmanager
def e5m2_activations() -> Iterator[None]:
    """Of fp8_rowwise with scales that are no powers of two."""
    formats = Fp8Rowwise.low_bit_formats

    def low_bit_formats(self: Fp8Rowwise, gemm: Any) -> tuple[OperandFormat, OperandFormat]:
        first, second = formats(self, gemm)
        return (first._replace(fmt="e5m2"), second) if gemm == "output" and not self.power_of_two else (first, second)

    with patch.object(Fp8Rowwise, "low_bit_formats", low_bit_formats):
        yield


@contextlib.contextmanager
def head_to_nearest() -> Iterator[None]:
    """The gradient of logits is rounded to nearest in INT8."""
    with patch.object(LowBitScheme, "for_linear", lambda self, *_, **__: self):
        yield


def collapsed_router(offset: float = 1.0) -> contextlib.AbstractContextManager[None]:
    """At first all tokens go to the first experts, whose logits have this offset."""

    def constant(router: Any, inputs: tuple[torch.Tensor]) -> tuple[torch.Tensor]:
        return (torch.cat([torch.full_like(inputs[0][:, :1], 5.0), inputs[0][:, 1:]], dim=1),)

    def collapse(model: Any) -> None:
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.register_forward_pre_hook(constant)
            router.weight[:, 0] = 0
            router.weight[: router.moe.per_token, 0] = offset / 5.0

    return changed_model(collapse)
