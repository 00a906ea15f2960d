"""An optimizer's elementwise update of many tensors in one launch: clipping, decay, update, states, weights.

Memory traffic is at its floor: weight, gradient and state codes are read and written once. The rest happens in fp32 in
registers: states are decoded, updated and encoded; a bf16 weight without a master copy and a weight stored as codes are
rounded stochastically, with bits from Philox keyed on (seed, step, parameter number, element).

    rule           states              update (g: the gradient times the clipping scale)
    adamw          m, v (unsigned)     m = b1·m + (1-b1)·g, v = b2·v + (1-b2)·g², u = (m / c1) / (sqrt(v / c2) + eps)
    lion           m                   u = sign(b1·m + (1-b1)·g), m = b2·m + (1-b2)·g
    sgd            m                   u = m = b1·m + g
    sgd_nesterov   m                   m = b1·m + g, u = b1·m + g
    apply          -                   u = g

and then p = p·(1 - lr·weight_decay) - lr·u. c1, c2: Adam's bias corrections 1 - b^step, with the tensor's own step.

How one launch serves many tensors: a table on the device holds every tensor's addresses and sizes, and a second one the
tensor of every CTA. There is one launch per combination of formats that occurs, whatever the number of tensors, and one
small launch that increments the steps and computes every tensor's factors. Hyperparameters are in device memory: when
they change, nothing recompiles or synchronizes, and the launches can be captured in a CUDA graph (`set_hyper` outside
of it).

The absmax of a new weight, which a tensorwise scale needs, costs no pass over the weights: the kernel has them in
registers (`Slot.amax`).
"""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from qtrain.kernels.numerics.philox import random_bits_ref
from qtrain.kernels.optim.state_formats import dequantize_state, quantize_state, round_to_bf16
from qtrain.kernels.optim.update_launch import Launches
from qtrain.kernels.optim.update_rules import (
    HYPER,
    MIX_M,
    MIX_V,
    SIGNED_STATES,
    UPDATE_ROLE,
    LowBitWeight,
    Slot,
    is_stochastic,
)

__all__ = ["SIGNED_STATES", "FusedUpdate", "Slot"]


class FusedUpdate:
    """A rule over a list of tensors: built once, then `step` is called with the gradients of each step.

    sr: bf16 weights without a master copy, and bf16 states, are rounded stochastically; low-bit weights and unsigned
    low-bit states always are. kernel: None takes the kernel on CUDA devices and the plain PyTorch definition elsewhere.
    """

    def __init__(
        self,
        rule: str,
        slots: Sequence[Slot],
        *,
        groups: int = 1,
        seed: int = 0,
        sr: bool = True,
        kernel: bool | None = None,
    ):
        assert slots and rule in SIGNED_STATES
        self.rule, self.slots, self.sr = rule, list(slots), sr
        device = slots[0].weight.device
        for slot in slots:
            for (format, _), signed in zip(slot.states, SIGNED_STATES[rule], strict=True):
                assert not format.block or format.signed == signed, f"{rule}: a state in {format.id}"
        # fp64, as torch's own optimizers compute their scalars: 1 - 0.999**step loses digits in fp32.
        self.hyper = torch.zeros(groups, len(HYPER), dtype=torch.float64, device=device)
        self._hyper_values: list[list[float | None]] = [[None] * len(HYPER) for _ in range(groups)]
        # One tensor of counters, of which every slot's step is a view: one launch increments all.
        steps = [torch.zeros(()) if slot.step is None else slot.step.float() for slot in slots]
        self.steps = torch.stack([s.cpu() for s in steps]).to(device)  # fp32 [tensors]; exact up to 2**24 steps
        for i, slot in enumerate(self.slots):
            slot.step = self.steps[i]
        # The step is written by each update, on the device: no copy from the host while a CUDA graph is captured.
        numbers = torch.tensor([slot.number for slot in slots], dtype=torch.int64)
        keys = torch.stack([torch.full_like(numbers, seed), torch.zeros_like(numbers), numbers], dim=1)
        self.keys = keys.to(device)  # int64 [tensors, 3]: seed, step, number
        use_kernel = device.type == "cuda" if kernel is None else kernel
        self._kernels = Launches(rule, self.slots, sr, self.hyper, self.steps, self.keys) if use_kernel else None

    def set_hyper(self, group: int, values: Mapping[str, float | Tensor]) -> None:
        """Set hyperparameters of a group by their names in HYPER; launches only for those that changed. Tensors are
        copied on the device."""
        for name, value in values.items():
            column = HYPER.index(name)
            if isinstance(value, Tensor):
                self.hyper[group, column].copy_(value)
                self._hyper_values[group][column] = None  # unknown on the host from now on
            elif value != self._hyper_values[group][column]:
                self.hyper[group, column].fill_(value)
                self._hyper_values[group][column] = value

    def prepare(self, grads: Sequence[Tensor | None]) -> None:
        """What `step` of this very sequence takes of the host, but for its launches."""
        if self._kernels is not None:
            self._kernels.prepare(grads)

    @torch.no_grad()
    def step(self, grads: Sequence[Tensor | None], grad_scale: Tensor | None = None) -> None:
        """One update. grads: of every tensor, None for one that is not updated. grad_scale: a scalar on the device that
        multiplies the gradients (clipping); not finite: there is no update, and no step is counted."""
        if self._kernels is not None:
            self._kernels.step(grads, grad_scale)
        else:
            _step_ref(self, grads, grad_scale)
        for slot, grad in zip(self.slots, grads, strict=True):
            if slot.amax is not None and grad is not None:
                slot.amax.record()

    @property
    def launches(self) -> int:
        """Kernel launches per step, besides those of `set_hyper`."""
        return self._kernels.count if self._kernels is not None else 0


