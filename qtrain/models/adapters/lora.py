"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv:2106.09685): y = base(x) + scale · (x·Aᵀ)·Bᵀ, only A and B train.

A linear of the native decoder may fuse several projections in its rows (q, k and v; gate and up). Each has its own
adapter, A [r, K] and B [rows, r], so the same parameters are trained as by PEFT on separate projections, and they are
saved and loaded in its format (`peft_format.py`). The base is any linear, also a low-bit one. Adapters are fp32 and
multiply in the dtype of the activations. They add two memory-bound GEMMs per linear: the A of all projections are
concatenated, so x is read once, and their B form a block-diagonal matrix, so the result is written once; of a low-bit
base in the epilogue of its own GEMM (`quant/adapted_linear.py`). Adapters of the experts that a router chooses among
are in `lora_experts.py`.

DoRA (Liu et al. 2024, arXiv:2402.09353) trains the norm of each row of the weight separately from its direction:
y = m / ||W + scale · B·A|| · (W + scale · B·A)·x + bias, with m [N] initialized to ||W|| and the norm treated as a
constant by the gradient. B·A is not materialized: the squared norm of a row is ||W||² + 2 scale · W·Aᵀ·Bᵀ
+ scale² · B·A·Aᵀ·Bᵀ.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from qtrain.core.checks import Range
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.maybe_none import MaybeNone
from qtrain.models.config.hf_layout import Projection, TensorSlice, weights_of
from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat, SafetensorsFormat
from qtrain.models.hf.initial_values import named_generator
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.lora_experts import EXPERT_TARGETS, LoraExperts
from qtrain.models.native.moe import Experts
from qtrain.quant.adapted_linear import Adapted, AdapterModule, adapted_linear
from qtrain.quant.export import exported_weight
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.merged_linear import Adapter, Merge, MergedLinear, merge_key, merged_linear
from qtrain.tensors.partition import Partition
from qtrain.tensors.quantized_tensor import OperandFormat

ALL = "all-linear"


@dataclasses.dataclass(frozen=True)
class Lora:
    """The options of --lora. targets: names of projections, those of routed experts as in EXPERT_TARGETS; ALL stands
    for those of every linear but the head and routed experts. adapter: a folder to continue from, whose r, alpha,
    targets, rslora and dora then apply. base: the format of the frozen weights; none: as the model has them, in its
    codes if it is quantized; dense: the model's dtype. merge: the weights that the exported model adds the adapters to,
    those trained on or the source's own. merge_format: the export format whose rounding of the merged weights adapters
    train through; None: they train on the base as it is."""

    r: Annotated[int, Range(1, 65_536)] = 16
    alpha: Annotated[float, Range(1e-6)] = 16.0
    dropout: Annotated[float, Range(0, 0.99)] = 0.0
    targets: str | tuple[str, ...] = ALL
    rslora: bool = False
    dora: bool = False
    base: Literal["none", "dense", "nf4", "int8", "fp8"] = "none"
    merge: Literal["trained", "original"] = "trained"
    merge_format: str | None = None
    adapter: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """`targets` as a list."""
        return (self.targets,) if isinstance(self.targets, str) else tuple(self.targets)

    @property
    def expert_targets(self) -> list[str]:
        """Those of `targets` that are linears of routed experts."""
        return [name for name in self.names if name in EXPERT_TARGETS.values()]

    @property
    def low_bit_base(self) -> str | None:
        """The format in which weights are frozen; None: they stay as the model has them, or in high precision."""
        return None if self.base in ("none", "dense") else self.base

    @property
    def scale(self) -> float:
        """alpha / r, or alpha / sqrt(r) with rsLoRA (Kalajdzievski 2023, arXiv:2312.03732)."""
        return self.alpha / (math.sqrt(self.r) if self.rslora else self.r)


