"""Pairs of seeds: each run once, whatever interrupts the command; a line of results for each; variants; time limit."""

import contextlib
import functools
import json
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from qtrain.core.config import source_digest
from qtrain.core.errors import UserError
from qtrain.pairs import runs as pair_runs
from qtrain.pairs.seed_pairs import main
from tests.data.corpora import write_jsonl
from tests.system import serving, write_model

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
STARTS = ("--recipe", "recipe.json", "--runs_dir", "pairs")


@pytest.fixture
def trained(tmp_path, monkeypatch) -> Iterator[list[list[str]]]:
    """A recipe, and the arguments of every training run: real processes, forked from one that has torch imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(pair_runs, "POLL_SECONDS", 0.2)
    write_jsonl(Path("jsonl"))
    recipe = {"model": write_model(Path("tiny.json")), "train_ds": TEXT, "eval_ds": TEXT, "seq_len": 32, "n_steps": 4}
    recipe |= {"eval_interval": 2, "eval_sequences": 2, "batch_size": 2, "ckpt_interval": 2, "device": "cpu"}
    Path("recipe.json").write_text(json.dumps({**recipe, "export": False, "_comment": "for tests"}))
    variants = {"head": {"quantize": "int8", "quantize_lm_head": True}, "adamw_8bit": {"optim": "adamw_8bit"}}
    Path("variants.json").write_text(json.dumps({**variants, "_comment": "for tests"}))
    started: list[list[str]] = []

    with contextlib.ExitStack() as stack:
        server = functools.cache(lambda: stack.enter_context(serving(tmp_path)))  # from the first run on

        def fork(arguments: list[str], **options: object) -> subprocess.CompletedProcess:
            started.append(arguments)
            done = server().run("llm_pretrain", arguments)
            return subprocess.CompletedProcess(arguments, done.code, done.out, done.err)

        monkeypatch.setattr(pair_runs, "pretrain", fork)
        yield started


def results(path: str = "pairs/results.json") -> dict[str, dict]:
    tables = json.loads(Path(path).read_text())["tables"]
    return {row["name"]: row["cells"] for table in tables for row in table["rows"]}


def lines(folder: str = "pairs/results") -> list[dict]:
    return [json.loads(line) for path in sorted(Path(folder).glob("*.jsonl")) for line in path.read_text().splitlines()]


def test_runs_are_made_once_and_compared_in_pairs(trained, capsys):
    arguments = [*STARTS, "--variants", "variants.json", "--schemes", "bf16,int8,head,adamw_8bit", "--seeds", "7,8"]
    main(arguments)
    names = [Path(run[1]).stem for run in trained]
    assert [name.rsplit("-", 1)[1] for name in names] == ["seed7"] * 4 + ["seed8"] * 4 and len(set(names)) == 8
    records = {(record["variant"], record["seed"]): record for record in lines()}
    assert len(records) == 8 and {record["data"] for record in records.values()} == {records["bf16", 7]["data"]}
    for record in records.values():
        assert [step for step, _ in record["eval_loss"]] == [0, 2, 4] and record["tokens"] == 4 * 2 * 32
        assert len(record["train_loss"]) == 4 and record["versions"]["torch"] and record["finished"] > "2020"
        assert record["source"] == record["versions"]["source"] == source_digest()
    ends = {key: record["eval_loss"][-1][1] for key, record in records.items()}
    assert len(set(ends.values())) == 8, "a variant's settings did not reach its run"
    differences = [ends["int8", seed] - ends["bf16", seed] for seed in (7, 8)]
    rows, printed = results(), capsys.readouterr().out
    assert rows["int8"]["difference"]["value"] == pytest.approx(sum(differences) / 2)
    assert rows["int8"]["standard error"]["value"] == pytest.approx(abs(differences[0] - differences[1]) / 2)
    assert f"int8, seed 7, step 4: {ends['int8', 7]:.4f}, {differences[0]:+.4f} over bf16" in printed
    assert "int8, seed 8, step 4" in printed and "(mean of 2: " in printed and "8 of 8 runs are finished" in printed
    assert (
        "adamw_8bit: mean" in Path("pairs/results.html").read_text()
        or ">adamw_8bit-seed1<" in Path("pairs/results.html").read_text()
    )

    trained.clear()
    main([*arguments, "--json", "again.json"])
    assert not trained and results("again.json") == rows and len(lines()) == 8


def test_runs_of_another_machine_are_not_repeated(trained, capsys):
    """Its file of results is enough; runs on other data are made again and compared among themselves."""
    main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1"])
    Path("pairs/results").rename("there")
    shutil.rmtree("pairs")
    trained.clear()
    arguments = [*STARTS, "--schemes", "bf16,int8", "--seeds", "1,2", "--others", "there"]
    main(arguments)
    assert [Path(run[1]).stem[-5:] for run in trained] == ["seed2"] * 2
    assert [record["seed"] for record in lines()] == [2, 2] and results()["int8"]["pairs"]["value"] == 2
    main(["--collect", "--results_dir", "pairs/results", "--others", "there", "--json", "all.json"])
    assert results("all.json") == results()
    assert Path("all.html").is_file() and "--collect" in json.loads(Path("all.json").read_text())["command"]
    # A reference alone, for runs of other machines.
    main([*STARTS, "--schemes", "bf16", "--seeds", "1,3", "--others", "there", "--results_dir", "one"])
    assert [record["seed"] for record in lines("one")] == [3]

    path = next(Path("jsonl").glob("*.jsonl"))
    path.write_text(path.read_text() + '{"text": "another day"}\n')
    trained.clear()
    main([*STARTS, "--schemes", "int8", "--reference", "bf16", "--seeds", "1", "--others", "there", "pairs/results"])
    assert len(trained) == 1 and lines()[-1]["data"] != lines("there")[0]["data"]
    assert results()[f"int8, seed 1, data {lines()[-1]['data'][:4]}"]["over bf16"]["reason"].startswith(
        "no run of bf16"
    )


def test_an_unfinished_run_goes_on_from_its_checkpoint(trained):
    arguments = [*STARTS, "--schemes", "bf16,int8", "--seeds", "1"]
    main(arguments)
    finished = results()
    shutil.rmtree("pairs/results")
    (folder,) = Path("pairs/llm_pretrain").glob("*_int8-*seed1")
    shutil.rmtree(folder / "checkpoints/00000004")
    kept = (folder / "metrics.jsonl").read_text().splitlines(keepends=True)
    (folder / "metrics.jsonl").write_text("".join(line for line in kept if json.loads(line)["step"] <= 2))
    trained.clear()
    main(arguments)
    assert [run[2:] for run in trained] == [["--resume", str(folder)]]
    assert results()["int8"]["difference"] == finished["int8"]["difference"] and len(lines()) == 2


def test_a_run_that_fails_is_a_reason_and_the_others_are_compared(trained, monkeypatch):
    fork = pair_runs.pretrain

    def broken(arguments: list[str], **options: object) -> subprocess.CompletedProcess:
        name = Path(arguments[1]).name
        return fork(["--nothing"] if name.startswith("int8") and "seed2" in name else arguments, **options)

    monkeypatch.setattr(pair_runs, "pretrain", broken)
    main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1,2", "--overrides", '{"n_steps":2}'])
    rows = results()
    assert "exit status 2" in rows["int8, seed 2"]["loss"]["reason"]
    assert rows["int8"]["pairs"]["value"] == 1 and "standard error" not in rows["int8"]


def test_nothing_is_begun_where_little_time_is_left(trained, capsys):
    main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1", "--time_limit", "1"])
    assert not trained and not Path("pairs/results").exists()
    assert "0 of 2 runs are finished; the same command goes on" in capsys.readouterr().out
    assert results()["int8, seed 1"]["loss"]["reason"] == "not begun within --time_limit"


STOPPABLE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: (print("saved", flush=True), sys.exit(143)))
print("begun", flush=True)
time.sleep(60)
"""


