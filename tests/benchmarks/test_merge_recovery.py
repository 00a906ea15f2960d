"""Recovery of adapters merged into low bits: the table, and what training through the rounding is for."""

import json

import pytest
import torch

from benchmarks import merge_recovery
from qtrain.core.errors import UserError
from qtrain.models import ModelSource, build_model


@pytest.mark.sweep
def test_the_table_has_a_row_for_each_format_and_seed(tmp_path, capsys):
    argv = ["--pretrain_steps", "2", "--steps", "2", "--formats", "ct_int8", "--seeds", "3", "--device", "cpu"]
    merge_recovery.main([*argv, "--json", str(tmp_path / "a.json")])
    (table,) = json.loads((tmp_path / "a.json").read_text())["tables"]
    assert [row["name"] for row in table["rows"]] == ["ct_int8, seed 3"]
    assert set(table["rows"][0]["cells"]) == set(merge_recovery.COLUMNS)
    assert "| ct_int8, seed 3" in capsys.readouterr().out


def test_a_rounded_model_is_rounded_once():
    """Its values are those of codes: rounding them again to INT8 changes no code."""
    model = build_model(ModelSource("small", merge_recovery.SHAPE, "--model"), seed=0)
    once = merge_recovery.rounded(model, "ct_int8")
    twice = merge_recovery.rounded(once, "ct_int8")
    weights = [m.layers[0].mlp.down_proj.weight for m in (model, once, twice)]
    assert not torch.equal(weights[0], weights[1])
    torch.testing.assert_close(weights[1], weights[2], rtol=1e-6, atol=1e-9)
    assert torch.equal(model.embed_tokens.weight, once.embed_tokens.weight)


def test_a_format_without_merged_weights_is_refused():
    with pytest.raises(UserError, match=r"--formats\.merge_format: unknown format 'bitnet'"):
        merge_recovery.main(["--formats", "bitnet"])
