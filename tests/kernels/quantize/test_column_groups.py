"""Column scales of groups of rows: the codes and scales of each group's own rows, quantized alone."""

import pytest
import torch

from qtrain.kernels.grouped.token_permutation import ALIGNMENT
from qtrain.kernels.numerics.formats import LINEAR_FORMATS, unpack
from qtrain.kernels.numerics.philox import NEAREST, Rounding
from qtrain.kernels.quantize.absmax import column_absmax_ref, launch_absmax
from qtrain.kernels.quantize.column_groups import BLOCK_ROWS, BlockGroups, equal_groups
from qtrain.kernels.quantize.dual_bf16x2 import launch_dual_bf16x2
from qtrain.kernels.quantize.operators import quantize, quantize_dual, quantize_transposed
from qtrain.kernels.quantize.reference import quantize_ref, quantize_transposed_ref
from qtrain.kernels.quantize.tiled import Tile, launch_tiled
from qtrain.kernels.swiglu.backward import launch_quantize_swiglu_backward
from qtrain.kernels.swiglu.quantize import quantize_swiglu, quantize_swiglu_backward, quantize_swiglu_rowwise
from qtrain.kernels.swiglu.rowwise import launch_quantize_swiglu_rowwise
from qtrain.kernels.swiglu.swiglu import swiglu, swiglu_backward
from tests.cases import sampled, without_e5m2
from tests.kernels.quantize.test_kernels import KEY, ROLE, same, stress_matrix
from tests.kernels.swiglu.test_quantize import bits_of, reference_output

GROUP_OF_BLOCK = [0, 0, 2, 3, -1]
"""Group 1 has no rows; the last block belongs to none."""
GROUPS = 4
FEW = [0, 2, -1]


