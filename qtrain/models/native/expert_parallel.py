"""Expert parallelism of the native decoder: each rank of a group holds some of every mixture's experts.

All else, routers and shared experts too, is on every rank, and every rank has its own tokens; what ranks send each
other is in `quant/parallel_experts.py`. The group is one of --ep, whose ranks read micro-batches of their own, or that
of tensor parallelism, which divides the tokens of a micro-batch.
"""

import dataclasses

from qtrain.comm.split import Split
from qtrain.comm.tensor_group import TensorGroup
from qtrain.core.errors import UserError
from qtrain.models.config.model import ModelConfig


def check_experts_divisible(config: ModelConfig | None, ranks: int, model: str) -> None:
    """UserError where `--ep ranks` does not divide the experts of --model, or where there are none."""
    if config is None or not config.mixture_layers:
        raise UserError(f"--ep: {ranks}, but {model} is not a mixture of experts; leave it out.")
    if (experts := config.mixture.experts) % ranks:
        allowed = ", ".join(str(d) for d in range(1, experts + 1) if experts % d == 0)
        raise UserError(f"--ep: {ranks} does not divide the {experts} experts of {model}; allowed: {allowed}.")


def rank_experts(config: ModelConfig, ranks: int, micro_batches: int) -> ModelConfig:
    """The sizes of what one of `ranks` computes: its experts, and the most routes to them that the tokens of its
    group's micro-batches can have, counted for each token of one."""
    if ranks == 1 or config.mixture is None:
        return config
    own = config.mixture.experts // ranks
    per_token = micro_batches * min(config.mixture.per_token, own)
    return dataclasses.replace(config, mixture=dataclasses.replace(config.mixture, experts=own, per_token=per_token))


def expert_split(config: ModelConfig, group: TensorGroup, name: str) -> Split | None:
    """Which part of the parameter `name` a rank of `group` holds, if it is one of experts."""
    mixture, rows = config.mixture, {}
    if mixture is not None:
        rows = {"gate_up": 2 * mixture.width, "down_proj": config.hidden_size}
    *_, owner, module, _ = ["", "", *name.split(".")]
    if owner != "experts" or module not in rows:
        return None
    return Split.evenly(0, (mixture.experts * rows[module],), group.ranks, group.rank)


class ExpertParallel:
    """The part of a decoder that one rank holds. config: of the whole model."""

    def __init__(self, config: ModelConfig, group: TensorGroup):
        check_experts_divisible(config, group.ranks, "the model")
        self.group, self.config = group, config

    def split(self, name: str) -> Split | None:
        """Which part of the parameter `name` this rank holds; None: all of it."""
        return expert_split(self.config, self.group, name)
