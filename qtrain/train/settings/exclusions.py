"""What --tp and --ep cannot be combined with, and options that have no effect without another one.

An option that contradicts the rest of the command line is refused. One that only lacks something here, such as the
GPU that a recipe was written for, is answered by a line of the plan.
"""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from qtrain.core.errors import UserError
from qtrain.optim import OPTIMIZERS, LRSchedule, OptimizerSpec
from qtrain.quant import LowBitScheme, Scheme
from qtrain.train.settings.machine import run_world
from qtrain.train.settings.settings import BatchGeometry, LanguageSettings, TrainSettings


@dataclass(frozen=True)
class Given:
    """The settings of a run, and what follows from them."""

    settings: TrainSettings
    device: torch.device
    dtype: torch.dtype
    scheme: Scheme
    schedule: LRSchedule

    def has(self, name: str) -> bool:
        """Whether the script has the flag `name` and its value is not the default."""
        fields = {field.name: field for field in dataclasses.fields(self.settings)}
        return name in fields and getattr(self.settings, name) != fields[name].default

    def key(self, name: str, key: str) -> Any:
        """The value of a key in a flag's JSON object; None where it is not given."""
        return (getattr(self.settings, name, None) or {}).get(key)


@dataclass(frozen=True)
class Dependence:
    """option: a flag, or a key of one. idle: whether it is given and has no effect. why: the rest of the sentence; fix:
    its end, where `refused`."""

    option: str
    idle: Callable[[Given], bool]
    why: str
    refused: bool = False
    fix: str = ", or leave it out"


def _without(name: str, needed: str) -> Callable[[Given], bool]:
    return lambda given: given.has(name) and not getattr(given.settings, needed)


def _all_bf16(given: Given) -> bool:
    scheme = given.scheme
    plain = isinstance(scheme, LowBitScheme) and scheme.stored_format is None and not scheme.latent
    return plain and set(scheme.gemm_dtypes().values()) == {"bf16"}


def _stored(given: Given) -> bool:
    return isinstance(given.scheme, LowBitScheme) and given.scheme.stored_format is not None


def _decayless(key: str) -> Callable[[Given], bool]:
    return lambda given: given.schedule.decay == 0 and given.key("lr_schedule_kwargs", key) is not None


def _fp32(given: Given) -> bool:
    return given.dtype == torch.float32


DEPENDENCES = (
    Dependence(
        "--gradient_wire, --deterministic",
        lambda g: g.has("gradient_wire") and g.settings.deterministic,
        "the one rounds what the other promises to add exactly",
        refused=True,
        fix="; leave one out",
    ),
    Dependence(
        "--gradient_wire",
        lambda g: g.has("gradient_wire") and run_world(g.settings) == 1,
        "has no effect on one process",
    ),
    Dependence(
        "--reshard_after_forward",
        lambda g: g.settings.reshard_after_forward == "always" and run_world(g.settings) == 1,
        "has no effect on one process",
    ),
    Dependence(
        "--sequence_parallel",
        lambda g: g.has("sequence_parallel") and g.settings.tp == 1,
        "has no effect without --tp",
    ),
    Dependence(
        "--gradient_accumulation",
        lambda g: g.settings.deterministic and g.has("gradient_accumulation") and not g.has("micro_batch_size"),
        "with it the micro-batch, and so the last bits of a --deterministic loss, depends on the number of processes; "
        "give --micro_batch_size instead",
    ),
    Dependence("--hellaswag_file", _without("hellaswag_file", "hellaswag"), "needs --hellaswag", refused=True),
    Dependence("--hellaswag_limit", _without("hellaswag_limit", "hellaswag"), "needs --hellaswag", refused=True),
    Dependence("--eval_images", _without("eval_images", "eval_ds"), "needs --eval_ds", refused=True),
    Dependence("--eval_sequences", _without("eval_sequences", "eval_ds"), "has no effect without --eval_ds"),
    Dependence("--sample_tokens", _without("sample_tokens", "sample_prompts"), "has no effect without prompts"),
    Dependence("--answer_tokens", _without("answer_tokens", "accuracy"), "has no effect without --accuracy"),
    Dependence(
        "--augment.mixup_prob",
        lambda g: g.key("augment", "mixup_prob") is not None
        and not (g.key("augment", "mixup") or g.key("augment", "cutmix")),
        'needs "mixup" or "cutmix"',
        refused=True,
    ),
    Dependence("--lr_schedule_kwargs.decay_type", _decayless("decay_type"), 'needs a "decay" above 0', refused=True),
    Dependence("--lr_schedule_kwargs.final", _decayless("final"), 'needs a "decay" above 0', refused=True),
    Dependence(
        "--quantize",
        _all_bf16,
        "all three GEMMs are in bf16, so nothing is quantized; use --quantize bf16",
        refused=True,
    ),
    Dependence(
        "--quantize_kwargs.fast_accum",
        lambda g: g.device.type == "cpu" and g.key("quantize_kwargs", "fast_accum") not in (None, False, []),
        "has no effect on a CPU, which accumulates in fp32",
    ),
    Dependence(
        "--freeze_embedding_layer",
        lambda g: g.has("freeze_embedding_layer") and g.has("lora"),
        "has no effect with --lora, which freezes all weights",
    ),
    Dependence(
        "--router_bias_rate",
        lambda g: g.has("router_bias_rate") and g.has("lora"),
        "routers are frozen with --lora; train all weights",
        refused=True,
    ),
    Dependence(
        "--optim",
        lambda g: "." in g.settings.optim and _stored(g) and not g.has("lora"),
        "other libraries' optimizers cannot update weights that --quantize stores in low bits; use qtrain's, as adamw",
        refused=True,
    ),
    Dependence(
        "--quantize_lm_head",
        lambda g: g.settings.quantize_lm_head and g.settings.quantize == "bf16",
        "has no effect with --quantize bf16",
    ),
    Dependence(
        "--optim_kwargs.master",
        lambda g: _fp32(g) and g.key("optim_kwargs", "master") == "fp32",
        "has no effect on fp32 weights",
    ),
    Dependence(
        "--optim_kwargs.sr",
        lambda g: _fp32(g) and g.key("optim_kwargs", "sr") is True,
        "has no effect on fp32 weights; it rounds bf16 ones and bf16 states",
    ),
    Dependence(
        "--lr_schedule_kwargs.decay",
        lambda g: g.settings.optim == "adamw_schedule_free" and g.schedule.decay > 0,
        'adamw_schedule_free averages instead of decaying; {"decay":0} is usual',
    ),
)


