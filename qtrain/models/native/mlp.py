"""The gated MLP of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.kernels.swiglu.swiglu import swiglu, swiglu_8bit
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.attention import SequenceInfo
from qtrain.quant import KEEP_ALL, supports_swiglu_mlp, swiglu_mlp
from qtrain.quant.adapted_linear import adapted_mlp, adapted_pair
from qtrain.quant.arguments import Exchange


def runs_kernels(x: Tensor) -> bool:
    """Whether the activation is a kernel's: on a CPU PyTorch's operations are faster than the kernel's reference."""
    return x.is_cuda


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [..., C] -> [..., C]. `gate_up` holds the rows of gate, then up. width: the config's
    if None. `memory`: what takes the place of tensors that backward reads."""

    memory = KEEP_ALL

    def __init__(self, config: ModelConfig, width: int | None = None):
        super().__init__()
        width = width or config.intermediate_size
        self.gate_up = nn.Linear(config.hidden_size, 2 * width, bias=config.mlp_bias)
        self.projections = {"gate_up": [width] * 2}  # as in `Attention`
        self.sub_norm = nn.RMSNorm(width, eps=config.rms_norm_eps) if config.sub_norm else None
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, info: SequenceInfo | None = None) -> Tensor:
        return self.compute(x)

    def compute(self, x: Tensor, exchange: Exchange | None = None) -> Tensor:
        """exchange: of `gate_up`, where it takes other processes' tokens too."""
        linears, in_8_bits = (self.gate_up, self.down_proj), self.memory.gate_up_8bit
        if (runs_kernels(x) or in_8_bits) and self.sub_norm is None and supports_swiglu_mlp(*linears, in_8_bits):
            return swiglu_mlp(*linears, x, exchange, self.memory)
        plain = exchange is None and self.sub_norm is None and not in_8_bits
        if runs_kernels(x) and plain and (pair := adapted_pair(*linears, x.dtype)) is not None:
            return adapted_mlp(*pair, x)
        gate_up = self.gate_up(x) if exchange is None else self.gate_up(x, exchange)  # [..., 2I]
        if in_8_bits:
            y = swiglu_8bit(gate_up)
        elif runs_kernels(x):
            y = swiglu(gate_up)
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return self.down_proj(y if self.sub_norm is None else self.sub_norm(y))
