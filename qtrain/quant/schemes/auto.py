"""`--quantize auto`: for each linear shape the fastest scheme on this device, measured before the run.

Low-bit products are not always faster: a small linear can spend more on quantizing its operands than the products save.
Each candidate is timed as it will train: forward and backward over a micro-batch's tokens, including the quantization
of input and gradient, and the weight's quantization divided by the micro-batches of a step. The user chooses the
`candidates`; all are assumed to learn equally well.
"""

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.quant.choices import find_linears
from qtrain.quant.grouped_linear import groups_of
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.scheme_map import SchemeMap
from qtrain.quant.swap import quantize_linears

Shape = tuple[int, int]
"""In-features and out-features."""

WARM_UP_SECONDS = 0.3
"""Work before the first timing: clocks and caches of an idle device would count against the first candidate."""

_QUEUE_CYCLES = 20_000_000
"""About 10 ms of GPU clocks: the device spins while the host enqueues, so that launch overhead is not measured."""


@SCHEMES.register("auto")
@dataclass(frozen=True)
class Auto(Scheme):
    """the fastest of several schemes for each linear shape, timed on this device when the run begins"""

    candidates: tuple[str, ...] = ("bf16", "int8", "fp8_tensorwise", "fp8_rowwise")
    chosen: dict[str, str] | None = None

    def schemes(self, others: Iterable[str] = ()) -> dict[str, Scheme]:
        """The candidates and `others`, by name. UserError for a scheme that changes more than speed."""
        flag = "--quantize_kwargs.candidates"
        if not self.candidates:
            raise UserError(f"{flag}: the list is empty; name at least one scheme.")
        made = {name: SCHEMES.make(name, {}, flag) for name in dict.fromkeys((*self.candidates, *others))}
        for name, scheme in made.items():
            low_bit = isinstance(scheme, LowBitScheme)
            if isinstance(scheme, Auto) or (low_bit and (scheme.latent or scheme.stored_format is not None)):
                raise UserError(f"{flag}: {name!r} cannot be chosen by speed: it changes what the model's weights are.")
        return made

    def chosen_before(self) -> dict[str, str]:
        """The schemes chosen by an earlier run, by shape ('896 -> 1152')."""
        return self.chosen or {}


def _text(shape: Shape) -> str:
    return f"{shape[0]} -> {shape[1]}"


