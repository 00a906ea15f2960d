"""Grouped products of packed codes: those of the unpacked ones."""

import pytest
import torch

from qtrain.kernels.grouped.grouped_int4_mm import k_grouped_int4_mm, launch_unpack_int4, m_grouped_int4_mm
from qtrain.kernels.grouped.grouped_mm import k_grouped_mm_ref, m_grouped_mm_ref
from qtrain.kernels.numerics.formats import pack, unpack
from tests.kernels.gemm.test_scaled_mm import DTYPES
from tests.kernels.grouped.cases import ROUTINGS, routed, rows_operands, sums_operands


def check_products(device: str) -> None:
    for number, routing in enumerate(ROUTINGS):
        g, role = routed(routing, device=device), ("output", "grad_input")[number % 2]
        a, b, *scales = rows_operands(g, 32, 64, DTYPES[0], role)
        a, b = (x.clamp(-8, 7) for x in (a, b))
        packed = pack(a, "int4"), pack(b, "int4")
        y = m_grouped_int4_mm(*packed, *scales, g.group_of_block, g.starts, torch.bfloat16)
        assert torch.equal(y, m_grouped_mm_ref(a, b, *scales, g.starts, torch.bfloat16))
        a, b, *scales = sums_operands(g, 32, 64, DTYPES[0])
        a, b = (x.clamp(-8, 7) for x in (a, b))
        dw = k_grouped_int4_mm(pack(a, "int4"), pack(b, "int4"), *scales, g.starts, torch.bfloat16)
        assert torch.equal(dw, k_grouped_mm_ref(a, b, *scales, g.starts, torch.bfloat16))


def test_products_of_unpacked_codes():
    check_products("cpu")


@pytest.mark.filterwarnings("ignore")
def test_operators():
    g = routed("random")
    a, b, *scales = rows_operands(g, 16, 32, DTYPES[0], "output")
    a, b = pack(a.clamp(-8, 7), "int4"), pack(b.clamp(-8, 7), "int4")
    torch.library.opcheck(m_grouped_int4_mm, (a, b, *scales, g.group_of_block, g.starts, torch.bfloat16))
    a, b, *scales = sums_operands(g, 16, 32, DTYPES[0])
    a, b = pack(a.clamp(-8, 7), "int4"), pack(b.clamp(-8, 7), "int4")
    torch.library.opcheck(k_grouped_int4_mm, (a, b, *scales, g.starts, torch.bfloat16))


def check_unpacking(device: str) -> None:
    for shape in ((1, 1), (3, 5), (37, 130), (64, 256)):
        packed = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(device)
        assert torch.equal(launch_unpack_int4(packed), unpack(packed, "int4", 2 * shape[1]))


@pytest.mark.interpreter
def test_unpacking_in_the_interpreter():
    check_unpacking("cpu")


@pytest.mark.gpu
def test_on_gpu():
    check_unpacking("cuda")
    check_products("cuda")
