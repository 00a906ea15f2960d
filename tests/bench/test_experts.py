"""The experts' table: every scheme is checked against fp64, and the roofline is that of a count by hand."""

import pytest
import torch

from qtrain.bench.case import Bench, WrongResultError
from qtrain.bench.experts import SHAPES, ExpertsProblem, ExpertsShape, experts_case, experts_table, roofline_ms
from qtrain.core.hardware.device import Hardware
from qtrain.quant import SCHEMES

CPU = torch.device("cpu")
HARDWARE = Hardware("a device", {"bf16": 1.0, "int8": 2.0, "fp8": 2.0}, None, measured=False)
NAMES = ("bf16", "int8", "fp8_tensorwise", "fp8_blockwise", "bitnet")


def test_every_scheme_runs_or_says_why():
    schemes = {name: SCHEMES.make(name, {}, "") for name in NAMES}
    table = experts_table(SHAPES["cpu"], schemes, Bench(CPU, HARDWARE, 1.0, lambda what, cell: None))
    cells = {name: cells["4 experts"] for name, cells in table.rows.items()}
    assert next(iter(cells)) == "bf16" and all(cells[name].value > 0 for name in NAMES[:4])
    assert cells["int8"].details["over_bf16"] == pytest.approx(cells["bf16"].value / cells["int8"].value)


@pytest.mark.parametrize("which", range(4))
def test_a_wrong_gradient_is_refused(which):
    case = experts_case(ExpertsProblem(SHAPES["cpu"]["4 experts"], CPU), SCHEMES.make("int8", {}, ""))
    out = list(case.run(*case.inputs))
    assert 0 < case.check(out) <= 1
    out[which] = out[which] * 1.2
    with pytest.raises(WrongResultError, match=("y", "dx", "dgate_up", "ddown")[which]):
        case.check(out)


def test_the_roofline_by_hand():
    """Infinite bandwidth: six products of 2 R C I, those of gate_up twice as large. Infinite peaks: the bytes."""
    shape = ExpertsShape(experts=4, per_token=2, hidden=128, width=64, tokens=96)
    bf16, fp8 = (SCHEMES.make(name, {}, "") for name in ("bf16", "fp8_tensorwise"))
    work = 3 * 3 * 2 * 192 * 128 * 64 / 1e9
    assert roofline_ms(shape, bf16, HARDWARE, 1e12) == pytest.approx(work)
    assert roofline_ms(shape, fp8, HARDWARE, 1e12) == pytest.approx(work / 2)
    t, r, c, i, e = 96, 192, 128, 64, 4
    passes = 4 * t * c + 2 * r * c * 2 + r * (4 + 2) * i + r * (6 + 4) * i + 4 * (r + t) * c
    inputs = 2 * r * (c + i + c + 2 * i) + 2 * e * c * (2 * i + i + i + 2 * i)
    results = 2 * r * (2 * i + c + i + c) + 2 * e * c * 3 * i
    sums = 2 * r * (c + 2 * i + c + i)
    fast = Hardware("a device", {"bf16": 1e12}, None, measured=False)
    assert roofline_ms(shape, bf16, fast, 1.0) == pytest.approx((passes + inputs + results + sums) / 1e9)


@pytest.mark.gpu
def test_every_scheme_on_gpu():
    schemes = {name: SCHEMES.make(name, {}, "") for name in NAMES[:4]}
    shapes = {"small": ExpertsShape(8, 2, 512, 256, 1024)}
    table = experts_table(shapes, schemes, Bench(torch.device("cuda", 0), HARDWARE, 5.0, lambda what, cell: None))
    assert all(table.rows[name]["small"].reason is None for name in NAMES[:4]), table.markdown()
