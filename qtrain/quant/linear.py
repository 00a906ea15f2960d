"""A linear layer whose three GEMMs a scheme runs: one autograd function and one module for every scheme.

The module keeps the master `weight` as its parameter: what the optimizer, checkpoints and exports know. Beside it live
the weight's operands (codes and scales in both layouts): derived, never saved, renewed by `refresh` once per optimizer
step and only read by forward, backward and recomputation. With delayed scaling the scales of x and dy lie there too,
and what is seen of their absmax until the next step (`delayed.py`).
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
        amax: tuple[Operand, ...],  # of x and of dy, where the scheme keeps them
        differentiated: bool,  # whether backward may follow: gradients are off in here anyway
    ) -> Tensor:
        needs_dx = differentiated and ctx.needs_input_grad[0]
        needs_dw = differentiated and ctx.needs_input_grad[1]
        x_output, x_grad_weight = scheme.input_operands(x, key, (True, needs_dw), *amax[:1])
        y = scheme.multiply("output", x_output, w_output or (weight,), x.dtype, bias)
        kept_w = (w_grad_input or (weight,)) if needs_dx else ()
        kept_x = x_grad_weight if needs_dw else ()
        ctx.save_for_backward(*kept_w, *kept_x)
        ctx.n_kept_w, ctx.scheme, ctx.key, ctx.amax, ctx.weight_dtype = len(kept_w), scheme, key, amax, weight.dtype
        return y

    @staticmethod
    def backward(ctx, dy: Tensor):
        kept = ctx.saved_tensors  # read once: activation checkpointing allows no second time
        w_grad_input, x_grad_weight = kept[: ctx.n_kept_w], kept[ctx.n_kept_w :]
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        if needs_dx or needs_dw:
            dy_grad_input, dy_grad_weight = ctx.scheme.grad_operands(dy, ctx.key, (needs_dx, needs_dw), *ctx.amax[1:])
        if needs_dx:
            dx = ctx.scheme.multiply("grad_input", dy_grad_input, w_grad_input, dy.dtype)
        if needs_dw:
            dw = ctx.scheme.multiply("grad_weight", dy_grad_weight, x_grad_weight, ctx.weight_dtype)
        if needs_dbias:
            dbias = dy.sum(dim=0, dtype=torch.float32).to(ctx.weight_dtype)
        return dx, dw, dbias, None, None, None, None, None, None


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
        if scheme.amax_history:
            for name in ("x_scale", "x_amax", "dy_scale", "dy_amax"):
                self.register_buffer(name, torch.zeros(1, device=key.device), persistent=False)
        self.fresh_version = self.weight._version

    @torch.no_grad()
    def _operands(self) -> tuple[Operand, Operand]:
        return self.scheme.weight_operands(self.weight, self.key if self.scheme.stochastic_rounding else None)

    @torch.no_grad()
    def refresh(self) -> None:
        """Quantize the weight again; to be called after every change of it."""
        output, grad_input = self._operands()
        for i, tensor in enumerate((*output, *grad_input)):
            operand = getattr(self, f"operand_{i}")
            if operand is not tensor:  # a stored weight's codes are an operand themselves
                operand.copy_(tensor)
        self.fresh_version = self.weight._version

    def forward(self, x: Tensor) -> Tensor:
        y = LowBitLinearFunction.apply(
            x.reshape(-1, self.in_features), self.weight, self.bias, *self.arguments(), torch.is_grad_enabled()
        )
        return y.view(*x.shape[:-1], self.out_features)

    def arguments(self) -> tuple[LowBitScheme, Tensor | None, Operand, Operand, tuple[Operand, ...]]:
        """What an autograd function wants besides x, weight and bias: scheme, key, the weight's operands, amax."""
        operands = tuple(getattr(self, f"operand_{i}") for i in range(self._n_output + self._n_grad_input))
        key = self.key if self.scheme.stochastic_rounding and self.training else None
        return self.scheme, key, operands[: self._n_output], operands[self._n_output :], self._amax()

    def _amax(self) -> tuple[Operand, ...]:
        """What delayed scaling reads and, in training, writes: of x, then of dy; nothing where it is not used."""
        if not self.scheme.amax_history:
            return ()
        if not self.training:
            return (self.x_scale,), (self.dy_scale,)
        return (self.x_scale, self.x_amax), (self.dy_scale, self.dy_amax)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"
