"""What a run will be, before anything is allocated: sizes, memory by kind, and the shortest time physics allows."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qtrain.config import as_dict
from qtrain.hardware import Hardware
from qtrain.kernels.autotune import forced
from qtrain.models import ModelConfig
from qtrain.models.cost import (
    MemoryEstimate,
    all_of,
    count_parameters,
    estimate_memory,
    flops_per_token,
)
from qtrain.models.trained_cost import TrainedPart
from qtrain.optim import OptimizerSpec, ParameterShape
from qtrain.quant import LowBitScheme, Scheme
from qtrain.train.log.status import duration, short_number
from qtrain.train.plan.units import TOKENS, Unit
from qtrain.train.settings import BatchGeometry, LanguageSettings, TrainSettings

GIB = 1024**3


@dataclass(frozen=True)
class Plan:
    """The plan of a run.

    parameters: None for a model that only transformers knows (--model_impl hf); flops, seconds and memory are empty
    then. flops: per token, forward and backward, by kind of work; seconds: the shortest time per token by kind, each
    kind at the dense peak of the arithmetic that it runs in; memory: bytes at the peak, by kind; emulated: arithmetic
    of the scheme that the device has not; unit: tokens, or what stands for them everywhere here.
    """

    model: str
    scheme: str
    geometry: BatchGeometry
    n_steps: int
    tokens_per_step: int
    hardware: Hardware
    data: tuple[str, ...]
    parameters: int | None = None
    flops: dict[str, float] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    emulated: tuple[str, ...] = ()
    unit: Unit = TOKENS

    def efficiency(self, tok_s: float) -> dict[str, float | None]:
        """`sol`: share of the speed of light; `mfu`: share of the dense bf16 peak. None where the work is unknown."""
        if not self.flops:
            return {"sol": None, "mfu": None}
        per_device = tok_s / self.geometry.world
        peak = self.hardware.peak("bf16") * 1e12
        return {"sol": per_device * sum(self.seconds.values()), "mfu": per_device * sum(self.flops.values()) / peak}

    def settings_in_force(self, settings: TrainSettings) -> dict[str, Any]:
        """The settings with the batch geometry worked out."""
        micro, accumulation = self.geometry.micro_batch_size, self.geometry.gradient_accumulation
        return {**as_dict(settings), "micro_batch_size": micro, "gradient_accumulation": accumulation}

    def lines(self) -> list[str]:
        """The plan as text."""
        g, tokens = self.geometry, self.n_steps * self.tokens_per_step
        sequences = g.micro_batch_size * g.gradient_accumulation * g.world
        unit, total = self.unit, f", {self.tokens_per_step:,} tokens" if self.unit is TOKENS else ""
        count = f"{_billions(self.parameters)} parameters, " if self.parameters else ""
        rows = [("model", f"{self.model}, {count}linears in {self.scheme}")]
        rows += [("data", line) for line in self.data]
        rows += [
            (
                "batch",
                f"{sequences:,} {unit.batch} ({g.micro_batch_size} x {g.gradient_accumulation} accumulated x {g.world} "
                f"device{'s' * (g.world > 1)}){total}",
            ),
            ("steps", f"{self.n_steps:,}, {short_number(tokens)} {unit.many}"),
            ("device", f"{self.hardware.name}, {self._peaks()}"),
        ]
        if self.emulated:
            rows.append(
                ("", f"no {' or '.join(self.emulated)} arithmetic: emulated, for its results and not its speed")
            )
        rows += self._memory_rows() + self._time_rows(tokens)
        return [f"{name:8}{text}" for name, text in rows]

    def _peaks(self) -> str:
        rates = ", ".join(f"{name} {rate:.3g}" for name, rate in self.hardware.peaks.items() if name != "bandwidth")
        return f"{'measured' if self.hardware.measured else 'datasheet'} TFLOP/s: {rates}"

    def _memory_rows(self) -> list[tuple[str, str]]:
        if not self.memory:
            return []
        kinds = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in self.memory.items())
        total, have = sum(self.memory.values()), self.hardware.memory_bytes
        rows = [("memory", f"{total / GIB:.2f}{f' of {have / GIB:.1f}' if have else ''} GiB: {kinds}")]
        if have and total > have:
            rows.append(("", "this does not fit: lower --micro_batch_size, or use --activation_checkpointing full"))
        return rows

    def _time_rows(self, tokens: int) -> list[tuple[str, str]]:
        if not self.flops:
            return []
        fastest = self.geometry.world / sum(self.seconds.values())
        shares = ", ".join(f"{kind} {100 * s / sum(self.seconds.values()):.0f}%" for kind, s in self.seconds.items())
        return [
            ("compute", f"{short_number(sum(self.flops.values()))}FLOP {self.unit.one}; of the shortest time {shares}"),
            (
                "time",
                f"{duration(tokens / fastest)} at the speed of light ({short_number(fastest)} {self.unit.per_second}); "
                f"{duration(2 * tokens / fastest)} at half of it",
            ),
        ]


def _billions(number: int) -> str:
    """Parameters are counted in billions (B), not giga."""
    return short_number(number).replace("G", "B")


def make_plan(
    settings: LanguageSettings,
    model_config: ModelConfig | None,
    scheme: Scheme,
    optimizer: OptimizerSpec,
    geometry: BatchGeometry,
    hardware: Hardware,
    dtype: torch.dtype,
    data: tuple[str, ...],
    trained: TrainedPart | None = None,
) -> Plan:
    """The plan of a language model's run; model_config is None for an architecture that has no native decoder.
    trained: what trains, where not everything does."""
    forced()  # a QTRAIN_IMPL that names nothing is refused before anything is written
    shared = {
        "model": settings.model,
        "scheme": getattr(scheme, "name", "") or settings.quantize,
        "geometry": geometry,
        "n_steps": settings.n_steps,
        "tokens_per_step": settings.batch_size * settings.seq_len,
        "hardware": hardware,
        "data": data,
        "emulated": emulated_arithmetics(scheme, hardware),
    }
    if model_config is None:
        return Plan(**shared)
    if isinstance(scheme, LowBitScheme) and scheme.sub_norm:
        model_config = model_config.with_sub_norms("--quantize")
    found = flops_per_token(model_config, settings.seq_len)
    flops = {"blocks": found.blocks, "head": found.head, "attention": found.attention}
    flops = flops if trained is None else trained.flops(flops, model_config.num_hidden_layers)
    frozen = trained is not None and bool(trained.adapters)
    return Plan(
        **shared,
        parameters=count_parameters(model_config).total,
        flops=flops,
        seconds=shortest_seconds(flops, scheme, settings.quantize_lm_head, hardware, dtype, frozen),
        memory=_memory(settings, model_config, scheme, optimizer, geometry, dtype, trained).at_peak,
    )


def emulated_arithmetics(scheme: Scheme, hardware: Hardware) -> tuple[str, ...]:
    """The arithmetics of a scheme's GEMMs that the device has not."""
    arithmetics = {name for _, part in scheme.parts() for name in part.gemm_dtypes().values()} - {"bf16"}
    return tuple(sorted(name for name in arithmetics if hardware.emulates(name)))


