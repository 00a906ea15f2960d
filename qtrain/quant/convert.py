"""Swaps a model's linears by scheme, says which it swapped and why it left the others, and keeps their codes fresh."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import LowBitScheme, Scheme


@dataclass(frozen=True)
class LinearChoice:
    """What became of one linear: `reason` is None where it was swapped."""

    name: str
    in_features: int
    out_features: int
    reason: str | None


@dataclass
class QuantizedModel:
    """A model's swapped linears and the counters that key their stochastic rounding."""

    choices: list[LinearChoice]
    linears: list[LowBitLinear]
    keys: Tensor  # int64 [linears, 3]: seed, step, number of each; a linear holds its row

    @property
    def step(self) -> int:
        """The micro-step whose random bits are drawn; it decides a stochastically rounded weight's codes too."""
        return int(self.keys[0, 1]) if len(self.keys) else 0

    def set_step(self, step: int) -> None:
        """Name the micro-step whose random bits are drawn next."""
        self.keys[:, 1].fill_(step)

    def refresh(self) -> None:
        """Renew every weight's codes; once after each optimizer step and after loading a checkpoint."""
        for linear in self.linears:
            linear.refresh()

    def watch(self, optimizer: torch.optim.Optimizer) -> None:
        """Have each optimizer step count as a change of the weights: torch's fused optimizers do not count it."""
        weights = [linear.weight for linear in self.linears]
        if weights:
            optimizer.register_step_post_hook(lambda *_: torch.autograd.graph.increment_version(weights))

    def assert_fresh(self) -> None:
        """An assertion that no weight has changed since its codes were made (counted by torch's version counter)."""
        stale = [i for i, linear in enumerate(self.linears) if linear.weight._version != linear.fresh_version]
        names = [choice.name for choice in self.choices if choice.reason is None]
        assert not stale, f"stale codes: {', '.join(names[i] for i in stale[:3])} changed after the last refresh"


def quantize_linears(
    model: nn.Module, scheme: Scheme, *, seed: int, head: nn.Module | None = None, quantize_head: bool = False
) -> QuantizedModel:
    """Swap the linears of `model` in place. `head` is its output head, left alone unless `quantize_head`."""
    device = next(model.parameters()).device
    most = sum(isinstance(module, nn.Linear) for module in model.modules())
    keys = torch.tensor([[seed, 0, number] for number in range(most)], dtype=torch.int64, device=device)
    quantized = QuantizedModel([], [], keys.view(-1, 3))
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear):
            continue
        reason = _reason_to_leave(module, scheme, module is head and not quantize_head)
        if reason is None:
            swapped = LowBitLinear(module, scheme, quantized.keys[len(quantized.linears)])
            swapped.train(module.training)
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, swapped)
            quantized.linears.append(swapped)
        quantized.choices.append(LinearChoice(name, module.in_features, module.out_features, reason))
    return quantized


def _reason_to_leave(linear: nn.Linear, scheme: Scheme, spared_head: bool) -> str | None:
    if not isinstance(scheme, LowBitScheme):
        return "the scheme quantizes nothing"
    if spared_head:
        return "output head (--quantize_lm_head takes it too)"
    if type(linear) is not nn.Linear:
        return f"a {type(linear).__name__}, not a plain linear"
    return scheme.refusal(linear.in_features, linear.out_features, linear.weight.device)


def describe_choices(choices: list[LinearChoice]) -> list[str]:
    """A line for each (shape, reason), with how many linears share it: what the plan prints."""
    groups: dict[tuple[str, int, int, str | None], int] = {}
    for c in choices:
        kind = ".".join(part for part in c.name.split(".") if not part.isdigit())
        key = (kind, c.in_features, c.out_features, c.reason)
        groups[key] = groups.get(key, 0) + 1
    return [
        f"{count:4d} x {kind} {k} -> {n}: " + ("quantized" if reason is None else f"left, {reason}")
        for (kind, k, n, reason), count in groups.items()
    ]