def rows_of_groups(columns, seed, kind, dtype, device, group_of_block=GROUP_OF_BLOCK):
    """x [M, columns] with a NaN or an Inf in group 2 alone, zeros in blocks of no group."""
    x = stress_matrix(BLOCK_ROWS * len(group_of_block), columns, seed, "outlier", dtype, "cpu")
    if kind == "nonfinite":
        first = BLOCK_ROWS * group_of_block.index(2)
        x[first + 4, columns // 3], x[first + 14, columns // 2] = float("nan"), -float("inf")
    x[(torch.tensor(group_of_block) < 0).repeat_interleave(BLOCK_ROWS)] = 0
    groups = BlockGroups(torch.tensor(group_of_block, dtype=torch.int32, device=device), GROUPS)
    return x.to(device), groups


def alone(x, fmt, key, power_of_two, groups):
    """Transposed codes (unpacked) and scale of each group's rows, by the quantizer without groups. The random bits are
    those of the rows' places in x."""
    k, of_row = x.shape[1], groups.group_of_block.repeat_interleave(BLOCK_ROWS)
    bits = Rounding(key, ROLE).bits(x.shape)[1]
    codes, scale = torch.zeros(k, x.shape[0], device=x.device), []
    for group in range(groups.count):
        mine = of_row == group
        own, s = quantize_transposed_ref(x[mine], fmt, "rowwise", None if bits is None else bits[mine], power_of_two)
        codes[:, mine] = unpack(own, fmt, int(mine.sum())).float()
        scale.append(s)
    return codes, torch.cat(scale)


def check_against_alone(found, x, fmt, key, power_of_two, groups):
    codes, scale = alone(x, fmt, key, power_of_two, groups)
    got, got_scale = unpack(found[0], fmt, x.shape[0]).float(), found[1]
    if fmt == "ternary":  # a mean depends on the order
        assert torch.allclose(got_scale, scale, rtol=1e-6, equal_nan=True)
    else:
        same([got_scale], [scale], fmt)
    assert torch.equal(got, codes), fmt


def test_blocks_are_those_of_groups():
    assert BLOCK_ROWS == ALIGNMENT
    assert equal_groups(3, 256, torch.device("cpu")).tolist() == [0, 0, 1, 1, 2, 2]
    with pytest.raises(AssertionError, match="not a multiple of 128"):
        equal_groups(2, 130, torch.device("cpu"))
    with pytest.raises(AssertionError, match="130 rows are not 2 blocks"):
        quantize_transposed(torch.ones(130, 8), "int8", "rowwise", group_of_block=torch.zeros(2).int(), groups=2)


@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", LINEAR_FORMATS)
def test_each_group_as_if_alone(fmt, key):
    for kind in ("outlier", "nonfinite"):
        x, groups = rows_of_groups(40, 0, kind, torch.float32, "cpu")
        if fmt == "ternary" and kind == "nonfinite":
            x[BLOCK_ROWS * GROUP_OF_BLOCK.index(2) + 14, 20] = (
                1.0  # of an Inf the mean is an Inf alone and a NaN among groups
            )
        grouped = {"group_of_block": groups.group_of_block, "groups": groups.count}
        found = quantize_transposed(x, fmt, "rowwise", key, ROLE, kind == "outlier", **grouped)
        check_against_alone(found, x, fmt, key, kind == "outlier", groups)
        dual = quantize_dual(x, fmt, "rowwise", "rowwise", key, ROLE, power_of_two=kind == "outlier", **grouped)
        same(dual, [*quantize(x, fmt, "rowwise", key, ROLE, kind == "outlier"), *found], fmt)


def test_other_granularities_are_not_changed():
    x, groups = rows_of_groups(64, 0, "outlier", torch.float32, "cpu")
    for granularity in ("tensorwise", "1x128", "128x128", "32x32"):
        found = quantize_transposed(x, "int8", granularity, group_of_block=groups.group_of_block, groups=GROUPS)
        same(found, quantize_transposed(x, "int8", granularity), granularity)


def expected_dual(x, fmt, rounding, power_of_two, groups):
    row_bits, column_bits = rounding.bits(x.shape)
    return [
        *quantize_ref(x, fmt, "rowwise", row_bits, power_of_two),
        *quantize_transposed_ref(x, fmt, "rowwise", column_bits, power_of_two, groups=groups),
    ]


def check_tiled(x, fmt, key, power_of_two, groups, **options):
    rounding = Rounding(key, ROLE)
    found = launch_tiled(x, fmt, "rowwise", "rowwise", rounding, power_of_two, groups=groups, **options)
    same(found, expected_dual(x, fmt, rounding, power_of_two, groups), fmt)
    found = launch_tiled(x, fmt, None, "rowwise", rounding, power_of_two, groups=groups, **options)
    same(found, expected_dual(x, fmt, rounding, power_of_two, groups)[2:], fmt)


def check_bf16x2(x, fmt, key, power_of_two, groups):
    for rounding in (NEAREST,) if key is None else (Rounding(key, ROLE), Rounding(key, ROLE, rows=False)):
        found = launch_dual_bf16x2(x, fmt, "rowwise", rounding, power_of_two, groups=groups)
        same(found, expected_dual(x, fmt, rounding, power_of_two, groups), (fmt, rounding))


def check_absmax(x, groups, **options):
    for rows in (False, True):
        found = launch_absmax(x, rows=rows, columns=True, groups=groups, **options)[2]
        assert torch.equal(bits_of(found), bits_of(column_absmax_ref(x, groups)))


@pytest.mark.interpreter
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", without_e5m2(["int8", "e4m3", "e5m2"]))
def test_kernels_in_the_interpreter(fmt, key):
    for kind in ("outlier", "nonfinite")[: 1 if key is None else 2]:
        x, groups = rows_of_groups(48, 1, kind, torch.bfloat16, "cpu", FEW)
        check_bf16x2(x, fmt, key, kind == "outlier", groups)
        check_absmax(x, groups)
        if fmt == "int8":
            check_tiled(x.float(), fmt, key, kind == "outlier", groups, tile=Tile(64, 64, 4))
            check_absmax(x.float(), groups)


@pytest.mark.interpreter
def test_packed_formats_in_the_interpreter():
    x, groups = rows_of_groups(40, 2, "outlier", torch.float32, "cpu", FEW)
    check_tiled(x, "int4", KEY, False, groups)
    scale = quantize_transposed_ref(x, "ternary", "rowwise", groups=groups)[1]
    found = launch_tiled(x, "ternary", None, "rowwise", scale_t=scale, groups=groups)
    same(found, quantize_transposed_ref(x, "ternary", "rowwise", groups=groups), "ternary")


def check_swiglu_rows(width, fmt, key, kind, device, group_of_block):
    x, groups = rows_of_groups(2 * width, 3, kind, torch.bfloat16, device, group_of_block)
    y, rounding = reference_output(x, None), NEAREST if key is None else Rounding(key, ROLE)
    *found, columns = launch_quantize_swiglu_rowwise(x, fmt, rounding, groups=groups)
    same(found, quantize_ref(y, fmt, "rowwise", rounding.bits(y.shape)[0]), fmt)
    assert torch.equal(bits_of(columns), bits_of(column_absmax_ref(y, groups)))


def check_swiglu_gradient(width, fmt, key, kind, device, group_of_block):
    x, groups = rows_of_groups(2 * width, 3, kind, torch.bfloat16, device, group_of_block)
    dy, _ = rows_of_groups(width, 4, "outlier", torch.bfloat16, device, group_of_block)
    y, dx = reference_output(x, None), reference_output(x, dy)
    columns, rounding = column_absmax_ref(y, groups), NEAREST if key is None else Rounding(key, ROLE)
    codes_t, scale_t, got, amax = launch_quantize_swiglu_backward(x, dy, columns, fmt, rounding, groups=groups)
    same((codes_t, scale_t), quantize_transposed_ref(y, fmt, "rowwise", rounding.bits(y.shape)[1], groups=groups), fmt)
    assert torch.equal(got.nan_to_num(nan=-1.0), dx.nan_to_num(nan=-1.0))
    assert torch.equal(bits_of(amax[1]), bits_of(column_absmax_ref(dx, groups)))
    dual = launch_dual_bf16x2(dx, fmt, "rowwise", rounding, row_column_amax=amax, groups=groups)
    same(dual, expected_dual(dx, fmt, rounding, False, groups), fmt)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "fmt, key, group_of_block", sampled([("int8", None, [2]), ("e4m3", KEY, [0, 2, -1])], lambda *_: True)
)
def test_swiglu_in_the_interpreter(fmt, key, group_of_block):
    check_swiglu_rows(48, fmt, key, "outlier", "cpu", group_of_block)
    check_swiglu_gradient(48, fmt, key, "nonfinite", "cpu", FEW)


