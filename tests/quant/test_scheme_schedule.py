"""--quantize_schedule: when each scheme begins, and what the model is built with."""

import pytest

from qtrain.core.errors import UserError
from qtrain.quant.scheme_schedule import built_scheme, first_steps, read_phases

TERNARY = [[0, "bf16"], [0.2, "bitnet"]]


def test_shares_and_numbers_of_steps():
    phases = read_phases([[0, "bf16"], [0.25, "int8"], [600, "fp8_rowwise"]])
    assert first_steps(phases, 1000) == [0, 250, 600]
    assert [phase.spec for phase in phases] == ["bf16", "int8", "fp8_rowwise"]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([], "first entry must begin at 0"),
        ([[0.1, "int8"]], "first entry must begin at 0"),
        ([0, 1], r"\(0\): an entry is a list of two"),
        ([[0, "bf16", 1]], "an entry is a list of two"),
        ([[0, "bf16"], [1.5, "int8"]], r"1\.5 is not allowed"),
        ([[0, "bf16"], [-1, "int8"]], "-1 is not allowed"),
        ([[0, "bf16"], [True, "int8"]], "True is not allowed"),
        ([[0, "bf16"], ["x", "int8"]], "'x' is not allowed"),
        ([[0, "bf16"], [float("nan"), "int8"]], "nan is not allowed"),
        ([[0, "int9"]], "Did you mean 'int8'"),
        ([[0, "bf16"], [0.5, {"scheme": "int8", "outptu": "bf16"}]], "Did you mean 'output'"),
        ([[0, "bf16"], [0.5, {"output": "bf16"}]], 'the key "scheme" is missing'),
        ([[0, "auto"]], "'auto' chooses schemes"),
        ([[0, "int8_weight"], [0.5, "int8"]], "weights stored in low bits"),
        ([[0, "int8"], [0.5, "int8"]], "int8 follows itself"),
    ],
)
def test_what_is_no_schedule_is_refused(given, said):
    with pytest.raises(UserError, match=said):
        read_phases(given)


@pytest.mark.parametrize(
    ("given", "steps", "said"),
    [
        ([[0, "bf16"], [20, "int8"]], 10, "int8 begins after 20 steps, and there are 10"),
        ([[0, "bf16"], [0.01, "int8"]], 10, "int8 begins after 0 of 10 steps, and the entry before it after 0"),
        ([[0, "bf16"], [9, "int8"], [0.5, "bf16"]], 10, "bf16 begins after 5 of 10 steps"),
    ],
)
def test_entries_are_in_order_and_before_the_end(given, steps, said):
    with pytest.raises(UserError, match=said):
        first_steps(read_phases(given), steps)


def test_the_norms_of_a_later_scheme_are_there_from_the_first_step():
    scheme = built_scheme(read_phases(TERNARY), {"layers.0.*": "int8"})
    assert scheme.root.sub_norm
    assert scheme.at("layers.1.mlp.down_proj").scheme.leaves_all
    assert scheme.at("layers.0.mlp.down_proj").scheme.gemm_dtypes()["output"] == "int8"
    assert not built_scheme(read_phases([[0, "bf16"], [0.2, "int8"]]), None).root.sub_norm
