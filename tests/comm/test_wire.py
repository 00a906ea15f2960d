"""Messages of different lengths, and the count of their bytes."""

import torch

from qtrain.comm.wire import all_gather_rows, exchange, gather, in_buckets, maximum_over_ranks, sent
from tests.worlds import run_ranks


def _exchange(sizes: list[int]) -> tuple:
    me = torch.distributed.get_rank()
    messages = torch.cat([torch.full((n,), 10.0 * me + d) for d, n in enumerate(sizes)]).bfloat16()
    received = exchange(messages, sizes, sizes[me], None, "test")
    return received.tolist(), sent["test"]


def test_all_to_all_of_uneven_messages_and_one_of_no_elements():
    found = run_ranks(3, _exchange, [2, 0, 1])
    assert [rows for rows, _ in found] == [[[0, 0], [10, 10], [20, 20]], [[], [], []], [[2], [12], [22]]]
    assert [count for _, count in found] == [2 * 1, 2 * 3, 2 * 2]  # bf16, without a rank's message to itself


def _gather(sizes: list[int]) -> tuple:
    me = torch.distributed.get_rank()
    rows = gather(torch.full((sizes[me],), me, dtype=torch.uint8), sizes, None, "test")
    maxima = torch.tensor([float(me), -float(me)])
    maximum_over_ranks(maxima)
    return [row.tolist() for row in rows], sent["test"], maxima.tolist(), all_gather_rows(torch.tensor([me])).tolist()


def test_gather_of_uneven_messages():
    for rows, count, maxima, every in run_ranks(3, _gather, [2, 0, 3]):
        assert rows == [[0, 0], [], [2, 2, 2]] and count == 6  # padded to the longest
        assert maxima == [2, 0] and every == [[0], [1], [2]]


def test_buckets_hold_items_in_order_and_a_large_one_alone():
    size = 1 << 27
    assert list(in_buckets([1, 1, 1, 5, 1], lambda n: n * size)) == [[1, 1], [1], [5], [1]]
    assert list(in_buckets([], int)) == []
