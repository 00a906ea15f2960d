"""The cost of training a vision model on one image, measured by one forward pass on the meta device."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


@dataclass(frozen=True)
class VisionCost:
    """Of one image. FLOPs of forward and backward, two per multiply-add, without recomputation.

    blocks, head: linears; other: convolutions and other products. rows: of the input of most linears (its tokens).
    kept: bytes that backward keeps, each operation on its own. linear_rows: name of each linear -> rows of its input.
    bypassed: linears whose weight the model reads without calling them.
    """

    blocks: float
    head: float
    attention: float
    other: float
    rows: int
    kept: int
    linear_rows: Mapping[str, int]
    bypassed: tuple[str, ...]

    @property
    def flops(self) -> dict[str, float]:
        kinds = {"blocks": self.blocks, "head": self.head, "attention": self.attention, "other": self.other}
        return {kind: work for kind, work in kinds.items() if work}


def vision_cost(model: nn.Module, head: nn.Module | None, input_size: tuple[int, int, int]) -> VisionCost | None:
    """Run `model`, on the meta device, on one image; None if it cannot run there."""
    model.train()
    linears = {module: name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    rows: dict[nn.Linear, int] = {}
    hooks = [
        m.register_forward_hook(lambda m, args, _: rows.update({m: args[0].numel() // m.in_features})) for m in linears
    ]
    without_grad_input: list[float] = []  # forward FLOPs of convolutions of the image itself

    def note_input(m: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        if not args[0].requires_grad:
            # weight[0], [C_in / groups, kernel]: the multiply-adds of one output.
            without_grad_input.append(2.0 * output.numel() * m.weight[0].numel())

    convolutions = [m for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)]
    hooks += [m.register_forward_hook(note_input) for m in convolutions]
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        # By storage: views of one tensor count once.
        kept[tensor.untyped_storage()._cdata] = tensor
        return tensor

    dtype = next(model.parameters()).dtype
    image, attention = torch.empty(1, *input_size, device="meta", dtype=dtype), _Attention()
    counter = FlopCounterMode(display=False)
    try:
        with counter, attention, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            model(image).sum()
    except (RuntimeError, NotImplementedError, TypeError):
        return None
    finally:
        for hook in hooks:
            hook.remove()
    weights = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())}
    work = {m: 6.0 * count * m.in_features * m.out_features for m, count in rows.items()}
    head_flops = work.pop(head, 0.0) if isinstance(head, nn.Linear) else 0.0
    attention_flops = 3.0 * attention.flops
    # Backward has two products for each of the forward pass; for the image, one.
    total = 3.0 * counter.get_total_flops() - sum(without_grad_input)
    counts = sorted(count for m, count in rows.items() if m is not head)
    return VisionCost(
        blocks=sum(work.values()),
        head=head_flops,
        attention=attention_flops,
        other=max(total - sum(work.values()) - head_flops, 0.0),
        rows=counts[len(counts) // 2] if counts else 1,  # the median
        kept=sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights),
        linear_rows={name: rows[m] for m, name in linears.items() if m in rows},
        bypassed=tuple(name for m, name in linears.items() if m not in rows),
    )


class _Attention(TorchFunctionMode):
    """Replaces attention by one that keeps what fused kernels keep (q, k, v, output; no scores), and counts its
    FLOPs."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0.0

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        q, k, v = args[:3]
        # q·kᵀ sums over D, p·v makes E columns: 2·S·T·(D + E) of each head.
        self.flops += 2.0 * q.shape[:-2].numel() * q.shape[-2] * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        return _FusedAttention.apply(q, k, v)


class _FusedAttention(torch.autograd.Function):
    """Attention without arithmetic: q [..., S, D], k [..., T, D], v [..., T, E] -> [..., S, E]."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = q.new_empty(*q.shape[:-1], v.shape[-1])
        ctx.save_for_backward(q, k, v, out)
        return out
