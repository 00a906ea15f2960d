"""What ZeRO and full sharding leave on a rank: whether layers are sharded too (--reshard_after_forward), and the share
of the trained parameters on the rank of a shard group that holds most of them.

Rows are sharded unevenly: 4,608 rows over 1,024 ranks are 5 rows each on the first 921 of them. As
`parallel/sharding/shards.py` does it; checked against real shards by `benchmarks/fake_world.py`.
"""

import heapq
import math
from collections.abc import Callable, Sequence

from torch import nn

from qtrain.core.errors import UserError
from qtrain.optim import ParameterShape
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.shards import ALIGNMENT
from qtrain.tensors.stored_weight import rows_divide
from qtrain.train.plan.checked_settings import CheckedSettings

# ---- full sharding --------------------------------------------------------------------------------------------------


def resharded(mode: str, mesh: Mesh, memory: float, have: int | None) -> bool:
    """Whether --reshard_after_forward `mode` shards layers fully on `mesh`. memory: bytes per GPU if it does not; have:
    those of a GPU."""
    too_large = bool(have) and memory > have
    return mesh.shard > 1 and (mode == "always" or (mode == "auto" and too_large))


def reshards(
    checked: CheckedSettings, memory: float, have: int | None, model: nn.Module, blocks: list[nn.Module]
) -> bool:
    """`resharded` on the run's mesh. blocks: the layers of `model`. Raises UserError where --reshard_after_forward
    always cannot be done. One process has layers in host memory in place of shards."""
    if "weights" in checked.offload:
        return True
    stored = getattr(checked.scheme.root, "stored_format", None)
    if stored is not None and not rows_divide(stored):
        return False
    mode, mesh = checked.settings.reshard_after_forward, checked.mesh
    if mode == "always" and mesh.world > 1:
        if mesh.shard == 1:
            raise UserError(
                f"--reshard_after_forward: always, but --dp_replicate {mesh.replicate} leaves nothing to shard; give "
                "a smaller --dp_replicate."
            )
        if not blocks:
            raise UserError(f"--reshard_after_forward: always, but {type(model).__name__} has no repeated layers.")
    return bool(blocks) and resharded(mode, mesh, memory, have)


# ---- the fullest rank -----------------------------------------------------------------------------------------------


def fullest_share(shapes: Sequence[ParameterShape], shards: int, needs_whole: Callable[[bool], bool]) -> float:
    """Elements of the fullest rank, of all. needs_whole: whether the optimizer needs all of a parameter on one rank,
    given whether it is a matrix of a hidden layer."""
    total = sum(shape.elements for shape in shapes)
    if shards == 1 or not total:
        return 1.0
    rows, vectors, whole = 0, 0, []
    for shape in shapes:
        # Small vectors have owners that balance out: an equal share each.
        if len(shape.shape) < 2:  # many small ones, which plans of decoders have as a single one
            vectors += shape.elements
            continue
        # Rows are sharded where the optimizer works on rows; else the whole matrix has one owner.
        own = None if shape.stored or needs_whole(shape.hidden) else _rows_of_first(shape.shape, shards)
        if own is None:
            whole += [math.prod(shape.shape)] * shape.count
        else:
            rows += own * shape.count
    return (rows + _fullest_owner(whole, shards) + vectors / shards) / total


def _rows_of_first(shape: tuple[int, ...], shards: int) -> int | None:
    """Elements of the first rank's rows, which has most; None for a parameter that is not sharded."""
    width, per_rank = math.prod(shape[1:]), -(-shape[0] // shards)
    # Shards begin at multiples of ALIGNMENT elements, or the parameter stays whole.
    cuts = {min(rank * per_rank, shape[0]) for rank in range(shards)}
    return per_rank * width if all(cut * width % ALIGNMENT == 0 for cut in cuts) else None


def _fullest_owner(sizes: Sequence[int], shards: int) -> int:
    """Where each whole parameter, the largest first, goes to the rank that has least."""
    loads = [0] * shards
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(loads, loads[0] + size)
    return max(loads)
