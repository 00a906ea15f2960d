"""Collectives within compiled code: in the order of the graph, on every rank.

A custom op without side effects is a function of its inputs to Inductor, which runs those that do not depend on each
other in the order that its estimate of memory prefers. Every rank compiles for itself, and two ranks that have come to
different orders wait for each other for ever. Inductor keeps the order of torch's own collectives
(`torch._inductor.comms.decide_global_ordering_of_comms`); this has it take ours for collectives too.
"""

import functools
from collections.abc import Callable
from typing import Any

from qtrain.kernels.compiler import add_cache_tag, operator

_COLLECTIVES: set[str] = set()
"""Custom ops that meet other ranks, by name."""


def collective(name: str, fake: Callable) -> Callable:
    """`operator` of a function that meets other ranks."""
    _COLLECTIVES.add(f"qtrain::{name}")

    @functools.wraps(fake)  # its parameters are read too
    def traced(*args: Any) -> Any:
        _keep_order()  # whoever traces it may compile it next
        return fake(*args)

    return operator(name, traced)


@functools.cache
def _keep_order() -> None:
    import torch._inductor.comms  # late: it takes a second, and is there when something is compiled

    inductor: Any = torch._inductor
    is_torchs = inductor.comms.contains_collective

    def contains_collective(node: Any, *rest: Any) -> bool:
        op = getattr(getattr(node, "node", None), "op_overload", None)
        return is_torchs(node, *rest) or (op is not None and op.name() in _COLLECTIVES)

    inductor.comms.contains_collective = contains_collective
    # Without gradients it moves operations to where their results are read, before it orders collectives.
    inductor.config.reorder_for_locality = False
    add_cache_tag("qtrain: collectives in order")  # what was compiled without is not used
