"""The curves of paired runs as pages: losses of every run, and differences to the reference with the band of seeds."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from qtrain.core.errors import os_errors
from qtrain.pairs.results import RunResult, grouped, make_pairs, title_of
from qtrain.train.log.report.compare import ComparedRun, compare_page
from qtrain.train.log.report.records import Curve
from qtrain.train.log.report.write import write_page


def write_pages(runs: Sequence[RunResult], reference: str, path: Path) -> list[Path]:
    """Write a comparison with the reference for each recipe and data that have pairs: `path` with the ending .html, the
    second one -2.html, ... UserError where one cannot be written."""
    written: list[Path] = []
    for found in grouped(runs, lambda run: (run.recipe_key, run.data)).values():
        if not make_pairs(found, reference):
            continue
        number = f"-{len(written) + 1}" if written else ""
        page = path.with_name(f"{path.stem}{number}.html")
        ordered = sorted(found, key=lambda run: (run.variant != reference, run.seed))
        title = f"{title_of(found[0])}: variants over {reference}"
        with os_errors(f"--json: cannot write {page}"):
            write_page(compare_page([_compared(run) for run in ordered], title), page)
        written.append(page)
    return written


def _compared(run: RunResult) -> ComparedRun:
    settings = {**run.recipe, **run.overrides, "seed": run.seed, "GPU": run.device, "_versions": run.versions}
    last = max(run.losses)
    seconds = run.tokens / run.tok_s if run.tok_s else None

    def curve(points: Sequence[Sequence[float]]) -> Curve | None:
        if not points:
            return None
        steps, losses = np.array(points, np.float64).T
        x = {"steps": steps, "tokens": steps * run.tokens / last}
        return Curve(x | ({"hours": steps / last * seconds / 3600} if seconds else {}), losses)

    train, validation = curve(run.train_loss), curve(run.eval_loss)
    return ComparedRun(f"{run.variant}-seed{run.seed}", settings, train, validation, tokens=run.tokens, seconds=seconds)
