"""Every row of the table of products runs and is right, or says why it does not; a wrong result is not timed."""

import pytest
import torch

from qtrain.bench import matmul_rows
from qtrain.bench.case import Bench, WrongResultError, check_product, implementation
from qtrain.bench.matmul_rows import ROWS
from qtrain.bench.matmuls import Problem, matmul_table
from qtrain.bench.tables import Cell
from qtrain.core.hardware.device import Hardware
from qtrain.kernels.autotune import forced

CPU = torch.device("cpu")
NOT_ON_A_CPU = ("Inductor", "torchao", "FP8 cuBLAS, 1x128", "MXFP8", "NVFP4")
TABLE = Hardware("a device", {"bf16": 2.0, "int8": 4.0}, None, measured=False)


def filled(problem: Problem, rows=ROWS):
    told = []
    report = lambda what, cell: told.append(what)  # noqa: E731
    table = matmul_table({"it": problem}, rows, Bench(CPU, TABLE, 1.0, report))
    assert len(told) == len(rows)
    return table


def test_every_row_runs_or_says_why():
    table = filled(Problem(48, 32, 256, CPU))
    for row in ROWS:
        cell = table.rows[row.name]["it"]
        if any(word in row.name for word in NOT_ON_A_CPU):
            assert "GPU only" in cell.reason or "pip install torchao" in cell.reason, row.name
        else:
            assert cell.reason is None and cell.value > 0 and 0 <= cell.details["error_share"] <= 1, row.name
    assert table.rows["peak INT8 (datasheet, dense)"]["it"].value == 4.0
    assert len({row.name for row in ROWS}) == len(ROWS)


@pytest.mark.parametrize("a,b", [(True, True), (False, True)])
def test_layouts(a, b):
    """Operands lie as asked, the product is the same; packed codes have one layout and say so."""
    problem = Problem(48, 32, 256, CPU, a, b)
    table = filled(problem, [row for row in ROWS if "rowwise" in row.name or "plain" in row.name])
    assert "one layout" in table.rows["INT4 Triton, packed, plain"]["it"].reason
    assert "K-major only" in table.rows["FP8 cuBLAS, rowwise"]["it"].reason
    for name in ("INT8 Triton, rowwise", "INT8 cuBLAS, plain", "FP8 Triton, plain", "INT8 Triton, plain"):
        assert table.rows[name]["it"].reason is None, name
    case = matmul_rows.int8_plain(problem)
    assert [x.t().is_contiguous() for x in case.inputs] == [a, b]
    assert torch.equal(case.run(*case.inputs), matmul_rows.int8_plain(Problem(48, 32, 256, CPU)).run(*case.inputs))


@pytest.mark.parametrize("plant", [lambda out: out[3, 5].add_(1), lambda out: out[47].zero_(), lambda out: out.t()])
def test_a_wrong_result_is_refused(monkeypatch, plant):
    def planted(a, b):
        out = matmul_rows.torch._int_mm(a, b.t())
        changed = plant(out)
        return changed if changed.shape == (32, 48) else out

    monkeypatch.setattr(matmul_rows, "int8_mm", planted)
    cell = filled(Problem(48, 32, 256, CPU), [row for row in ROWS if row.name == "INT8 Triton, plain"])
    cell = cell.rows["INT8 Triton, plain"]["it"]
    assert cell.reason.startswith("wrong result, not timed") and cell.details["wrong"] and cell.value is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_single_bad_element_of_a_rounded_result_is_seen(dtype):
    a, b = torch.randn(40, 300, dtype=torch.float64), torch.randn(30, 300, dtype=torch.float64)
    check = check_product(lambda: a, lambda: b, 2.0**-20)
    right = (a @ b.t()).to(dtype)
    assert check(right) <= 1
    for bad in (right[7, 9] * 1.02, float("nan"), float("inf")):
        wrong = right.clone()
        wrong[7, 9] = bad
        with pytest.raises(WrongResultError):
            check(wrong)


def test_a_row_that_fails_is_a_reason():
    def prepare():
        raise RuntimeError("no such kernel\nand more")

    cell = Bench(CPU, TABLE, 1.0, lambda what, cell: None).examine(prepare, lambda case, ms: Cell(1.0))
    assert cell.reason == "RuntimeError: no such kernel"


def test_a_family_is_forced_for_a_while(monkeypatch):
    monkeypatch.setenv("QTRAIN_IMPL", "cublas")
    with implementation("triton"):
        assert forced() == "triton"
    assert forced() == "cublas"
    monkeypatch.delenv("QTRAIN_IMPL")
    with implementation("triton"):
        assert forced() == "triton"
    assert forced() is None


@pytest.mark.gpu
@pytest.mark.parametrize("layout", [(False, False), (False, True), (True, True)])
def test_every_row_on_gpu(layout):
    """Inductor's rows take minutes: they are left to the benchmark itself."""
    rows = [row for row in ROWS if "Inductor" not in row.name]
    table = filled(Problem(512, 768, 1024, torch.device("cuda", 0), *layout), rows)
    reasons = {name: cells["it"].reason for name, cells in table.rows.items() if cells["it"].reason}
    known = ("compute capability", "pip install", "K-major", "one layout")
    assert all(any(word in reason for word in known) for reason in reasons.values()), reasons
