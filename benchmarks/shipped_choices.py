"""Add the choices of this machine's autotuner to those that come with the package.

QTRAIN_TUNE=all QTRAIN_CACHE=tuned python llm_pretrain.py ...       # on the GPU, of models whose shapes are common
python -m benchmarks.shipped_choices --tuned tuned

A file of the cache becomes one of `qtrain/kernels/choices/`, for the same device and torch version, or joins it; a
choice replaces that of the same shape among other candidates. Small products are left out: those of tests, and of
models that are over in a minute.
"""

import json
import math
import re
import sys
from dataclasses import dataclass
from pathlib import Path

from qtrain.core.config import parse
from qtrain.core.errors import UserError
from qtrain.core.process import run_script
from qtrain.kernels.autotune import SHIPPED
from qtrain.train.settings.listing import listing

LEAST = 2**30
"""Multiplications of the products that are taken."""


@dataclass(frozen=True)
class ShippedChoicesSettings:
    """Add the choices of this machine's autotuner to those that come with the package."""

    tuned: str = str(Path.home() / ".cache" / "qtrain")
    """Directory of the autotuner's files, QTRAIN_CACHE."""


def main(argv: list[str]) -> None:
    settings = parse(ShippedChoicesSettings, argv, "-m benchmarks.shipped_choices", listing)
    files = sorted(Path(settings.tuned).glob("tuning-*-torch-*-kernels-*.json"), key=lambda file: file.stat().st_mtime)
    if not files:
        raise UserError(f"--tuned: {settings.tuned} has no file of the autotuner; train with QTRAIN_CACHE set to it.")
    for file in files:
        found = re.fullmatch(r"tuning-(.*)-kernels-[0-9a-f]{8}\.json", file.name)
        assert found is not None
        path = SHIPPED / f"{found[1]}.json"
        before = json.loads(path.read_text()) if path.exists() else {}
        tuned = json.loads(file.read_text())
        tuned = {entry: name for entry, name in tuned.items() if math.prod(sizes(entry)) >= LEAST}
        again = {without_checksum(entry) for entry in tuned}
        choices = {entry: name for entry, name in before.items() if without_checksum(entry) not in again} | tuned
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(choices, indent=0, sort_keys=True) + "\n")
        print(f"{path.name}: {len(choices)} choices, {len(before)} before", file=sys.stderr)


def sizes(entry: str) -> list[int]:
    """M, N and K of "scaled_mm 4096 9728 896 int8 ... checksum"."""
    return [int(text) for text in entry.split()[1:-1] if text.isdigit()][:3]


def without_checksum(entry: str) -> str:
    """All but the checksum of the candidates' names."""
    return entry.rpartition(" ")[0]


if __name__ == "__main__":
    run_script(main)
