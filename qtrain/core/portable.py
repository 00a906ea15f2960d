"""What POSIX has and Windows lacks, so that CPU runs work on both."""

import os
import signal
import sys
from pathlib import Path

GROUP_SIGNALS = [getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1", "SIGHUP") if hasattr(signal, name)]
"""Signals that reach all processes of a run, of those that the platform has."""


def sync_to_disk(path: Path) -> None:
    """fsync a written file, or a folder, whose entries Windows can neither open nor sync."""
    if path.is_dir() and not hasattr(os, "O_DIRECTORY"):
        return
    descriptor = os.open(path, os.O_RDONLY if hasattr(os, "O_DIRECTORY") else os.O_RDWR)  # Windows syncs writable files
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def peak_resident_bytes() -> int:
    """The largest resident memory of this process so far."""
    try:
        import resource
    except ImportError:
        import psutil

        return psutil.Process().memory_info().peak_wset
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
