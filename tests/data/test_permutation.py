"""Computed permutations are bijections of any size, differ by key, and look up single places as the whole says."""

import numpy as np
import pytest

from qtrain.data.permutation import Permutation, hash64, uniform


@pytest.mark.parametrize("n", [*range(1, 34), 63, 64, 65, 1000, 4097, 100_003])
def test_is_a_bijection(n):
    whole = Permutation(n, 7, n).all()
    assert np.array_equal(np.sort(whole), np.arange(n))


@pytest.mark.parametrize("n", [1, 2, 5, 64, 1001])
def test_single_places_agree_with_the_whole(n):
    permutation = Permutation(n, 3)
    assert [permutation(i) for i in range(n)] == permutation.all().tolist()


def test_a_huge_range_needs_no_memory():
    permutation = Permutation(10**15, 1)
    images = {permutation(i) for i in range(1000)}
    assert len(images) == 1000 and max(images) < 10**15
    assert np.std([i / 10**15 for i in images]) == pytest.approx(12**-0.5, rel=0.1)  # spread over the whole range


def test_keys_give_different_orders_and_every_order_of_three_occurs():
    assert not np.array_equal(Permutation(100, 1, 0).all(), Permutation(100, 1, 1).all())
    orders = [tuple(Permutation(3, seed).all().tolist()) for seed in range(600)]
    assert len(set(orders)) == 6 and all(60 <= orders.count(order) <= 140 for order in set(orders))


def test_first_place_is_uniform():
    counts = np.bincount([Permutation(10, seed)(0) for seed in range(5000)], minlength=10)
    assert ((counts - 500) ** 2 / 500).sum() < 27.9  # chi-square with 9 degrees of freedom, p = 0.001


def test_hash_is_stable_and_uniform():
    assert hash64(1, 2) == 0x363D507D9DD1CAC8  # positions of saved checkpoints rest on it
    assert Permutation(10, 42).all().tolist() == [6, 4, 7, 0, 3, 8, 9, 2, 1, 5]
    assert hash64(1, 2) != hash64(2, 1) and hash64(0) != hash64(0, 0) and hash64(-1) != hash64(1)
    draws = [uniform(5, i) for i in range(4000)]
    assert min(draws) >= 0 and max(draws) < 1 and np.mean(draws) == pytest.approx(0.5, abs=0.02)
