"""The plan of a language model's run, from its config and from what the swap will do to its linears."""

import functools
from collections.abc import Sequence
from dataclasses import asdict, replace

from qtrain.core.errors import UserError
from qtrain.core.hardware.device import Hardware
from qtrain.models import ModelConfig
from qtrain.models.cost.memory import Peak
from qtrain.models.cost.parameters import count_parameters, flops_per_token, forward_again, layer_linears, linear_key
from qtrain.models.cost.step_traffic import moved_bytes, requantized_bytes
from qtrain.models.cost.teacher import teacher_flops
from qtrain.models.cost.trained import TrainedPart
from qtrain.parallel.layers.local_config import local_config
from qtrain.parallel.mesh import Mesh
from qtrain.quant import LinearChoice
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.plan.language_traffic import language_traffic
from qtrain.train.plan.plan import Figures, Plan, make_plan
from qtrain.train.plan.step_time import TEACHER
from qtrain.train.settings.machine import reserves_every_routing
from qtrain.train.settings.recompute import kept_8bit, recompute_kinds
from qtrain.train.settings.settings import TrainSettings


def plan_language_run(
    checked: CheckedSettings,
    model_config: ModelConfig | None,
    linears: Sequence[LinearChoice],
    hardware: Hardware,
    trained: TrainedPart | None = None,
    teacher: ModelConfig | None = None,
) -> Plan:
    """model_config: None for an architecture that has no native decoder; the plan then has no figures. trained: what
    trains, where not everything does. teacher: of --distill."""
    settings = checked.language
    if model_config is None:
        return make_plan(checked, linears, hardware, None, per_sample=settings.seq_len)
    # BitNet adds norms before the output projections, whose weights count.
    if checked.scheme.root.sub_norm:
        model_config = model_config.with_sub_norms("--quantize")
    _check_8bit(settings, model_config)
    flops = asdict(flops_per_token(model_config, settings.seq_len))
    per_layer, counted = layer_linears(model_config), count_parameters(model_config)
    own_config = local_config(model_config, settings.tp, settings.ep, reserves_every_routing(settings))
    run = LanguageRun(checked, model_config, linears, trained, teacher)
    # Of one rank; without --tp and --ep the same, whose bytes are counted once.
    own_trained = None if trained is None else trained.on_rank(settings.ep)
    own = run if own_config == model_config else replace(run, config=own_config, trained=own_trained)

    def memory_on(mesh: Mesh, reshards: bool) -> Peak:
        here = (mesh, reshards) == (checked.mesh, checked.reshards)
        on_mesh = own if here else replace(own, checked=replace(checked, mesh=mesh, reshards=reshards))
        return on_mesh.memory().at_peak

    flops = flops if trained is None else trained.flops(flops)
    if teacher is not None:
        flops = {**flops, TEACHER: teacher_flops(teacher, settings.seq_len)}
    figures = Figures(
        active=counted.active if counted.inactive else None,
        flops=flops,
        # A mixture's token uses some of the experts: their GEMMs count with the share that runs.
        work={n.name: n.weights if n.is_head else per_layer[linear_key(n.name)].used for n in linears},
        frozen=bool(run.adapters),
        moe=model_config.moe is not None,
        again=forward_again(model_config, recompute_kinds(settings)),
        memory_on=memory_on,
        between=run.between_products(),
        # A tied one stays.
        embedding_bytes=0.0 if model_config.tie_word_embeddings else counted.embedding / 2 * checked.dtype.itemsize,
        moved_bytes=moved_bytes(
            own_config,
            run.step_shape,
            checked.geometry.gradient_accumulation,
            run.low_bit,
            own.trained_in_full,
        ),
        update_bytes=run.update_bytes(),
        requantized_bytes=0.0 if run.adapters else requantized_bytes(own_config, run.step_shape, run.low_bit),
        traffic=functools.partial(language_traffic, run),
        resharding=settings.reshard_after_forward,
    )
    return make_plan(checked, linears, hardware, figures, parameters=counted.total, per_sample=settings.seq_len)


def _check_8bit(settings: TrainSettings, model_config: ModelConfig) -> None:
    """UserError where what --keep_8bit keeps would be computed again."""
    if not kept_8bit(settings):
        return
    kinds = recompute_kinds(settings)
    if model_config.moe_layers and "norm" in kinds:
        raise UserError(
            f"--keep_8bit: {settings.model} is a mixture of experts, whose gate_up norm would compute again; leave "
            "norm (--activation_checkpointing selective) out."
        )
    if model_config.sub_norm and kinds & {"norm", "swiglu"}:
        raise UserError(
            "--keep_8bit: with a norm before the MLP's output projection, norm and swiglu would "
            "compute gate_up again; leave them (--recompute, --activation_checkpointing selective) out."
        )
