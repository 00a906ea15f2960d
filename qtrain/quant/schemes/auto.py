"""`--quantize auto`: for each linear shape the fastest scheme on this device, measured before the run.

Low-bit products are not always faster: a small linear can spend more on quantizing its operands than the products save.
Each candidate is timed as it will train: forward and backward over a micro-batch's tokens, including the quantization
of input and gradient, and the weight's quantization divided by the micro-batches of a step. The user chooses the
`candidates`; all are assumed to learn equally well.
"""

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.quant.grouped_linear import groups_of
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.swap import find_linears, quantize_linears
from qtrain.quant.tensor_roles import Gemm

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

    def gemm_dtypes(self) -> dict[Gemm, str]:
        raise AssertionError("choose_per_shape resolves auto first")

    def parts(self) -> list[tuple[float, Scheme]]:
        raise AssertionError("choose_per_shape resolves auto first")

    def schemes(self) -> dict[str, Scheme]:
        """The candidates, by name. UserError for a scheme that changes more than speed."""
        flag = "--quantize_kwargs.candidates"
        if not self.candidates:
            raise UserError(f"{flag}: the list is empty; name at least one scheme.")
        made = {
            name: SCHEMES.make(name, {}, flag) for name in dict.fromkeys((*self.candidates, *self.former().values()))
        }
        for name, scheme in made.items():
            low_bit = isinstance(scheme, LowBitScheme)
            if isinstance(scheme, Auto) or (low_bit and (scheme.latent or scheme.stored_format is not None)):
                raise UserError(f"{flag}: {name!r} cannot be chosen by speed: it changes what the model's weights are.")
        return made

    def former(self) -> dict[str, str]:
        """The schemes chosen by an earlier run, by shape ('896 -> 1152')."""
        return self.chosen or {}


@dataclass(frozen=True)
class PerShape(Scheme):
    """`auto` resolved: a scheme for each linear shape."""

    taken: dict[Shape, str]
    schemes: dict[str, Scheme]
    counts: dict[Shape, int]

    def gemm_dtypes(self) -> dict[Gemm, str]:
        largest = max(self.taken, key=lambda shape: shape[0] * shape[1] * self.counts[shape])
        return self.for_linear(*largest).gemm_dtypes()

    def parts(self) -> list[tuple[float, Scheme]]:
        weights = {shape: shape[0] * shape[1] * count for shape, count in self.counts.items()}
        total = sum(weights.values())
        return [(weights[shape] / total, self.for_linear(*shape)) for shape in self.taken]

    def for_linear(self, in_features: int, out_features: int, *, head: bool = False) -> Scheme:
        return self.schemes[self.taken[in_features, out_features]].for_linear(in_features, out_features, head=head)

    def as_json(self) -> dict[str, str]:
        """For `chosen`, so that a resumed run takes the same schemes."""
        return {_text(shape): name for shape, name in self.taken.items()}


def _text(shape: Shape) -> str:
    return f"{shape[0]} -> {shape[1]}"


def linear_shapes(model: nn.Module, leave: nn.Module | None = None, min_size: int = 0) -> dict[Shape, int]:
    """The number of linears of each shape, except `leave` and those with fewer than `min_size` in- or out-features. The
    experts of a mixture count as one linear of one expert's shape: they are timed as that, over all tokens."""
    counts: dict[Shape, int] = {}
    for linear in find_linears(model):
        shape = (linear.in_features, linear.out_features // groups_of(linear))
        if linear is not leave and min(shape) >= min_size:
            counts[shape] = counts.get(shape, 0) + 1
    return counts


def choose_per_shape(
    scheme: Auto,
    counts: Mapping[Shape, int],
    *,
    tokens: int,
    accumulation: int,
    dtype: torch.dtype,
    device: torch.device,
) -> tuple[PerShape, list[str]]:
    """The fastest candidate for each shape, and the lines of a table; shapes in `scheme.chosen` are not timed again.

    tokens: per micro-batch. accumulation: micro-batches per step, which share one quantization of the weight.
    """
    schemes, former = scheme.schemes(), scheme.former()
    taken: dict[Shape, str] = {}
    names = list(dict.fromkeys(scheme.candidates))
    width = max(len(_text(shape)) for shape in counts) if counts else 0
    lines = [f"auto    ms of forward and backward, {tokens:,} tokens: {', '.join(names)}"]
    why: dict[str, str] = {}
    if any(_text(shape) not in former for shape in counts):
        warm_up(dtype, device)
    for shape, count in counts.items():
        if _text(shape) in former:
            taken[shape] = former[_text(shape)]  # a resumed run: timings differ from run to run, its schemes may not
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
                raise UserError(f"--quantize_kwargs.candidates: none can run a linear {_text(shape)}; add 'bf16'.")
            taken[shape] = min(times, key=times.__getitem__)
            shown = "  ".join(f"{times[name]:8.3f}" if name in times else f"{'-':>8}" for name in names)
        lines.append(f"        {count:4d} x {_text(shape):{width}}  {shown}  {taken[shape]}")
    lines += [f"        {name}: {reason}" for name, reason in why.items()]
    return PerShape(taken, schemes, dict(counts)), lines


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
    model = nn.Sequential(nn.Linear(in_features, out_features, bias=False, dtype=dtype, device="meta"))
    # Declared on meta and filled on the device: no initialization by the host.
    model.to_empty(device=device)
    with torch.no_grad():
        # Not zeros: power draw, and so clocks, depend on the data.
        model[0].weight.normal_(0.0, 0.02, generator=generator)
    quantized = quantize_linears(model, scheme, seed=0)
    x = torch.randn(tokens, in_features, **like).requires_grad_()
    dy = torch.randn(tokens, out_features, **like)

    def train() -> None:
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
