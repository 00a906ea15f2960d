"""A finished run sent to a tracker, from its metrics.jsonl and config.json: as if it had logged there while it ran."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from qtrain.core.errors import TrainingStopped, UserError, first_line
from qtrain.train.log.jsonl import in_order, read_object, read_records
from qtrain.train.log.trackers import TRACKERS, WHOLE_RUN, check_trackers, curves


def send_run(folder: Path, tracker: str) -> int:
    """Send the run in `folder` to the tracker of this name. Returns the number of records sent.

    Where the tracker has the run already, wandb ignores the steps that it has, TensorBoard shows them once, and the
    others get a new run of this name. UserError for an unknown tracker, one that is not installed, and a folder without
    records; TrainingStopped where the tracker fails.
    """
    folder = Path(folder)
    check_trackers([tracker], "--to")
    if not folder.is_dir():
        raise UserError(f"--to {tracker}: there is no run folder {str(folder)!r}.")
    records = timed(in_order(read_records(folder / "metrics.jsonl")[0]))
    if not records:
        raise UserError(
            f"--to {tracker}: {folder / 'metrics.jsonl'} has no records; give the folder of a run that has trained, "
            "RUNS_DIR/SCRIPT/TIME_NAME."
        )
    config = read_object(folder / "config.json")
    project, name = (str(config.get(key) or default) for key, default in (("project", "qtrain"), ("run_name", "run")))
    try:
        opened = TRACKERS[tracker](config, folder.resolve(), project, name, WHOLE_RUN)
        try:
            for record in records:
                if values := curves(record):
                    opened.log(values, record["step"], record["time"])
                if samples := _samples(record):
                    opened.log_samples(samples, record["step"])
        finally:
            opened.close()
    except Exception as error:  # any library's: not logged in, no network, a full disk
        raise TrainingStopped(f"--to {tracker}: {type(error).__name__}: {first_line(error)}") from None
    return len(records)


def timed(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The records, each with a `time`, if any has one: that of the one before, where it has none of its own."""
    found = [dict(record) for record in records]
    # The first time of any record also stands in for records before it.
    latest = next((time for r in found if (time := _number(r.get("time")))), None)
    for record in found:
        record["time"] = latest = _number(record.get("time")) or latest
    return found


def _number(value: Any) -> float | None:
    return value if isinstance(value, int | float) and not isinstance(value, bool) and value > 0 else None


def _samples(record: Mapping[str, Any]) -> list[tuple[str, str]]:
    """The samples of a record that are ones: a file may have been edited."""
    samples = record.get("samples")
    pairs = [s for s in samples if isinstance(s, list) and len(s) == 2] if isinstance(samples, list) else []
    return [(prompt, text) for prompt, text in pairs if isinstance(prompt, str) and isinstance(text, str)]
