"""Recovery by quantization-aware training: the table, and that both ends of a run begin alike."""

import json

import pytest
import torch

from benchmarks import qat_recovery
from qtrain.core.errors import UserError
from qtrain.models import ModelSource, build_model
from qtrain.models.hf.formats.format import EXPORT_FORMATS
from qtrain.quant.schemes.qat import WEIGHTS


@pytest.mark.sweep
def test_the_table_has_a_row_for_each_format_and_seed(tmp_path, capsys):
    argv = [
        "--steps",
        "4",
        "--share",
        "0.5",
        "--weights",
        "int8",
        "--seeds",
        "3",
        "--device",
        "cpu",
        "--distill",
        "0.5",
    ]
    qat_recovery.main([*argv, "--json", str(tmp_path / "a.json")])
    (table,) = json.loads((tmp_path / "a.json").read_text())["tables"]
    assert [row["name"] for row in table["rows"]] == ["int8, seed 3"]
    assert set(table["rows"][0]["cells"]) == {
        *qat_recovery.COLUMNS,
        *qat_recovery.CONTINUED,
        *qat_recovery.DISTILLED,
    }
    out = capsys.readouterr().out
    assert all(f"{row}: recovered " in out for row in ("int8", "int8, continued", "int8, distilled"))


def test_both_ends_of_a_run_begin_with_its_weights_and_states():
    model = build_model(ModelSource("small", qat_recovery.SHAPE, "--model"), seed=0)
    optimizer = torch.optim.AdamW(model.parameters())
    (high, _), (qat, _) = (qat_recovery.finished((model, optimizer), None, 1, {}, w) for w in (None, "int8"))
    tensors = [[p.detach() for p in m.parameters()] for m in (model, high, qat)]
    assert all(map(torch.equal, tensors[0], tensors[1])) and all(map(torch.equal, tensors[0], tensors[2]))
    assert all(a is not b for a, b in zip(model.parameters(), qat.parameters(), strict=True))


def test_steps_that_continue_have_numbers_and_a_warm_up_of_their_own():
    rates = qat_recovery.learning_rates(1.0, 100)
    again = qat_recovery.learning_rates(0.1, 100, first=100)
    assert list(rates) == list(range(100)) and list(again) == list(range(100, 200))
    assert rates[0] == pytest.approx(1 / 3) and rates[3] == 0.97 and rates[99] == pytest.approx(0.01)
    assert list(again.values()) == pytest.approx([0.1 * rate for rate in rates.values()])


def test_each_weight_is_rounded_as_its_export_rounds_it():
    formats = {name: EXPORT_FORMATS.make(fmt, {}, "").weight for name, fmt in qat_recovery.EXPORTS.items()}
    assert formats == WEIGHTS


def test_a_weight_that_qat_does_not_have_is_refused():
    with pytest.raises(UserError, match="'int4' is not allowed"):
        qat_recovery.main(["--weights", "int4"])
