"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): y = base(x) + scale · (x·Aᵀ)·Bᵀ, only A and B train.

A linear of the native decoder may hold several projections in its rows (q, k and v; gate and up). Each has an adapter
of its own, A [r, K] and B [its rows, r], so that what is trained is what PEFT trains on the projections apart, and is
saved and loaded in its format (`peft_format.py`). The base is any linear, a low-bit one too. Adapters are fp32, and
multiply in the dtype of the activations. They cost two GEMMs a linear, bound by memory: the A of all its projections
are stacked, so x is read once, and their B stand in a block-diagonal matrix, so the result is written once.

DoRA (Liu et al. 2024, arXiv:2402.09353) trains the length of each of the weight's rows apart from its direction:
y = m / ||W + scale · B·A|| · (W + scale · B·A)·x + bias, with m [N] trained from ||W|| on and the norm a constant to
the gradient. B·A is not made for it: its square is, row by row, ||W||² + 2 scale · W·Aᵀ·Bᵀ + scale² · B·A·Aᵀ·Bᵀ.
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
    """The options of --lora. `adapter` is a folder to go on from: r, alpha, targets, rslora and dora are then its
    own."""

    r: Annotated[int, Range(1)] = 16
    alpha: Annotated[float, Range(1e-6)] = 16.0
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    targets: str | tuple[str, ...] = ALL
    rslora: bool = False
    dora: bool = False
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
        self.magnitude: nn.ParameterList | None = None
        if lora.dora:
            with torch.no_grad():
                squares = exported_weight(base).float().square().sum(dim=1)  # [N], of a weight that does not change
            self.register_buffer("base_squares", squares, persistent=False)
            norms = squares.sqrt()
            self.magnitude = nn.ParameterList(nn.Parameter(norms[p.start : p.stop].clone()) for p in adapted)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> Tensor | None:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        y = self.base(x)
        if self.dropout and self.training:
            x = F.dropout(x, self.dropout)
        y = y + F.linear(F.linear(x, self._a().to(x.dtype)), self._b().to(x.dtype))
        if self.magnitude is None:
            return y
        norms = self._norms()
        gains = [m / norms[p.start : p.stop] for p, m in zip(self.adapted, self.magnitude, strict=True)]
        gain = self._over_rows(gains, 1.0).to(y.dtype)  # [N]
        return gain * y if self.bias is None else gain * y + (1 - gain) * self.bias

    def _a(self) -> Tensor:
        """All A, one under the other [P·r, K]."""
        return self.lora_a[0] if len(self.lora_a) == 1 else torch.cat(list(self.lora_a))

    def _b(self) -> Tensor:
        """scale · B of each projection in its rows and in the columns of its A; else 0. [N, P·r]"""
        rank, last = self.lora_b[0].shape[1], len(self.lora_b) - 1
        spread = [F.pad(b, (i * rank, (last - i) * rank)) if last else b for i, b in enumerate(self.lora_b)]
        return self.scale * self._over_rows(spread)

    def _over_rows(self, parts: list[Tensor], fill: float = 0.0) -> Tensor:
        """What each adapted projection has, in its rows; `fill` in the others."""
        rows, at = [], 0
        for projection, part in zip(self.adapted, parts, strict=True):
            if projection.start > at:
                rows.append(part.new_full((projection.start - at, *part.shape[1:]), fill))
            rows.append(part)
            at = projection.stop
        if at < self.out_features:
            rows.append(parts[-1].new_full((self.out_features - at, *parts[-1].shape[1:]), fill))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """||W + scale · B·A|| of each row, fp32 [N]."""
        a, b = self._a(), self._b()
        product = self.base(a.to(self.weight.dtype))  # A·Wᵀ [P·r, N], in the arithmetic that the base multiplies in
        product = (product if self.bias is None else product - self.bias).float()
        squares = self.base_squares + 2 * (b * product.t()).sum(dim=1) + (b * (b @ (a @ a.t()))).sum(dim=1)
        return squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """One plain linear that computes the same, in the weight's dtype."""
        weight = exported_weight(self.base).float().clone()
        for i, (projection, a, b) in enumerate(zip(self.adapted, self.lora_a, self.lora_b, strict=True)):
            rows = weight[projection.start : projection.stop]
            rows += self.scale * (b @ a)
            if self.magnitude is not None:
                rows *= (self.magnitude[i] / rows.norm(dim=1)).unsqueeze(1)
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


def chosen_targets(lora: Lora, words: list[str], flag: str = "--lora") -> list[str]:
    """The projections among `words` that adapters go on. UserError for a target that is none of them."""
    targets = words if lora.targets == ALL else [lora.targets] if isinstance(lora.targets, str) else lora.targets
    for target in targets:
        if target not in words:
            raise unknown_name(f"{flag}.targets", "projection", target, [*words, ALL])
    if not targets:
        raise UserError(f"{flag}.targets: the list is empty; name projections, or {ALL!r}.")
    return list(targets)


def add_lora(model: nn.Module, lora: Lora, seed: int, flag: str = "--lora") -> list[LoraLinear]:
    """Freeze every parameter, and put adapters on the linears that `lora.targets` names; B is 0, A is drawn as PEFT
    draws it (Kaiming uniform), from (seed, name). UserError for a target that the model does not have."""
    model.requires_grad_(False)
    known = projections(model)
    targets = chosen_targets(lora, sorted({p.word for parts in known.values() for p in parts}), flag)
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


def check_combination(lora: Lora, quantize: str, activation_checkpointing: str, flag: str = "--lora") -> None:
    """UserError for options of --lora that do not go with each other, or with the settings named."""
    if lora.dropout and activation_checkpointing != "none":
        raise UserError("--activation_checkpointing: what is computed again would drop other values; set dropout to 0.")
    if lora.dora and lora.dropout:
        raise UserError(f"{flag}.dropout: {lora.dropout} does not go with DoRA, which scales all that is added; set 0.")
    if lora.dora and quantize != "bf16":
        raise UserError(
            f"--quantize: {quantize!r} does not go with DoRA, which needs the length of the weights as they multiply; "
            f'leave it out, or give {flag} a "base".'
        )


def lora_linears(model: nn.Module) -> dict[str, LoraLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}


def merge_lora(model: nn.Module) -> None:
    """Put plain linears with the adapters' work in their weights in the place of all adapted ones."""
    for name, linear in lora_linears(model).items():
        model.set_submodule(name, linear.merged())
