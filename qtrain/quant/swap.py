"""Swaps a model's linears and convolutions by scheme.

Any nn.Module works: its nn.Linear and nn.Conv2d submodules are swapped. For schemes that normalize the input of every
linear, the model may have a method `add_sub_norms`.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError
from qtrain.quant.attachments import carry_attachments, own_names
from qtrain.quant.choices import NO_NAMES, LinearChoice, choose_linears, find_layers, shared_weights
from qtrain.quant.conv2d import Convolution, LowBitConv2d
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.quantized_model import QuantizedModel, SharedLinear
from qtrain.quant.scheme import LowBitScheme, Scheme
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
    shared: Callable[[str], SharedLinear | None] = lambda name: None,
    one_weight_layout: bool = False,
    forward_only: bool = False,
) -> QuantizedModel:
    """Swap the linears and convolutions of `model` in place, except its output head `head` unless `quantize_head`.

    Lazy parameters get their values, one at a time: first those that stay in high precision, the largest first, then
    each weight before it is quantized. realize: False where whoever shards the weights does both: lazy ones stay lazy,
    and codes of trained weights take no memory now.

    min_size: linears with fewer in- or out-features stay in high precision; left: those that a scheme which keeps codes
    leaves, by name, with the reason. A scheme that stores weights in low bits replaces parameters, so the optimizer
    must be built afterwards. UserError where a scheme requires norms that this model cannot have. shared: the linears
    of which other processes hold other parts, by name. one_weight_layout: keep one layout of weights' codes, where the
    other follows from it (`weight_codes.in_one_layout`). forward_only: nothing is trained: of a weight whose codes
    `output` reads those are kept alone.
    """
    if scheme.root.sub_norm and (add_sub_norms := getattr(model, "add_sub_norms", None)) is not None:
        add_sub_norms("--quantize")
    device = next(model.parameters()).device
    linears, tied = find_layers(model), shared_weights(model)
    choices = choose_linears(
        model, scheme, device=device, head=head, quantize_head=quantize_head, min_size=min_size, left=left
    )
    # One tensor for all linears: a new step is one fill, and every linear's key is a view of its row.
    keys = torch.tensor([[seed, 0, 0]] * len(choices), dtype=torch.int64, device=device).view(-1, 3)
    own_keys = key_views(keys, choices)
    quantized = QuantizedModel(choices, [], keys, own_keys, shared=shared, one_weight_layout=one_weight_layout)
    quantized.sub_norm = scheme.root.sub_norm
    number_keys(quantized)
    if forward_only:
        quantized.choices = choices = [_without_backward(choice) for choice in choices]
    if realize:
        swapped_weights = {id(linear.weight) for linear, c in zip(linears, choices, strict=True) if c.reason is None}
        for parameter in sorted(model.parameters(), key=Tensor.numel, reverse=True):
            if id(parameter) not in swapped_weights:
                materialize(parameter)
    for (linear, names), choice in zip(linears.items(), choices, strict=True):
        if choice.reason is not None:
            quantized.left[choice.name] = weakref.ref(linear)
            continue
        if realize and (codes := _existing_codes(linear.weight, choice.scheme, choice.name)) is not None:
            linear.weight = nn.Parameter(codes, linear.weight.requires_grad)
        elif realize:
            materialize(linear.weight)
        swapped = swap(linear, choice, quantized)
        # A module that is reachable under several names stays one module.
        for name in names:
            model.set_submodule(name, swapped)
        quantized.linears.append(swapped)
        if forward_only and id(swapped.weight) not in tied and _reads_codes(swapped.scheme):
            swapped.keep_codes_only()
        # Not codes that are the weight itself, nor those of a frozen weight, which nobody would compute again.
        if not realize and swapped.scheme.stored_format is None and swapped.weight.requires_grad:
            swapped.weight_codes.free()
    quantized.keep_amax()
    return quantized


def swap(linear: nn.Linear | Convolution, choice: LinearChoice, quantized: QuantizedModel) -> LowBitLinear:
    """The linear or convolution of a choice in low bits. A lazy weight stays lazy: its codes take no memory until it
    has a value."""
    scheme = choice.in_one_layout if quantized.one_weight_layout else choice.scheme
    plain, part, key = linear.weight, quantized.shared(choice.name), quantized.own_keys[choice.name]
    with with_zeros(plain):
        if scheme.stored_format is not None and not isinstance(plain.data, StoredWeight):
            stored = StoredWeight.from_value(plain, scheme.stored_format)
            linear.weight = nn.Parameter(stored, plain.requires_grad)
        kind: Any = LowBitConv2d if isinstance(linear, nn.Conv2d) else LowBitLinear
        swapped = kind(linear, scheme, key, None if part is None else part.reduce).train(linear.training)
    if part is not None:
        swapped.exchange = part.exchange
    carry_attachments(linear, swapped, own_names(linear))
    # The parameter of codes replaces the lazy one: it needs an initializer of its own.
    if (stored_format := scheme.stored_format) is not None and is_lazy(plain) and linear.weight is not plain:

        def stored_value() -> StoredWeight:
            codes = _existing_codes(plain, scheme, choice.name)
            return StoredWeight.from_value(initial_value(plain), stored_format) if codes is None else codes

        make_lazy(linear.weight, stored_value)
    if is_lazy(swapped.weight):
        swapped.weight_codes.free()
    return swapped


def _existing_codes(weight: Tensor, scheme: LowBitScheme, name: str) -> StoredWeight | None:
    """The codes that a lazy weight has already in the format that the scheme stores. UserError for a scheme that keeps
    those of a checkpoint, where the weight has none."""
    codes = None if scheme.stored_format is None else existing_codes(weight, scheme.stored_format)
    if codes is None and scheme.keeps_codes:
        raise UserError(
            f"--lora.base: {name} has no codes in the format that the config.json of --model says, or only a part of "
            'it has; use "base":"dense", or one of nf4, int8 and fp8.'
        )
    return codes


def _without_backward(choice: LinearChoice) -> LinearChoice:
    """The choice with operands for `output` alone."""
    return choice if choice.scheme is None else replace(choice, scheme=choice.scheme.derived(forward_only=True))


def _reads_codes(scheme: LowBitScheme) -> bool:
    """Whether `output` reads codes that are kept beside a weight in high precision."""
    return scheme.stored_format is None and scheme.formats_of("w")[0] is not None


# ---- keys of stochastic rounding -------------------------------------------------------------------------------------


def key_views(keys: Tensor, choices: Sequence[LinearChoice]) -> dict[str, Tensor]:
    """The key of each linear, a row of `keys`: of SIBLINGS that of the first, as one object, by which a compiler tells
    that they are equal."""
    first: dict[tuple[str, int | str], Tensor] = {}
    return {choice.name: first.setdefault(_key_group(choice.name), keys[row]) for row, choice in enumerate(choices)}


def number_keys(quantized: QuantizedModel) -> list[int]:
    """Write the numbers of the linears into the keys. Returns them, by choice."""
    # Swapped linears are counted: random bits follow from the map, however it came to be.
    numbers: dict[tuple[str, int | str], int] = {}
    for number, choice in enumerate(choice for choice in quantized.choices if choice.reason is None):
        part = quantized.shared(choice.name)
        numbers.setdefault(_key_group(choice.name), number + (part.first_number if part else 0))
    found = [numbers.get(_key_group(choice.name), 0) for choice in quantized.choices]
    quantized.keys[:, 2].copy_(torch.tensor(found, dtype=torch.int64))
    return found


def _key_group(name: str) -> tuple[str, int | str]:
    """Equal for linears that share a Philox key: their parent module and their set of SIBLINGS, or their own name."""
    parent, _, own = name.rpartition(".")
    return parent, next((i for i, names in enumerate(SIBLINGS) if own in names), own)
