"""The linears' table: every scheme's gradients are checked, and what it leaves in bf16 is a reason."""

import pytest
import torch

from qtrain.bench.case import Bench, WrongResultError
from qtrain.bench.linears import LinearProblem, linear_case, linear_table
from qtrain.core.hardware.device import Hardware
from qtrain.quant import SCHEMES
from qtrain.quant.schemes.auto import Auto

CPU = torch.device("cpu")
HARDWARE = Hardware("a device", {"bf16": 1.0, "int8": 2.0, "fp8": 2.0}, None, measured=False)
NAMES = [name for name in SCHEMES.names() if SCHEMES.get(name, "") is not Auto]


def filled(schemes, device=CPU, tokens=128, shape=(96, 128)):
    schemes = {name: SCHEMES.make(name, {}, "") for name in schemes}
    return linear_table({"it": shape}, tokens, schemes, Bench(device, HARDWARE, 1.0, lambda what, cell: None))


def test_every_scheme_runs():
    table = filled(NAMES)
    column = "it 96x128"
    for name in NAMES:
        cell = table.rows[name][column]
        assert cell.reason is None and cell.value > 0, (name, cell.reason)
    assert next(iter(table.rows)) == "bf16"
    cells = {name: cells[column] for name, cells in table.rows.items()}
    assert cells["int8"].details["over_bf16"] == pytest.approx(cells["bf16"].value / cells["int8"].value)
    work = 2 * 128 * 96 * 128 / 1e9
    assert cells["bf16"].details["roofline_ms"] == pytest.approx(3 * work)
    assert cells["switchback"].details["roofline_ms"] == pytest.approx(2 * work)


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_wrong_gradient_is_refused(which):
    case = linear_case(LinearProblem(64, 32, 48, CPU), SCHEMES.make("int8", {}, ""))
    out = list(case.run(*case.inputs))
    assert 0 < case.check(out) <= 1
    out[which] = out[which] * 1.2
    with pytest.raises(WrongResultError, match=("y", "dx", "dw")[which]):
        case.check(out)


def test_runs_do_not_add_up():
    """Each call has gradients of its own: timing one a hundred times times the same work."""
    case = linear_case(LinearProblem(64, 32, 48, CPU), SCHEMES.make("bf16", {}, ""))
    first, second = case.run(*case.inputs), case.run(*case.inputs)
    assert torch.equal(first[2], second[2])


@pytest.mark.gpu
def test_every_scheme_on_gpu():
    table = filled(NAMES, torch.device("cuda", 0), 512, (512, 1024))
    reasons = {name: cells["it 512x1024"].reason for name, cells in table.rows.items()}
    assert all(r is None or r.startswith("left in bf16") for r in reasons.values()), reasons