def check_swiglu_operators(device):
    for dtype, fmt, fmt_y in ((torch.float32, "int8", "int8"), (torch.bfloat16, "e4m3", "int8")):
        x, groups = rows_of_groups(2 * 48, 3, "outlier", dtype, device)
        dy, _ = rows_of_groups(48, 4, "outlier", dtype, device)
        grouped = {"group_of_block": groups.group_of_block, "groups": groups.count}
        *_, columns = quantize_swiglu_rowwise(x, fmt_y, **grouped)
        found = quantize_swiglu_backward(
            x, dy, columns, fmt, None, 0, True, True, False, fmt_y, None, 0, False, **grouped
        )[:6]
        dx = swiglu_backward(dy, x)
        expected = [*quantize_dual(dx, fmt, "rowwise", "rowwise", **grouped)]
        expected += quantize_transposed(swiglu(x), fmt_y, "rowwise", **grouped)
        same(found, expected, fmt)
        same(quantize_swiglu(x, dy, "int4", "rowwise", "rowwise", **grouped)[:4],
             quantize_dual(dx, "int4", "rowwise", "rowwise", **grouped), "int4")  # fmt: skip


def test_swiglu_operators():
    check_swiglu_operators("cpu")


def test_operators():
    x, groups = rows_of_groups(48, 0, "outlier", torch.float32, "cpu")
    grouped = {"group_of_block": groups.group_of_block, "groups": groups.count}
    torch.library.opcheck(quantize_transposed, (x, "int8", "rowwise"), grouped)
    torch.library.opcheck(quantize_dual, (x, "e4m3", "rowwise", "rowwise"), grouped)
    torch.library.opcheck(torch.ops.qtrain.quantize_swiglu_rowwise.default, (x, "int8"), grouped)
    columns = column_absmax_ref(swiglu(x), groups)
    arguments = x, x[:, :24].contiguous(), columns, "int8", None, 0, True, True, False, "e4m3", None, 0, False
    torch.library.opcheck(torch.ops.qtrain.quantize_swiglu_backward.default, arguments, grouped)


def random_groups(generator):
    """Up to four blocks of each group, one at least of group 2, then blocks of none."""
    counts = torch.randint(0, 5, (GROUPS,), generator=generator).tolist()
    counts[2] = max(counts[2], 1)
    return [group for group, count in enumerate(counts) for _ in range(count)] + [-1] * counts[0]


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("fmt", ["int8", "e4m3", "e5m2"])
def test_kernels_on_gpu(fmt, key):
    generator, key = torch.Generator().manual_seed(5), key if key is None else key.cuda()
    for number in range(40):
        group_of_block = random_groups(generator)
        columns = 16 * int(torch.randint(1, 80, (), generator=generator))
        kind = ("outlier", "nonfinite")[number % 2]
        x, groups = rows_of_groups(columns, number, kind, torch.bfloat16, "cuda", group_of_block)
        check_bf16x2(x, fmt, key, number % 4 == 0, groups)
        check_tiled(x, fmt, key, number % 4 == 0, groups)
        check_absmax(x, groups)
        check_absmax(x.float(), groups)
        if number % 4 == 0:
            check_tiled(x, "int4", key, False, groups)
        if number % 8 == 0:
            width = (144, 608, 4864)[number // 8 % 3]
            check_swiglu_rows(width, fmt, key, kind, "cuda", group_of_block)
            check_swiglu_gradient(width, fmt, key, kind, "cuda", group_of_block)
    check_swiglu_operators("cuda")