class LoraLinear(AdapterModule):
    """A linear with adapters on some of its projections. `weight` and `bias` are the base's. number: among the linears
    with adapters; it keys the random bits of the merge."""

    def __init__(self, base: nn.Linear | LowBitLinear, adapted: list[Projection], lora: Lora, number: int = 0):
        super().__init__()
        self.base, self.adapted, self.scale, self.dropout = base, adapted, lora.scale, lora.dropout
        self.in_features, self.out_features = base.in_features, base.out_features
        like = {"dtype": torch.float32, "device": base.weight.device}
        self.lora_a = nn.ParameterList(nn.Parameter(torch.empty(lora.r, base.in_features, **like)) for _ in adapted)
        self.lora_b = nn.ParameterList(nn.Parameter(torch.zeros(p.stop - p.start, lora.r, **like)) for p in adapted)
        self.merge_format = None if lora.merge_format is None else merge_format(lora.merge_format).weight
        """The format of the merged weight that forward multiplies; None: it multiplies the base."""
        self.register_buffer("merge_key", merge_key(number).to(base.weight.device), persistent=False)
        self.magnitude: nn.ParameterList | None = None
        if lora.dora:
            with torch.no_grad():
                squares = exported_weight(base).float().square().sum(dim=1)  # [N], of a frozen weight
            self.register_buffer("base_squares", squares, persistent=False)
            norms = squares.sqrt()
            self.magnitude = nn.ParameterList(nn.Parameter(norms[p.start : p.stop].clone()) for p in adapted)

    @property
    def weight(self) -> Tensor:
        return self.base.weight

    @property
    def bias(self) -> nn.Parameter | MaybeNone:
        return self.base.bias

    def forward(self, x: Tensor) -> Tensor:
        a, b = self._a().to(x.dtype), self._b().to(x.dtype)
        if self.merge_format is not None:
            return merged_linear(x, a, b, self.bias, self._merge(self.merge_format))
        if isinstance(self.base, LowBitLinear) and not self._drops:
            y = adapted_linear(self.base, x, a, b)
        else:
            y = self.base(x) + F.linear(F.linear(F.dropout(x, self.dropout) if self._drops else x, a), b)
        if self.magnitude is None:
            return y
        norms = self._norms()
        gains = [m / norms[p.start : p.stop] for p, m in zip(self.adapted, self.magnitude, strict=True)]
        gain = self._over_rows(gains, 1.0).to(y.dtype)  # [N]
        # y has the bias in it, which is not scaled: gain · (y - bias) + bias.
        return gain * y if self.bias is None else gain * y + (1 - gain) * self.bias

    @property
    def _drops(self) -> bool:
        return bool(self.dropout) and self.training

    def base_and_adapters(self, dtype: torch.dtype) -> Adapted | None:
        more = self.merge_format is not None or self.magnitude is not None or self._drops
        if more or not isinstance(self.base, LowBitLinear):
            return None
        return Adapted(self.base, self._a().to(dtype), self._b().to(dtype))

    def _merge(self, fmt: OperandFormat) -> Merge:
        pairs = zip(self.adapted, self.lora_a, self.lora_b, strict=True)
        adapters = tuple(Adapter(p.start, p.stop, a.detach(), b.detach()) for p, a, b in pairs)
        return Merge(self.weight.detach(), adapters, self.scale, fmt, self.merge_key)

    def _a(self) -> Tensor:
        """All A, concatenated: [P·r, K]."""
        return self.lora_a[0] if len(self.lora_a) == 1 else torch.cat(list(self.lora_a))

    def _b(self) -> Tensor:
        """scale · B of each projection, block-diagonal: [N, P·r]."""
        rank, last = self.lora_b[0].shape[1], len(self.lora_b) - 1
        # B of projection i [rows, r] goes into the columns [i·r, (i + 1)·r).
        spread = [F.pad(b, (i * rank, (last - i) * rank)) if last else b for i, b in enumerate(self.lora_b)]
        return self.scale * self._over_rows(spread)

    def _over_rows(self, values: list[Tensor], fill: float = 0.0) -> Tensor:
        """The value of each adapted projection in its rows, `fill` in the other rows: [N, ...]."""
        rows, at = [], 0
        for projection, value in zip(self.adapted, values, strict=True):
            if projection.start > at:
                rows.append(value.new_full((projection.start - at, *value.shape[1:]), fill))
            rows.append(value)
            at = projection.stop
        if at < self.out_features:
            rows.append(values[-1].new_full((self.out_features - at, *values[-1].shape[1:]), fill))
        return rows[0] if len(rows) == 1 else torch.cat(rows)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Norm of each row of W + scale · B·A, fp32 [N]."""
        a, b = self._a(), self._b()
        product = self.base(a.to(self.weight.dtype))  # A·Wᵀ [P·r, N], in the base's arithmetic
        product = (product if self.bias is None else product - self.bias).float()
        # ||W||² + 2·scale·B·(A·Wᵀ) + scale²·B·(A·Aᵀ)·Bᵀ, of each row; b has the scale in it.
        squares = self.base_squares + 2 * (b * product.t()).sum(dim=1) + (b * (b @ (a @ a.t()))).sum(dim=1)
        # A sum of terms of either sign, each rounded: near zero it may come out negative.
        return squares.clamp(min=torch.finfo(torch.float32).tiny).sqrt()

    @torch.no_grad()
    def add_adapter(self, index: int, rows: Tensor) -> Tensor:
        """The fp32 weight `rows` [n, K] of the adapted projection `index`, with its adapter."""
        # On the weight's device: one that is offloaded is merged in host memory.
        rows = rows + self.scale * (self.lora_b[index] @ self.lora_a[index]).to(rows.device)
        if self.magnitude is not None:
            rows *= (self.magnitude[index].to(rows.device) / rows.norm(dim=1)).unsqueeze(1)
        return rows

    @torch.no_grad()
    def merged(self) -> nn.Linear:
        """The equivalent plain linear, in the weight's dtype."""
        weight = exported_weight(self.base).float().clone()
        for i, projection in enumerate(self.adapted):
            rows = slice(projection.start, projection.stop)
            weight[rows] = self.add_adapter(i, weight[rows])
        with torch.device("meta"):
            linear = MergedLinear(self.in_features, self.out_features, bias=self.bias is not None)
        linear.trained, linear.key = self.merge_format, self.merge_key
        linear.weight = nn.Parameter(weight.to(self.weight.dtype), requires_grad=False)
        linear.bias = self.bias
        return linear


