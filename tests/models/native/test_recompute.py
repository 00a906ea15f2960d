"""Selective recomputation keeps a named set of operators, which is every matrix product and attention."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import CheckpointPolicy

import qtrain
from qtrain.models.native.attention import SequenceInfo
from qtrain.models.native.recompute import (
    GEMM_OPERATORS,
    GROUPED_OPERATORS,
    KeptResults,
    LayerRegions,
    Policy,
    contexts,
    keep_nothing,
)
from tests.models.families import drawn, source_of

KEEP, FORWARD = Policy(KeptResults()), SimpleNamespace(is_recompute=False)


def test_selective_keeps_every_product_of_this_project_and_no_quantizer():
    """Every operator whose name ends in mm, but that which has no result, attention, and codes that are there to be
    kept."""
    kernels = Path(qtrain.__file__).parent / "kernels"
    defined = {n for file in kernels.rglob("*.py") for n in re.findall(r'^@operator\("(\w+)"', file.read_text(), re.M)}
    products = {name for name in defined if name.endswith("_mm")} - {"add_scaled_mm"}
    assert len(products) >= 14 and len(defined) >= 40
    for file in kernels.rglob("*.py"):
        importlib.import_module(".".join(file.relative_to(Path(qtrain.__file__).parents[1]).with_suffix("").parts))
    operands = torch.empty(128, 256), torch.empty(4 * 512, 256), torch.empty(1), torch.empty(5)
    kept = {
        name
        for name in defined
        if KEEP(FORWARD, getattr(torch.ops.qtrain, name).default, *operands) == CheckpointPolicy.MUST_SAVE
    }
    others = {"keep_8bit", "causal_attention", "packed_attention"}
    assert kept == products | others == {*GEMM_OPERATORS, *GROUPED_OPERATORS, *others}
    assert KEEP(FORWARD, torch.ops.aten.bmm.default) == CheckpointPolicy.MUST_SAVE
    assert KEEP(FORWARD, torch.ops.higher_order.flex_attention) == CheckpointPolicy.MUST_SAVE
    assert KEEP(FORWARD, torch.ops.aten._int_mm.default) == CheckpointPolicy.PREFER_RECOMPUTE


def test_products_that_sum_over_few_columns_are_computed_again():
    """Those of an adapter's B: of a linear, and of 4 experts. What A computes, which has few columns, is kept."""
    mm, grouped = torch.ops.aten.mm.default, torch.ops.qtrain.m_grouped_plain_mm.default
    blocks, starts = torch.empty(1), torch.empty(5)
    for rank, again in ((8, CheckpointPolicy.PREFER_RECOMPUTE), (128, CheckpointPolicy.MUST_SAVE)):
        assert KEEP(FORWARD, mm, torch.empty(128, rank), torch.empty(rank, 256)) == again
        assert KEEP(FORWARD, grouped, torch.empty(128, rank), torch.empty(4 * 256, rank), blocks, starts) == again
        assert KEEP(FORWARD, mm, torch.empty(128, 256), torch.empty(256, rank)) == CheckpointPolicy.MUST_SAVE
        of_a = torch.empty(128, 256), torch.empty(4 * rank, 256)
        assert KEEP(FORWARD, grouped, *of_a, blocks, starts) == CheckpointPolicy.MUST_SAVE


def test_a_compiler_is_given_a_policy_also_of_a_region_that_keeps_nothing():
    """Without one, torch 2.11 does not recompute what autograd functions compute, as low-bit linears are."""
    policies = []

    def backend(graph: torch.fx.GraphModule, inputs: object):
        regions = [module for module in graph.children() if isinstance(module, torch.fx.GraphModule)]
        policies.extend(region.meta.get("_checkpoint_context_fn") for region in regions)
        return graph.forward

    layer = drawn(source_of("llama2")).layers[0]
    layer.regions = LayerRegions.of(frozenset({"block"}))
    torch._dynamo.reset()
    info = SequenceInfo(1, 8, torch.ones(8, 1, 4), torch.ones(8, 1, 4))
    torch.compile(layer, backend=backend, fullgraph=True)(torch.randn(1, 8, 32), info)
    assert [policy.args for policy in policies] == [(keep_nothing,)]


def test_a_product_is_told_by_what_has_run_before_it():
    """Those of qkv, of o_proj, with adapters too, and of the MLP."""
    aten, x, b = torch.ops.aten, torch.empty(2, 8, 128), torch.empty(128, 128)
    mm, attention = aten.mm.default, aten._scaled_dot_product_flash_attention_for_cpu.default
    layer = [mm, attention, mm, mm, aten.add.Tensor, mm]
    for again, first, kept in (
        ("qkv", "qkv", [False, True, True, True, False, True]),
        ("attention", "qkv", [True, False, True, True, False, True]),
        ("ffn", "qkv", [True, True, True, True, False, False]),
        ("ffn", "ffn", [False, True, False, False, False, False]),
    ):
        policy = Policy(KeptResults()._replace(**{again: False}), first)
        for recomputes in (False, True):
            ctx = SimpleNamespace(is_recompute=recomputes)
            found = [policy(ctx, op, *((x, x) if op is aten.add.Tensor else (b, b))) for op in layer]
            assert [one == CheckpointPolicy.MUST_SAVE for one in found] == kept, (again, first)


def test_a_compiler_is_given_constants():
    """Of a named tuple among the arguments torch 2.11's compiler makes one whose fields are all true."""
    kept = KeptResults(qkv=False, ffn=False)
    with_arguments = contexts(kept, "ffn")
    assert all(type(argument) in (bool, str) for argument in with_arguments.args)
    forward, _ = with_arguments()
    assert forward.policy_fn.kept == kept and forward.policy_fn.stages[False] == "ffn"
