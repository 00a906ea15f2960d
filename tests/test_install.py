"""The wheel: package, recipes and a console command for each script, used from another folder."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

from qtrain import SCRIPTS
from tests.system import ROOT, flags


def pip(*arguments: object) -> None:
    command = [sys.executable, "-m", "pip", *map(str, arguments), "--no-index", "--no-deps", "--quiet"]
    outcome = subprocess.run(command, capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stderr


def test_the_installed_commands_work_from_another_folder(tmp_path):
    source, installed, elsewhere = tmp_path / "source", tmp_path / "installed", tmp_path / "elsewhere"
    left = shutil.ignore_patterns(".*", "runs", "build", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, source, ignore=left, symlinks=True)  # building writes into the source folder
    pip("wheel", source, "--no-build-isolation", "--wheel-dir", tmp_path)
    (wheel,) = tmp_path.glob("qtrain-*.whl")
    pip("install", wheel, "--no-compile", "--target", installed)
    elsewhere.mkdir()
    assert {p.name for p in (installed / "bin").iterdir()} >= {f"qtrain-{name.replace('_', '-')}" for name in SCRIPTS}
    environment = {**os.environ, "PYTHONPATH": str(installed)}

    def run(*words: str) -> str:
        outcome = subprocess.run(words, cwd=elsewhere, env=environment, capture_output=True, text=True)
        assert outcome.returncode == 0, outcome.stderr
        return outcome.stdout

    where = run(sys.executable, "-c", "import qtrain; print(qtrain.__file__)").strip()
    assert Path(where).is_relative_to(installed)
    (elsewhere / "a.txt").write_text("some text " * 500)
    commands, tokenize = installed / "bin", flags(files="a.txt", split="all", tokenizer="byte", output_dir="tokens")
    run(f"{commands}/qtrain-tokenize-data", *tokenize)
    data = {"type": "token", "dataset_dir": "tokens"}
    settings = {"config": "configs/quickstart.json", "train_ds": data, "eval_ds": data, "seq_len": 32}
    assert "memory" in run(f"{commands}/qtrain-llm-pretrain", *flags(**settings, dry_run=True))
