"""Packed codes: what each byte holds, and back again at every length."""

import pytest
import torch

from qtrain.kernels.numerics.packing import pack_int4, pack_ternary, unpack_int4, unpack_ternary


def test_first_code_in_the_lowest_bits():
    assert pack_int4(torch.tensor([[1, -1, 7]], dtype=torch.int8)).tolist() == [[0xF1, 0x07]]
    assert pack_ternary(torch.tensor([[1, -1, 0, 1, -1]], dtype=torch.int8)).tolist() == [[0b01001101, 0b11]]


@pytest.mark.parametrize(
    "pack,unpack,largest,per_byte", [(pack_int4, unpack_int4, 7, 2), (pack_ternary, unpack_ternary, 1, 4)]
)
def test_round_trip(pack, unpack, largest, per_byte):
    for shape in [(1, 1), (3, 5), (4, 130), (0, 8), (5, 0)]:
        codes = torch.randint(-largest, largest + 1, shape, dtype=torch.int8)
        packed = pack(codes)
        assert packed.dtype == torch.uint8 and packed.shape == (shape[0], -(-shape[1] // per_byte))
        back = unpack(packed, shape[1])
        assert torch.equal(back, codes) and back.is_contiguous()