def merge_format(name: str, flag: str = "--lora") -> ExportFormat:
    """The export format that `merge_format` names. UserError for another, and for one that holds no merged weights."""
    formats = {known: EXPORT_FORMATS.make(known, {}, flag) for known in EXPORT_FORMATS.names()}
    allowed = {
        known: fmt for known, fmt in formats.items()
        if isinstance(fmt, SafetensorsFormat) and fmt.weight.fmt != "ternary"
    }  # fmt: skip
    if name not in allowed:
        raise unknown_name(f"{flag}.merge_format", "format", name, allowed)
    return allowed[name]


def check_merge_format(model: nn.Module, lora: Lora) -> None:
    """UserError for a linear of `model`, which may be on the meta device, whose merged weight `merge_format` cannot
    hold."""
    if lora.merge_format is None:
        return
    fmt = merge_format(lora.merge_format)
    for name, found in projections(model).items():
        for projection in found:
            why = fmt.refusal(projection.stop - projection.start, _linear(model, name).in_features)
            if why and (projection.word in lora.names or ALL in lora.names):
                raise UserError(
                    f"--lora.merge_format: {lora.merge_format!r} cannot hold {projection.hf_name}: {why}; name another "
                    "format, or other targets."
                )


def _linear(model: nn.Module, name: str) -> Any:
    """An nn.Linear or LowBitLinear; of experts a GroupedLinear or LowBitLinear."""
    return model.get_submodule(name)


def projections(model: nn.Module) -> dict[str, list[Projection]]:
    """Name of each linear that can have adapters, all but the output head and experts -> its projections."""
    experts = {m for owner in model.modules() if isinstance(owner, Experts) for m in owner.modules()}
    kinds, without = (nn.Linear, LowBitLinear), {model.lm_head, *experts}
    linears = {n: m for n, m in model.named_modules() if isinstance(m, kinds) and m not in without}
    if not isinstance(model, Decoder):  # transformers does not fuse projections
        return {n: [Projection(n.removeprefix("model."), 0, m.out_features)] for n, m in linears.items()}
    return _in_layout(model, linears)


def expert_projections(model: nn.Module) -> dict[str, list[Projection]]:
    """Name of each linear of the experts -> every projection of every expert."""
    if not isinstance(model, Decoder):
        return {}
    owners = [name for name, m in model.named_modules() if isinstance(m, Experts)]
    linears = {f"{owner}.{own}": _linear(model, f"{owner}.{own}") for owner in owners for own in EXPERT_TARGETS}
    return _in_layout(model, linears) if linears else {}


def _in_layout(model: Decoder, linears: Mapping[str, Any]) -> dict[str, list[Projection]]:
    def projection(entry: TensorSlice, rows: int) -> Projection:
        stop = rows if entry.stop is None else entry.stop
        return Projection(entry.hf_name.removesuffix(".weight"), entry.start, stop)

    found = weights_of(model.config, linears)
    return {name: [projection(e, linears[name].out_features) for e in entries] for name, entries in found.items()}


