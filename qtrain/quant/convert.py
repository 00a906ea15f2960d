"""Swaps a model's linears by scheme, says which it swapped and why it left the others, and keeps their codes fresh.

Any model is taken: linears are found as modules, so they are those that the model calls. What a model says of itself is
only its output head and, for schemes that want every linear's input normed, a method `add_sub_norms`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtrain.quant.delayed_scaling import AmaxHistory
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme
from qtrain.tensors.stored_weight import StoredWeight

SIBLINGS = (
    {"q_proj", "k_proj", "v_proj"},
    {"gate_proj", "up_proj"},
    {"query", "key", "value"},
    {"q", "k", "v"},
    {"w1", "w3"},
)
"""Names of a module's linears that read the same input. They draw the same random bits for it, so that a compiled model
finds that it is quantized alike for each and does it once; in no product do the two meet."""


@dataclass(frozen=True)
class LinearChoice:
    """What became of one linear: `reason` is None where it was swapped, then `scheme` says to which scheme."""

    name: str
    in_features: int
    out_features: int
    reason: str | None
    scheme: str = ""


@dataclass
class QuantizedModel:
    """A model's swapped linears, the counters that key their rounding, and what delayed scaling remembers."""

    choices: list[LinearChoice]
    linears: list[LowBitLinear]
    keys: Tensor  # int64 [linears, 3]: seed, step, number of each; a linear holds its row, or its first sibling's
    amax: AmaxHistory | None = None

    @property
    def step(self) -> int:
        """The micro-step whose random bits are drawn; it decides a stochastically rounded weight's codes too."""
        return int(self.keys[0, 1]) if len(self.keys) else 0

    def set_step(self, step: int) -> None:
        """Name the micro-step whose random bits are drawn next."""
        self.keys[:, 1].fill_(step)

    @property
    def changes(self) -> bool:
        """Whether a step leaves anything to renew."""
        return self.amax is not None or any(linear.weight.requires_grad for linear in self.linears)

    def refresh(self, frozen: bool = False) -> None:
        """Renew the codes of every weight that trains, and every scale; once after each optimizer step. After loading a
        checkpoint, with `frozen`, those of the others too."""
        if self.amax is not None:
            self.amax.roll()
        self.refresh_weights(frozen)

    def refresh_weights(self, frozen: bool = False) -> None:
        """Renew the codes alone: where weights change for a while, between two steps."""
        for linear in self.linears:
            if frozen or linear.weight.requires_grad:
                linear.refresh()

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint holds besides the model's: the very tensors, to be followed by `refresh`."""
        return {} if self.amax is None else {"amax_history": self.amax.history}

    def mark_fresh(self) -> None:
        """Say that every weight's codes have just been renewed by other means than `refresh`: by its recording."""
        for linear in self.linears:
            linear.mark_fresh()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Have each optimizer step count as a change of the weights: torch's fused optimizers do not count it."""
        weights = [linear.weight for linear in self.linears if linear.weight.requires_grad]
        if weights:
            optimizer.register_step_post_hook(lambda *_: torch.autograd.graph.increment_version(weights))

    def assert_fresh(self) -> None:
        """An assertion that no weight has changed since its codes were made (counted by torch's version counter)."""
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
) -> list[LinearChoice]:
    """What `quantize_linears` does with each linear, in its order. The model may be on the meta device: `device` is
    where it trains."""
    choices, shared = [], _shared_weights(model)
    nothing = not isinstance(scheme, LowBitScheme) and [part for _, part in scheme.parts()] == [scheme]
    for linear, names in find_linears(model).items():
        taken = ""
        if nothing:
            reason = "the scheme quantizes nothing"
        elif linear is head and not quantize_head:
            reason = "output head (--quantize_lm_head takes it too)"
        elif type(linear) is not nn.Linear:
            reason = f"a {type(linear).__name__}, not a plain linear"
        elif min(linear.in_features, linear.out_features) < min_size:
            reason = f"it has fewer than {min_size} in- or out-features (--quantize_min_size)"
        else:
            own = scheme.for_linear(linear.in_features, linear.out_features)
            reason = _refusal(linear, own, id(linear.weight) in shared, device)
            taken = "" if reason else own.name or SCHEMES.name_of(own)
        choices.append(LinearChoice(names[0], linear.in_features, linear.out_features, reason, taken))
    return choices


