"""bf16 products within compiled code: those of Inductor's graph become `bf16_mm`, which chooses an algorithm.

The pass runs when Inductor has fused and decomposed what it would: what backward recomputes, and which sums became a
product's bias, is as without it.
"""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, Node

from qtrain.kernels.gemm.bf16_mm import is_large_bf16
from qtrain.kernels.gemm.cublas_lt import algorithm_names

_PRODUCTS = {torch.ops.aten.mm.default: 2, torch.ops.aten.addmm.default: 3}
"""Numbers of operands: (a, b), and (bias, a, b)."""


@functools.cache
def choose_compiled_products() -> None:
    """Have what is compiled from now on choose algorithms, where there are any. A pass of the user's own stays, and
    then ours is left out."""
    from torch._inductor import config  # late: it takes a second, and is there when something is compiled
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

    class ChosenProducts(CustomGraphPass):
        def __call__(self, graph: Graph) -> None:
            replace_products(graph)

        def uuid(self) -> Any:
            return get_hash_for_files((__file__,))

    if algorithm_names() and config.post_grad_custom_post_pass is None:
        config.post_grad_custom_post_pass = ChosenProducts()


def replace_products(graph: Graph) -> None:
    """Large products of bf16 on a GPU, in place."""
    for op, count in _PRODUCTS.items():
        for node in graph.find_nodes(op="call_function", target=op):
            if len(node.args) == count and not node.kwargs and _is_chosen(*node.args):
                *bias, a, b = node.args
                with graph.inserting_before(node):
                    chosen = graph.call_function(torch.ops.qtrain.bf16_mm.default, (a, b, *bias))
                # What was traced of its arguments is of other ones.
                chosen.meta = {key: value for key, value in node.meta.items() if key != "eager_input_vals"}
                node.replace_all_uses_with(chosen)
                graph.erase_node(node)


def _is_chosen(*operands: Any) -> bool:
    values = [operand.meta.get("val") if isinstance(operand, Node) else None for operand in operands]
    tensors = [v for v in values if isinstance(v, Tensor) and all(isinstance(size, int) for size in v.shape)]
    if len(tensors) < len(operands):
        return False
    *bias, a, b = tensors
    return is_large_bf16(a, b) and all(vector.shape == b.shape[1:] for vector in bias)
