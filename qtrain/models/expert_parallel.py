"""Expert parallelism of the native decoder: each rank of a group holds some of every mixture's experts.

All else, routers and shared experts too, is on every rank, and every rank has its own tokens; what ranks send each
other is in `quant/parallel_experts.py`.
"""

from qtrain.distributed.split import Split
from qtrain.distributed.tensor_group import TensorGroup
from qtrain.errors import UserError
from qtrain.models.config import ModelConfig


def check_experts_divisible(config: ModelConfig | None, ranks: int, model: str) -> None:
    """UserError where `--ep ranks` does not divide the experts of --model, or where there are none."""
    if config is None or config.mixture is None:
        raise UserError(f"--ep: {ranks}, but {model} is not a mixture of experts; leave it out.")
    if (experts := config.mixture.experts) % ranks:
        allowed = ", ".join(str(d) for d in range(1, experts + 1) if experts % d == 0)
        raise UserError(f"--ep: {ranks} does not divide the {experts} experts of {model}; allowed: {allowed}.")


class ExpertParallel:
    """The part of a decoder that one rank holds. config: of the whole model."""

    def __init__(self, config: ModelConfig, group: TensorGroup):
        check_experts_divisible(config, group.ranks, "the model")
        self.group, self.config = group, config

    def split(self, name: str) -> Split | None:
        """Which part of the parameter `name` this rank holds; None: all of it."""
        mixture = self.config.mixture
        rows = {"gate_up": 2 * mixture.width, "down_proj": self.config.hidden_size}
        *_, owner, module, _ = ["", "", *name.split(".")]
        if owner != "experts" or module not in rows:
            return None
        return Split.evenly(0, (mixture.experts * rows[module],), self.group.ranks, self.group.rank)