def quantize_linears(
    model: nn.Module,
    scheme: Scheme,
    *,
    seed: int,
    head: nn.Module | None = None,
    quantize_head: bool = False,
    min_size: int = 0,
) -> QuantizedModel:
    """Swap the linears of `model` in place. `head` is its output head, left alone unless `quantize_head`.

    min_size: a linear with fewer in- or out-features is left alone. A scheme that stores weights in low bits makes new
    parameters, so an optimizer comes after. UserError where a scheme asks for norms that this model cannot have.
    """
    if isinstance(scheme, LowBitScheme) and scheme.sub_norm and hasattr(model, "add_sub_norms"):
        model.add_sub_norms("--quantize")
    device = next(model.parameters()).device
    linears, rows = find_linears(model), {}
    keys = torch.tensor([[seed, 0, number] for number in range(len(linears))], dtype=torch.int64, device=device)
    choices = choose_linears(model, scheme, device=device, head=head, quantize_head=quantize_head, min_size=min_size)
    quantized = QuantizedModel(choices, [], keys.view(-1, 3))
    for (linear, names), choice in zip(linears.items(), choices, strict=True):
        if choice.reason is None:
            key = rows.setdefault(_drawing_group(names[0]), quantized.keys[len(quantized.linears)])
            swapped = _swap(linear, scheme.for_linear(linear.in_features, linear.out_features), key)
            for name in names:
                model.set_submodule(name, swapped)
            quantized.linears.append(swapped)
    delayed = [linear for linear in quantized.linears if linear.scheme.amax_history]
    if delayed:
        quantized.amax = AmaxHistory(delayed)
    return quantized


def _drawing_group(name: str) -> tuple[str, int | str]:
    """The same of linears that draw alike: the module and the group of SIBLINGS; of others themselves."""
    module, _, own = name.rpartition(".")
    return module, next((i for i, names in enumerate(SIBLINGS) if own in names), own)


def _swap(linear: nn.Linear, scheme: Scheme, key: Tensor) -> LowBitLinear:
    assert isinstance(scheme, LowBitScheme)
    if scheme.stored_format is not None:
        stored = StoredWeight.from_value(linear.weight, scheme.stored_format)
        linear.weight = nn.Parameter(stored, linear.weight.requires_grad)
    return LowBitLinear(linear, scheme, key).train(linear.training)


def _refusal(linear: nn.Linear, scheme: Scheme, shared: bool, device: torch.device) -> str | None:
    """Why `scheme` does not take this linear on `device`; shared: its weight is another module's too."""
    if not isinstance(scheme, LowBitScheme):
        return "the fastest as it is"
    if shared and (scheme.latent or scheme.stored_format is not None):
        return "its weight is another module's too, which needs it in high precision"
    return scheme.refusal(linear.in_features, linear.out_features, device)


def find_linears(model: nn.Module) -> dict[nn.Linear, list[str]]:
    """Every linear of a model, each once, with all the names that it goes by."""
    found: dict[nn.Linear, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, nn.Linear):
            found.setdefault(module, []).append(name)
    return found


def _shared_weights(model: nn.Module) -> set[int]:
    """ids of parameters that more than one module holds."""
    holders: dict[int, int] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            holders[id(parameter)] = holders.get(id(parameter), 0) + 1
    return {parameter for parameter, count in holders.items() if count > 1}


def describe_choices(choices: list[LinearChoice]) -> list[str]:
    """A line for each (shape, reason), with how many linears share it: what the plan prints."""
    mixed = len({c.scheme for c in choices if c.reason is None}) > 1
    groups: dict[tuple[str, int, int, str], int] = {}
    for c in choices:
        kind = ".".join(part for part in c.name.split(".") if not part.isdigit())
        done = f"left, {c.reason}" if c.reason else f"quantized, {c.scheme}" if mixed else "quantized"
        key = (kind, c.in_features, c.out_features, done)
        groups[key] = groups.get(key, 0) + 1
    return [f"{count:4d} x {kind} {k} -> {n}: {done}" for (kind, k, n, done), count in groups.items()]
