"""The cost of training a vision model on one image, measured by one forward pass on the meta device."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode


class ConvInput(NamedTuple):
    """What a convolution reads of one image."""

    elements: int
    others_keep: bool
    """Whether another operation keeps it for backward too, as the activation that computed it."""


@dataclass(frozen=True)
class VisionCost:
    """Of one image. FLOPs of forward and backward, two per multiply-add, without recomputation.

    blocks: linears and convolutions; head: a linear; other: other products. rows: of the input of most linears (its
    tokens). kept: bytes that backward keeps, each operation on its own. linear_rows: name of each linear -> rows of its
    input; of a convolution pixels of its output. conv_inputs: by name too. bypassed: linears and convolutions whose
    weight the model reads without calling them.
    """

    blocks: float
    head: float
    attention: float
    other: float
    rows: int
    kept: int
    linear_rows: Mapping[str, int]
    conv_inputs: Mapping[str, ConvInput]
    bypassed: tuple[str, ...]

    @property
    def flops(self) -> dict[str, float]:
        kinds = {"blocks": self.blocks, "head": self.head, "attention": self.attention, "other": self.other}
        return {kind: work for kind, work in kinds.items() if work}


def vision_cost(model: nn.Module, head: nn.Module | None, input_size: tuple[int, int, int]) -> VisionCost | None:
    """Run `model`, on the meta device, on one image; None if it cannot run there."""
    model.train()
    try:
        return _measure(model, head, input_size)
    except ValueError:  # BatchNorm trains on more than one value a channel, which one small image may not have
        return _measure(model.eval(), head, input_size)
    finally:
        model.train()


def _measure(model: nn.Module, head: nn.Module | None, input_size: tuple[int, int, int]) -> VisionCost | None:
    layers = {m: n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    rows: dict[Any, int] = {}
    read: dict[Any, Tensor] = {}  # the inputs of convolutions

    def note_input(m: Any, args: tuple[Tensor, ...], output: Tensor) -> None:
        rows[m] = output.numel() // m.weight.shape[0]
        if not isinstance(m, nn.Linear):
            read[m] = args[0]

    hooks = [m.register_forward_hook(note_input) for m in layers]
    kept: dict[int, Tensor] = {}
    keepers: Counter[int] = Counter()

    def keep(tensor: Tensor) -> Tensor:
        # By storage: views of one tensor count once.
        kept[tensor.untyped_storage()._cdata] = tensor
        keepers[tensor.untyped_storage()._cdata] += 1
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
    forward = {m: 2.0 * count * m.weight.numel() for m, count in rows.items()}
    # Backward has two products for each of the forward pass; for the image, one.
    image_flops = sum(flops for m, flops in forward.items() if m in read and not read[m].requires_grad)
    head_flops = 3.0 * forward[head] if isinstance(head, nn.Linear) and head in forward else 0.0
    counts = sorted(count for m, count in rows.items() if m is not head and isinstance(m, nn.Linear))
    return VisionCost(
        blocks=3.0 * sum(forward.values()) - image_flops - head_flops,
        head=head_flops,
        attention=3.0 * attention.flops,
        other=max(3.0 * (counter.get_total_flops() - sum(forward.values())), 0.0),
        rows=counts[len(counts) // 2] if counts else 1,  # the median
        kept=sum(t.untyped_storage().nbytes() for key, t in kept.items() if key not in weights),
        linear_rows={name: rows[m] for m, name in layers.items() if m in rows},
        conv_inputs={layers[m]: ConvInput(x.numel(), keepers[x.untyped_storage()._cdata] > 1) for m, x in read.items()},
        bypassed=tuple(name for m, name in layers.items() if m not in rows),
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
