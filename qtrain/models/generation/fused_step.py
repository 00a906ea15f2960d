"""A step of generation in five launches a layer, for dense decoders on a GPU (`kernels/decode`).

    qkv = norm(x) · Wᵀ      attention over the cache      x += y · Wᵀ      y = swiglu(norm(x) · Wᵀ)      x += y · Wᵀ

Weights are read as the codes that training multiplies with. Activations of one row stay in the model's dtype, where
training's GEMMs quantize them too; those of several are quantized where tensor cores multiply such codes
(`weight_only_mm.py`). So it differs from the model's forward pass by the rounding of activations.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn

from qtrain.kernels.decode.cached_attention import Heads, cached_attention
from qtrain.kernels.decode.operands import FORMATS_READ, Fused, Weight
from qtrain.kernels.decode.weight_only_mm import weight_only_mm
from qtrain.kernels.numerics.formats import FORMATS, pack
from qtrain.models.native.attention import Attention
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.mlp import MLP
from qtrain.quant.linear import LowBitLinear
from qtrain.tensors.quantized_tensor import QuantizedTensor


def runs_fused(model: nn.Module) -> TypeGuard[Decoder]:
    """Whether every layer is one that `FusedStep` computes: no latent attention, experts, adapters, or norms over all
    heads; on one GPU."""
    if not isinstance(model, Decoder) or not model.norm.weight.is_cuda or model.norm.weight.dtype != torch.bfloat16:
        return False
    if model.config.rope_dim != model.config.head_dim:
        return False
    linears = [model.lm_head]
    for layer in model.layers:
        if type(layer.attn) is not Attention or type(layer.mlp) is not MLP:
            return False
        if layer.attn.q_norm is not None and not layer.attn.norms_heads:
            return False
        linears += [layer.attn.qkv, layer.attn.o_proj, layer.mlp.gate_up, layer.mlp.down_proj]
    return all(type(linear) in (nn.Linear, LowBitLinear) for linear in linears)


def read_weight(linear: Any) -> Weight:
    """What a linear's `output` multiplies with. Codes of formats without a kernel are dequantized to the dtype of the
    weight, once."""
    rows = linear.weight_codes.operands().rows if isinstance(linear, LowBitLinear) else None
    if not isinstance(linear, LowBitLinear) or not isinstance(rows, QuantizedTensor):
        return Weight(linear.weight.detach())
    fmt, codes, scale = rows.format.fmt, rows.codes, rows.scale
    if (packed := linear.scheme.packed_weight) is not None:
        fmt, codes = packed.fmt, pack(codes, packed.fmt)
    plain = rows.tensor_scale is None and not rows.format.hadamard and rows.format.sum_dim == 1
    whole = codes.shape[1] * FORMATS[fmt].packing == linear.in_features and codes.is_contiguous()
    if fmt not in FORMATS_READ or not plain or not whole:
        return Weight(rows.values(linear.weight.dtype)[:, : linear.in_features].contiguous())
    return Weight(codes, scale.float(), fmt, rows.format.granularity)  # MX scales are powers of two: exact in fp32


class _Layer(NamedTuple):
    qkv: tuple[Weight, Fused]
    heads: Heads
    o_proj: tuple[Weight, Fused]
    gate_up: tuple[Weight, Fused]
    down_proj: tuple[Weight, Fused]


class FusedStep:
    """Logits of one new token a row. cos, sin: fp32 [T, D/2]."""

    def __init__(self, model: Decoder, cos: Tensor, sin: Tensor):
        config = model.config
        self._model, self._tables, self._eps = model, (cos, sin), config.rms_norm_eps
        window = config.sliding_window or 0

        def product(linear: Any, norm: Any, swiglu: bool = False) -> tuple[Weight, Fused]:
            bias = getattr(linear, "bias", None)
            weight = None if norm is None else norm.weight.detach()
            return read_weight(linear), Fused(weight, self._eps, None if bias is None else bias.detach(), swiglu)

        self._layers = []
        for layer in model.layers:
            attn, mlp = layer.attn, layer.mlp
            q_norm, k_norm = (None if norm is None else norm.weight.detach() for norm in (attn.q_norm, attn.k_norm))
            self._layers.append(
                _Layer(
                    product(attn.qkv, layer.attn_norm),
                    Heads(config.head_dim**-0.5, window, q_norm, k_norm, self._eps),
                    product(attn.o_proj, attn.sub_norm),
                    product(mlp.gate_up, layer.mlp_norm, swiglu=True),
                    product(mlp.down_proj, mlp.sub_norm),
                )
            )
        self._head = product(model.lm_head, model.norm)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights and scales that a step reads."""
        products = [self._head]
        for layer in self._layers:
            products += [layer.qkv, layer.o_proj, layer.gate_up, layer.down_proj]
        tensors = [t for weight, _ in products for t in (weight.codes, weight.scale) if t is not None]
        return sum(t.numel() * t.element_size() for t in tensors)

    def __call__(self, token: Tensor, at: Tensor, caches: Sequence[tuple[Tensor, Tensor]]) -> Tensor:
        """Logits [B, V] of token int64 [B] at the places `at`; its keys and values are stored in the layers' caches,
        [B, KV heads, T, D] each."""
        x = self._model.embed_tokens(token)
        for layer, (keys, values) in zip(self._layers, caches, strict=True):
            y = cached_attention(_multiply(x, layer.qkv), keys, values, at, *self._tables, layer.heads)
            x = _multiply(y, layer.o_proj, x)
            x = _multiply(_multiply(x, layer.gate_up), layer.down_proj, x)
        return _multiply(x, self._head)


def _multiply(x: Tensor, product: tuple[Weight, Fused], residual: Tensor | None = None) -> Tensor:
    weight, fused = product
    return weight_only_mm(x, weight, fused._replace(residual=residual))
