"""Changes the schemes of linears of a model that trains.

Afterwards the model is the one that would have been built with the new map: linears that stay in high precision are
nn.Linear, the others LowBitLinear, and all draw the random bits of that model; convolutions are linears here.
Parameters are the same objects, so optimizers and checkpoints do not notice; hooks and attributes go with their
linear. Codes are made anew. The absmax history of linears that stay under delayed scaling is kept, for it is of their
tensors, whatever the format; others begin without one.

What has been recorded of the steps before launches other kernels: recorded graphs are dropped by the number of
assignments (`StepGraphs`), and a compiler notices that a module is another one.
"""

import logging
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from qtrain.core.errors import UserError, unknown_name
from qtrain.quant.attachments import CONV, LOW_BIT_LINEAR, carry_attachments
from qtrain.quant.choices import LinearChoice, decide, reason_to_leave, shared_weights
from qtrain.quant.compiled_layers import allow_kinds
from qtrain.quant.conv2d import LowBitConv2d
from qtrain.quant.grouped_linear import GroupedLinear
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.quantized_model import QuantizedModel
from qtrain.quant.scheme import Scheme
from qtrain.quant.scheme_map import spec_of, spec_text
from qtrain.quant.swap import number_keys, swap

log = logging.getLogger("qtrain")

REASON = "reassigned"
"""Of linears that stay in high precision because of it."""


def reassign(model: nn.Module, quantized: QuantizedModel, schemes: Mapping[str, Scheme]) -> None:
    """Run the named linears in other schemes from the next step on; to be called between steps, on all processes.

    A lazy weight stays lazy, and its linear has no codes until it has a value. UserError for names that are no
    linears', and for schemes that these cannot run in. Where processes share weights, or host memory has them,
    `DataParallel.reassign` is what to call.
    """
    current, before = {choice.name: choice for choice in quantized.choices}, quantized.by_name()
    for name in schemes:
        if name not in current:
            raise unknown_name("reassign", "linear", name, current)
    linears = {name: quantized.linear(name) for name in schemes}
    shared = shared_weights(model)
    chosen = {
        name: _choose(current[name], linears[name], scheme, id(linears[name].weight) in shared, quantized)
        for name, scheme in schemes.items()
    }
    # Linears that are in the wanted scheme already keep their codes and history.
    changed = {name: choice for name, choice in chosen.items() if choice.spec != current[name].spec}
    if not changed:
        return
    histories, numbers = quantized.amax_rows(), quantized.keys[:, 2].tolist()
    quantized.choices = [changed.get(name, choice) for name, choice in current.items()]
    quantized.keys[:, 1].fill_(quantized.step)  # of a model without linears in low bits nobody has set it
    # Numbers count swapped linears, so a change may renumber those after it.
    now = number_keys(quantized)
    after = {name: linear for name, linear in before.items() if name not in changed}
    for name, choice in changed.items():
        new = plain = _plain(linears[name])
        quantized.left.pop(name, None)
        if choice.reason is None:
            new = after[name] = swap(plain, choice, quantized)
            quantized.ask_amax(new)
        else:
            quantized.left[name] = weakref.ref(new)
        _replace(model, linears[name], new)
    quantized.linears = [after[choice.name] for choice in quantized.choices if choice.reason is None]
    _keep_histories(quantized, histories)
    # Weights that are rounded stochastically are rounded again, with the bits of their new numbers.
    renumbered = {name for name, number, then in zip(current, now, numbers, strict=True) if number != then}
    for name in [name for name in after if name in renumbered and name not in changed]:
        if after[name].weight.requires_grad and any(after[name].scheme.rounds("w")):
            after[name].refresh()
    quantized.assignments += 1
    allow_kinds(len(changed))  # at most so many layers are of a new kind
    for spec in dict.fromkeys(spec_text(choice.spec) for choice in changed.values()):
        names = [name for name, choice in changed.items() if spec_text(choice.spec) == spec]
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        log.info("scheme      %s: %s%s", spec, ", ".join(names[:4]), more)


def _choose(
    current: LinearChoice,
    linear: LowBitLinear | nn.Linear | nn.Conv2d,
    scheme: Scheme,
    shared: bool,
    quantized: QuantizedModel,
) -> LinearChoice:
    """The choice of a linear in another scheme. UserError where it cannot run in it."""
    if current.spec == spec_of(None if scheme.leaves_all else scheme):
        return current
    choice = replace(current, reason=REASON, scheme=None, assigned=None, rounds_logits=False)
    why = None
    if parametrize.is_parametrized(linear):  # its weight is computed, and is no parameter that another could take
        why = "its weight is parametrized"
    elif "forward" in vars(linear):  # which calls the old module
        why = "its forward pass is replaced"
    elif isinstance(linear, LowBitLinear) and (linear.codes_only or linear.gathered):
        why = "its weight is not in memory; call DataParallel.reassign"
    elif not scheme.leaves_all:
        why = reason_to_leave(_plain(linear), current, scheme, REASON, True, 0)
        choice = decide(current, scheme, shared, linear.weight.device)
        why = why or choice.reason
        if scheme.sub_norm and not quantized.sub_norm:
            why = 'the model lacks its norms; give it "sub_norm":false'
    if current.stored or choice.stored:
        why = "weights stored in low bits are parameters of another kind, which a model has from its build on"
    if why:
        raise UserError(f"reassign: {current.name} cannot run in {spec_text(spec_of(scheme))}: {why}.")
    return choice


def _plain(linear: LowBitLinear | nn.Linear | nn.Conv2d) -> nn.Linear | nn.Conv2d:
    """A linear or convolution in high precision with the parameters of `linear`; itself if it is one."""
    if not isinstance(linear, LowBitLinear):
        return linear
    # On meta no memory is allocated for weights that are replaced at once.
    with torch.device("meta"):
        plain: Any = _like(linear)
    plain.weight, plain.bias = linear.weight, linear.bias
    carry_attachments(linear, plain, LOW_BIT_LINEAR | CONV if isinstance(linear, LowBitConv2d) else LOW_BIT_LINEAR)
    return plain.train(linear.training)


def _like(linear: LowBitLinear) -> nn.Module:
    """A module in high precision of the same sizes, with parameters of its own."""
    if isinstance(linear, LowBitConv2d):
        return linear.plain()
    if linear.groups is None:
        return nn.Linear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    return GroupedLinear(linear.groups.count, linear.in_features, linear.out_features // linear.groups.count)


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` wherever `old` is, also within an adapter."""
    for module in list(model.modules()):
        # A copy: setattr changes what is iterated over.
        for name, child in list(module.named_children()):
            if child is old:
                setattr(module, name, new)


def _keep_histories(quantized: QuantizedModel, histories: Mapping[str, torch.Tensor]) -> None:
    """Begin the histories of delayed scaling that the model has now with those that it had, by linear."""
    quantized.keep_amax()
    for name, own in quantized.amax_rows().items():
        if name in histories:
            steps = min(histories[name].shape[1], quantized.by_name()[name].scheme.amax_history)
            # [2 (x, dy), steps]; the schemes' histories may differ in length.
            own[:, :steps] = histories[name][:, :steps]
    if quantized.amax is not None:
        quantized.amax.roll()  # nothing has been seen since the last time: it computes scales
