"""Layers of timm's transformers through this package's kernels: SwiGLU MLPs (`SwiGLUPacked`, as in DINOv2's ViT-giant),
attention, and norms.

As timm runs a quantized SwiGLU MLP, the activation and its gradient, the largest tensors of a block, are written in
bf16 and read again for their codes, and the gradient once more for that of fc1's bias. In `swiglu_mlp` they are
quantized and summed as they are computed: of a block of ViT-giant and 64 images that moves 270 MB less in forward and
810 MB in backward. In bf16 the kernel of the activation still writes both halves of its gradient from one read. Of
attention, backward concatenates the gradients of q, k and v, another 300 MB; `packed_attention` writes them side by
side. And of a norm Inductor reads its input and the gradient twice in backward, which `residual_norm` reads once.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.kernels.attention.packed import packed_attention, takes_packed_attention
from qtrain.kernels.norm.residual_norm import residual_norm
from qtrain.kernels.swiglu.swiglu import swiglu
from qtrain.models.native.mlp import runs_kernels
from qtrain.quant import supports_swiglu_mlp, swiglu_mlp


class SwiGLUMLP(nn.Module):
    """fc2(silu(gate) * up) with [gate, up] = fc1(x), [..., C] -> [..., C]; parameters have timm's names."""

    def __init__(self, fc1: nn.Linear, fc2: nn.Linear):
        super().__init__()
        self.fc1, self.fc2 = fc1, fc2

    def forward(self, x: Tensor) -> Tensor:
        if runs_kernels(x) and supports_swiglu_mlp(self.fc1, self.fc2):
            return swiglu_mlp(self.fc1, self.fc2, x)
        gate_up = self.fc1(x)
        if runs_kernels(x) or x.is_meta:  # where the plan counts what is kept: the kernel keeps its input alone
            return self.fc2(swiglu(gate_up))
        gate, up = gate_up.chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


class SelfAttention(nn.Module):
    """proj(softmax(q · kᵀ / √D) · v) with [q, k, v] = qkv(x), [B, S, C] -> [B, S, C]; parameters have timm's names."""

    def __init__(self, qkv: nn.Linear, proj: nn.Linear, heads: int):
        super().__init__()
        self.qkv, self.proj, self.num_heads = qkv, proj, heads

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        qkv = self.qkv(x).unflatten(-1, (3, self.num_heads, -1))  # [B, S, 3, H, D]
        if attn_mask is None and not is_causal and takes_packed_attention(qkv):
            o = packed_attention(qkv, qkv.shape[-1] ** -0.5)
        else:
            q, k, v = (t.transpose(1, 2) for t in qkv.unbind(2))
            o = F.scaled_dot_product_attention(q, k, v, attn_mask, is_causal=is_causal).transpose(1, 2)
        return self.proj(o.flatten(2))


class EncoderBlock(nn.Module):
    """The stream [B, S, C] -> [B, S, C]: attention, then an MLP, of its LayerNorm, each added to it. It has the modules
    of a `Block` of timm."""

    def __init__(self, block: Any):
        super().__init__()
        self.norm1, self.attn, self.ls1, self.drop_path1 = block.norm1, block.attn, block.ls1, block.drop_path1
        self.norm2, self.mlp, self.ls2, self.drop_path2 = block.norm2, block.mlp, block.ls2, block.drop_path2

    def forward(self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        mask = {} if attn_mask is None and not is_causal else {"attn_mask": attn_mask, "is_causal": is_causal}
        x, y = _with_norm(x, self.norm1)
        x = x + self.drop_path1(self.ls1(self.attn(y, **mask)))
        x, y = _with_norm(x, self.norm2)
        return x + self.drop_path2(self.ls2(self.mlp(y)))


def _with_norm(x: Tensor, norm: Any) -> tuple[Tensor, Tensor]:
    """x, for the residual, and its LayerNorm."""
    return residual_norm(x, norm.weight, norm.eps, norm.bias) if runs_kernels(x) else (x, norm(x))


def use_kernels(model: nn.Module) -> None:
    """Replace layers of timm that compute nothing else than those above, in place."""
    for parent in reversed(list(model.modules())):  # a block's layers before it
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if _is_swiglu(child):
                setattr(parent, name, SwiGLUMLP(child.fc1, child.fc2))
            elif _is_plain_attention(child):
                setattr(parent, name, SelfAttention(child.qkv, child.proj, child.num_heads))
            elif _is_plain_block(child):
                setattr(parent, name, EncoderBlock(child))


def _is_swiglu(module: Any) -> bool:
    """Without a norm, dropout, or convolutions."""
    from timm.layers import GluMlp

    if type(module) is not GluMlp or module.gate_last:
        return False
    plain = isinstance(module.norm, nn.Identity) and module.drop1.p == module.drop2.p == 0
    return plain and type(module.act) is nn.SiLU and all(type(m) is nn.Linear for m in (module.fc1, module.fc2))


def _is_plain_attention(module: Any) -> bool:
    """Without norms, a gate, or dropout."""
    from timm.models.vision_transformer import Attention

    if type(module) is not Attention or not module.fused_attn:
        return False
    # Versions of timm differ in which of them there are.
    others = (getattr(module, name, None) for name in ("q_norm", "k_norm", "norm", "gate"))
    plain = all(other is None or isinstance(other, nn.Identity) for other in others)
    return plain and module.attn_drop.p == module.proj_drop.p == 0


def _is_plain_block(module: Any) -> bool:
    """With LayerNorms of weight and bias; timm's fast norms take other kernels."""
    from timm.models.vision_transformer import Block

    if type(module) is not Block:
        return False
    norms = module.norm1, module.norm2
    return all(isinstance(n, nn.LayerNorm) and n.bias is not None and not getattr(n, "_fast_norm", 0) for n in norms)
