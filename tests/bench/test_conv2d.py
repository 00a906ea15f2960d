"""The table of convolutions at sizes of a CPU: its cases are right, and a wrong result is found."""

import pytest
import torch

from qtrain.bench import conv2d
from qtrain.bench.case import Bench, WrongResultError
from qtrain.bench.conv2d import COLUMNS, GEMMS, LAYERS, coded_case, conv2d_table, layer_case, network, plain_case
from qtrain.core.hardware.device import describe_hardware

CPU = torch.device("cpu")
PROBLEMS = {p.name.split()[1]: p for p in network(CPU)}


@pytest.mark.parametrize("kernel", ["3x3/2", "1x1/2", "2x2/2"])
@pytest.mark.parametrize("gemm", GEMMS)
def test_products_pass_their_checks_and_wrong_ones_do_not(gemm, kernel):
    p = PROBLEMS[kernel]
    for case in (plain_case(p, gemm), coded_case(p, gemm, "INT8"), coded_case(p, gemm, "FP8")):
        out = case.run(*case.inputs)
        assert case.check(out) <= 1
        for wrong in (1.05 * out, out.flip(0), torch.full_like(out, float("nan"))):
            with pytest.raises(WrongResultError):
                case.check(wrong)


@pytest.mark.parametrize("scheme", LAYERS)
def test_layers_pass_their_checks(scheme):
    case = layer_case(PROBLEMS["3x3/2"], scheme)
    assert case.check(case.run(*case.inputs)) <= 1


def test_sums_count_each_convolution_as_often_as_it_occurs(monkeypatch):
    found = [p for p in network(CPU) if p.name.startswith("resnet50 1x1 16")]
    assert [p.count for p in found] == [1, 2]
    monkeypatch.setattr(conv2d, "network", lambda device: found)
    monkeypatch.setattr(conv2d, "COLUMNS", [column for column in COLUMNS if column.startswith("output")])
    failing = lambda p, gemm, arithmetic: 1 / (arithmetic == "INT8")  # noqa: E731
    monkeypatch.setattr(conv2d, "coded_case", lambda *a: failing(*a) and coded_case(*a))
    table = conv2d_table(Bench(CPU, describe_hardware(CPU), 1.0, lambda what, cell: None))
    *rows, sums = table.rows.values()
    for column in ("output bf16", "output INT8"):
        assert sums[column].value == pytest.approx(rows[0][column].value + 2 * rows[1][column].value)
    assert rows[0]["output FP8"].reason.startswith("ZeroDivisionError") and sums["output FP8"].value is None


def test_the_networks_are_those_of_the_papers():
    """At a GPU's sizes: the 52 convolutions of ResNet-50 but for the stem, 4.1 G multiply-adds an image with it."""
    found = network(torch.device("cuda"))
    resnet = [p for p in found if p.name.startswith("resnet50")]
    assert sum(p.count for p in resnet) == 52
    stem = 112 * 112 * 64 * 3 * 49
    total = sum(p.count * p.shape.multiply_adds for p in resnet) / conv2d.BATCH + stem
    assert total == pytest.approx(4.09e9, rel=0.01)
