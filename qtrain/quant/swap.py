"""Swaps a model's linears by scheme, states which were swapped and why others were not, and refreshes their codes.

Any nn.Module works: its nn.Linear submodules are swapped. The caller names the output head; for schemes that normalize
the input of every linear, the model may have a method `add_sub_norms`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError
from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS
from qtrain.quant.delayed_scaling import AmaxHistory
from qtrain.quant.gemm_table import emulates_grouped
from qtrain.quant.grouped_linear import GroupedLinear, groups_of
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scales import Reduce
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.weight_codes import in_one_layout, scales_by_amax
from qtrain.tensors.lazy import existing_codes, initial_value, is_lazy, make_lazy, materialize, with_zeros
from qtrain.tensors.stored_weight import StoredWeight

SIBLINGS = (
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"query", "key", "value"},
    {"q", "k", "v"},
    {"w1", "w3"},
)
"""Names of a module's linears that read the same input. They share a Philox key, so that a compiler finds equal
quantizations of the input and keeps one. The shared bits never meet in one product."""


NOTHING = "the scheme quantizes nothing"
NO_NAMES: Mapping[str, str] = {}


class SharedWeight(NamedTuple):
    """How a linear's weight is shared with other processes that hold other parts of it."""

    first_number: int
    """Added to the number of the linear in its Philox key: parts must not draw the same bits."""
    reduce: Reduce
    """Of statistics over those processes."""


@dataclass(frozen=True)
class LinearChoice:
    """The decision on one linear: `reason` says why it stays in high precision; None: it is swapped, to `scheme`."""

    name: str
    in_features: int
    out_features: int
    reason: str | None
    scheme: LowBitScheme | None = None
    groups: int = 1
    """Matrices of this shape in the linear (`grouped_linear.py`)."""
    is_head: bool = False
    rounds_logits: bool = False
    """Whether the gradient of its output is rounded stochastically because it is the head."""

    @property
    def shape(self) -> tuple[int, int]:
        """Of the weight."""
        return self.groups * self.out_features, self.in_features

    @property
    def weights(self) -> int:
        rows, columns = self.shape
        return rows * columns

    @property
    def stored(self) -> bool:
        """Whether the weight itself is kept in low bits."""
        return self.scheme is not None and self.scheme.stored_format is not None

    @property
    def in_one_layout(self) -> LowBitScheme | None:
        """`scheme` with one layout of the weight's codes, where it can have it; products of groups read both."""
        return in_one_layout(self.scheme) if self.scheme is not None and self.groups == 1 else self.scheme

    @property
    def emulated(self) -> bool:
        """Whether its products are emulated on every device, as those of experts in MX formats are."""
        if self.scheme is None or self.groups == 1:
            return False
        low_bit = [gemm for gemm, arithmetic in self.scheme.gemm_dtypes().items() if arithmetic != "bf16"]
        return any(emulates_grouped(*self.scheme.low_bit_formats(gemm)) for gemm in low_bit)

    @property
    def scheme_name(self) -> str:
        """As `--quantize` has it; "" of a linear that is left."""
        return "" if self.scheme is None else self.scheme.name or SCHEMES.name_of(self.scheme)


