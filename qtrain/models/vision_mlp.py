"""SwiGLU MLPs of timm's models (`SwiGLUPacked`, as in DINOv2's ViT-giant) through the kernels of the native decoder.

As timm runs them, the activation and its gradient, the largest tensors of a block, are written in bf16 and read again
for their codes, and the gradient once more for that of fc1's bias. In `swiglu_mlp` they are quantized and summed as
they are computed: of a block of ViT-giant and 64 images that moves 270 MB less in forward and 810 MB in backward.
"""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

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
        gate, up = self.fc1(x).chunk(2, dim=-1)
        return self.fc2(F.silu(gate) * up)


def fuse_swiglu_mlps(model: nn.Module) -> None:
    """Replace timm's SwiGLU MLPs by `SwiGLUMLP`, in place."""
    for parent in list(model.modules()):
        children: list[tuple[str, Any]] = list(parent.named_children())
        for name, child in children:
            if _is_swiglu(child):
                setattr(parent, name, SwiGLUMLP(child.fc1, child.fc2))


def _is_swiglu(module: Any) -> bool:
    """Whether it computes nothing else: no norm, no dropout, no convolutions."""
    from timm.layers import GluMlp

    if type(module) is not GluMlp or module.gate_last:
        return False
    plain = isinstance(module.norm, nn.Identity) and module.drop1.p == module.drop2.p == 0
    return plain and type(module.act) is nn.SiLU and all(type(m) is nn.Linear for m in (module.fc1, module.fc2))
