"""Training with --ep: what is refused, and the parameters of a rank's experts."""

import dataclasses
from collections.abc import Callable, Iterable

from torch import nn

from qtrain.distributed.mesh import Mesh
from qtrain.distributed.shards import Sharded, shard_parameters
from qtrain.distributed.tensor_group import TENSOR_RANK_NUMBERS
from qtrain.errors import UserError
from qtrain.models import Decoder
from qtrain.models.mixture import Experts
from qtrain.optim import OPTIMIZERS, OptimizerSpec
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.settings import LanguageSettings, TrainSettings


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


def shard_experts(
    model: Decoder,
    named: Iterable[tuple[str, nn.Parameter]],
    mesh: Mesh,
    needs_whole: Callable[[nn.Parameter], bool],
    freed: Callable[[nn.Parameter], bool],
    *,
    in_order: bool,
) -> list[Sharded]:
    """The parameters of this rank's experts, divided over the ranks that hold the same ones. needs_whole, freed: as for
    `shard_parameters`; in_order: compute as one process with all experts would, bit for bit."""
    terms = {}
    for module in model.modules() if in_order else ():
        if isinstance(module, Experts):
            terms |= module.keep_in_order()
    found = []
    for sharded in shard_parameters(named, mesh.of_experts, needs_whole, freed):
        split, parameter = model.split(sharded.name), sharded.parameter
        sharded.master.whole_shape = split.whole_shape(parameter.shape)
        sharded.master.first_element = split.ranges[0][0] * parameter.shape[1]
        if isinstance(parameter.data, StoredWeight):  # its update draws bits without regard to the first element
            sharded.master.first_random_number = mesh.of_experts.tensor_rank * TENSOR_RANK_NUMBERS
        found.append(dataclasses.replace(sharded, terms=terms.get(id(parameter))))
    return found