# ---- definition ------------------------------------------------------------------------------------------------------


def _step_ref(update: FusedUpdate, grads: Sequence[Tensor | None], grad_scale: Tensor | None) -> None:
    """The rules in plain PyTorch, or torch's own fused AdamW where it applies; that scales gradients in place."""
    scale = 1.0 if grad_scale is None else float(grad_scale)
    if not math.isfinite(scale):
        return
    plain: dict[int, list[int]] = {}
    for i, (slot, grad) in enumerate(zip(update.slots, grads, strict=True)):
        if grad is None:
            continue
        if _torch_takes(update, slot, grad):  # one fused call for all, many times as fast on a CPU
            plain.setdefault(slot.group, []).append(i)
            continue
        update.steps[i] += 1
        update.keys[i, 1] = update.steps[i].to(torch.int64)  # as the factors' kernel does on a GPU
        lr, weight_decay, beta1, beta2, eps = update.hyper[slot.group].tolist()
        hyper = (lr, weight_decay, beta1, beta2, eps)
        _update_ref(update.rule, slot, grad, float(update.steps[i]), hyper, scale, update.keys[i], update.sr)
    for group, indices in plain.items():
        lr, weight_decay, beta1, beta2, eps = update.hyper[group].tolist()
        slots = [update.slots[i] for i in indices]
        torch._foreach_add_([slot.step for slot in slots], 1)
        torch._fused_adamw_(
            [slot.weight.detach() for slot in slots],
            [grad for i in indices if (grad := grads[i]) is not None],
            [slot.states[0][1]["value"] for slot in slots],
            [slot.states[1][1]["value"] for slot in slots],
            [],
            [slot.step for slot in slots],
            amsgrad=False,
            lr=lr,
            beta1=beta1,
            beta2=beta2,
            weight_decay=weight_decay,
            eps=eps,
            maximize=False,
            # torch divides the gradients by it, in place; found_inf must be given along with it.
            grad_scale=None if scale == 1 else update.steps.new_tensor(1 / scale),  # where the weights are
            found_inf=None if scale == 1 else update.steps.new_zeros(()),
        )
    for slot, grad in zip(update.slots, grads, strict=True):
        if slot.amax is not None and grad is not None and grad.numel():
            absmax = torch.linalg.vector_norm(slot.weight.detach(), ord=torch.inf).float()
            # In place: the weight's quantizer reads this memory.
            slot.amax.bits.copy_(absmax.view(torch.int32))


