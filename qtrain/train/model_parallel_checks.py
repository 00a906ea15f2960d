"""What --tp and --ep cannot be combined with; what depends on a model's sizes comes later."""

from qtrain.core.errors import UserError
from qtrain.optim import OPTIMIZERS, OptimizerSpec
from qtrain.train.settings import LanguageSettings, TrainSettings


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
