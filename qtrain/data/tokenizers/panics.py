"""Rust's own report of a panic, kept off stderr: the Python error that follows says the same in a line."""

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator

_alone = threading.Lock()


@contextlib.contextmanager
def muted_panics() -> Iterator[None]:
    """Holds back what is written to the descriptor of stderr; it is written afterwards, unless the block panics."""
    # The descriptor is the process's: one thread at a time may replace it.
    with _alone, tempfile.TemporaryFile() as held:
        try:
            stderr = os.dup(2)
        except OSError:  # closed
            yield
            return
        # Rust writes to the descriptor, past Python's sys.stderr.
        os.dup2(held.fileno(), 2)
        panicked = False
        try:
            yield
        except BaseException as error:
            panicked = type(error).__name__ == "PanicException"
            raise
        finally:
            os.dup2(stderr, 2)
            os.close(stderr)
            held.seek(0)
            if not panicked and (text := held.read()):
                os.write(2, text)