def test_a_run_is_stopped_by_a_signal_that_lets_it_save(monkeypatch, tmp_path):
    """A process gets its GPU by CUDA_VISIBLE_DEVICES, and SIGTERM when its time is over."""
    script = tmp_path / "qtrain" / "scripts" / "llm_pretrain.py"
    script.parent.mkdir(parents=True)
    for folder in (script.parent, script.parent.parent):
        (folder / "__init__.py").touch()
    script.write_text(STOPPABLE)
    monkeypatch.setattr(pair_runs, "child_environment", lambda: {"PYTHONPATH": str(tmp_path)})
    monkeypatch.chdir(tmp_path)
    done = pair_runs.pretrain([], gpu="3", seconds=3.0, stdout=subprocess.PIPE, text=True)
    assert (done.returncode, done.stdout) == (143, "begun\nsaved\n") and done.args[0] == sys.executable
    script.write_text("import os; print(os.environ['CUDA_VISIBLE_DEVICES'])")
    assert pair_runs.pretrain([], gpu="3", stdout=subprocess.PIPE, text=True).stdout == "3\n"


def test_runs_are_spread_over_the_gpus(monkeypatch, tmp_path):
    """As many at a time as there are GPUs, never two on one."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    running: set[str] = set()
    seen: list[str] = []

    class Run:
        variant, seed, recipe = "bf16", 1, {}

        def train(self, gpu: str, seconds: float | None) -> None:
            assert gpu not in running and seconds is None
            running.add(gpu)
            seen.append(gpu)
            both.wait(10)  # both GPUs are busy at once
            running.remove(gpu)

    both = threading.Barrier(2)
    monkeypatch.setattr(pair_runs, "POLL_SECONDS", 0.1)
    progress = pair_runs.Progress([], "bf16", [])
    monkeypatch.setattr(progress, "update", lambda runs: None)
    assert pair_runs.train_all([Run() for _ in range(6)], 0, None, progress) == {}
    assert sorted(seen) == ["4"] * 3 + ["6"] * 3


REFUSED = {
    "one scheme": (["--schemes", "bf16"], "--schemes: 'bf16' leaves nothing to compare"),
    "an unknown scheme": (["--schemes", "bf16,int9"], "--schemes: .*int9.*int8"),
    "an unknown variant": (
        ["--variants", "variants.json", "--schemes", "bf16,heed"],
        "--schemes: unknown scheme or variant 'heed'. Did you mean 'head'",
    ),
    "a scheme twice": (["--schemes", "bf16,int8,int8"], "--schemes: int8 is given twice"),
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
    "an unknown reference": (["--reference", "bf61"], "--reference: unknown variant 'bf61'. Did you mean 'bf16'"),
    "no such results": (["--others", "nowhere"], "--others: nowhere is not a folder"),
    "nothing to collect": (["--collect"], "--collect: there are no results in pairs/results"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_mistakes_are_refused_before_anything_is_trained(trained, case):
    flags, words = REFUSED[case]
    with pytest.raises(UserError, match=words):
        main([*STARTS, "--schemes", "bf16,int8", "--seeds", "1", *flags])
    assert not trained and not Path("pairs").exists()


VARIANTS = {
    "an unknown setting": ('{"x": {"quantise": "int8"}}', r"--variants \(v.json\): x: unknown key 'quantise'. Did you"),
    "a wrong type": ('{"x": {"lr": "high"}}', r"--variants \(v.json\): x.lr: "),
    "no settings": ('{"x": "int8"}', 'x: a variant is a JSON object of settings, not "int8"'),
    "a name of a scheme": ('{"int8": {"quantize": "int4"}}', "int8: it is the name of a scheme"),
    "a name twice": ('{"x": {"quantize": "int4"}, "x": {"quantize": "int8"}}', "the key 'x' is given twice"),
    "no name": ('{"a,b": {"quantize": "int4"}}', "a,b: it is not a name"),
    "other steps": ('{"x": {"n_steps": 3}}', "x: n_steps is the same in both runs of a pair"),
    "its own seed": ('{"x": {"seed": 3}}', "x: seed is the same in both runs of a pair"),
}


@pytest.mark.parametrize("case", VARIANTS)
def test_wrong_variants_are_refused(trained, case):
    text, words = VARIANTS[case]
    Path("v.json").write_text(text)
    with pytest.raises(UserError, match=words):
        main([*STARTS, "--variants", "v.json", "--schemes", "bf16,x", "--seeds", "1"])
    assert not trained and not Path("pairs").exists()


def test_runs_of_other_settings_are_not_mixed(trained):
    """Another recipe is other runs; one name for other settings of a variant is refused."""
    arguments = [*STARTS, "--variants", "variants.json", "--schemes", "bf16,head", "--seeds", "1"]
    main(arguments)
    main([*arguments, "--overrides", '{"lr":0.1}'])
    assert len(trained) == 4 and len({Path(run[1]).stem for run in trained}) == 4
    assert results()["head"]["pairs"]["value"] == 1 and len([row for row in results() if "seed" in row]) == 2
    Path("variants.json").write_text('{"head": {"quantize": "int4", "quantize_lm_head": true}}')
    with pytest.raises(UserError, match=r"--schemes, --results_dir: 'head' .*int4.*, and of seed 1 .*int8"):
        main(arguments)
