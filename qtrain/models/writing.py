"""Writing what a finished run exports."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from qtrain.errors import TrainingStopped, first_line


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
