"""The schedule of two passes over groups of rows: each block twice, codes after all absmaxes of their group."""

import random

import pytest
import torch

from qtrain.kernels.quantize.column_groups import BLOCK_ROWS, BlockGroups
from qtrain.kernels.quantize.dual_groups import launch_dual_groups
from qtrain.kernels.quantize.group_passes import launch_schedule, schedule_ref
from tests.kernels.quantize.test_column_groups import check_bf16x2, check_swiglu_passes, rows_of_groups
from tests.kernels.quantize.test_kernels import KEY


def blocks_of_groups(generator: random.Random, groups: int, most: int) -> list[int]:
    """Ascending groups of up to `most` blocks, some without any; then blocks of none. Group 2 has one at least."""
    sizes = [generator.choice((0, 1, 1, 2, most)) for _ in range(groups)]
    sizes[2] = max(sizes[2], 1)
    return [group for group, size in enumerate(sizes) for _ in range(size)] + [-1] * generator.choice((0, 1, 7))


def test_codes_come_after_the_absmaxes_of_their_group():
    generator = random.Random(0)
    for lead in (1, 2, 3, 10, 100) * 20:
        of_block = blocks_of_groups(generator, 6, 30)
        steps = schedule_ref(torch.tensor(of_block, dtype=torch.int32), lead).tolist()
        assert sorted(action for action, _ in steps) == list(range(2 * len(of_block)))
        recorded = {group: 0 for group in range(-1, 6)}
        for action, awaited in steps:
            group = of_block[action // 2]
            if action % 2 == 0:
                recorded[group] += 1
            else:
                group = max(group, 0)
                assert recorded[group] == awaited == of_block.count(group), (of_block, lead)


def test_absmaxes_run_ahead_by_the_lead_and_no_more_than_a_group():
    of_block = torch.arange(20, dtype=torch.int32).repeat_interleave(3)
    actions = schedule_ref(of_block, 6)[:, 0].tolist()
    ahead = [sum(a % 2 == 0 for a in actions[: i + 1]) - a // 2 for i, a in enumerate(actions) if a % 2]
    assert ahead[: -3 * 3] == [9, 8, 7] * 17  # the group itself and the lead
    assert max(ahead) == 9


def check_schedule(device):
    generator = random.Random(1)
    for tiles in (1, 3, 16, 500):
        of_block = blocks_of_groups(generator, 40, 30)
        groups = BlockGroups(torch.tensor(of_block, dtype=torch.int32, device=device), 40)
        steps = launch_schedule(groups, tiles).cpu()
        ahead = int(steps[:, 0].remainder(2).argmax())  # absmax steps before the first codes
        first = of_block.count(of_block[0])
        assert torch.equal(steps, schedule_ref(groups.of_block.cpu(), min(ahead, len(of_block)) - first)), tiles


@pytest.mark.interpreter
def test_schedule_in_the_interpreter():
    check_schedule("cpu")


@pytest.mark.gpu
def test_schedule_on_gpu():
    check_schedule("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("key", [None, KEY], ids=["nearest", "stochastic"])
def test_passes_over_many_groups_on_gpu(key):
    """Many more tiles than CTAs at once; groups of a block beside groups larger than the lead."""
    generator, key = random.Random(2), key if key is None else key.cuda()
    for _ in range(3):
        of_block = [group for group in range(4) for _ in range(generator.choice((1, 2, 150)))] + [-1] * 5
        x, groups = rows_of_groups(2048, 0, "outlier", torch.bfloat16, "cuda", of_block)
        check_bf16x2(x, "int8", key, False, groups)
        check_swiglu_passes(768, "int8", "e4m3", key, "outlier", "cuda", of_block)


@pytest.mark.gpu
def test_passes_give_the_same_codes_every_time():
    """A CTA that read an absmax too early would give other codes."""
    of_block = torch.arange(128, dtype=torch.int32, device="cuda").repeat_interleave(9)
    x = torch.randn(BLOCK_ROWS * of_block.numel(), 2048, device="cuda").bfloat16()
    first = launch_dual_groups(x, "int8", BlockGroups(of_block, 128))
    for _ in range(50):
        again = launch_dual_groups(x, "int8", BlockGroups(of_block, 128))
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