def shortest_seconds(
    flops: Mapping[str, float],
    scheme: Scheme,
    quantized_head: bool,
    hardware: Hardware,
    dtype: torch.dtype,
    frozen: bool = False,
) -> dict[str, float]:
    """Seconds per token at dense peaks, by kind of work: `blocks` run in the scheme's arithmetic, `head` too where it
    is quantized, and all else, like a GEMM that a scheme leaves alone, in the weights' dtype. frozen: linears have no
    grad_weight, nor has `flops` its work."""
    plain = "bf16" if dtype == torch.bfloat16 else "fp32"

    def seconds(work: float, arithmetics: list[str]) -> float:
        rates = [hardware.peak(plain if name == "bf16" else name) * 1e12 for name in arithmetics]
        return sum(work / len(rates) / rate for rate in rates)

    left_out = ("grad_weight",) if frozen else ()
    gemms = [
        (share, [d for gemm, d in part.gemm_dtypes().items() if gemm not in left_out]) for share, part in scheme.parts()
    ]
    quantized = {"blocks", "head"} if quantized_head else {"blocks"}
    return {
        kind: sum(seconds(share * work, names) for share, names in (gemms if kind in quantized else [(1.0, [plain])]))
        for kind, work in flops.items()
    }


def _memory(
    settings: LanguageSettings,
    model_config: ModelConfig,
    scheme: Scheme,
    optimizer: OptimizerSpec,
    geometry: BatchGeometry,
    dtype: torch.dtype,
    trained: TrainedPart | None,
) -> MemoryEstimate:
    element, low_bit = dtype.itemsize, [(s, part) for s, part in scheme.parts() if isinstance(part, LowBitScheme)]
    kept = sum(share * part.kept_input_bytes(element) for share, part in low_bit)
    kept += element * (1 - sum(share for share, _ in low_bit))
    remade = sum(share for share, part in low_bit if part.whole_rows("x") and part.whole_rows("dy"))
    if model_config.mlp_bias or model_config.sub_norm:  # no gated MLP in one function
        remade = 0.0
    if trained is not None and trained.adapters:
        kept, remade = element, 0.0  # a frozen linear keeps nothing, and its adapters the input itself
    trained = trained or all_of(model_config, element)
    shapes = [ParameterShape(*found) for found in trained.shapes]
    return estimate_memory(
        model_config,
        micro_batch_size=geometry.micro_batch_size,
        seq_len=settings.seq_len,
        element=element,
        optimizer_bytes=optimizer.total_state_bytes(shapes, trained.element) / count_parameters(model_config).total,
        checkpointing=settings.activation_checkpointing,
        compiled=settings.compile,
        loss_chunks=settings.loss_chunks,
        accumulates=geometry.gradient_accumulation > 1,
        in_backward=settings.optimizer_in_backward,
        code_bytes=sum(share * part.code_bytes() for share, part in low_bit),
        linear_input=None if kept == element else kept,  # the input itself is no other tensor than a plain linear keeps
        linear_weight=element + sum(share * (part.weight_bytes(element) - element) for share, part in low_bit),
        remade=remade,
        dequantized=any(part.stored_format and "bf16" in part.gemm_dtypes().values() for _, part in low_bit),
        trained=trained,
    )
