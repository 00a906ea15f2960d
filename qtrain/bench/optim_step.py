"""Optimizer steps over a model's parameter shapes: time, bytes, launches and states, against other libraries'.

python -m qtrain.bench.optim_step --model qwen2.5-1.5b
python -m qtrain.bench.optim_step --model quickstart --device cpu --names adamw torch.AdamW

The bytes of a step are the weight, its gradient and its states, each read once and, except the gradient, written once.
Bytes / time relative to the copy bandwidth tells how close a step is to the memory bound. Names are those of --optim;
`torch.AdamW` is torch's fused implementation. Names whose library is not installed have a footnote instead of figures.
"""

import sys
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import torch
from torch import Tensor, nn

from qtrain.bench.tables import Cell, Table, write_asked
from qtrain.bench.timing import copy_bandwidth, measure, watching_clocks
from qtrain.core.checks import Range
from qtrain.core.config import JsonDict, parse
from qtrain.core.errors import UserError
from qtrain.core.process import run_script
from qtrain.kernels.optim import update_launch
from qtrain.models import read_model_source
from qtrain.models.build import empty_decoder
from qtrain.optim import OPTIMIZERS, Optimizer, parameter_groups
from qtrain.train.settings.machine import choose_device

OURS = ("adamw", "adamw_bf16_sr", "adamw_8bit", "adamw_fp8", "adamw_4bit")
PEERS = ("torch.AdamW", "bnb.AdamW8bit", "torchao.AdamW8bit", "torchao.AdamW4bit", "torchao.AdamWFp8")
COLUMNS = ("ms", "of the copy bandwidth", "launches", "state bytes per parameter", "bytes per parameter")


@dataclass(frozen=True)
class StepSettings:
    """Time optimizer steps over a model's parameters."""

    model: str = "qwen2.5-1.5b"
    """Model whose parameter shapes are used, as for llm_pretrain.py."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    dtype: Literal["bf16", "fp32"] = "bf16"
    """Dtype of weights and gradients."""
    names: tuple[str, ...] = (*OURS, *PEERS)
    """Optimizers, as for --optim."""
    kwargs: JsonDict = None
    """Options of qtrain's optimizers as JSON."""
    json: str | None = None
    """File for the figures."""
    tile: Annotated[int, Range(256)] = update_launch.TILE
    """Elements of a kernel tile; for tuning."""
    loops: Annotated[int, Range(1)] = update_launch.LOOPS
    """Tiles per program; for tuning."""
    thread: Annotated[int, Range(1)] = update_launch.ELEMENTS_A_THREAD
    """Elements per thread; for tuning."""


def stand_in(model: str, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """The model on `device` with small random weights and gradients."""
    module = empty_decoder(read_model_source(model)).to(dtype).to_empty(device=device)
    module.tie()
    generator = torch.Generator(device).manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.normal_(0, 0.02, generator=generator)
            # Not zeros: the power drawn depends on the bits.
            p.grad = torch.empty_like(p).normal_(0, 1e-3, generator=generator)
    return module


def optimizer_state_bytes(optimizer: Optimizer) -> int:
    """Bytes of all states, inner tensors of tensor subclasses included."""
    inner = [t for state in optimizer.state.values() for v in state.values() for t in _plain(v)]
    return sum(t.numel() * t.element_size() for t in inner)


def _plain(value: object) -> list[Tensor]:
    if hasattr(value, "__tensor_flatten__"):
        return [t for name in value.__tensor_flatten__()[0] for t in _plain(getattr(value, name))]
    return [value] if isinstance(value, Tensor) else []


def time_step(
    name: str, options: dict[str, Any], module: nn.Module, device: torch.device, copy: float
) -> dict[str, Cell]:
    """The cells of one optimizer over the module's parameters. copy: copy bandwidth, TB/s."""
    if name == "torch.AdamW":
        options = {"fused": True, **options}  # torch's fastest: one kernel for many tensors
    spec = OPTIMIZERS.make(name, options, "--names")
    optimizer = spec.build(parameter_groups(module, 0.1), 1e-5, seed=0)
    optimizer.step()  # allocates the states
    # Parameters, gradients and states of a model are larger than the cache: nothing has to be rotated.
    ms = measure(lambda: optimizer.step(), (), device, budget_ms=400.0).ms
    parameters = list(module.parameters())
    count = sum(p.numel() for p in parameters)
    states = optimizer_state_bytes(optimizer)
    # weight read and written, gradient read, states read and written
    elements = sum(p.numel() * (2 * p.element_size() + p.grad.element_size()) for p in parameters if p.grad is not None)
    moved = elements + 2 * states
    share = moved / ms / 1e9 / copy
    cells = [Cell(ms, text=f"{ms:.2f}"), Cell(share, text=f"{100 * share:.0f}%")]
    cells.append(Cell(float(_launches(optimizer))) if device.type == "cuda" else Cell())
    cells += [Cell(states / count, text=f"{states / count:.3f}"), Cell(moved / count, text=f"{moved / count:.2f}")]
    return dict(zip(COLUMNS, cells, strict=True))


def _launches(optimizer: Optimizer) -> int:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as recorded:
        optimizer.step()
        torch.cuda.synchronize()
    return sum(e.count for e in recorded.key_averages() if e.device_type == torch.autograd.DeviceType.CUDA)


def main(argv: list[str]) -> None:
    settings = parse(StepSettings, argv, "-m qtrain.bench.optim_step")
    # Tuning: constants of the fused update's launcher.
    update_launch.TILE, update_launch.LOOPS = settings.tile, settings.loops
    update_launch.ELEMENTS_A_THREAD = settings.thread
    device = choose_device(settings.device)
    module = stand_in(settings.model, {"bf16": torch.bfloat16, "fp32": torch.float32}[settings.dtype], device)
    copy = copy_bandwidth(device)
    note = f"Copy bandwidth {copy:.2f} TB/s."
    table = Table(f"Optimizer steps over {settings.model}", f"{settings.dtype} weights", COLUMNS, [note])
    with watching_clocks(device) as clocks:
        for name in settings.names:
            options = (settings.kwargs or {}) if name in OURS else {}
            try:
                cells = time_step(name, options, module, device, copy)
            except UserError as error:  # a library that is not installed
                cells = {COLUMNS[0]: Cell(reason=str(error))}
            for column, cell in cells.items():
                table.put(name, column, cell)
            first = cells[COLUMNS[0]]
            print(f"{name}: {first.reason or first.shown() + ' ms'}", file=sys.stderr, flush=True)
            if device.type == "cuda":
                torch.cuda.empty_cache()
    print(table.markdown(), clocks.line(), sep="\n\n")
    write_asked([table], settings, device, clocks.record())


if __name__ == "__main__":
    run_script(main)