def _torch_takes(update: FusedUpdate, slot: Slot, grad: Tensor) -> bool:
    dtype = slot.weight.dtype
    return (
        update.rule == "adamw"
        and type(slot.weight) in (Tensor, torch.nn.Parameter)
        and slot.master is None
        and (dtype == torch.float32 or not update.sr)  # torch rounds bf16 to nearest
        and grad.dtype == dtype
        and all(not f.block and tensors["value"].dtype == dtype for f, tensors in slot.states)
    )


def _update_ref(
    rule: str, slot: Slot, grad: Tensor, step: float, hyper: tuple[float, ...], grad_scale: float, key: Tensor, sr: bool
) -> None:
    """One tensor's update by the definition."""
    lr, weight_decay, beta1, beta2, eps = hyper
    weight, shape = slot.weight, slot.weight.shape
    stored = isinstance(weight, LowBitWeight)
    p = weight.dequantize() if stored else (weight.detach() if slot.master is None else slot.master).float()
    g = grad.float() * grad_scale if grad_scale != 1 else grad.float()
    # fp32 from here on, as in the kernel's registers; each tensor is rounded once, when it is stored.
    states = [dequantize_state(tensors, format, shape) for format, tensors in slot.states]
    if rule == "adamw":
        m = states[0] * beta1 + g * (1 - beta1)
        v = states[1] * beta2 + g * g * (1 - beta2)
        states = [m, v]
        # torch's formula, eps outside of the root.
        u = (m / (1 - beta1**step)) / (v.sqrt() / (1 - beta2**step) ** 0.5 + eps)
    elif rule == "lion":
        u = (states[0] * beta1 + g * (1 - beta1)).sign()
        states = [states[0] * beta2 + g * (1 - beta2)]
    elif rule == "apply":
        u = g
    else:
        states = [states[0] * beta1 + g]
        u = states[0] if rule == "sgd" else states[0] * beta1 + g
    p = p * (1 - lr * weight_decay) - u * lr

    bits = _bits(slot, key) if _needs_bits(slot, sr) else None  # by multiplier
    # Not strict: a rule may have one state, or none.
    for (format, tensors), value, mix in zip(slot.states, states, (MIX_M, MIX_V), strict=False):
        drawn = bits[mix] if bits is not None and is_stochastic(format, sr) else None
        for name, tensor in quantize_state(value, format, drawn).items():
            tensors[name].copy_(tensor)
    if stored:
        weight.store_(p, key, UPDATE_ROLE)
        return
    if slot.master is not None:
        slot.master.copy_(p)
    if weight.dtype == torch.bfloat16:
        p = round_to_bf16(p, bits[1] if bits is not None and sr and slot.master is None else None)
    weight.detach().copy_(p)


def _bits(slot: Slot, key: Tensor) -> dict[int, Tensor]:
    """16 random bits per element, for the weight (1) and for each state by its multiplier; a shard's are those of its
    elements in the whole tensor."""
    size = slot.weight.shape.numel()
    end = slot.first_element + size
    # Whole draws from element 0 of the tensor on: four words of two halves per eight elements, as the kernel draws.
    rng_words = random_bits_ref((-(-end // 8), 4, 2), key, UPDATE_ROLE).long()
    rng_words = rng_words[..., 0] | rng_words[..., 1] << 16
    found = {}
    for mix in (1, MIX_M, MIX_V):
        mixed = rng_words * mix  # int64; the low 32 bits are those of the kernel's uint32 product
        halves = torch.stack([mixed & 0xFFFF, mixed >> 16 & 0xFFFF], dim=-1)
        found[mix] = halves.flatten()[slot.first_element : end].int().view(slot.weight.shape)
    return found


def _needs_bits(slot: Slot, sr: bool) -> bool:
    """Whether anything of a tensor is rounded stochastically here; a `LowBitWeight` rounds itself."""
    plain = not isinstance(slot.weight, LowBitWeight)
    weight = plain and sr and slot.weight.dtype == torch.bfloat16 and slot.master is None
    return weight or any(is_stochastic(format, sr) for format, _ in slot.states)
