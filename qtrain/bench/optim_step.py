"""Optimizer steps over a model's real parameter shapes: time, bytes, launches, states; beside other libraries'.

python -m qtrain.bench.optim_step --model qwen2.5-1.5b
python -m qtrain.bench.optim_step --model quickstart --device cpu --names adamw torch.AdamW

The bytes of a step are the weight, its gradient and its states, each read and, but for the gradient, written once;
their share of the copy bandwidth is how near a step is to the floor. Names are those of --optim; `torch.AdamW` stands
for torch's own, fused. A name whose library is not installed is left out, and said so.
"""

import json
import sys
from dataclasses import asdict, dataclass
from typing import Annotated, Literal

import torch
import tyro
from torch import Tensor, nn

from qtrain.bench.timing import copy_bandwidth, measure, watching_clocks
from qtrain.checks import Range
from qtrain.errors import UserError
from qtrain.kernels.optim import update_launch
from qtrain.models import empty_model, read_model_source
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.train.settings import choose_device

OURS = ("adamw", "adamw_bf16_sr", "adamw_8bit", "adamw_fp8", "adamw_4bit")
PEERS = ("torch.AdamW", "bnb.AdamW8bit", "torchao.AdamW8bit", "torchao.AdamW4bit", "torchao.AdamWFp8")


@dataclass(frozen=True)
class StepSettings:
    """Time optimizer steps."""

    model: str = "qwen2.5-1.5b"
    """Model whose parameters' shapes are taken, as for llm_pretrain.py."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Where."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Of weights and gradients."""
    names: tuple[str, ...] = (*OURS, *PEERS)
    """Optimizers, as for --optim."""
    kwargs: str = "{}"
    """Their options as JSON, the same for all."""
    json: str | None = None
    """File to append a line a result to."""
    tile: Annotated[int, Range(256)] = update_launch.TILE
    """Elements of a kernel's tile; for tuning."""
    loops: Annotated[int, Range(1)] = update_launch.LOOPS
    """Tiles a program works on; for tuning."""
    thread: Annotated[int, Range(1)] = update_launch.ELEMENTS_A_THREAD
    """Elements a thread works on; for tuning."""


@dataclass(frozen=True)
class StepResult:
    """ms: median of a step; share: of the copy bandwidth; launches: kernels a step, None where not counted;
    state_bytes: a parameter; moved: bytes a parameter."""

    name: str
    parameters: int
    ms: float
    share: float
    launches: int | None
    state_bytes: float
    moved: float


def stand_in(model: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model on `device` with small random weights, and gradients."""
    module = empty_model(read_model_source(model)).to(dtype).to_empty(device=device)
    module.tie()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.02, generator=generator)
            p.grad = torch.empty_like(p).normal_(0, 1e-3, generator=generator)
    return module


def state_size(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of all states, codes and scales of tensor subclasses included."""
    inner = [t for state in optimizer.state.values() for v in state.values() for t in _plain(v)]
    return sum(t.numel() * t.element_size() for t in inner)


def _plain(value: object) -> list[Tensor]:
    if hasattr(value, "__tensor_flatten__"):
        return [t for name in value.__tensor_flatten__()[0] for t in _plain(getattr(value, name))]
    return [value] if isinstance(value, Tensor) else []


def time_step(name: str, options: dict, module: nn.Module, device: torch.device, copy: float) -> StepResult:
    """One optimizer over the module's parameters; its states are freed afterwards."""
    if name == "torch.AdamW":
        options = {"fused": True, **options}
    spec = OPTIMIZERS.make(name, options, "--names")
    optimizer = spec.build(parameter_groups(module, 0.1), 1e-5, seed=0)
    optimizer.step()
    ms = measure(lambda: optimizer.step(), (), device, budget_ms=400.0).ms
    parameters = list(module.parameters())
    count = sum(p.numel() for p in parameters)
    states = state_size(optimizer)
    moved = sum(p.numel() * (2 * p.element_size() + p.grad.element_size()) for p in parameters) + 2 * states
    launches = _launches(optimizer) if device.type == "cuda" else None
    return StepResult(name, count, ms, moved / ms / 1e9 / copy, launches, states / count, moved / count)


def _launches(optimizer: torch.optim.Optimizer) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        optimizer.step()
        torch.cuda.synchronize()
    return sum(e.count for e in recorded.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)


def main(argv: list[str]) -> None:
    settings = tyro.cli(StepSettings, args=argv)
    update_launch.TILE, update_launch.LOOPS = settings.tile, settings.loops
    update_launch.ELEMENTS_A_THREAD = settings.thread
    device = choose_device(settings.device)
    dtype = torch.bfloat16 if settings.dtype == "bf16" else torch.float32
    options, copy = json.loads(settings.kwargs), copy_bandwidth(device)
    module = stand_in(settings.model, dtype, device)
    print(f"{settings.model}, {settings.dtype}, copy bandwidth {copy:.2f} TB/s")
    print("| | ms | of the copy bandwidth | launches | state bytes a parameter | bytes a parameter |")
    print("|---|---|---|---|---|---|")
    with watching_clocks(device) as clocks:
        for name in settings.names:
            try:
                found = time_step(name, options if name in OURS else {}, module, device, copy)
            except UserError as error:
                print(f"{name}: {error}", file=sys.stderr)
                continue
            print(
                f"| {name} | {found.ms:.2f} | {100 * found.share:.0f}% | {found.launches or ''} | "
                f"{found.state_bytes:.3f} | {found.moved:.2f} |",
                flush=True,
            )
            if settings.json:
                with open(settings.json, "a", encoding="utf-8") as file:
                    file.write(json.dumps({"model": settings.model, "dtype": settings.dtype, **asdict(found)}) + "\n")
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(clocks.line())


if __name__ == "__main__":
    main(sys.argv[1:])
