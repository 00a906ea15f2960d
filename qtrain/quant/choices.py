"""The decision on each linear of a model: the scheme that it runs in, or why it stays in high precision.

Any nn.Module works: its nn.Linear submodules are found, and its convolutions, which count as linears here
(`conv2d.py`). The caller names the output head.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import nn

from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS
from qtrain.quant.attachments import cannot_swap
from qtrain.quant.conv2d import CONVOLUTIONS, Convolution, cannot_convolve, has_no_convolution, is_pointwise
from qtrain.quant.gemm_table import emulates_grouped
from qtrain.quant.grouped_linear import GroupedLinear, groups_of
from qtrain.quant.scheme import LowBitScheme, Scheme
from qtrain.quant.scheme_map import Spec, kind_of, spec_of, spec_text
from qtrain.quant.weight_codes import in_one_layout

NOTHING = "the scheme quantizes nothing"
NO_NAMES: Mapping[str, str] = {}
HEAD = "output head (--quantize_lm_head takes it too)"


class Kernel(NamedTuple):
    """What makes a choice that of a convolution, as the plan lists it."""

    channels: int
    """Of the input."""
    size: tuple[int, ...]
    groups: int
    pointwise: bool
    """Whether it runs as a linear over pixels."""

    def shape_text(self, out_channels: int) -> str:
        grouped = f", {self.groups} groups" if self.groups > 1 else ""
        return f"{'x'.join(map(str, self.size))} {self.channels} -> {out_channels}{grouped}"


@dataclass(frozen=True)
class LinearChoice:
    """The decision on one linear: `reason` says why it stays in high precision; None: it is swapped, to `scheme`."""

    name: str
    in_features: int
    out_features: int
    reason: str | None
    scheme: LowBitScheme | MaybeNone = None
    groups: int = 1
    """Matrices of this shape in the linear (`grouped_linear.py`)."""
    is_head: bool = False
    rounds_logits: bool = False
    """Whether the gradient of its output is rounded stochastically because it is the head."""
    assigned: LowBitScheme | None = None
    """What the map of schemes has, of which `scheme` is made for a head, for experts or for a convolution."""
    kernel: Kernel | None = None
    """Of a convolution, which has C * R * S in-features; None: a linear."""

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
    def in_one_layout(self) -> LowBitScheme | MaybeNone:
        """`scheme` with one layout of the weight's codes, where it can have it; products of groups, and of kernels over
        several pixels, read both."""
        one_matrix = self.groups == 1 and (self.kernel is None or self.kernel.pointwise)
        return in_one_layout(self.scheme) if self.scheme is not None and one_matrix else self.scheme

    @property
    def emulated(self) -> bool:
        """Whether its products are emulated on every device, as those of experts in MX formats are."""
        if self.scheme is None or self.groups == 1:
            return False
        low_bit = [gemm for gemm, arithmetic in self.scheme.gemm_dtypes().items() if arithmetic != "bf16"]
        return any(emulates_grouped(*self.scheme.low_bit_formats(gemm)) for gemm in low_bit)

    @property
    def spec(self) -> Spec:
        """The scheme that it runs in, as --quantize_overrides has it."""
        return spec_of(self.assigned or self.scheme)


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
    trains. left: the linears that schemes which keep a checkpoint's codes leave, by name, with the reason."""
    choices: list[LinearChoice] = []
    shared = shared_weights(model)
    for linear, names in find_layers(model).items():
        choice = _choice_of(linear, names[0], linear is head)
        own, rule = scheme.at(choice.name)
        reason = reason_to_leave(linear, choice, own, rule, quantize_head, min_size)
        if reason is None and own.keeps_codes:
            reason = left.get(choice.name)
        shares = id(linear.weight) in shared
        choices.append(replace(choice, reason=reason) if reason else decide(choice, own, shares, device))
    return choices