@dataclass
class QuantizedModel:
    """A model's swapped linears, the Philox keys of their rounding, and the state of delayed scaling."""

    choices: list[LinearChoice]
    linears: list[LowBitLinear]
    keys: Tensor  # int64 [linears, 3]: seed, micro-step, number of the linear; SIBLINGS hold the row of the first
    amax: AmaxHistory | None = None
    reduce_amax: Callable[[Tensor], None] | None = None
    """Takes the maximum over processes of what delayed scaling has seen, in place; None: one process."""

    @property
    def step(self) -> int:
        """The micro-step that keys the random bits, of stochastically rounded weights too."""
        return int(self.keys[0, 1]) if len(self.keys) else 0

    def set_step(self, step: int) -> None:
        """Set the micro-step that keys the next random bits."""
        self.keys[:, 1].fill_(step)

    @property
    def needs_refresh(self) -> bool:
        """Whether `refresh` has anything to do after a step."""
        return self.amax is not None or any(linear.weight.requires_grad for linear in self.linears)

    def refresh(self) -> None:
        """Requantize every trained weight and update delayed scales; to be called after each optimizer step, and after
        a checkpoint is loaded. Codes of frozen weights stay those that the model was built with."""
        if self.amax is not None:
            self.amax.roll(self.reduce_amax)
        self.refresh_weights()

    def refresh_weights(self) -> None:
        """Requantize weights without a step of delayed scaling: where averaged weights are swapped in and out."""
        stale = [linear for linear in self.linears if linear.weight.requires_grad]
        LowBitLinear.refresh_spanning([linear for linear in stale if linear.reduce is not None])
        for linear in stale:
            if linear.reduce is None:
                linear.refresh()

    def tensors(self) -> dict[str, Tensor]:
        """The state tensors that a checkpoint holds besides the model's; loading them requires `refresh`."""
        return {} if self.amax is None else {"amax_history": self.amax.history}

    def mark_fresh(self) -> None:
        """State that the replay of a recorded `refresh` has updated all codes."""
        for linear in self.linears:
            linear.mark_fresh()

    def track_versions(self, optimizer: torch.optim.Optimizer) -> None:
        """Increment the weights' versions after each optimizer step where it did not, as torch's fused optimizers."""
        trained = [linear for linear in self.linears if linear.weight.requires_grad]

        def after_step(*_: object) -> None:
            torch.autograd.graph.increment_version([linear.weight for linear in trained if not linear.stale])

        if trained:
            optimizer.register_step_post_hook(after_step)

    def use_optimizer_amax(self, record: Callable[[LowBitLinear], WeightAmax | None]) -> None:
        """Compute scales from the absmax that the optimizer leaves of a weight. record: where it leaves that of a
        linear's weight; None: nowhere."""
        for linear in self.linears:
            if linear.weight.requires_grad and scales_by_amax(linear.scheme):
                linear.weight_amax = record(linear)

    def known_amax(self) -> frozenset[int]:
        """The linears, by number, of which `refresh` knows the absmax now; the others' weights it reads for it."""
        return frozenset(i for i, linear in enumerate(self.linears) if linear.known_amax is not None)

    def assert_fresh(self) -> None:
        """Assert that no weight has changed since its codes were computed."""
        stale = [i for i, linear in enumerate(self.linears) if linear.stale]
        names = [choice.name for choice in self.choices if choice.reason is None]
        assert not stale, f"stale codes: {', '.join(names[i] for i in stale[:3])} changed after the last refresh"


def choose_linears(
    model: nn.Module,
    scheme: Scheme,
    *,
    device: torch.device,
    head: nn.Module | None = None,
    quantize_head: bool = False,
    min_size: int = 0,
    left: Mapping[str, str] = NO_NAMES,
) -> list[LinearChoice]:
    """The decision of `quantize_linears` on each linear. `model` may be on the meta device; `device` is where it
    trains."""
    choices, shared = [], shared_weights(model)
    # `auto` is no LowBitScheme either, but has such parts.
    high_precision = not isinstance(scheme, LowBitScheme) and [part for _, part in scheme.parts()] == [scheme]
    for linear, names in find_linears(model).items():
        taken, groups, is_head, rounds_logits = None, groups_of(linear), linear is head, False
        n, k = linear.out_features // groups, linear.in_features
        if high_precision:
            reason = NOTHING
        elif is_head and not quantize_head:
            reason = "output head (--quantize_lm_head takes it too)"
        elif names[0] in left:
            reason = left[names[0]]
        elif type(linear) not in (nn.Linear, GroupedLinear):
            reason = f"a {type(linear).__name__}, not a plain linear"
        elif isinstance(linear, GroupedLinear) and n % BLOCK_ROWS:
            reason = f"products of groups take matrices with rows in multiples of {BLOCK_ROWS}"
        elif min(k, n) < min_size:
            reason = f"it has fewer than {min_size} in- or out-features (--quantize_min_size)"
        else:
            own = scheme.for_linear(k, n, head=is_head)
            own = own.for_experts() if groups > 1 else own
            reason = _refusal(linear, own, id(linear.weight) in shared, device)
            taken = None if reason else own
            if is_head and taken:
                rounds_logits = taken.stochastic_rounding != scheme.for_linear(k, n).stochastic_rounding
        choices.append(LinearChoice(names[0], k, n, reason, taken, groups, is_head, rounds_logits))
    return choices


