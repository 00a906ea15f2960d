"""A linear layer whose three GEMMs a scheme runs: one autograd function and one module for every scheme.

    forward    y  [M, N] = x  [M, K] · w [N, K]ᵀ    `output`: row codes of x, row codes of w
    backward   dx [M, K] = dy [M, N] · w [N, K]     `grad_input`: row codes of dy, transposed codes of w
               dw [N, K] = dy [M, N]ᵀ · x [M, K]    `grad_weight`: transposed codes of dy and of x

x is quantized once on entry, for `output` and for `grad_weight`; what backward keeps is its transposed codes. dy is
quantized once for both of its GEMMs. The module keeps the master `weight` as its parameter, which the optimizer,
checkpoints and exports know; with it are kept the weight's codes (`weight_codes.py`). With delayed scaling the scales
of x and dy are kept too, with the absmax seen since the last step (`delayed_scaling.py`).
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.kernels.quantize.column_groups import BlockGroups, equal_groups
from qtrain.quant.arguments import LinearArguments, codes_or, save_operands, saved_operands
from qtrain.quant.execute import Exchange, quantize_operands, quantize_with_sums, writes_softmax_codes
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.quantizers import ReuseBuffers
from qtrain.quant.scales import Reduce
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import DelayedScale, NeedsOperand
from qtrain.quant.weight_codes import (
    WeightCodes,
    WeightRequest,
    operands_of_codes,
    quantize_spanning_weights,
    quantize_weight,
    spanning_format,
)
from qtrain.tensors.quantized_tensor import Operands, QuantizedTensor


class LowBitLinearFunction(torch.autograd.Function):
    """y = x · wᵀ + bias, with each GEMM, forward and backward, run by the scheme."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # [M, K]
        weight: Tensor,  # [N, K], the master: it receives the gradient
        bias: Tensor | None,  # [N]
        linear: LinearArguments,
        grad_enabled: bool,  # inside a Function gradients are always disabled
    ) -> Tensor:
        needs_dx = grad_enabled and ctx.needs_input_grad[0]
        # Without them nothing is quantized for backward, and nothing is saved: evaluation, frozen weights.
        needs_dw = grad_enabled and ctx.needs_input_grad[1]
        x_output, x_grad_weight = quantize_operands(x, linear.request("x", NeedsOperand(True, needs_dw)))
        save_operands(
            ctx,
            # [K, N] codes, which the weight owns: no copy.
            codes_or(linear.weight.columns, weight) if needs_dx else None,
            x_grad_weight if needs_dw else None,  # [K, M] codes: one byte an element instead of x's two
        )
        # Backward takes the weight's codes from the saved tensors, which activation checkpointing recomputes.
        ctx.linear, ctx.weight_dtype = linear._replace(weight=None), weight.dtype
        return linear.multiply("output", x_output, codes_or(linear.weight.rows, weight), x.dtype, bias)

    @staticmethod
    def backward(ctx, dy: Tensor):
        w_grad_input, x_grad_weight = saved_operands(ctx)
        linear, exchange = ctx.linear, ctx.linear.exchange
        needs_dx, needs_dw, needs_dbias = ctx.needs_input_grad[:3]
        dx = dw = dbias = None
        dy_request = linear.request("dy", NeedsOperand(needs_dx, needs_dw))
        if needs_dbias:
            # In fp32: a sum over all tokens in bf16 would lose the small terms.
            (dy_grad_input, dy_grad_weight), sums = quantize_with_sums(dy, dy_request)
            dbias = sums.to(ctx.weight_dtype)
        elif needs_dx or needs_dw:
            dy_grad_input, dy_grad_weight = quantize_operands(dy, dy_request)
        if needs_dx:
            dx = linear.multiply("grad_input", dy_grad_input, w_grad_input, dy.dtype)  # [M, K]
            if exchange is not None:
                dx = exchange.reduce_dx(dx)
        if needs_dw:
            if exchange is not None:
                x_grad_weight = exchange.regather(x_grad_weight, dy.shape[0])
            dw = linear.weight_gradient(dy_grad_weight, x_grad_weight, ctx.weight_dtype)  # [N, K]
        return dx, dw, dbias, None, None


