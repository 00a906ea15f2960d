"""Draw finished or running runs: folders > records > page.

python -m qtrain report runs/llm_pretrain/RUN
python -m qtrain report RUN RUN ... --out compare.html
python -m qtrain report --serve RUN
python -m qtrain report --to wandb RUN

One run: RUN/report.html anew. Several: one page that compares them with the first. Needs no GPU and no torch.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from qtrain.core.checks import Range, user_path
from qtrain.core.config import parse
from qtrain.core.errors import UserError, os_errors
from qtrain.train.log.report.compare import compare_page, compared
from qtrain.train.log.report.page import bokeh_files
from qtrain.train.log.report.records import RunRecords, check_records, check_run, damage, read_run
from qtrain.train.log.report.serve import ReportServer
from qtrain.train.log.report.write import run_page, write_page

NAME = "-m qtrain report"
MAX_RUNS = 64


@dataclass(frozen=True)
class ReportSettings:
    """Draw a run, or compare several; words without dashes are --runs."""

    runs: tuple[str, ...] = ()
    """Run folders; several are compared with the first, and those that differ in the seed only are a group."""
    out: str | None = None
    """HTML file to write; None: RUN/report.html of one run, compare.html of several."""
    serve: bool = False
    """Serve the report of one run on this machine, http://127.0.0.1:PORT/, which refreshes while the run goes."""
    port: Annotated[int, Range(0, 65535)] = 8080
    """Port of --serve; 0: a free one."""
    to: str | None = None
    """Send the runs to this tracker instead, as if they had logged there while they trained: wandb, tensorboard,
    trackio, mlflow."""


def main(argv: list[str]) -> None:
    settings = parse(ReportSettings, as_flags(argv), NAME)
    if not settings.runs:
        raise UserError("--runs: no run is named; give a run folder, such as runs/llm_pretrain/RUN.")
    if len(settings.runs) > MAX_RUNS:
        raise UserError(f"--runs: {len(settings.runs)} runs are too many for a page; give at most {MAX_RUNS}.")
    if settings.to is None:
        bokeh_files()
    folders = [check_run(path, "--runs") for path in settings.runs]
    check_distinct(folders)
    if settings.to is not None:
        send(settings, settings.to, folders)
        return
    if settings.serve:
        serve(settings, folders)
        return
    out = check_out(settings, folders)
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        check_records(run, "--runs")
        if damaged := damage(run):
            print(f"warning: {run.folder}: {damaged}")
    text = run_page(runs[0]) if len(runs) == 1 else comparison(runs)
    with os_errors(f"--out: cannot write {out}"):
        write_page(text, out)
    print(f"report      {out}")


def as_flags(argv: list[str]) -> list[str]:
    """The command line with the words that are neither flags nor their values as --runs."""
    words, flags, takes_value = [], [], False
    for argument in argv:
        if takes_value or argument.startswith("-"):
            flags.append(argument)
            takes_value = argument in ("--out", "--port", "--to", "--config", "--completion")
        elif "--runs" in flags:
            flags.append(argument)
        else:
            words.append(argument)
    return [*flags, "--runs", *words] if words else flags


def check_distinct(folders: Sequence[Path]) -> None:
    """UserError for a run that is given twice: its difference to itself says nothing."""
    seen: dict[Path, Path] = {}
    for folder in folders:
        if (real := folder.resolve()) in seen:
            raise UserError(f"--runs: {folder} is given twice; leave one out.")
        seen[real] = folder


def send(settings: ReportSettings, tracker: str, folders: Sequence[Path]) -> None:
    if settings.out or settings.serve:
        raise UserError("--to: it sends runs and draws no page; leave --out and --serve, or --to, out.")
    from qtrain.train.log.send import send_run  # with the tracker's package

    for folder in folders:
        print(f"sent        {send_run(folder, tracker):,} records of {folder} to {tracker}", flush=True)


def check_out(settings: ReportSettings, folders: Sequence[Path]) -> Path:
    """Where the page is written. UserError for a place that no file can be written to."""
    default = folders[0] / "report.html" if len(folders) == 1 else Path("compare.html")
    out = user_path(settings.out, "--out") if settings.out else default
    if out.is_dir():
        raise UserError(f"--out: {out} is a folder; name an .html file.")
    if out.suffix.lower() not in (".html", ".htm"):
        raise UserError(f"--out: {out} is not an HTML file's name; end it in .html.")
    if not out.parent.is_dir():
        raise UserError(f"--out: the folder {out.parent} does not exist; create it first.")
    if not os.access(out.parent, os.W_OK):
        raise UserError(f"--out: cannot write into {out.parent}: Permission denied.")
    return out


def comparison(runs: Sequence[RunRecords]) -> str:
    """The page of several runs."""
    if not any(run.records for run in runs):
        raise UserError("--runs: none of the runs has logged a step yet.")
    empty = [f"{run.name}: no step has been logged yet" for run in runs if not run.records]
    notes = [f"{run.name}: {damaged}" for run in runs if (damaged := damage(run))]
    return compare_page([compared(run) for run in runs if run.records], notes=empty + notes)


def serve(settings: ReportSettings, folders: Sequence[Path]) -> None:
    if len(folders) > 1:
        raise UserError("--serve: it serves one run; write a page of several with --out.")
    if settings.out:
        raise UserError("--serve: it writes no file; leave --out or --serve out.")
    check_records(read_run(folders[0]), "--runs")
    with ReportServer(folders[0], settings.port) as server:
        print(f"{server.url}  (Ctrl-C ends it)", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
