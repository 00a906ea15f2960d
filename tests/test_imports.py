"""Imports point one way, between rooms and inside them; no cycles; only kernels/ knows Triton."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FILES = sorted((ROOT / "qtrain").rglob("*.py"))
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in FILES}

BELOW_QUANT = {"tensors", "kernels", "core"}
ROOMS = {
    "__main__": {"commands", "core"},
    "commands": {"bench", "train", "data", "models", "core"},
    "scripts": {"bench", "train", "comm", "models", "data", "quant", *BELOW_QUANT},
    "pairs": {"bench", "scripts", "train", "data", "quant", *BELOW_QUANT},
    "bench": {"train", "parallel", "comm", "models", "optim", "data", "quant", *BELOW_QUANT},
    "train": {"parallel", "comm", "models", "optim", "data", "quant", *BELOW_QUANT},
    "parallel": {"comm", "models", "optim", "data", "quant", *BELOW_QUANT},
    "models": {"quant", *BELOW_QUANT},
    "optim": BELOW_QUANT,
    "data": BELOW_QUANT,
    "quant": BELOW_QUANT,
    "comm": {"tensors", "kernels", "core"},
    "tensors": {"kernels", "core"},
    "kernels": {"core"},
    "core": set(),
}
"""What each room may import besides itself."""

INNER = {
    "core": set(),
    "core.hardware": {"core"},
    "kernels.compiler": set(),
    "kernels.compile_together": {"kernels.compiler"},
    "kernels.autotune": {"kernels.compiler", "kernels.compile_together"},
    "kernels.arrivals": {"kernels.compiler"},
    "kernels.column_sums": {"kernels.compiler", "kernels.autotune", "kernels.arrivals"},
    "kernels.numerics": {"kernels.compiler"},
    "kernels.softmax": {"kernels.compiler"},
    "kernels.quantize": {
        "kernels.compiler",
        "kernels.autotune",
        "kernels.arrivals",
        "kernels.column_sums",
        "kernels.numerics",
        "kernels.softmax",
    },
    "kernels.gemm": {
        "kernels.compiler",
        "kernels.compile_together",
        "kernels.autotune",
        "kernels.arrivals",
        "kernels.numerics",
    },
    "kernels.conv": {"kernels.compiler", "kernels.autotune", "kernels.gemm"},
    "kernels.swiglu": {
        "kernels.compiler",
        "kernels.autotune",
        "kernels.column_sums",
        "kernels.numerics",
        "kernels.quantize",
        "kernels.gemm",
    },
    "kernels.norm": {"kernels.compiler", "kernels.autotune", "kernels.column_sums"},
    "kernels.optim": {"kernels.compiler", "kernels.numerics"},
    "kernels.cross_entropy": {"kernels.compiler", "kernels.softmax"},
    "kernels.distillation": {"kernels.compiler", "kernels.cross_entropy"},
    "data.tokenizers": set(),
    "data": {"data.tokenizers"},
    "data.text": {"data", "data.tokenizers"},
    "data.examples": {"data", "data.tokenizers"},
    "data.images": {"data"},
    "quant.schemes": {"quant"},
    "quant.health": {"quant"},
    "parallel": set(),
    "parallel.layers": {"parallel"},
    "parallel.sharding": {"parallel", "parallel.layers"},
    "models.config": set(),
    "models.native": {"models.config"},
    "models.generation": {"models.config", "models.native"},
    "models.hf": {"models.config", "models.native"},
    "models.adapters": {"models.config", "models.native", "models.hf"},
    "models.cost": {"models.config", "models.native", "models.adapters"},
    "train.settings": set(),
    "train.log": set(),
    "train.state": {"train.settings", "train.log"},
    "train.step": {"train.settings", "train.log", "train.state"},
    "train.health": {"train.settings", "train.log", "train.state", "train.step"},
    "train.plan": {"train.settings", "train.log", "train.state", "train.step"},
    "train.assembly": {"train.settings", "train.log", "train.state", "train.step", "train.plan", "train.eval"},
    "train.eval": {"train.settings", "train.step"},
    "train.generate": {"train.settings", "train.plan", "train.assembly"},
    "train": {"train.settings", "train.log", "train.state", "train.step", "train.plan", "train.health"},
}
"""What a part of a room may import of that room, besides itself; "train": the room's own files, not its folders."""


def imported_modules(path: Path) -> set[str]:
    """Every module of this project that an import names anywhere in the file, inside functions too."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in names}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def room(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_import_direction(path):
    own, imports = room(module_of(path)), imported_modules(path)
    if own != "kernels":
        assert not any(m.split(".")[0] == "triton" for m in imports), "only kernels/ may import triton"
    assert not any(m.split(".")[0] in ("benchmarks", "tests") for m in imports), "an installed package has neither"
    used = {room(m) for m in imports if m.startswith("qtrain.")} - {own}
    allowed = ROOMS.get(own, set())
    assert not own or used <= allowed, f"{own} may not import {sorted(used - allowed)}"


def part(module: str) -> str:
    """'qtrain.kernels.gemm.int8_mm' -> 'kernels.gemm'; a file of the room itself is the room."""
    names = module.split(".")[1:]
    if ".".join(names[:2]) in INNER:
        return ".".join(names[:2])
    return ".".join(names[:2]) if len(names) > 2 else names[0] if names else ""


@pytest.mark.parametrize("inner", INNER)
def test_inner_order_of_a_room(inner):
    own_room = inner.split(".")[0]
    files = [p for p in FILES if part(module_of(p)) == inner and module_of(p) != f"qtrain.{own_room}"]  # not its facade
    assert files, f"{inner} is nowhere"
    for path in files:
        own_modules = [m for m in imported_modules(path) if m.startswith(f"qtrain.{own_room}")]
        used = {part(m) for m in own_modules} - {inner}
        assert used <= INNER[inner], f"{module_of(path)} may not import {sorted(used - INNER[inner])}"


def test_no_import_cycles():
    """Imports inside functions count: they hide a cycle, they do not remove it."""
    graph = {name: imported_modules(path) & MODULES.keys() - {name} for name, path in MODULES.items()}
    done: set[str] = set()

    def visit(name: str, path: tuple[str, ...]) -> None:
        assert name not in path, " > ".join((*path[path.index(name) :], name))
        if name not in done:
            for other in sorted(graph[name]):
                visit(other, (*path, name))
            done.add(name)

    for name in graph:
        visit(name, ())


def test_every_file_is_seen():
    assert len(FILES) > 150 and all(room(m) in {*ROOMS, ""} for m in MODULES)


def test_a_plan_of_a_shape_imports_no_package_that_it_does_not_need(tmp_path):
    program = """
import sys
import llm_pretrain
llm_pretrain.main(["--model", "quickstart", "--n_steps", "1", "--dry_run"])
heavy = {"transformers", "datasets", "timm", "huggingface_hub", "wandb", "pyarrow", "pandas", "bokeh", "torchvision"}
print("imported:", *sorted(heavy & sys.modules.keys()))
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "imported:"
