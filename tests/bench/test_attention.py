"""The table of attention: every row is checked against fp64."""

import pytest
import torch

from qtrain.bench.attention import ATTENTION_ROWS, SEEN, AttentionProblem, attention_table
from qtrain.bench.case import Bench, WrongResultError
from qtrain.core.hardware.device import Hardware

CPU = torch.device("cpu")
HARDWARE = Hardware("a device", {}, None, measured=False)


def filled(problem):
    return attention_table({"it": problem}, ATTENTION_ROWS, Bench(problem.device, HARDWARE, 1.0, lambda *cell: None))


def test_every_row():
    rows = filled(AttentionProblem(2, 128, 4, 2, 64, CPU)).rows
    for row in ATTENTION_ROWS:
        cell = rows[row.name]["it"]
        assert (cell.value or 0) > 0 or "GPU only" in cell.reason, (row.name, cell.reason)
    assert sum(cell["it"].reason is None for cell in rows.values()) == 2 * len(SEEN) + 1


def test_operations_are_of_the_pairs_that_see_each_other():
    problem = AttentionProblem(2, 16, 4, 2, 8, CPU)
    assert problem.operations("causal", 1) == 2 * 4 * 8 * 2 * (16 * 17 / 2)
    assert problem.operations("window", 1) == 2 * 4 * 8 * 2 * (1 + 15 * 2)
    documents, _ = problem.sees("documents")
    pairs = sum(n * (n + 1) / 2 for row in documents for n in row.unique(return_counts=True)[1].tolist())
    assert problem.operations("documents", 7) == 7 * 2 * 4 * 8 * pairs


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("seen", SEEN)
def test_a_wrong_result_is_refused(seen, which):
    row = next(row for row in ATTENTION_ROWS if row.seen == seen and row.both and "Triton" in row.name)
    case = row.prepare(AttentionProblem(2, 32, 4, 2, 16, CPU))
    out = [t.clone() for t in case.run(*case.inputs)]
    assert 0 < case.check(out) <= 1
    out[which][-1, :, -1] *= 1.05
    with pytest.raises(WrongResultError, match=("o", "dq", "dk", "dv")[which]):
        case.check(out)


@pytest.mark.gpu
def test_every_row_on_a_gpu():
    rows = filled(AttentionProblem(2, 256, 4, 2, 64, torch.device("cuda", 0))).rows
    reasons = {name: cell["it"].reason for name, cell in rows.items() if cell["it"].reason}
    assert not reasons
