"""Collectives between two processes: all are right, a broken one is not timed, and the figures fit together."""

import pytest

from qtrain.bench import collectives
from qtrain.bench.collectives import COLLECTIVES, cell_of, collective_table, main, parse_mib
from qtrain.core.errors import UserError
from qtrain.parallel.sharding.gradient_wire import GRADIENT_WIRES
from tests.worlds import run_ranks


def _table(breaks: bool) -> dict:
    import torch

    if breaks:  # of the sums of ours, only the first rank's
        collectives.add_in_order = lambda total, terms: total
    return collective_table([1], 3, torch.device("cpu")).record()


def test_every_collective_is_right_and_timed():
    first, other = run_ranks(2, _table, False)
    assert [row["name"] for row in first["rows"]] == [collective.name for collective in COLLECTIVES]
    assert {f"reduce-scatter, ours, {name}" for name in GRADIENT_WIRES} < {row["name"] for row in first["rows"]}
    for row in first["rows"]:
        cell = row["cells"]["1 MiB"]
        assert cell["microseconds"] > 0, row
        assert cell["algorithm_gb_s"] == pytest.approx(2**20 / cell["microseconds"] / 1e3)
        bus = cell["bus_gb_s"] / cell["algorithm_gb_s"]
        assert bus == pytest.approx(1.0 if row["name"].startswith("all-reduce") else 0.5)
    assert first == other  # the slowest rank's


def test_a_wrong_sum_is_not_timed():
    found, _ = run_ranks(2, _table, True)
    wrong = {row["name"] for row in found["rows"] if row["cells"]["1 MiB"].get("reason") == "wrong result, not timed"}
    assert wrong == {f"reduce-scatter, ours, {name}" for name in GRADIENT_WIRES}


def test_bandwidths_of_eight_ranks(monkeypatch):
    monkeypatch.setattr(collectives, "world", lambda: 8)
    by_name = {collective.name: collective for collective in COLLECTIVES}
    cell = cell_of(by_name["all-reduce, torch"], 1e-3, 10**8)
    assert cell.shown() == "1,000 us, 100, 175" and cell.value == pytest.approx(175)
    assert cell_of(by_name["all-gather, torch"], 1e-3, 10**8).value == pytest.approx(87.5)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sizes", "1,x"], "--sizes: 'x' is not a size; write whole numbers of MiB from 1 to 16,384"),
        (["--sizes", "0"], "--sizes: '0' is not a size"),
        (["--sizes", ","], "--sizes: it is empty"),
        (["--repeats", "1"], "--repeats: 1 is out of range"),
        ([], "WORLD_SIZE: collectives need several processes; start python -m torch.distributed.run"),
    ],
)
def test_bad_input(tmp_path, monkeypatch, flags, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as refused:
        main([*flags, "--device", "cpu"])
    assert message in str(refused.value) and not list(tmp_path.iterdir())


def test_sizes_are_sorted():
    assert parse_mib("4,1, 4") == [1, 4]
