"""report.html of a run, and the page of several: read, drawn, and put in place at once."""

import logging
import os
from pathlib import Path

from qtrain.core.errors import UserError, first_line
from qtrain.train.log.report import tables
from qtrain.train.log.report.heatmaps import expert_map, health_map
from qtrain.train.log.report.page import page
from qtrain.train.log.report.records import RunRecords, damage, read_run
from qtrain.train.log.report.single import charts_of

log = logging.getLogger("qtrain")


def run_page(run: RunRecords, failure: str | None = None, live: str | None = None) -> str:
    """The page of one run. failure: why it ended. live: the version of its data, where it is served."""
    charts = charts_of(run)
    lines = [("failed", f"The run has ended with an error: {failure}")] if failure else []
    lines += [("failed", damaged)] if (damaged := damage(run)) else []
    lines += [] if charts else [("soft", "No step has been logged yet.")]
    above = "".join(f'<p class="{style}">{tables.escaped(text)}</p>' for style, text in lines)
    maps = [(health_map(run), tables.what_if(run)), (expert_map(run), "")]
    return page(
        run.name,
        charts,
        above=above + tables.warnings(run) + tables.cards(tables.headline(run)),
        heat_maps=[(heat, extra) for heat, extra in maps if heat],
        below=tables.section("evaluations", "Evaluations", tables.evaluations(run))
        + tables.section("samples", "Samples", tables.samples(run))
        + tables.section("memory", "Memory", tables.memory_plan(run))
        + tables.section("machine", "Model and hardware", tables.machine(run), tables.versions_table(run))
        + tables.section("settings", "Settings", tables.settings(run)),
        counted=run.samples,
        live=live,
    )


def write_page(text: str, path: Path) -> Path:
    """Write the page. A browser that reloads finds a whole one. OSError where it cannot be written."""
    unfinished = path.with_name(f".{path.name}.tmp")
    unfinished.write_text(text, encoding="utf-8", errors="backslashreplace")
    os.replace(unfinished, path)
    return path


def write_report(run_dir: Path, failure: str | None = None) -> Path:
    """Write report.html into the folder of a finished or unfinished run. Returns its path. failure: why it ended.

    UserError without Bokeh, OSError where it cannot be written."""
    run_dir = Path(run_dir)
    return write_page(run_page(read_run(run_dir), failure), run_dir / "report.html")


def try_write_report(run_dir: Path, failure: str | None = None, quiet: bool = False) -> None:
    """Write report.html at the end of a run, which nothing about a report may fail. Logs where it is, or in one line
    why it is not; quiet: nothing."""
    try:
        written = write_report(run_dir, failure)
    except Exception as error:
        why = error.strerror if isinstance(error, OSError) and error.strerror else first_line(error)
        again = f" Then: python -m qtrain report {run_dir}" if isinstance(error, UserError) else ""
        if not quiet:
            log.warning("report.html is not written: %s%s", why, again)
        return
    if not quiet:
        log.info("report      %s", written)