def quantize_linears(
    model: nn.Module,
    scheme: Scheme,
    *,
    seed: int,
    head: nn.Module | None = None,
    quantize_head: bool = False,
    min_size: int = 0,
    left: Mapping[str, str] = NO_NAMES,
    realize: bool = True,
    shared: Callable[[str], SharedWeight | None] = lambda name: None,
    one_weight_layout: bool = False,
) -> QuantizedModel:
    """Swap the linears of `model` in place, except its output head `head` unless `quantize_head`.

    Lazy parameters get their values, one at a time: first those that stay in high precision, the largest first, then
    each weight before it is quantized. realize: False where whoever divides the weights does both: lazy ones stay lazy,
    and codes of trained weights take no memory now.

    min_size: linears with fewer in- or out-features stay in high precision; left: these too, by name, with the reason.
    A scheme that stores weights in low bits replaces parameters, so the optimizer must be built afterwards. UserError
    where a scheme requires norms that this model cannot have. shared: the linears of which other processes hold other
    parts, by name. one_weight_layout: keep one layout of weights' codes, where the other follows from it
    (`weight_codes.in_one_layout`).
    """
    if isinstance(scheme, LowBitScheme) and scheme.sub_norm and hasattr(model, "add_sub_norms"):
        model.add_sub_norms("--quantize")
    device = next(model.parameters()).device
    linears, key_of_group = find_linears(model), {}
    choices = choose_linears(
        model, scheme, device=device, head=head, quantize_head=quantize_head, min_size=min_size, left=left
    )
    parts = [shared(choice.name) for choice in choices if choice.reason is None]
    numbers = [(part.first_number if part else 0) + number for number, part in enumerate(parts)]
    # One tensor for all linears: a new step is one fill, and every linear's key is a view of its row.
    keys = torch.tensor([[seed, 0, number] for number in numbers], dtype=torch.int64, device=device)
    quantized = QuantizedModel(choices, [], keys.view(-1, 3))
    if realize:
        swapped_weights = {id(linear.weight) for linear, c in zip(linears, choices, strict=True) if c.reason is None}
        for parameter in sorted(model.parameters(), key=Tensor.numel, reverse=True):
            if id(parameter) not in swapped_weights:
                materialize(parameter)
    for (linear, names), choice in zip(linears.items(), choices, strict=True):
        if choice.reason is None:
            number = len(quantized.linears)
            key = key_of_group.setdefault(_key_group(names[0]), quantized.keys[number])
            own = choice.in_one_layout if one_weight_layout else choice.scheme
            if realize and (codes := _existing_codes(linear.weight, own, names[0])) is not None:
                linear.weight = nn.Parameter(codes, linear.weight.requires_grad)
            elif realize:
                materialize(linear.weight)
            swapped = _swap(linear, own, key, parts[number], names[0])
            for name in names:
                model.set_submodule(name, swapped)
            quantized.linears.append(swapped)
            # Not codes that are the weight itself, nor those of a frozen weight, which nobody would compute again.
            computed = swapped.scheme.stored_format is None and swapped.weight.requires_grad
            if is_lazy(swapped.weight) or (computed and not realize):
                swapped.weight_codes.free()
    delayed = [linear for linear in quantized.linears if linear.scheme.amax_history]
    if delayed:
        quantized.amax = AmaxHistory(delayed)
    return quantized