class LowBitLinear(nn.Module):
    """Replaces an nn.Linear and keeps its parameters: `weight` and `bias` are the same objects."""

    reduce: Reduce | MaybeNone
    x_scale: Tensor
    x_amax: Tensor
    dy_scale: Tensor
    dy_amax: Tensor

    def __init__(self, linear: nn.Linear | nn.Conv2d, scheme: LowBitScheme, key: Tensor, reduce: Reduce | None = None):
        """key: int64 [3] on the device, the Philox key of stochastic rounding: seed, step, number of the linear.
        reduce: over the processes that hold the other parts of the weight; None: there are none."""
        super().__init__()
        # A scale that covers less than the whole weight is the part's own: nothing to exchange.
        self.reduce = None if spanning_format(scheme) is None else reduce
        """Reduces the statistics of a scale that covers the whole weight (`scales.py`)."""
        self.in_features, self.out_features = linear.weight.shape[1:].numel(), linear.weight.shape[0]
        self.weight, self.bias = linear.weight, linear.bias
        self.scheme = scheme
        # Not saved: seed, step and number follow from the run.
        self.register_buffer("key", key, persistent=False)
        self.weight_key = key
        """The key that rounds the weight."""
        self.groups: BlockGroups | None = None
        """The rows of each matrix of a GroupedLinear, which have scales of their own."""
        if isinstance(linear, GroupedLinear):
            # N of one group; its rows are whole blocks, so no scale of a column spans two experts.
            rows = linear.out_features // linear.groups
            self.groups = BlockGroups(equal_groups(linear.groups, rows, key.device), linear.groups)
        # Allocated once: later values are written into the same memory, which CUDA graphs have recorded.
        self.weight_codes = WeightCodes(self._quantize(self.weight), self.weight._version)
        self.codes_only = False
        """Whether the weight itself is not in memory."""
        self.gathered = False
        """Whether the weight comes and goes with its codes (full sharding): whoever brings it calls `refresh`."""
        self.weight_amax: WeightAmax | None = None
        """Left by the optimizer: of the weight, or of this process's rows of it with codes_only."""
        self.gradient_sum: Tensor | MaybeNone = None
        """What backward adds the gradient of the weight to (`gradient_sums.py`); None: it returns it to autograd."""
        self.exchange: Exchange | MaybeNone = None
        """With processes that hold other tokens of the same micro-batch; None: there are none."""
        self.probe: Callable[[LinearArguments], LinearArguments] | None = None
        """What a health sample makes of the arguments of this linear (`health/probe.py`); None: it runs as it is."""
        self.in_high_precision = False
        """Whether the probe has it multiply the weight itself."""
        if scheme.amax_history:
            for name in ("x_scale", "x_amax", "dy_scale", "dy_amax"):
                self.register_buffer(name, torch.zeros(1, device=key.device), persistent=False)

    # ---- the weight's codes ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _quantize(self, weight: Tensor, reuse: ReuseBuffers | None = None) -> Operands:
        request = self._request(weight, self.weight_key, reuse)
        return quantize_weight(request) if self.reduce is None else quantize_spanning_weights([request], self.reduce)[0]

    def _request(self, weight: Tensor, key: Tensor, reuse: ReuseBuffers | None) -> WeightRequest:
        rounding_key = key if self.scheme.stochastic_rounding else None
        return WeightRequest(self.scheme, weight, rounding_key, self.groups, reuse)

    @torch.no_grad()
    def refresh(self, weight: Tensor | None = None) -> None:
        """Quantize the weight again; to be called after every change of it. weight: its value, if this module keeps
        codes only, or gets its weight when it runs."""
        if weight is None and (self.codes_only or self.gathered):
            return
        amax = self.known_amax if weight is None else None  # that of another value would be stale
        reuse = ReuseBuffers(self.weight_codes.operands(), amax)
        codes = self._quantize(self.weight if weight is None else weight, reuse)
        self.weight_codes.update(codes, self.weight._version)

    @staticmethod
    @torch.no_grad()
    def refresh_spanning(linears: Sequence["LowBitLinear"]) -> None:
        """`refresh` of linears whose scales cover the parts of the same other processes, with one reduction for all."""
        # Codes of the others come from whoever gathers them.
        linears = [linear for linear in linears if not linear.codes_only]
        if not linears:
            return
        requests = [
            linear._request(linear.weight, linear.key, ReuseBuffers(linear.weight_codes.operands(), linear.known_amax))
            for linear in linears
        ]
        for linear, operands in zip(linears, quantize_spanning_weights(requests, linears[0].reduce), strict=True):
            linear.weight_codes.update(operands, linear.weight._version)

    @property
    def known_amax(self) -> Tensor | None:
        """The bits of `weight_amax` where they are those of the present weight."""
        return self.weight_amax.bits if self.weight_amax is not None and self.weight_amax.known else None

    def receive_codes(self, codes: QuantizedTensor) -> None:
        """Take the weight's codes in the scheme's `wire_format`, as those of `output` alone where there is a second
        layout: see `WeightCodes.derive_second_layout`."""
        operands = operands_of_codes(self.scheme, codes, self.in_features, second_layout=False)
        self.weight_codes.update(operands, self.weight._version)

    def keep_codes_only(self) -> None:
        """Free the weight's memory. The parameter keeps its shape and receives the gradient; `refresh` then needs the
        value."""
        self.codes_only = True
        # A view of one element, all strides 0: the shape that autograd checks gradients against, without its memory.
        self.weight.data = self.weight.new_zeros(()).expand(self.weight.shape)

    @property
    def stale(self) -> bool:
        """Whether the weight has changed since its codes were computed (counted by torch's version counter)."""
        return self.weight._version != self.weight_codes.version

    def mark_fresh(self) -> None:
        """State that the codes were refreshed by other means: by the replay of a recorded `refresh`."""
        self.weight_codes.version = self.weight._version  # a replay runs no Python: only the codes are new

    # ---- the products ------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor, exchange: Exchange | None = None) -> Tensor:
        """y [..., N] of x [..., K]; with an exchange that of all processes' rows, [T, N]."""
        arguments = self.arguments()
        if exchange is not None:
            arguments = arguments._replace(exchange=exchange)
        # Grad mode is read here: inside of forward it is always off.
        y = LowBitLinearFunction.apply(
            x.reshape(-1, self.in_features), self.weight, self.bias, arguments, torch.is_grad_enabled()
        )
        return y.view(*x.shape[:-1], self.out_features) if exchange is None else y

    def reads_softmax_gradient(self, logits: Tensor, needs_dx: bool) -> bool:
        """Whether backward, given the `SoftmaxGradient` of these outputs, computes codes of it and reads no values."""
        needs = NeedsOperand(needs_dx, self.weight.requires_grad)
        return self.bias is None and self.probe is None and writes_softmax_codes(self.scheme, needs, logits)

    def arguments(self) -> LinearArguments:
        """What the autograd functions of this module and of `swiglu_mlp` need besides x, weight and bias."""
        key = self.key if self.scheme.stochastic_rounding and self.training else None  # evaluation rounds to nearest
        x_scale = dy_scale = None
        if self.scheme.amax_history:  # an evaluation records nothing
            x_scale = DelayedScale(self.x_scale, self.x_amax if self.training else None)
            dy_scale = DelayedScale(self.dy_scale, self.dy_amax if self.training else None)
        codes = self.weight_codes.operands()
        arguments = LinearArguments(
            self.scheme, key, codes, x_scale, dy_scale, exchange=self.exchange, gradient_sum=self.gradient_sum
        )
        return arguments if self.probe is None else self.probe(arguments)

    def extra_repr(self) -> str:
        return f"in_features={self.in_features}, out_features={self.out_features}, scheme={self.scheme}"
