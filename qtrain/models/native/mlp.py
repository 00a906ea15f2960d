"""The gated MLP of a layer."""

import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.comm.tensor_group import TensorGroup
from qtrain.kernels.swiglu.swiglu import swiglu
from qtrain.models.config.model import ModelConfig
from qtrain.models.native.tensor_parallel import TensorParallel, Tokens, norm_of_part
from qtrain.quant import supports_swiglu_mlp, swiglu_mlp


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)), [..., C] -> [..., C]. `gate_up` holds the rows of gate, then up. width: the config's
    if None."""

    def __init__(self, config: ModelConfig, tensor: TensorParallel | None = None, width: int | None = None):
        super().__init__()
        self.tensor = tensor
        width = width or config.intermediate_size
        self.gate_up = nn.Linear(config.hidden_size, 2 * width, bias=config.mlp_bias)
        self.fused_rows = {"gate_up": [width] * 2}  # as in `Attention`
        self.sub_norm = norm_of_part(width, config, tensor) if config.sub_norm else None
        self.down_proj = nn.Linear(width, config.hidden_size, bias=config.mlp_bias)

    def forward(self, x: Tensor, tokens: Tokens | None = None) -> Tensor:
        if self.tensor is None:
            return self._forward(x)
        gather = self.tensor.code_gather(self.gate_up, x, tokens)
        y = self._forward(x if gather else self.tensor.enter(x, tokens), gather)
        return self.tensor.leave(y, tokens)

    def _forward(self, x: Tensor, gather: TensorGroup | None = None) -> Tensor:
        """gather: the ranks whose tokens `gate_up` takes besides this rank's."""
        if x.is_cuda and self.sub_norm is None and supports_swiglu_mlp(self.gate_up, self.down_proj):
            return swiglu_mlp(self.gate_up, self.down_proj, x, gather)
        gate_up = self.gate_up(x) if gather is None else self.gate_up(x, gather)  # [..., 2I]
        if x.is_cuda:
            y = swiglu(gate_up)
        else:  # PyTorch's operations are faster than the kernel's reference
            gate, up = gate_up.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return self.down_proj(y if self.sub_norm is None else self.sub_norm(y))
