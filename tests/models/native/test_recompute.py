"""Selective recomputation keeps a named set of operators, which is every matrix product and attention."""

import importlib
import re
from pathlib import Path
from types import SimpleNamespace

import torch
from torch.utils.checkpoint import CheckpointPolicy

import qtrain
from qtrain.models.native.recompute import GEMM_OPERATORS, GROUPED_OPERATORS, Kept, Policy

KEEP, FORWARD = Policy(Kept()), SimpleNamespace(is_recompute=False)


def test_selective_keeps_every_product_of_this_project_and_no_quantizer():
    """Every operator whose name ends in mm."""
    kernels = Path(qtrain.__file__).parent / "kernels"
    defined = {n for file in kernels.rglob("*.py") for n in re.findall(r'^@operator\("(\w+)"', file.read_text(), re.M)}
    products = {name for name in defined if name.endswith("_mm")}
    assert len(products) >= 14 and len(defined) >= 40
    for file in kernels.rglob("*.py"):
        importlib.import_module(".".join(file.relative_to(Path(qtrain.__file__).parents[1]).with_suffix("").parts))
    operands = torch.empty(128, 256), torch.empty(4 * 512, 256), torch.empty(1), torch.empty(5)
    kept = {
        name
        for name in defined
        if KEEP(FORWARD, getattr(torch.ops.qtrain, name).default, *operands) == CheckpointPolicy.MUST_SAVE
    }
    assert kept == products == {*GEMM_OPERATORS, *GROUPED_OPERATORS}
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
