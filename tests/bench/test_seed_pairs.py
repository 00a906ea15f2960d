"""Pairs of seeds: each run once, whatever interrupts the command; differences and their standard error."""

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtrain.bench import seed_pairs
from qtrain.bench.seed_pairs import main
from qtrain.errors import UserError
from tests.data.corpora import write_jsonl
from tests.system import serving, write_model

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
STARTS = ("--recipe", "recipe.json", "--runs_dir", "pairs")


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Iterator[list[list[str]]]:
    """A recipe, and the arguments of every training run: real processes, forked from one that has torch imported."""
    monkeypatch.chdir(tmp_path)
    write_jsonl(Path("jsonl"))
    recipe = {"model": write_model(Path("tiny.json")), "train_ds": TEXT, "eval_ds": TEXT, "seq_len": 32, "n_steps": 4}
    recipe |= {"eval_interval": 2, "eval_sequences": 2, "batch_size": 2, "ckpt_interval": 2, "device": "cpu"}
    Path("recipe.json").write_text(json.dumps({**recipe, "export": False, "_comment": "for tests"}))
    started: list[list[str]] = []

    with serving(tmp_path) as server:

        def fork(arguments: list[str], **_: object) -> subprocess.CompletedProcess:
            if "--dry_run" not in arguments:
                started.append(arguments)
            done = server.run("llm_pretrain", arguments)
            return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)

        monkeypatch.setattr(seed_pairs, "pretrain", fork)
        yield started


def results() -> dict[str, dict]:
    tables = json.loads(Path("pairs/results.json").read_text())["tables"]
    return {row["name"]: row["cells"] for table in tables for row in table["rows"]}


def test_runs_are_made_once_and_compared_in_pairs(trained, capsys):
    arguments = [*STARTS, "--schemes", 'bf16,int8,int8:{"stochastic_rounding":false}', "--seeds", "7,8"]
    main(arguments)
    names = [Path(run[1]).stem for run in trained]
    assert [name.rsplit("-", 1)[1] for name in names] == ["seed7"] * 3 + ["seed8"] * 3 and len(set(names)) == 6
    rows = results()
    ends = {name: cells["step 4"]["value"] for name, cells in rows.items() if "step 4" in cells}
    differences = [ends[f"int8, seed {seed}"] / ends[f"bf16, seed {seed}"] - 1 for seed in (7, 8)]
    assert rows["int8"]["mean"]["value"] == pytest.approx(sum(differences) / 2)
    error = abs(differences[0] - differences[1]) / 2
    assert rows["int8"]["standard error"]["value"] == pytest.approx(error)
    assert ends["bf16, seed 7"] != ends["bf16, seed 8"] != ends["int8, seed 8"]
    trained.clear()
    main([*arguments, "--json", "again.json"])
    assert not trained
    again = json.loads(Path("again.json").read_text())["tables"]
    assert again == json.loads(Path("pairs/results.json").read_text())["tables"]


def test_an_unfinished_run_goes_on_from_its_checkpoint(trained):
    arguments = [*STARTS, "--schemes", "bf16,int8", "--seeds", "1"]
    main(arguments)
    finished = results()
    (folder,) = Path("pairs/llm_pretrain").glob("*_int8-seed1")
    shutil.rmtree(folder / "checkpoints/00000004")
    lines = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in lines if json.loads(line)["step"] <= 2))
    trained.clear()
    main(arguments)
    assert [run[2:] for run in trained] == [["--resume", str(folder)]]
    assert results() == finished


def test_a_run_that_fails_is_a_reason_and_the_others_are_compared(trained, monkeypatch):
    fork = seed_pairs.pretrain

    def broken(arguments: list[str], **options: object) -> subprocess.CompletedProcess:
        return fork(["--nothing"] if "int8-seed2" in arguments[1] else arguments, **options)

    monkeypatch.setattr(seed_pairs, "pretrain", broken)
    main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1,2", "--overrides", '{"n_steps":2}'])
    rows = results()
    assert "exit status 2" in rows["int8, seed 2"]["over bf16"]["reason"]
    assert rows["int8"]["pairs"]["value"] == 1 and "standard error" not in rows["int8"]


REFUSED = {
    "one scheme": (["--schemes", "bf16"], "--schemes: 'bf16' leaves nothing to compare"),
    "an unknown scheme": (["--schemes", "bf16,int9"], "--schemes: .*int9.*int8"),
    "auto": (["--schemes", "bf16,auto"], "--schemes: auto"),
    "no seeds": (["--seeds", ","], "--seeds: ',' is not a list"),
    "a seed twice": (["--seeds", "1,1"], "--seeds: '1,1'"),
    "a word": (["--seeds", "one"], "--seeds: 'one'"),
    "no recipe": (["--recipe", "missing.json"], "--recipe: the file missing.json does not exist"),
    "a setting of this command": (["--overrides", '{"seed":3}'], "--overrides: seed is set by this command"),
    "no validation": (["--overrides", '{"eval_ds":null}'], "--recipe: .* names no validation data"),
    "an unknown setting": (
        ["--overrides", '{"lrr":1}'],
        r"--recipe, --schemes \(bf16\): unknown key 'lrr'. Did you mean",
    ),
    "a wrong option": (["--schemes", 'bf16,int8:{"sr":true}'], "--schemes"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_before_anything_is_trained(trained, case):
    flags, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1", *flags])
    assert not trained and not Path("pairs").exists()


def test_runs_of_other_settings_are_not_mixed(trained):
    main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1"])
    with pytest.raises(UserError, match=r"--runs_dir: .*bf16-seed1 was made with lr = .*, not 0.1; give another"):
        main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1", "--overrides", '{"lr":0.1}'])
