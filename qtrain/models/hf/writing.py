"""Writing what a finished run exports."""

import contextlib
import stat
from collections.abc import Iterable, Iterator
from pathlib import Path

from qtrain.core.checksums import NAME, write_checksums
from qtrain.core.errors import TrainingStopped, first_line


@contextlib.contextmanager
def writing_export(folder: Path | str) -> Iterator[None]:
    """Failures of the disk inside become TrainingStopped, which says how to get the export all the same."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise TrainingStopped(
            f"the export {folder} could not be written: {reason}. --resume exports the last checkpoint again."
        ) from None


def finish_export(folder: Path, names: Iterable[str]) -> None:
    """The last step of an export: the checksums of these files, and the permissions that the umask gives a new file:
    safetensors writes through a temporary file, which only its owner may read."""
    names = list(names)
    write_checksums(folder, names)
    permissions = stat.S_IMODE((folder / NAME).stat().st_mode)
    for name in names:
        (folder / name).chmod(permissions)
