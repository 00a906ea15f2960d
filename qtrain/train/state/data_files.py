"""The files that a run trains on: a position in them means nothing in others. A checkpoint holds their checksums."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qtrain.core.checks import shown
from qtrain.core.checksums import sampled_checksums
from qtrain.core.errors import UserError

MAX_FILES = 1 << 14
"""The files beyond these are not read."""


def files_entry(files: Sequence[Path]) -> dict[str, Any]:
    """The entry of a checkpoint's meta. UserError for a file that cannot be read."""
    try:
        checksums = sampled_checksums(files[:MAX_FILES])
    except OSError as error:
        raise UserError(f"--train_ds: cannot read {error.filename}: {error.strerror}.") from None
    return {"count": len(files), "checksums": checksums}


def check_files(saved: Any, files: Sequence[Path], here: Mapping[str, Any], checkpoint: Path) -> Iterator[str]:
    """Lines for the log, if files of text are not the `saved` ones, as they may be edited. UserError for token shards,
    which are written once: others of the same size are other data, and the run would go on somewhere in them.

    saved: the entry of `checkpoint`; here: that of `files`.
    """
    if not isinstance(saved, dict) or not saved.get("count") or not files:
        return
    before, now = saved.get("checksums"), here["checksums"]
    if not isinstance(before, list) or saved["count"] != here["count"] or len(before) != len(now):
        raise UserError(
            f"--train_ds: cannot resume: the run of {checkpoint} read {shown(saved['count'])} files, this one reads "
            f"{len(files)}. Use the data of the interrupted run."
        )
    changed = [file for file, old, new in zip(files, before, now, strict=False) if old != new]
    for file in changed:
        if file.suffix == ".bin":
            raise UserError(
                f"--train_ds: cannot resume: {file} is not the file that the run of {checkpoint} read: its contents "
                "differ. Use the data of the interrupted run; to train on these, start a new run from its export."
            )
    if changed:
        yield f"--resume: {len(changed)} of {len(files)} files of --train_ds have changed since, first {changed[0]}"