def _choice_of(linear: nn.Linear | Convolution, name: str, is_head: bool) -> LinearChoice:
    """The choice on a linear or convolution that is still to be made."""
    if isinstance(linear, nn.Linear):
        groups = groups_of(linear)
        return LinearChoice(name, linear.in_features, linear.out_features // groups, None, None, groups, is_head)
    pointwise = isinstance(linear, nn.Conv2d) and linear.groups == 1 and is_pointwise(linear)
    kernel = Kernel(linear.in_channels, tuple(linear.kernel_size), linear.groups, pointwise)
    summed = linear.weight.numel() // linear.out_channels
    return LinearChoice(name, summed, linear.out_channels, None, is_head=is_head, kernel=kernel)


def reason_to_leave(
    linear: nn.Linear | Convolution,
    choice: LinearChoice,
    scheme: Scheme,
    rule: str | None,
    quantize_head: bool,
    min_size: int,
) -> str | None:
    """Why a linear stays in high precision whatever low-bit scheme it has; None: the scheme decides."""
    if scheme.leaves_all:
        return rule or NOTHING
    if not isinstance(linear, nn.Linear):
        if why := cannot_convolve(linear):
            return why
        if not isinstance(scheme, LowBitScheme):
            return "schemes are timed for linears only"
    # Not isinstance: a subclass may have a forward pass of its own, which the swap would drop.
    elif type(linear) not in (nn.Linear, GroupedLinear):
        return f"a {type(linear).__name__}, not a plain linear"
    if why := cannot_swap(linear):
        return why
    if isinstance(linear, GroupedLinear) and choice.out_features % BLOCK_ROWS:
        return f"products of groups take matrices with rows in multiples of {BLOCK_ROWS}"
    # A rule that names the linear is stronger than flags that leave linears out.
    if choice.is_head and not (quantize_head or rule):
        return HEAD
    if min(choice.in_features, choice.out_features) < min_size and not rule:
        return f"it has fewer than {min_size} in- or out-features (--quantize_min_size)"
    return None


def decide(choice: LinearChoice, scheme: Scheme, shared: bool, device: torch.device) -> LinearChoice:
    """`choice` with the scheme that is assigned to it, or with the reason why it stays in high precision. shared:
    another module holds its weight too."""
    assert isinstance(scheme, LowBitScheme)  # the others leave all linears (`reason_to_leave`)
    k, n = choice.in_features, choice.out_features
    own = scheme.for_linear(k, n, head=choice.is_head)
    own = own.for_experts() if choice.groups > 1 else own
    reason = has_no_convolution(own) if choice.kernel else None
    if reason is None and shared and (own.latent or own.stored_format is not None):
        reason = "another module shares its weight and needs it in high precision"
    if reason := reason or own.refusal(k, n, device):
        return replace(choice, reason=reason, scheme=None, assigned=None, rounds_logits=False)
    # for_linear(head=True) may turn on rounding of dy: seen by comparing with a hidden linear of this shape.
    if choice.kernel and not choice.kernel.pointwise:
        own = own.derived(convolves=True)
    rounds_logits = choice.is_head and own.stochastic_rounding != scheme.for_linear(k, n).stochastic_rounding
    return replace(choice, reason=None, scheme=own, assigned=scheme, rounds_logits=rounds_logits)


def find_layers(model: nn.Module) -> dict[nn.Linear | Convolution, list[str]]:
    """Every nn.Linear and every convolution of a model, each once, with all of its names."""
    found: dict[nn.Linear | Convolution, list[str]] = {}
    # With duplicates: the swap must replace a shared module under each of its names.
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, (nn.Linear, *CONVOLUTIONS)):
            found.setdefault(module, []).append(name)
    return found


def find_linears(model: nn.Module) -> dict[nn.Linear, list[str]]:
    """`find_layers` without the convolutions."""
    return {linear: names for linear, names in find_layers(model).items() if isinstance(linear, nn.Linear)}


def shared_weights(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module holds."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            # Per module, not per name: a tied weight is one parameter of two modules.
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {parameter for parameter, count in holders.items() if count > 1}


def describe_choices(choices: list[LinearChoice]) -> list[str]:
    """The plan's lines: one per (kind, shape, decision), with the number of linears. Where linears of a kind and shape
    run in several schemes, their layers are listed."""
    if choices and all(c.reason == NOTHING for c in choices):
        return [f"{len(choices):4d} {layers_text(choices)}: all left, {NOTHING}"]
    # With one scheme the plan's header names it already.
    mixed = len({spec_text(c.spec) for c in choices if c.reason is None}) > 1
    groups: dict[tuple[str, str], dict[str, list[LinearChoice]]] = {}
    for c in choices:
        done = f"left, {c.reason}" if c.reason else f"quantized, {spec_text(c.spec)}" if mixed else "quantized"
        if c.rounds_logits:
            done += ", the gradient of logits rounded stochastically"
        each = f"{c.groups} of " if c.groups > 1 else ""
        shape = c.kernel.shape_text(c.out_features) if c.kernel else f"{each}{c.in_features} -> {c.out_features}"
        groups.setdefault((kind_of(c.name), shape), {}).setdefault(done, []).append(c)
    return [
        f"{len(linears):4d} x {kind} {shape}{_layers(linears) if len(decisions) > 1 else ''}: {done}"
        for (kind, shape), decisions in groups.items()
        for done, linears in decisions.items()
    ]


def layers_text(choices: Sequence[LinearChoice]) -> str:
    """What the choices are on."""
    return "linears and convolutions" if any(choice.kernel for choice in choices) else "linears"


def _layers(linears: list[LinearChoice]) -> str:
    """The numbers in their names, as ranges: " (0, 2-5)"."""
    numbers = [".".join(part for part in c.name.split(".") if part.isdigit()) for c in linears]
    # Two numbers in a name, of a stage and a block, are no range; "" is a linear outside of layers.
    if not all(number.isdigit() for number in numbers):
        return f" ({', '.join(numbers)})" if all(numbers) else ""
    ranges: list[list[int]] = []
    for number in sorted(map(int, numbers)):
        # Extends the open range [first, last].
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    return f" ({', '.join(str(a) if a == b else f'{a}-{b}' for a, b in ranges)})"
