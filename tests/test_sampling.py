"""The table of sampled tests names tests that exist."""

import ast
from pathlib import Path

from tests.sampling import CASES

ROOT = Path(__file__).parent.parent


def test_every_sampled_test_exists():
    for name in CASES:
        file, function = name.split("::")
        tree = ast.parse((ROOT / file).read_text())
        assert any(isinstance(node, ast.FunctionDef) and node.name == function for node in tree.body), name
