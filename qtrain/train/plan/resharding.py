"""Whether layers are fully sharded (--reshard_after_forward)."""

from torch import nn

from qtrain.errors import UserError
from qtrain.models.trained_cost import TrainedPart
from qtrain.train.checked_settings import CheckedSettings
from qtrain.train.plan.plan import Plan


def reshards(
    checked: CheckedSettings, plan: Plan, model: nn.Module, blocks: list[nn.Module], trained: TrainedPart | None
) -> bool:
    """plan: of the run without. blocks: the layers of `model`. trained: what trains; None: everything. Raises
    UserError where --reshard_after_forward always cannot be done."""
    mode, mesh = checked.settings.reshard_after_forward, checked.mesh
    if mode == "never" or mesh.world == 1:
        return False
    if mode == "always" and mesh.shard == 1:
        raise UserError(
            f"--reshard_after_forward: always, but --dp_replicate {mesh.replicate} leaves nothing to divide; give a "
            "smaller --dp_replicate."
        )
    if mode == "always" and not blocks:
        raise UserError(f"--reshard_after_forward: always, but {type(model).__name__} has no repeated layers.")
    have = plan.hardware.memory_bytes
    too_large = bool(have) and sum(plan.memory.values()) > have
    whole_layers = mesh.tensor == 1 and mesh.of_experts is None  # neither --tp nor --ep divides them
    divisible = mesh.shard > 1 and whole_layers and blocks and not (trained and trained.adapters)
    return mode == "always" or bool(too_large and divisible)
