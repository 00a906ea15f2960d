"""The status line in a terminal and without one, and that train.log holds everything."""

import io
import logging
import os
import sys

import pytest
from rich.console import Console

from qtrain.train.log.status import StatusLine, duration, setup_log, short_number, three_digits


@pytest.fixture(autouse=True)
def _put_the_logger_back():
    yield
    logger = logging.getLogger("qtrain")
    for handler in list(logger.handlers):
        logger.removeHandler(handler)
        handler.close()
    logger.propagate = True


def console(terminal: bool) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=100, color_system=None)


FIELDS = {"loss": 3.25, "grad_norm": 0.5189, "tok_s": 151_234.0, "sol": 0.413, "memory": 38 * 2**30, "step_s": 2.0}


def test_the_line_without_a_terminal_has_every_field_and_no_escape_codes(tmp_path):
    out = console(terminal=False)
    with StatusLine(1000, setup_log(tmp_path, out)) as status:
        status.update(120, **FIELDS)
    line = (
        "step 120/1,000 12.0% | loss 3.2500 | norm 0.519 | 151k tok/s | 2,000 ms | sol 41.3% | 38.0 GiB | ETA 29m 20s"
    )
    assert out.file.getvalue() == line + "\n"
    assert (tmp_path / "train.log").read_text().endswith(f" INFO {line}\n")


def test_the_power_is_shown_where_it_is_known(tmp_path):
    out = console(terminal=False)
    with StatusLine(1000, setup_log(tmp_path, out)) as status:
        status.update(120, **FIELDS, power=1234.5)
    assert "| 38.0 GiB | 1,234 W | ETA 29m 20s" in out.file.getvalue()


def test_a_narrow_terminal_shows_everything_in_place(tmp_path):
    """Lines are folded between fields, and redrawn: the cursor goes up again."""
    out = Console(file=io.StringIO(), force_terminal=True, width=50, color_system=None)
    with StatusLine(1000, setup_log(tmp_path, out), interval_s=3600) as status:
        for step in (120, 121):
            status.update(step, **FIELDS, power=612.0)
            status._live.refresh()
        shown = out.file.getvalue()
    for field in (
        "step 121/1,000 12.1% | loss 3.2500 | norm 0.519\n",
        "151k tok/s | 2,000 ms | sol 41.3% | 38.0 GiB\n",
    ):
        assert field in shown.replace("\r", "")
    assert "612 W | ETA 29m 18s" in shown and "\x1b[1A" in shown


def test_the_eta_is_of_many_steps_so_that_one_slow_step_changes_it_little(tmp_path):
    def eta(seconds: list[float]) -> str:
        out = console(terminal=False)
        with StatusLine(1100, setup_log(tmp_path, out), interval_s=0) as status:
            for step, step_s in enumerate(seconds, 1):
                status.update(step, step_s=step_s)
        return out.file.getvalue().splitlines()[-1].partition("ETA ")[2]

    assert eta([0.1] * 100) == "1m 40s"
    assert eta([0.1] * 99 + [10]) == "3m 19s"  # of the last step alone it would be 2h 46m
    assert eta([10.0] * 20 + [0.1] * 1000) == "10s"


def test_plain_lines_come_at_intervals_and_the_last_always(tmp_path):
    out = console(terminal=False)
    with StatusLine(50, setup_log(tmp_path, out), interval_s=3600) as status:
        for step in range(1, 51):
            status.update(step, loss=1.0)
    assert [line.split()[1] for line in out.file.getvalue().splitlines()] == ["1/50", "50/50"]


def test_in_a_terminal_the_line_is_live_and_messages_appear_above_it(tmp_path):
    out = console(terminal=True)
    logger = setup_log(tmp_path, out)
    with StatusLine(50, logger, interval_s=0) as status:
        status.update(1, loss=1.0)
        logger.info("evaluating [held out]")
        status.update(2, loss=0.5)
        status._live.refresh()
    shown = out.file.getvalue()
    assert "\x1b[" in shown and "evaluating [held out]" in shown
    assert shown.index("evaluating") < shown.rindex("step 2/50")
    log = (tmp_path / "train.log").read_text()
    assert "evaluating [held out]" in log and "step 1/50" in log and "\x1b" not in log


def test_a_second_setup_does_not_duplicate_lines(tmp_path):
    setup_log(tmp_path, console(terminal=False))
    out = console(terminal=False)
    logger = setup_log(tmp_path, out)
    logger.info("once")
    logger.warning("careful")
    assert out.file.getvalue() == "once\nwarning: careful\n"
    assert (tmp_path / "train.log").read_text().count("once") == 1


def test_other_ranks_only_warn_and_write_no_file(tmp_path):
    out = console(terminal=False)
    logger = setup_log(tmp_path, out, rank=3)
    logger.info("hidden")
    logger.warning("seen")
    assert out.file.getvalue() == "warning: rank 3: seen\n"
    assert not (tmp_path / "train.log").exists()


def test_long_messages_are_not_wrapped_without_a_terminal(tmp_path):
    out = console(terminal=False)
    setup_log(tmp_path, out).info("x" * 500)
    assert out.file.getvalue() == "x" * 500 + "\n"


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0"), (12.34, "12.3"), (999.6, "1k"), (151_234, "151k"), (1_234_567, "1.23M"), (7e9, "7G")]
)
def test_short_numbers(value, text):
    assert short_number(value) == text


@pytest.mark.parametrize("value,shown", [(1234.5, "1,234"), (99.95, "100.0"), (1.2345, "1.23"), (0.0, "0.0"), (2, "2")])
def test_three_digits(value, shown):
    assert three_digits(value) == shown


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0s"),
        (1e-4, "under 0.01s"),
        (0.4, "0.40s"),
        (59.6, "1m 00s"),
        (185, "3m 05s"),
        (3720, "1h 02m"),
        (90_000, "1d 01h"),
    ],
)
def test_durations(seconds, text):
    assert duration(seconds) == text


# ---- no output fails a run -------------------------------------------------------------------------------------------

ODD = "caf\u00e9 \u2192 \u6f22\u5b57 \U0001f600 \udc80"


@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "latin-1", "utf-8"])
def test_text_that_the_consoles_encoding_lacks_is_escaped(tmp_path, monkeypatch, encoding):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict", write_through=True))
    log = setup_log(tmp_path)
    with StatusLine(2, log, unit=ODD) as status:
        log.info("step 1: sample: %s", ODD)
        status.update(1, tok_s=1.0)
    shown = raw.getvalue().decode(encoding)
    assert "step 1: sample: caf" in shown and "\\udc80" in shown and ("\\u2192" in shown) == (encoding != "utf-8")
    assert "caf\u00e9 \u2192" in (tmp_path / "train.log").read_text(encoding="utf-8")


def test_a_console_that_is_gone_gets_nothing_more(tmp_path, monkeypatch):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", open(write, "w", encoding="utf-8"))  # noqa: SIM115
    log = setup_log(tmp_path)
    for number in range(3):
        log.info("line %d", number)
    sys.stdout.flush()
    assert (tmp_path / "train.log").read_text().count("line") == 3


def test_a_log_file_on_a_full_disk_costs_its_lines_only(tmp_path, capsys):
    (tmp_path / "train.log").symlink_to("/dev/full")
    setup_log(tmp_path).info("hello")
    found = capsys.readouterr()
    assert "hello" in found.out and "Traceback" not in found.err
