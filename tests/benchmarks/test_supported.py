"""docs/supported.md is what the code says, for the GPUs that kernels are compiled for."""

import pytest
import torch

from benchmarks.supported import GPUS, PAGE, TABLES, pretended, rendered
from qtrain.core.hardware.capabilities import has_fp8, has_mx, has_wgmma
from qtrain.core.hardware.datasheets import DATASHEET
from qtrain.quant import SCHEMES
from tests.kernels.test_compile import ARCHITECTURES


def test_the_page_is_what_the_code_says():
    text = PAGE.read_text()
    assert rendered(text) == text, "run python -m benchmarks.supported"
    assert all(f"<!-- supported: {name} -->" in text for name in TABLES)


def test_it_has_the_targets_of_the_compile_tests():
    assert tuple(GPUS) == ARCHITECTURES
    assert sorted(product for products in GPUS.values() for product in products) == sorted(DATASHEET)


def row(scheme: str) -> dict[str, str]:
    head, _, *lines = TABLES["schemes"]().splitlines()
    cells = {name.strip(" `"): cells for line in lines for cells in [line.split("|")] for name in cells[1].split(",")}
    assert cells.keys() | {"auto"} == set(SCHEMES.names())
    return {name.strip(): cell.strip() for name, cell in zip(head.split("|"), cells[scheme], strict=True)}


def test_a_few_cells():
    """Written down a second time."""
    assert set(row("int8").values()) & {"native", "emulated", "refused", "reference"} == {"native", "reference"}
    fp8 = row("fp8_rowwise")
    assert [fp8[name] for name in ("sm_80", "sm_86", "sm_89", "sm_90")] == ["refused", "refused", "native", "native"]
    mx = row("mxfp8")
    assert (mx["sm_80"], mx["sm_90"], mx["sm_100"], mx["experts"]) == ("refused", "emulated", "native", "emulated")
    assert row("nvfp4")["sm_100"] == "emulated"


@pytest.mark.parametrize("arch", GPUS)
def test_the_pretended_gpus_datasheet_has_its_arithmetic(arch):
    with pretended(arch) as device:
        for product in GPUS[arch]:
            peaks = DATASHEET[product].peaks
            assert has_fp8(device) == ("fp8" in peaks) and has_mx(device) == ("mxfp8" in peaks), product
        assert has_wgmma(device) == (arch == 90)
    assert not has_fp8(torch.device("cpu"))
