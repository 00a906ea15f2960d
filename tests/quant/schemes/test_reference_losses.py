"""A small run in every scheme has the losses and gradient norms that it had (`reference_losses.py` writes them).

Other CPUs, and other versions of torch, add in another order; a last bit can move a value to the next code. Measured
with ATEN_CPU_CAPABILITY=default and avx2 against AVX-512: losses moved by up to 6e-5 of themselves with 8 bits and 4e-4
with fewer, gradient norms by 3e-3 and 1e-2, and by 2e-7 where nothing is rounded. There this sees wrong formats and
products. On a machine that adds as that of the record did, which the run without low bits tells by every bit, it sees
any change. A name does not tell: two machines of one name, torch and instructions have differed.
"""

import json

import pytest

from qtrain.quant import SCHEMES
from tests.quant.schemes.reference_losses import CASES, FILE, STEPS, small_run

RECORD = json.loads(FILE.read_text())
RECORDED = RECORD["losses"]
EXACT, EIGHT_BITS, FEWER = (1e-5, 1e-5), (3e-4, 6e-3), (1e-3, 2e-2)
"""Tolerances of losses and of gradient norms."""
TOLERANCES = dict.fromkeys(("bf16", "int8_weight", "int4_weight"), EXACT)
TOLERANCES |= dict.fromkeys(("int4", "nvfp4", "bitnet", "binary"), FEWER)


def test_every_scheme_is_recorded():
    assert {case["quantize"] for case in CASES.values()} == {*SCHEMES.names()} - {"auto"}
    assert RECORDED.keys() == CASES.keys()


@pytest.fixture(scope="module")
def same(tmp_path_factory) -> bool:
    """Whether this machine adds as that of the record did."""
    return small_run(tmp_path_factory.mktemp("plain"), **CASES["bf16"]) == RECORD["plain"]


@pytest.mark.parametrize("name", CASES)
def test_losses_have_not_drifted(name, same, tmp_path):
    found, recorded = small_run(tmp_path, **CASES[name]), RECORDED[name]
    of_losses, of_norms = EXACT if same else TOLERANCES.get(CASES[name]["quantize"], EIGHT_BITS)
    norms = slice(STEPS, 2 * STEPS)
    assert found[norms] == pytest.approx(recorded[norms], rel=of_norms)
    assert found[:STEPS] + found[2 * STEPS :] == pytest.approx(recorded[:STEPS] + recorded[2 * STEPS :], rel=of_losses)
