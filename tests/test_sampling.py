"""The table of sampled tests names tests that exist."""

import ast
from pathlib import Path

from tests.sampling import CASES

ROOT = Path(__file__).parent.parent


def test_every_sampled_test_exists():
    found = {}
    for name in CASES:
        file, function = name.split("::")
        if file not in found:
            tree = ast.parse((ROOT / file).read_text())
            found[file] = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
        assert function in found[file], name
