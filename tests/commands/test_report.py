"""`python -m qtrain report`: one run, several, and what it refuses: one message, exit code 2, nothing written."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from qtrain.__main__ import main
from tests.system import ROOT, call
from tests.train.log.report.pages import Page, records, write_run


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_run(Path("runs/a"), records(5), {"quantize": "bf16", "n_steps": 5})
    write_run(Path("runs/b"), records(5), {"quantize": "int8", "n_steps": 5})


def test_one_run_is_drawn_into_its_folder():
    done = call(main, ["report", "runs/a"])
    assert done.code == 0 and done.out == "report      runs/a/report.html\n"
    assert "Steps5" in Page(Path("runs/a/report.html").read_text()).text
    assert call(main, ["report", "--out", "other.html", "runs/b"]).code == 0 and Path("other.html").is_file()


def test_several_runs_are_compared():
    done = call(main, ["report", "runs/a", "runs/b", "--out", "x.html"])
    assert done.code == 0 and "quantizebf16int8" in Page(Path("x.html").read_text()).text
    assert call(main, ["report", "runs/a", "runs/b"]).code == 0 and Path("compare.html").is_file()


def test_runs_are_sent_to_a_tracker():
    done = call(main, ["report", "--to", "tensorboard", "runs/a", "runs/b"])
    assert done.code == 0, done.err
    assert done.out == "".join(f"sent        5 records of runs/{x} to tensorboard\n" for x in "ab")
    assert list(Path("runs/a").rglob("events.out.tfevents*")) and not Path("runs/a/report.html").exists()


def test_neither_torch_nor_a_gpu_is_needed():
    code = (
        "import sys, runpy; sys.argv = ['-m', 'report', 'runs/a']\n"
        "try: runpy.run_module('qtrain', run_name='__main__')\n"
        "finally: print(sorted({'torch', 'triton', 'transformers'} & set(sys.modules)))"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def broken(folder: str, **files: str | None) -> str:
    Path(folder).mkdir(parents=True)
    for name, text in files.items():
        Path(folder, name.replace("_", ".")).write_text(text)
    return folder


MISTAKES = {
    "an unknown tracker": (["--to", "wandv", "runs/a"], "Did you mean 'wandb'?"),
    "a tracker and a page": (["--to", "tensorboard", "--out", "x.html", "runs/a"], "--to: it sends runs and draws no"),
    "no run": ([], "--runs: no run is named"),
    "an empty name": ([""], "--runs: the value is empty"),
    "a NUL": (["runs/\0"], "NUL character"),
    "a missing folder": (["runs/c"], "--runs: runs/c does not exist. Did you mean runs/"),
    "a missing parent": (["nowhere/at/all"], "--runs: nowhere/at/all does not exist."),
    "a long name": (["x" * 5000], "--runs: cannot read"),
    "an unknown user": (["~nobody-here/run"], "there is no such user"),
    "a file": (["runs/a/metrics.jsonl"], "is not a run folder; give the folder that holds metrics.jsonl"),
    "the folder of runs": (["runs"], "it has no metrics.jsonl. It holds runs: give one, such as runs/b."),
    "an empty folder": (["empty"], "empty is not a run folder: it has no metrics.jsonl"),
    "metrics as a folder": (["folder"], "is not a run folder: it has no metrics.jsonl"),
    "metrics as a FIFO": (["fifo"], "fifo/metrics.jsonl is a FIFO, not a regular file"),
    "metrics as a link to nowhere": (["link"], "link/metrics.jsonl is a symbolic link to 'gone', which does not exist"),
    "a CSV for metrics": (["csv"], "is not the log of a run: none of its 3 lines is a JSON object"),
    "binary metrics": (["binary"], "is not the log of a run"),
    "metrics of another tool": (["other"], "is not the log of a run: none of its 1 lines"),
    "a trainer_state.json": (["state"], "is not the log of a run: none of its 8 lines"),
    "a JSON list of records": (["list"], "is not the log of a run: none of its 1 lines"),
    "a page of a proxy": (["html"], "is not the log of a run: none of its 1 lines"),
    "compressed metrics": (["gzip"], "gzip/metrics.jsonl is not the log of a run"),
    "one of several compressed": (["runs/a", "gzip"], "gzip/metrics.jsonl is not the log of a run"),
    "one of several damaged": (["runs/a", "csv"], "csv/metrics.jsonl is not the log of a run"),
    "one of several missing": (["runs/a", "runs/bb"], "runs/bb does not exist. Did you mean runs/b?"),
    "a run twice": (["runs/a", "runs/b", "runs/../runs/a/"], "given twice"),
    "a link to the same run": (["runs/a", "same"], "same is given twice"),
    "several that have logged nothing": (["new", "new2"], "none of the runs has logged a step yet"),
    "too many": (["runs/a"] * 65, "65 runs are too many"),
    "--out a folder": (["runs/a", "--out", "empty"], "--out: empty is a folder; name an .html file"),
    "--out without .html": (["runs/a", "--out", "x.pdf"], "--out: x.pdf is not an HTML file's name"),
    "--out in no folder": (["runs/a", "--out", "no/x.html"], "--out: the folder no does not exist"),
    "--out in a file": (["runs/a", "--out", "runs/a/config.json/x.html"], "--out:"),
    "--out without a name": (["runs/a", "--out"], "--out"),
    "--out empty": (["runs/a", "--out", ""], "--out: the value is empty"),
    "an unknown flag": (["runs/a", "--output", "x.html"], "--output: unknown flag. Did you mean --out?"),
    "a port that is none": (["--serve", "runs/a", "--port", "70000"], "--port: 70000 is out of range"),
    "a word for a port": (["--serve", "runs/a", "--port", "http"], "--port"),
    "several to serve": (["--serve", "runs/a", "runs/b"], "--serve: it serves one run"),
    "serving a file": (["--serve", "runs/a", "--out", "x.html"], "--serve: it writes no file"),
    "serving no run": (["--serve"], "--runs: no run is named"),
    "serving a damaged run": (["--serve", "csv"], "is not the log of a run"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_is_one_message(case, tmp_path):
    words, message = MISTAKES[case]
    broken("empty")
    broken("csv", metrics_jsonl="step,loss\n1,2.0\n2,1.5\n")
    broken("other", metrics_jsonl=json.dumps({"epoch": 1, "loss": 2.0}) + "\n")
    broken("state", metrics_jsonl=json.dumps({"log_history": [{"step": 1, "loss": 2.0}]}, indent=1) + "\n")
    broken("list", metrics_jsonl=json.dumps([{"step": 1, "loss": 2.0}]) + "\n")
    broken("html", metrics_jsonl="<html><body>404</body></html>\n")
    Path(broken("gzip"), "metrics.jsonl").write_bytes(gzip.compress(Path("runs/a/metrics.jsonl").read_bytes()))
    broken("new", metrics_jsonl="")
    broken("new2", metrics_jsonl="")
    Path(broken("binary"), "metrics.jsonl").write_bytes(bytes(range(256)) * 50)
    Path(broken("folder"), "metrics.jsonl").mkdir()
    os.mkfifo(Path(broken("fifo"), "metrics.jsonl"))
    Path(broken("link"), "metrics.jsonl").symlink_to("gone")
    Path("same").symlink_to("runs/a")
    before = {path for path in tmp_path.rglob("*")}
    done = call(main, ["report", *words])
    assert done.code == 2 and message in done.err and "Traceback" not in done.err
    assert len(done.err.strip().splitlines()) == 1
    assert {path for path in tmp_path.rglob("*")} == before


def test_what_is_damaged_in_part_is_drawn_and_said():
    with Path("runs/a/metrics.jsonl").open("a") as file:
        file.write('nonsense\n{"step": 6, "loss": 1.5}\n{"step": 7, "lo')
    Path("runs/a/config.json").write_text("{")
    done = call(main, ["report", "runs/a"])
    assert done.code == 0
    said = "warning: runs/a: metrics.jsonl: 1 damaged line is left out; config.json cannot be read"
    assert done.out.splitlines() == [said, "report      runs/a/report.html"]
    assert "Steps6" in Page(Path("runs/a/report.html").read_text()).text


PARTS: dict[str, tuple[dict[str, str], str]] = {
    "a run that writes": ({"metrics.jsonl": '{"step": 6, "lo', "run.lock": ""}, ""),
    "a hole": ({"metrics.jsonl": "\0" * 300 + "\n"}, "metrics.jsonl: 1 damaged line is left out"),
    "samples of another tool": ({"health.jsonl": "nonsense\n{}\n"}, "health.jsonl: 2 damaged lines are left out"),
    "a config that is cut": ({"config.json": "{"}, "config.json cannot be read"),
}


@pytest.mark.parametrize("case", PARTS)
def test_runs_that_are_damaged_in_part_or_go_on_are_compared(case):
    files, said = PARTS[case]
    for name, text in files.items():
        with Path("runs/b", name).open("w" if name == "config.json" else "a") as file:
            file.write(text)
    done = call(main, ["report", "runs/a", "runs/b"])
    assert done.code == 0 and not done.err
    assert done.out.splitlines() == [f"warning: runs/b: {said}"] * bool(said) + ["report      compare.html"]
    assert {"loss", "speed"} <= {chart["key"] for chart in Page(Path("compare.html").read_text()).data["data"]}


def test_a_run_that_has_logged_nothing_yet_has_a_page():
    broken("new", metrics_jsonl="")
    assert call(main, ["report", "new"]).code == 0
    assert "No step has been logged yet" in Path("new/report.html").read_text()
    done = call(main, ["report", "runs/a", "new"])
    assert done.code == 0 and "new: no step has been logged yet" in Path("compare.html").read_text()