def chosen_targets(lora: Lora, words: Collection[str], experts: Collection[str], flag: str = "--lora") -> set[str]:
    """The names that get adapters: of `words`, projections of linears, which ALL stands for, and of `experts`.
    UserError for a target that is none of them."""
    allowed = [*words, *experts, ALL]
    for target in lora.names:
        if target not in allowed:
            raise unknown_name(f"{flag}.targets", "projection", target, allowed)
    if not lora.names:
        raise UserError(f"{flag}.targets: the list is empty; name projections, or {ALL!r}.")
    return {*lora.names, *(words if ALL in lora.names else ())} - {ALL}


def add_lora(model: nn.Module, lora: Lora, seed: int, flag: str = "--lora") -> list[LoraLinear | LoraExperts]:
    """Freeze every parameter and add adapters to the projections that `lora.targets` names. B is 0, A is initialized as
    in PEFT (Kaiming uniform) from (seed, name). UserError for a target that the model does not have."""
    model.requires_grad_(False)
    linears, experts = projections(model), expert_projections(model)
    words = {projection.word for found in linears.values() for projection in found}
    targets = chosen_targets(lora, words, EXPERT_TARGETS.values() if experts else (), flag)
    added: list[LoraLinear | LoraExperts] = []
    for name, candidates in linears.items():
        chosen = [projection for projection in candidates if projection.word in targets]
        if chosen:
            linear = LoraLinear(_linear(model, name), chosen, lora, len(added))
            for projection, a in zip(chosen, linear.lora_a, strict=True):
                _initialize(a, seed, projection.hf_name)
            added.append(_replace(model, name, linear))
    for name, fused in experts.items():
        owner, _, own = name.rpartition(".")
        if EXPERT_TARGETS[own] in targets:
            hf_name = f"model.{owner.removesuffix('experts')}{EXPERT_TARGETS[own]}"
            assert isinstance(model, Decoder)
            linear = _adapted_experts(model, name, hf_name, fused, lora)
            _initialize(linear.lora_a.weight, seed, hf_name, model.partition(f"{name}.lora_a.weight"))
            added.append(_replace(model, name, linear))
    return added


def _adapted_experts(model: Decoder, name: str, hf_name: str, fused: list[Projection], lora: Lora) -> LoraExperts:
    """fused: of every expert, of which this process may have some."""
    base, experts, part = _linear(model, name), model.config.mixture.experts, model.partition(f"{name}.weight")
    count, (start, stop) = experts, (0, fused[-1].stop) if part is None else part.ranges[0]
    if part is not None and model.parts is not None:
        count = experts * part.length // part.full
        model.parts = model.parts.with_adapters(lora.r)
    own = [dataclasses.replace(p, start=p.start - start, stop=p.stop - start) for p in fused if start <= p.start < stop]
    return LoraExperts(base, count, experts, hf_name, own, lora.r, lora.scale, lora.dropout)


def _initialize(a: Tensor, seed: int, hf_name: str, part: Partition | None = None) -> None:
    """part: what `a` is of the A that is drawn."""
    drawn = a if part is None else a.new_empty(part.full_shape(a.shape))
    # With a = √5 the bound is 1/√K, as of nn.Linear's own weights.
    generator = named_generator(seed, f"{hf_name}.lora_A", a.device)
    with torch.no_grad():
        nn.init.kaiming_uniform_(drawn, a=math.sqrt(5), generator=generator)
        if part is not None:
            a.copy_(part.take(drawn))


def _replace(model: nn.Module, name: str, linear: LoraLinear | LoraExperts) -> LoraLinear | LoraExperts:
    model.set_submodule(name, linear.train(linear.base.training))
    return linear


def lora_linears(model: nn.Module) -> dict[str, LoraLinear | LoraExperts]:
    kinds = (LoraLinear, LoraExperts)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds)}


def merge_lora(model: nn.Module, *, experts_only: bool = False) -> None:
    """Replace every adapted linear by the equivalent plain one; experts_only: those of experts, of which other
    processes have other ones."""
    for name, linear in lora_linears(model).items():
        if isinstance(linear, LoraExperts) or not experts_only:
            model.set_submodule(name, linear.merged())
