"""Imports point one way: scripts > train > {models, optim, data, quant} > kernels > hardware."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
BASE = {"errors", "checks", "registry", "config", "hub"}  # know no room; every room may use them
ALLOWED = {
    "train": {"train", "models", "optim", "data", "quant", "kernels", "hardware"},
    "bench": {"bench", "train", "models", "optim", "data", "quant", "kernels", "hardware"},
    "models": {"models", "quant", "kernels", "hardware"},
    "optim": {"optim", "kernels", "hardware"},
    "data": {"data", "kernels", "hardware"},
    "quant": {"quant", "kernels", "hardware"},
    "kernels": {"kernels", "hardware"},
    "hardware": set(),
    **{name: set() for name in BASE},
}
FILES = sorted((ROOT / "qtrain").rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Every module named by an import anywhere in the file, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_import_direction(path):
    parts = path.relative_to(ROOT / "qtrain").with_suffix("").parts
    own = parts[0]
    imports = imported_modules(path)
    if own != "kernels":
        assert not any(m.split(".")[0] == "triton" for m in imports), "only kernels/ may import triton"
    if own == "__init__":
        return
    used = {room(m) for m in imports if m.split(".")[0] == "qtrain"} - BASE - {"__version__"}
    assert used <= ALLOWED[own], f"{own} may not import {sorted(used - ALLOWED[own])}"
    if own in BASE:
        assert not used


def test_every_file_is_seen():
    assert len(FILES) > 20 and any("kernels" in str(p) for p in FILES)
