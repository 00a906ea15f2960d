"""Whether layers are fully sharded (--reshard_after_forward)."""

from torch import nn

from qtrain.comm.mesh import Mesh
from qtrain.core.errors import UserError
from qtrain.train.checked_settings import CheckedSettings


def resharded(mode: str, mesh: Mesh, memory: float, have: int | None) -> bool:
    """Whether --reshard_after_forward `mode` shards layers fully on `mesh`. memory: bytes per GPU if it does not; have:
    those of a GPU."""
    too_large = bool(have) and memory > have
    return mesh.shard > 1 and (mode == "always" or (mode == "auto" and too_large))


def reshards(
    checked: CheckedSettings, memory: float, have: int | None, model: nn.Module, blocks: list[nn.Module]
) -> bool:
    """`resharded` on the run's mesh. blocks: the layers of `model`. Raises UserError where --reshard_after_forward
    always cannot be done."""
    mode, mesh = checked.settings.reshard_after_forward, checked.mesh
    if mode == "always" and mesh.world > 1:
        if mesh.shard == 1:
            raise UserError(
                f"--reshard_after_forward: always, but --dp_replicate {mesh.replicate} leaves nothing to divide; give "
                "a smaller --dp_replicate."
            )
        if not blocks:
            raise UserError(f"--reshard_after_forward: always, but {type(model).__name__} has no repeated layers.")
    return bool(blocks) and resharded(mode, mesh, memory, have)
