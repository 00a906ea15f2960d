"""The plan of a vision model's run: what `plan.py` says of language models, in images."""

import torch
from torch import nn

from qtrain.hardware import Hardware
from qtrain.kernels.autotune import forced
from qtrain.models.vision_cost import VisionCost
from qtrain.optim import OptimizerSpec, ParameterShape, parameter_groups
from qtrain.quant import LowBitScheme, Scheme, linear_shapes
from qtrain.train.in_backward import model_parts
from qtrain.train.plan.plan import Plan, emulated_arithmetics, shortest_seconds
from qtrain.train.plan.units import IMAGES
from qtrain.train.settings import BatchGeometry, TrainSettings


def make_vision_plan(
    settings: TrainSettings,
    model: nn.Module,
    head: nn.Module | None,
    cost: VisionCost | None,
    scheme: Scheme,
    optimizer: OptimizerSpec,
    geometry: BatchGeometry,
    hardware: Hardware,
    dtype: torch.dtype,
    data: tuple[str, ...],
    *,
    blocks: int,
    ema: bool,
) -> Plan:
    """The plan; model: on the meta device, blocks: how many it repeats."""
    forced()  # a QTRAIN_IMPL that names nothing is refused before anything is written
    shared = {
        "model": settings.model,
        "scheme": settings.quantize,
        "geometry": geometry,
        "n_steps": settings.n_steps,
        "tokens_per_step": settings.batch_size,
        "hardware": hardware,
        "data": data,
        "unit": IMAGES,
        "emulated": emulated_arithmetics(scheme, hardware),
        "parameters": sum(p.numel() for p in model.parameters()),
    }
    if cost is None:
        return Plan(**shared)
    quantized_head = settings.quantize_lm_head
    memory = _memory(settings, model, head, cost, scheme, optimizer, geometry, dtype, blocks)
    if ema:
        memory["average"] = 4 * shared["parameters"]
    return Plan(
        **shared,
        flops=cost.flops,
        seconds=shortest_seconds(cost.flops, scheme, quantized_head, hardware, dtype),
        memory=memory,
    )


def _memory(
    settings: TrainSettings,
    model: nn.Module,
    head: nn.Module | None,
    cost: VisionCost,
    scheme: Scheme,
    optimizer: OptimizerSpec,
    geometry: BatchGeometry,
    dtype: torch.dtype,
    blocks: int,
) -> dict[str, int]:
    """Bytes by kind. Activations are an upper bound for a compiled model, which keeps some results only once."""
    element, parameters = dtype.itemsize, sum(p.numel() for p in model.parameters())
    shapes = [
        ParameterShape(tuple(p.shape), 1, group["hidden"], group["parts"])
        for group in parameter_groups(model, 0.0)
        for p in group["params"]
    ]
    left = None if settings.quantize_lm_head else head
    in_linears = sum(k * n * count for (k, n), count in linear_shapes(model, left, settings.quantize_min_size).items())
    low_bit = [(share, part) for share, part in scheme.parts() if isinstance(part, LowBitScheme)]
    kept = cost.kept * element / next(model.parameters()).element_size()
    inputs = cost.linear_inputs * element / next(model.parameters()).element_size()
    kept += sum(share * inputs * (part.kept_input_bytes(element) / element - 1) for share, part in low_bit)
    if settings.activation_checkpointing == "full" and blocks:
        tokens = cost.rows * max((k for k, _ in linear_shapes(model, left, 0)), default=0)
        kept = kept / blocks + blocks * tokens * element
    weights = element * parameters + sum(s * in_linears * (part.weight_bytes(element) - element) for s, part in low_bit)
    gradients = parameters
    if settings.optimizer_in_backward:
        gradients = max(sum(p.numel() for p in part) for part in model_parts(model).values())
    found = {
        "weights": weights,
        "gradients": element * gradients,
        "optimizer": optimizer.total_state_bytes(shapes, element),
        "activations": geometry.micro_batch_size * kept,
        "codes": sum(share * in_linears * part.code_bytes() for share, part in low_bit),
    }
    return {kind: int(size) for kind, size in found.items() if size}