def linear_shapes(
    model: nn.Module, leave: Callable[[str, nn.Module], bool] = lambda name, linear: False, min_size: int = 0
) -> dict[Shape, list[str]]:
    """The names of the linears of each shape, except those to `leave` and those with fewer than `min_size` in- or
    out-features. The experts of a mixture count as one linear of one expert's shape: they are timed as that, over all
    tokens."""
    shapes: dict[Shape, list[str]] = {}
    for linear, names in find_linears(model).items():
        shape = (linear.in_features, linear.out_features // groups_of(linear))
        if min(shape) >= min_size and not leave(names[0], linear):
            shapes.setdefault(shape, []).append(names[0])
    return shapes


def scheme_per_shape(scheme: Auto, shapes: Mapping[Shape, Sequence[str]], chosen: Mapping[str, str]) -> SchemeMap:
    """`auto` resolved: a rule for each linear of `shapes`. chosen: by shape, as `choose_per_shape` returns it."""
    made = scheme.schemes(chosen.values())
    rules = tuple((name, made[chosen[_text(shape)]]) for shape, names in shapes.items() for name in names)
    return SchemeMap(scheme, rules, "the fastest in high precision")


def choose_per_shape(
    scheme: Auto,
    shapes: Mapping[Shape, Sequence[str]],
    *,
    tokens: int,
    accumulation: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[dict[str, str], list[str]]:
    """The fastest candidate for each shape, for `chosen`, and the lines of a table; shapes in `scheme.chosen` are not
    timed again.

    tokens: per micro-batch. accumulation: micro-batches per step, which share one quantization of the weight.
    """
    before = scheme.chosen_before()
    schemes = scheme.schemes(before.values())
    taken: dict[str, str] = {}
    names = list(dict.fromkeys(scheme.candidates))
    width = max(len(_text(shape)) for shape in shapes) if shapes else 0
    lines = [f"auto    ms of forward and backward, {tokens:,} tokens: {', '.join(names)}"]
    why: dict[str, str] = {}
    if any(_text(shape) not in before for shape in shapes):
        warm_up(dtype, device)
    for shape, linears in shapes.items():
        text = _text(shape)
        if text in before:
            taken[text] = before[text]  # a resumed run: timings differ from run to run, its schemes may not
            shown = "chosen earlier"
        else:
            times: dict[str, float] = {}
            for name in names:
                candidate = schemes[name]
                refusal = candidate.refusal(*shape, device) if isinstance(candidate, LowBitScheme) else None
                if refusal is None:
                    times[name] = 1e3 * time_linear(candidate, shape, tokens, accumulation, dtype, device)
                else:
                    why[name] = refusal
            if not times:
                raise UserError(f"--quantize_kwargs.candidates: none can run a linear {text}; add 'bf16'.")
            taken[text] = min(times, key=times.__getitem__)
            shown = "  ".join(f"{times[name]:8.3f}" if name in times else f"{'-':>8}" for name in names)
        lines.append(f"        {len(linears):4d} x {text:{width}}  {shown}  {taken[text]}")
    lines += [f"        {name}: {reason}" for name, reason in why.items()]
    return taken, lines


def warm_up(dtype: torch.dtype, device: torch.device) -> None:
    """Multiply matrices for WARM_UP_SECONDS."""
    size = 4096 if device.type == "cuda" else 256
    x, end = torch.ones(size, size, dtype=dtype, device=device), time.perf_counter() + WARM_UP_SECONDS
    while time.perf_counter() < end:
        x @ x
        if device.type == "cuda":
            torch.cuda.synchronize()


def time_linear(
    scheme: Scheme, shape: Shape, tokens: int, accumulation: int, dtype: torch.dtype, device: torch.device
) -> float:
    """Seconds of forward and backward of one linear in `scheme`, plus its share of quantizing the weight."""
    in_features, out_features = shape
    generator = torch.Generator(device).manual_seed(0)
    like = {"dtype": dtype, "device": device, "generator": generator}
    linear = nn.Linear(in_features, out_features, bias=False, dtype=dtype, device="meta")
    model: Any = nn.Sequential(linear)  # whose only linear is swapped
    # Declared on meta and filled on the device: no initialization by the host.
    model.to_empty(device=device)
    with torch.no_grad():
        # Not zeros: power draw, and so clocks, depend on the data.
        model[0].weight.normal_(0.0, 0.02, generator=generator)
    quantized = quantize_linears(model, scheme, seed=0)
    x = torch.randn(tokens, in_features, **like).requires_grad_()
    dy = torch.randn(tokens, out_features, **like)

    def train() -> None:
        # Not backward(): adding to `.grad` would be one more pass over the weight.
        torch.autograd.grad(model(x), (x, model[0].weight), dy)

    seconds = _seconds(train, device)
    # A step's micro-batches share one quantization of the weight.
    return seconds + _seconds(quantized.refresh, device) / accumulation if quantized.linears else seconds


def _seconds(work: Callable[[], None], device: torch.device) -> float:
    """Median seconds of a call, after a first one that may compile and autotune."""
    work()
    if device.type != "cuda":
        return statistics.median(_elapsed(work) for _ in range(3))
    runs = [_device_seconds(work, 3) for _ in range(6)]  # the first one warms up caches and clocks
    return statistics.median(runs[1:])


def _elapsed(work: Callable[[], None]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def _device_seconds(work: Callable[[], None], calls: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(_QUEUE_CYCLES)
    start.record()
    for _ in range(calls):
        work()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e-3 / calls
