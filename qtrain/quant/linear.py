"""A linear layer whose three GEMMs a scheme runs: one autograd function and one module for every scheme.

The module keeps the master `weight` as its parameter: what the optimizer, checkpoints and exports know. Beside it live
the weight's operands (codes and scales in both layouts): derived, never saved, renewed by `refresh` once per optimizer
step and only read by forward, backward and recomputation.
"""

import torch
from torch import Tensor, nn

from qtrain.quant.scheme import LowBitScheme, Operand


class LowBitLinearFunction(torch.autograd.Function):
    """y = x · wᵀ + bias, with each GEMM, forward and backward, run by the scheme."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        weight: Tensor,  # [N, K], the master: it receives the gradient
        bias: Tensor | None,  # [N]
        scheme: LowBitScheme,
        key: Tensor | None,
        w_output: Operand,
        w_grad_input: Operand,
    ) -> Tensor:
        x_output, x_grad_weight = scheme.input_operands(x, key)
        y = scheme.multiply("output", x_output, w_output or (weight,), x.dtype)
        needs_dx, needs_dw = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        kept_w = (w_grad_input or (weight,)) if needs_dx else ()
        kept_x = x_grad_weight if needs_dw else ()
        ctx.save_for_backward(*kept_w, *kept_x)
        ctx.n_kept_w, ctx.scheme, ctx.key, ctx.weight_dtype = len(kept_w), scheme, key, weight.dtype
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        kept = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        w_grad_input, x_grad_weight = kept[: ctx.n_kept_w], kept[ctx.n_kept_w :]
        dx = dw = dbias = None
        dy_grad_input, dy_grad_weight = ctx.scheme.grad_operands(dy, ctx.key)
        if ctx.needs_input_grad[0]:
            dx = ctx.scheme.multiply("grad_input", dy_grad_input, w_grad_input, dy.dtype)
        if ctx.needs_input_grad[1]:
            dw = ctx.scheme.multiply("grad_weight", dy_grad_weight, x_grad_weight, ctx.weight_dtype)
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(dim=0, dtype=torch.float32).to(ctx.weight_dtype)
        return dx, dw, dbias, None, None, None, None


class LowBitLinear(nn.Module):
    """Takes the place of an nn.Linear, and of its parameters: `weight` and `bias` are the same objects.

    key: int64 [3] on the device, what its stochastic rounding draws under: seed, step, number of the linear.
    """

    def __init__(self, linear: nn.Linear, scheme: LowBitScheme, key: Tensor):
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.weight, self.bias = linear.weight, linear.bias
        self.scheme = scheme
        self.register_buffer("key", key, persistent=False)
        output, grad_input = self._operands()
        self._n_output, self._n_grad_input = len(output), len(grad_input)
        for i, tensor in enumerate((*output, *grad_input)):
            self.register_buffer(f"operand_{i}", tensor, persistent=False)
        self.fresh_version = self.weight._version

    @torch.no_grad()
    def _operands(self) -> tuple[Operand, Operand]:
        return self.scheme.weight_operands(self.weight, self.key if self.scheme.stochastic_rounding else None)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the weight again; to be called after every change of it."""
        output, grad_input = self._operands()
        for i, tensor in enumerate((*output, *grad_input)):
            getattr(self, f"operand_{i}").copy_(tensor)
        self.fresh_version = self.weight._version

    def forward(self, x: Tensor) -> Tensor:
        operands = tuple(getattr(self, f"operand_{i}") for i in range(self._n_output + self._n_grad_input))
        key = self.key if self.scheme.stochastic_rounding and self.training else None
        y = LowBitLinearFunction.apply(
            x.reshape(-1, self.in_features),
            self.weight,
            self.bias,
            self.scheme,
            key,
            operands[: self._n_output],
            operands[self._n_output :],
        )
        return y.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"
