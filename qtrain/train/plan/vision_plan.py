"""The plan of a vision model's run, in images, from one pass over the meta device."""

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from qtrain.core.hardware.device import Hardware
from qtrain.models import VisionCost, repeated_blocks
from qtrain.models.cost.memory import Peak
from qtrain.optim import ParameterShape, parameter_groups
from qtrain.quant import LinearChoice, LowBitScheme
from qtrain.train.log.metrics import IMAGES
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.plan import Figures, Plan, make_plan
from qtrain.train.plan.scheme_bytes import code_bytes, kept_input_bytes, weight_bytes
from qtrain.train.plan.sharding import fullest_share
from qtrain.train.plan.traffic import Traffic, weights_on_wire
from qtrain.train.step.in_backward import model_partitions


def plan_vision_run(
    checked: CheckedSettings,
    model: nn.Module,
    cost: VisionCost | None,
    linears: Sequence[LinearChoice],
    hardware: Hardware,
) -> Plan:
    """model: on the meta device; cost: None for a model that does not run there: the plan then has no figures."""
    parameters = sum(p.numel() for p in model.parameters())
    if cost is None:
        return make_plan(checked, linears, hardware, None, parameters=parameters, unit=IMAGES)
    again = checked.settings.activation_checkpointing == "full"
    figures = Figures(
        flops=cost.flops,
        work={linear.name: linear.weights * cost.linear_rows.get(linear.name, 0) for linear in linears},
        memory_on=lambda mesh, reshards: _memory(replace(checked, mesh=mesh), model, cost, linears),
        traffic=lambda: _traffic(checked, model, linears),
        again={kind: float(kind != "head" and again) for kind in cost.flops},
    )
    return make_plan(checked, linears, hardware, figures, parameters=parameters, unit=IMAGES)


def _traffic(checked: CheckedSettings, model: nn.Module, linears: Sequence[LinearChoice]) -> Traffic:
    """What the ranks of any mesh send each other. They keep all weights in full, which timm's models may read."""
    element, parameters = checked.dtype.itemsize, [p.numel() for p in model.parameters()]
    return Traffic(
        parameters=sum(parameters),
        matrices=sum(p.ndim > 1 for p in model.parameters()),
        element=element,
        weights=weights_on_wire(sum(parameters), linears, element, codes_only=False),
        micro_batches=checked.geometry.gradient_accumulation,
        gradient_wire=checked.settings.gradient_wire,
        deterministic=checked.settings.deterministic,
    )


def _memory(checked: CheckedSettings, model: nn.Module, cost: VisionCost, linears: Sequence[LinearChoice]) -> Peak:
    """Bytes by kind. Activations are an upper bound for a compiled model, which keeps some results only once."""
    settings, element = checked.settings, checked.dtype.itemsize
    parameters = sum(p.numel() for p in model.parameters())
    stored = {linear.name + ".weight" for linear in linears if linear.stored}
    kept_in_low_bits = {id(p) for name, p in model.named_parameters() if name in stored}
    shapes = [
        ParameterShape(tuple(p.shape), 1, group["hidden"], group["parts"], stored=id(p) in kept_in_low_bits)
        for group in parameter_groups(model, 0.0)
        for p in group["params"]
    ]
    # Measured on the meta device in the model's dtype there; scaled to the run's.
    kept = cost.kept * element / next(model.parameters()).element_size()
    weights, codes = element * parameters, 0.0
    for linear in linears:
        scheme = linear.in_one_layout if settings.weight_codes == "one" else linear.scheme
        if scheme is not None:
            kept += _kept_input(linear, scheme, cost, element)
            weights += linear.weights * (weight_bytes(scheme, element) - element)
            codes += linear.weights * code_bytes(scheme)
    blocks = len(repeated_blocks(model))
    if settings.activation_checkpointing == "full" and blocks:
        width = max((linear.in_features for linear in linears if not (linear.is_head or linear.kernel)), default=0)
        # One block's activations at a time, and the input of each.
        kept = kept / blocks + blocks * cost.rows * width * element
    share = fullest_share(shapes, checked.mesh.shard, checked.optimizer.needs_whole)
    if share < 1:
        in_full = sum(shape.elements for shape in shapes if not shape.stored)
        weights += element * share * in_full  # the masters
    gradients = parameters
    if settings.optimizer_in_backward:
        # Those of the largest partition exist at once.
        gradients = max(sum(p.numel() for p in members) for members in model_partitions(model).values())
    found = {
        "weights": weights,
        "gradients": element * gradients,
        "optimizer": share * checked.optimizer.state_bytes(shapes, element),
        "activations": checked.geometry.micro_batch_size * kept,
        "codes": codes,
        "average": 4 * share * parameters if getattr(settings, "ema_decay", 0) else 0,
    }
    kinds = {kind: int(size) for kind, size in found.items() if size}
    on_host = checked.optimizer.host_bytes(shapes, element)
    return Peak("the start of backward", kinds, {name: int(share * size) for name, size in on_host.items()})


def _kept_input(linear: LinearChoice, scheme: LowBitScheme, cost: VisionCost, element: int) -> float:
    """Bytes that backward keeps of the input of a linear or convolution in low bits, more than of one that is not."""
    codes = kept_input_bytes(scheme, element)
    if linear.kernel is None:
        return cost.linear_rows.get(linear.name, 0) * linear.in_features * (codes - element)
    x = cost.conv_inputs.get(linear.name)
    if x is None or codes == element:
        return 0.0
    # Where the activation before it keeps the same tensor, codes come on top.
    return x.elements * (codes - element * (not x.others_keep))
