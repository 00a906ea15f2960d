"""The quantizers' table: every quantizer is checked by its rounding, and counted by its fewest bytes."""

import pytest
import torch

from qtrain.bench import quantizers
from qtrain.bench.case import Bench, WrongResultError
from qtrain.bench.quantizers import (
    QUANTIZER_ROWS,
    QUANTIZERS,
    ROWS_BETWEEN_PRODUCTS,
    check_quantized,
    quantizer_case,
    quantizer_table,
)
from qtrain.core.hardware.device import Hardware

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick_copy(monkeypatch):
    monkeypatch.setattr(quantizers, "copy_bandwidth", lambda device: 0.01)


def filled(shape, rows, device=CPU):
    hardware = Hardware("a device", {"bf16": 1.0, "bandwidth": 2.0}, None, measured=False)
    return quantizer_table([shape], rows, Bench(device, hardware, 1.0, lambda what, cell: None))


def test_every_quantizer_runs():
    table = filled((128, 256), QUANTIZER_ROWS)
    for name, cells in table.rows.items():
        cell = cells["128x256"]
        assert cell.reason is None and cell.value > 0, (name, cell.reason)
    assert table.rows["int8 rowwise"]["128x256"].details["bytes"] == 128 * 256 * 3 + 128 * 4
    assert table.rows["e4m3 1x128, both layouts"]["128x256"].details["bytes"] == 128 * 256 * 4 + (256 + 256) * 4
    assert table.rows["e4m3 1x128, transposed 128x128"]["128x256"].details["bytes"] == 128 * 256 * 4 + (256 + 2) * 4
    assert "0.0100 TB/s (datasheet 2.00)" in table.notes[0]


@pytest.mark.parametrize("q", QUANTIZERS, ids=lambda q: q.name)
def test_a_wrong_code_is_refused(q):
    case = quantizer_case(q, (128 if q.grouped else 16, 128), CPU)
    out = case.run(*case.inputs)
    assert case.check(out) <= 1
    for codes in out[::2]:
        wrong = codes.clone()
        bits = wrong.view(torch.uint8)
        bits[3, 5] = (bits[3, 5].int() + 3).remainder(256)  # three codes off
        spoilt = tuple(wrong if o is codes else o for o in out)
        with pytest.raises(WrongResultError):
            case.check(spoilt)


@pytest.mark.parametrize("row", ROWS_BETWEEN_PRODUCTS, ids=lambda row: row.name)
def test_a_wrong_number_between_products_is_refused(row):
    case = row.prepare((128, 256), CPU)
    out = case.run(*case.inputs)
    assert case.check(out) <= 2 and 0 <= case.unread < case.inputs[0].nbytes
    # A scale of codes may be any that saturates: codes alone.
    for spoilt in (i for i, t in enumerate(out) if t.dtype != torch.float32 or "SwiGLU" not in row.name):
        wrong = [t.clone(memory_format=torch.contiguous_format) for t in out]
        bits = wrong[spoilt].view(torch.uint8).flatten()
        bits[-1] ^= 0x24  # the highest byte: a third of the largest code, powers of two of a float
        with pytest.raises(WrongResultError):
            case.check(tuple(wrong))


def test_saturation_is_no_error():
    q = next(q for q in QUANTIZERS if q.given and not q.stochastic)
    x = torch.tensor([[1000.0, 1.0]], dtype=torch.bfloat16)
    codes = torch.tensor([[448.0, 1.0]]).to(torch.float8_e4m3fn)
    one = torch.ones(1)
    assert check_quantized(x, q)((codes, one, codes.t(), one)) <= 1


@pytest.mark.gpu
def test_every_quantizer_on_gpu():
    table = filled((512, 1024), QUANTIZER_ROWS, torch.device("cuda", 0))
    assert not {name: cells["512x1024"].reason for name, cells in table.rows.items() if cells["512x1024"].reason}