def _key_group(name: str) -> tuple[str, int | str]:
    """Equal for linears that share a Philox key: their parent module and their set of SIBLINGS, or their own name."""
    parent, _, own = name.rpartition(".")
    return parent, next((i for i, names in enumerate(SIBLINGS) if own in names), own)


def _existing_codes(weight: nn.Parameter, scheme: LowBitScheme, name: str) -> StoredWeight | None:
    """The codes that a lazy weight has already in the format that the scheme stores. UserError for a scheme that keeps
    those of a checkpoint, where the weight has none."""
    codes = None if scheme.stored_format is None else existing_codes(weight, scheme.stored_format)
    if codes is None and scheme.keeps_codes:
        raise UserError(
            f"--lora.base: {name} has no codes in the format that the config.json of --model says, or only a part of "
            'it has; use "base":"dense", or one of nf4, int8 and fp8.'
        )
    return codes


def _swap(linear: nn.Linear, scheme: LowBitScheme, key: Tensor, shared: SharedWeight | None, name: str) -> LowBitLinear:
    """A lazy weight stays lazy: its codes are those of zeros, until it has a value."""
    plain = linear.weight
    with with_zeros(plain):
        if scheme.stored_format is not None and not isinstance(plain.data, StoredWeight):
            stored = StoredWeight.from_value(plain, scheme.stored_format)
            linear.weight = nn.Parameter(stored, plain.requires_grad)
        swapped = LowBitLinear(linear, scheme, key, shared and shared.reduce).train(linear.training)
    if is_lazy(plain) and linear.weight is not plain:

        def stored() -> StoredWeight:
            codes = _existing_codes(plain, scheme, name)
            return StoredWeight.from_value(initial_value(plain), scheme.stored_format) if codes is None else codes

        make_lazy(linear.weight, stored)
    return swapped


def _refusal(linear: nn.Linear, scheme: Scheme, shared: bool, device: torch.device) -> str | None:
    """Why this linear stays in high precision on `device`; shared: another module holds its weight too."""
    if not isinstance(scheme, LowBitScheme):
        return "the fastest in high precision"
    if shared and (scheme.latent or scheme.stored_format is not None):
        return "another module shares its weight and needs it in high precision"
    return scheme.refusal(linear.in_features, linear.out_features // groups_of(linear), device)


def find_linears(model: nn.Module) -> dict[nn.Linear, list[str]]:
    """Every nn.Linear of a model, each once, with all of its names."""
    found: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            found.setdefault(module, []).append(name)
    return found


def shared_weights(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module holds."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {parameter for parameter, count in holders.items() if count > 1}


def describe_choices(choices: list[LinearChoice]) -> list[str]:
    """The plan's lines: one per (kind, shape, decision), with the number of linears."""
    if choices and all(c.reason == NOTHING for c in choices):
        return [f"{len(choices):4d} linears: all left, {NOTHING}"]
    mixed = len({c.scheme_name for c in choices if c.reason is None}) > 1
    groups: dict[tuple[str, str, str], int] = {}
    for c in choices:
        kind = ".".join(part for part in c.name.split(".") if not part.isdigit())
        done = f"left, {c.reason}" if c.reason else f"quantized, {c.scheme_name}" if mixed else "quantized"
        if c.rounds_logits:
            done += ", the gradient of logits rounded stochastically"
        each = f"{c.groups} of " if c.groups > 1 else ""
        key = (kind, f"{each}{c.in_features} -> {c.out_features}", done)
        groups[key] = groups.get(key, 0) + 1
    return [f"{count:4d} x {kind} {shape}: {done}" for (kind, shape, done), count in groups.items()]