def check_dependences(given: Given) -> tuple[str, ...]:
    """Lines for the plan: given options that have no effect. UserError for one that contradicts the others."""
    idle = [row for row in DEPENDENCES if row.idle(given)]
    for row in idle:
        if row.refused:
            raise UserError(f"{row.option}: {row.why}{row.fix}.")
    return tuple(f"note    {row.option}: {row.why}" for row in idle)


def check_tensor_parallel(settings: TrainSettings, optimizer: OptimizerSpec) -> None:
    """UserError for settings that --tp cannot be combined with; what depends on the model's sizes comes later."""
    if settings.tp == 1:
        return
    other = "divide the run with --dp_shard or --dp_replicate instead"
    if not isinstance(settings, LanguageSettings):
        raise UserError(f"--tp: {settings.tp}, but models of timm are not divided over processes; {other}.")
    if settings.model_impl != "native":
        raise UserError(
            f"--tp: {settings.tp}, but only qtrain's own decoder is divided; use --model_impl native, or {other}."
        )
    if getattr(settings, "lora", None) is not None:
        raise UserError(f"--tp: {settings.tp}, but adapters (--lora) are not divided over processes; {other}.")
    if settings.quantize == "auto" and settings.quantize_lm_head:
        raise UserError(
            f"--tp: {settings.tp}, but --quantize auto times one process's part of the head (--quantize_lm_head), and "
            "others may have fewer rows; name the scheme, or leave out --quantize_lm_head."
        )
    if settings.optimizer_in_backward:
        raise UserError(
            f"--tp: {settings.tp}, but --optimizer_in_backward updates a layer before the gradients of its norms are "
            "summed over its processes; leave one of them out."
        )
    if optimizer.needs_whole(hidden=True):
        known = {name: OPTIMIZERS.make(name, {}, "--optim") for name in OPTIMIZERS.names()}
        allowed = ", ".join(name for name, spec in known.items() if not spec.needs_whole(hidden=True))
        raise UserError(
            f"--tp: {settings.tp}, but --optim {settings.optim} works on whole matrices, and each process has a part; "
            f"allowed: {allowed}."
        )


def check_expert_parallel(settings: TrainSettings, script: str, optimizer: OptimizerSpec) -> None:
    """UserError for settings that --ep cannot be combined with; what depends on the model comes later."""
    if settings.ep == 1:
        return

    def refuse(why: str) -> UserError:
        return UserError(f"--ep: {settings.ep}, but {why}.")

    if not isinstance(settings, LanguageSettings):
        raise refuse("models of timm have no experts; leave it out")
    if settings.model_impl != "native":
        raise refuse("only qtrain's own decoder is divided; use --model_impl native, or leave it out")
    if getattr(settings, "lora", None) is not None:
        raise refuse("adapters (--lora) are not divided over processes; leave it out")
    if script == "llm_finetune":
        raise refuse(
            "processes that compute experts together need micro-batches of one shape, and those of instructions differ "
            "in length; leave it out"
        )
    if settings.tp > 1:
        raise refuse(f"--tp {settings.tp} divides the experts among its processes too; leave --ep out")
    if settings.optimizer_in_backward:
        raise refuse("--optimizer_in_backward does not know divided experts; leave one of them out")
    if settings.deterministic and settings.quantize == "nvfp4":
        raise refuse(
            "with --deterministic nvfp4 needs a scale of the tokens of all experts, which no process has; leave one of "
            "them out"
        )
    if not optimizer.takes_parts(hidden=True):
        known = {name: OPTIMIZERS.make(name, {}, "--optim") for name in OPTIMIZERS.names()}
        allowed = ", ".join(name for name, spec in known.items() if spec.takes_parts(hidden=True))
        raise refuse(
            f"--optim {settings.optim} works on the matrices of all experts at once, and each process has a part; "
            f"allowed: {allowed}"
        )


def check_in_backward(settings: TrainSettings, geometry: BatchGeometry, optimizer: OptimizerSpec) -> None:
    """UserError for settings that --optimizer_in_backward cannot be combined with."""
    if not settings.optimizer_in_backward:
        return
    if settings.deterministic:
        raise UserError(
            "--optimizer_in_backward: with --deterministic weights change only after all gradients are summed; leave "
            "it out."
        )
    flag, micro = "--optimizer_in_backward", geometry.micro_batch_size * geometry.gradient_accumulation
    if geometry.gradient_accumulation > 1:
        raise UserError(
            f"{flag}: a micro-batch's gradients are freed before the next one's could be added; give "
            f"--gradient_accumulation 1 --micro_batch_size {micro}, or a smaller --batch_size."
        )
    if settings.clip_grad_norm:
        raise UserError(
            f"{flag}: weights change before the norm of all gradients is known, so it cannot be clipped to "
            f"{settings.clip_grad_norm:g}; give --clip_grad_norm 0."
        )
    if reason := optimizer.refuses_partitions():
        raise UserError(f"{flag}: {reason}")
