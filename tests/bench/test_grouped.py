"""The table of grouped products: every row is right or says why it does not run; a wrong result is not timed."""

import pytest
import torch

from qtrain.bench import grouped as module
from qtrain.bench.case import Bench, WrongResultError
from qtrain.bench.grouped import GROUPED_ROWS, ROLES, GroupedProblem, grouped_table
from qtrain.core.hardware.device import Hardware

CPU = torch.device("cpu")
TABLE = Hardware("a device", {"bf16": 2.0}, None, measured=False)


def test_every_row_runs_or_says_why():
    problem = GroupedProblem(3, 300, 128, 256, CPU)
    table = grouped_table({"it": problem}, GROUPED_ROWS, Bench(CPU, TABLE, 1.0, lambda what, cell: None))
    for row in GROUPED_ROWS:
        cell = table.rows[row.name]["it"]
        if "FP8 PyTorch" in row.name:
            assert "on a GPU only" in cell.reason
        else:
            assert cell.reason is None and cell.value > 0 and 0 <= cell.details["error_share"] <= 1, row.name
    assert len({row.name for row in GROUPED_ROWS}) == len(GROUPED_ROWS)
    assert {row.name.split(",")[0] for row in GROUPED_ROWS} == set(ROLES)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("fmt, granularities", [("int8", ("rowwise", "rowwise")), ("e4m3", ("1x128", "1x128"))])
def test_a_wrong_result_is_refused(role, fmt, granularities):
    problem = GroupedProblem(2, 260, 128, 128, CPU)
    granularities = (
        granularities if role == "grad_weight" else (granularities[0], granularities[1].replace("1x", "128x"))
    )
    case = module._coded(role, fmt, granularities, None, problem)
    out = case.run(*case.inputs)
    assert case.check(out) <= 1
    wrong = out.clone()
    wrong[3, 5] += 10 * out.abs().max()
    with pytest.raises(WrongResultError, match="times the tolerance"):
        case.check(wrong)
    if role != "grad_weight":
        out[-1, 0] = 1
        with pytest.raises(WrongResultError, match="no group"):
            case.check(out)
