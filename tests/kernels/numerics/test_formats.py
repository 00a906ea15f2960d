"""Packed codes: what each byte holds, and back again at every length."""

import pytest
import torch

from qtrain.kernels.numerics.formats import pack, unpack


def test_first_code_in_the_lowest_bits():
    assert pack(torch.tensor([[1, -1, 7]], dtype=torch.int8), "int4").tolist() == [[0xF1, 0x07]]
    assert pack(torch.tensor([[1, -1, 0, 1, -1]], dtype=torch.int8), "ternary").tolist() == [[0b01001101, 0b11]]
    signs = torch.tensor([[1, -1, -1, 1, 1, 1, 1, -1, -1, 1]], dtype=torch.int8)
    assert pack(signs, "binary").tolist() == [[0b10000110, 0b1]]


@pytest.mark.parametrize(("fmt", "largest", "per_byte"), [("int4", 7, 2), ("ternary", 1, 4), ("binary", 1, 8)])
def test_round_trip(fmt, largest, per_byte):
    for shape in [(1, 1), (3, 5), (4, 130), (0, 8), (5, 0)]:
        codes = torch.randint(-largest, largest + 1, shape, dtype=torch.int8)
        codes = codes | 1 if fmt == "binary" else codes  # no code of 0
        packed = pack(codes, fmt)
        assert packed.dtype == torch.uint8 and packed.shape == (shape[0], -(-shape[1] // per_byte))
        back = unpack(packed, fmt, shape[1])
        assert torch.equal(back, codes) and back.is_contiguous()
