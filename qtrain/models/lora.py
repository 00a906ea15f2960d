"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): y = base(x) + scale · (x·Aᵀ)·Bᵀ, only A and B train.

A linear of the native decoder may hold several projections in its rows (q, k and v; gate and up). Each has an adapter
of its own, A [r, K] and B [its rows, r], so that what is trained is what PEFT trains on the projections apart, and is
saved and loaded in its format (`peft_format.py`). The base is any linear, a low-bit one too. Adapters are fp32, and
multiply in the dtype of the activations.
"""

import dataclasses
import hashlib
import math
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.checks import Range
from qtrain.errors import UserError, unknown_name
from qtrain.models.decoder import Decoder
from qtrain.models.hf import layout
from qtrain.quant.export import exported_weight
from qtrain.quant.linear import LowBitLinear

ALL = "all-linear"


@dataclasses.dataclass(frozen=True)
class Lora:
    """The options of --lora. `adapter` is a folder to go on from: r, alpha, targets and rslora are then its own."""

    r: Annotated[int, Range(1)] = 16
    alpha: Annotated[float, Range(1e-6)] = 16.0
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    targets: str | tuple[str, ...] = ALL
    rslora: bool = False
    base: Literal["none", "nf4", "int8", "fp8"] = "none"
    adapter: str | None = None

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


@dataclasses.dataclass(frozen=True)
class Projection:
    """A projection of a linear: its name in a Hugging Face model, and the rows of the linear that it is."""

    hf_name: str
    start: int
    stop: int

    @property
    def word(self) -> str:
        """What targets name: q_proj, up_proj, ..."""
        return self.hf_name.rpartition(".")[2]


class LoraLinear(nn.Module):
    """A linear with adapters on some of its projections. `weight` and `bias` are the base's."""

    def __init__(self, base: nn.Linear | LowBitLinear, adapted: list[Projection], lora: Lora):
        super().__init__()
        self.base, self.adapted, self.scale, self.dropout = base, adapted, lora.scale, lora.dropout
        self.in_features, self.out_features = base.in_features, base.out_features
        like = {"dtype": torch.float32, "device": base.weight.device}
        self.lora_a = nn.ParameterList(nn.Parameter(torch.empty(lora.r, base.in_features, **like)) for _ in adapted)
        self.lora_b = nn.ParameterList(nn.Parameter(torch.zeros(p.stop - p.start, lora.r, **like)) for p in adapted)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        x = F.dropout(x, self.dropout, self.training)
        deltas, at = [], 0
        for projection, a, b in zip(self.adapted, self.lora_a, self.lora_b, strict=True):
            if projection.start > at:
                deltas.append(y.new_zeros(*y.shape[:-1], projection.start - at))
            deltas.append(F.linear(F.linear(x, a.to(x.dtype)), b.to(x.dtype)))
            at = projection.stop
        if at < self.out_features:
            deltas.append(y.new_zeros(*y.shape[:-1], self.out_features - at))
        return y + self.scale * (deltas[0] if len(deltas) == 1 else torch.cat(deltas, dim=-1))

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One plain linear that computes the same, in the weight's dtype."""
        weight = exported_weight(self.base).float().clone()
        for projection, a, b in zip(self.adapted, self.lora_a, self.lora_b, strict=True):
            weight[projection.start : projection.stop] += self.scale * (b @ a)
        with torch.device("meta"):
            linear = nn.Linear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.weight = nn.Parameter(weight.to(self.weight.dtype), requires_grad=False)
        linear.bias = self.bias
        return linear


def projections(model: nn.Module) -> dict[str, list[Projection]]:
    """Name of each linear that adapters can go on -> its projections: all but the output head."""
    kinds = (nn.Linear, LowBitLinear)
    linears = {n: m for n, m in model.named_modules() if isinstance(m, kinds) and m is not model.lm_head}
    if not isinstance(model, Decoder):  # of transformers: projections are apart
        return {n: [Projection(n.removeprefix("model."), 0, m.out_features)] for n, m in linears.items()}
    found: dict[str, list[Projection]] = {}
    for piece in layout(model.config):
        owner, _, kind = (piece.name or "").rpartition(".")
        if kind == "weight" and owner in linears:
            stop = linears[owner].out_features if piece.stop is None else piece.stop
            found.setdefault(owner, []).append(Projection(piece.hf_name.removesuffix(".weight"), piece.start, stop))
    return found


def add_lora(model: nn.Module, lora: Lora, seed: int, flag: str = "--lora") -> list[LoraLinear]:
    """Freeze every parameter, and put adapters on the linears that `lora.targets` names; B is 0, A is drawn as PEFT
    draws it (Kaiming uniform), from (seed, name). UserError for a target that the model does not have."""
    model.requires_grad_(False)
    known = projections(model)
    words = sorted({p.word for parts in known.values() for p in parts})
    targets = words if lora.targets == ALL else [lora.targets] if isinstance(lora.targets, str) else lora.targets
    for target in targets:
        if target not in words:
            raise unknown_name(f"{flag}.targets", "projection", target, [*words, ALL])
    if not targets:
        raise UserError(f"{flag}.targets: the list is empty; name projections, or {ALL!r}.")
    added = []
    for name, parts in known.items():
        chosen = [part for part in parts if part.word in targets]
        if not chosen:
            continue
        base = model.get_submodule(name)
        linear = LoraLinear(base, chosen, lora).train(base.training)
        for part, a in zip(chosen, linear.lora_a, strict=True):
            digest = hashlib.sha256(f"{seed}/{part.hf_name}.lora_A".encode()).digest()
            generator = torch.Generator(a.device).manual_seed(int.from_bytes(digest[:8]) >> 1)
            nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        model.set_submodule(name, linear)
        added.append(linear)
    return added


def lora_linears(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def merge_lora(model: nn.Module) -> None:
    """Put plain linears with the adapters' work in their weights in the place of all adapted ones."""
    for name, linear in lora_linears(model).items():
        model.set_submodule(name, linear.merged())
