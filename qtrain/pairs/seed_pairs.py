"""What a scheme costs in learning, told by pairs: runs of a recipe under several variants, with the same seeds each.

python -m qtrain.pairs.seed_pairs --recipe configs/quickstart.json --schemes bf16,int8,fp8_rowwise --seeds 1,2,3
python -m qtrain.pairs.seed_pairs --collect --results_dir docs/results/learning --json docs/results/learning.json

A variant is a scheme, or a name of --variants with the settings that it replaces. A pair is two runs with one seed, so
with the same initial weights and the same batches; the tables give the difference of their validation losses in nats,
and of each variant the mean over seeds with its standard error. Runs of one seed are made before those of the next,
each by llm_pretrain.py in its own process on its own GPU. The same command again goes on where it was stopped, by
--time_limit or otherwise: finished runs are read, not repeated, and unfinished ones resumed from their last checkpoint.

A finished run is one line of a file in --results_dir; nothing else of it is needed. Files of several machines and days
in one folder are one set of results: results.py says which runs make a pair.
"""

import contextlib
import io
import json
import os
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from qtrain.bench.arguments import compared_schemes, name_and_options, split_list
from qtrain.bench.tables import check_json, write_json
from qtrain.core.checks import check_fields, user_path
from qtrain.core.config import JsonDict, as_dict, parse, read_recipe
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.process import run_script
from qtrain.data.eval_windows import eval_sets
from qtrain.pairs.pages import write_pages
from qtrain.pairs.results import RunResult, check_variants, data_fingerprint, make_tables, read_results
from qtrain.pairs.runs import PairedRun, Progress, train_all
from qtrain.quant import SCHEMES
from qtrain.scripts.llm_pretrain import PretrainSettings
from qtrain.scripts.llm_pretrain import main as pretrain
from qtrain.train.assembly.text import PLANNED_WITHOUT
from qtrain.train.log.report.page import bokeh_files
from qtrain.train.settings.listing import listing
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import CountOrZero

OWN = ("quantize", "quantize_kwargs", "seed", "run_name", "runs_dir")  # settings that this command gives each run
FIXED = (
    "model", "train_ds", "eval_ds", "seq_len", "batch_size", "n_steps", "eval_interval", "eval_sequences", "seed",
    "run_name", "runs_dir",
)  # fmt: skip
"""Settings that a variant cannot replace: both runs of a pair have them."""


@dataclass(frozen=True)
class SeedPairsSettings:
    """Compare the validation losses of schemes in pairs of runs with the same seed."""

    recipe: str = "configs/quickstart.json"
    """Recipe of llm_pretrain.py that every run follows; it names validation data (eval_ds)."""
    overrides: JsonDict = None
    """Settings that replace the recipe's, as a JSON object: '{"n_steps":1000,"compile":true}'."""
    schemes: str = "bf16,int8"
    """Variants to run, separated by commas: schemes, of which NAME:{JSON} sets the options, and names of --variants."""
    variants: str | None = None
    """JSON file of variants: an object NAME -> object of settings that replace the recipe's."""
    reference: str | None = None
    """Variant that the others are compared with; None: the first of --schemes."""
    seeds: str = "1,2,3"
    """Seeds, separated by commas: each is a run of every variant."""
    jobs: CountOrZero = 0
    """Runs at a time, each on its own GPU; 0: as many as there are GPUs."""
    time_limit: CountOrZero = 0
    """Seconds after which no run is begun and the running ones are stopped, each with a checkpoint, which takes up to a
    minute; the same command then goes on. 0: none."""
    runs_dir: str = "runs/seed_pairs"
    """Folder that holds the runs; those that are finished are not repeated."""
    results_dir: str | None = None
    """Folder to which finished runs are written, as a file of one line a run; None: RUNS_DIR/results."""
    others: tuple[str, ...] = ()
    """Further folders of such files, from other machines: runs in them are not repeated, and are in the tables."""
    json: str | None = None
    """JSON file to write the tables to, and the curves next to it as .html; None: RUNS_DIR/results.json."""
    collect: bool = False
    """Run nothing: make tables and pages of all results in --results_dir and --others, whatever their recipe."""


def main(argv: list[str]) -> None:
    began = time.monotonic()
    settings = parse(SeedPairsSettings, argv, "-m qtrain.pairs.seed_pairs", listing)
    runs_dir = user_path(settings.runs_dir, "--runs_dir")
    results_dir = user_path(settings.results_dir, "--results_dir") if settings.results_dir else runs_dir / "results"
    folders = [results_dir, *(user_path(folder, "--others") for folder in settings.others)]
    path = Path(settings.json) if settings.json else runs_dir / "results.json"
    check_json(path)
    bokeh_files()
    for folder in folders[1:]:
        if not folder.is_dir():
            raise UserError(f"--others: {folder} is not a folder.")
    # What other machines and earlier calls have finished is not run again.
    known = read_results(folders, "--results_dir, --others")
    if settings.collect:
        reference = settings.reference or split_list(settings.schemes)[0]
        if not known:
            raise UserError(f"--collect: there are no results in {', '.join(map(str, folders))}.")
        if reference not in (names := {run.variant for run in known}):
            raise unknown_name("--reference", "variant", reference, names)
        show(known, reference, {}, path, settings, argv)
        return

    # ---- runs: whatever can be refused is refused here ---------------------------------------------------------------
    runs = make_runs(settings, runs_dir)
    reference = settings.reference or runs[0].variant
    if reference not in (names := {run.variant for run in [*runs, *known]}):
        raise unknown_name("--reference", "variant", reference, names)
    device = describe_hardware(choose_device("auto")).name
    check_variants([*known, *runs], "--schemes, --results_dir")
    finished = {run.key for run in known}
    # Runs that this folder holds finished, but whose result is not written yet, are not repeated.
    todo = [run for run in runs if run.key not in finished and run.result(device) is None]
    check_recipes(todo)

    # ---- train -------------------------------------------------------------------------------------------------------
    runs_dir.mkdir(parents=True, exist_ok=True)
    # A file of its own for every call: several machines may write into one folder, and one several times a second.
    written = results_dir / f"{datetime.now(UTC):%Y%m%d-%H%M%S-%f}-{os.getpid()}.jsonl"
    deadline = began + settings.time_limit if settings.time_limit else None
    progress = Progress(runs, reference, known)
    failures = train_all(todo, settings.jobs, deadline, progress)

    # ---- results -----------------------------------------------------------------------------------------------------
    made = [result for run in runs if run.key not in finished and (result := run.result(device))]
    if made:
        results_dir.mkdir(parents=True, exist_ok=True)
        written.write_text("".join(result.line() for result in made), encoding="utf-8")
        print(f"results     {written} ({len(made)} runs)")
    wanted = {run.key for run in runs}
    shown = [
        r for r in [*known, *made] if r.key in wanted or (r.variant == reference and r.recipe_key == runs[0].key[0])
    ]
    show(shown, reference, failures, path, settings, argv)
    left = [run for run in runs if run.key not in {result.key for result in [*known, *made]}]
    print(
        f"{len(runs) - len(left)} of {len(runs)} runs are finished" + ("" if not left else "; the same command goes on")
    )


def show(
    runs: Sequence[RunResult], reference: str, failures: Mapping[str, str], path: Path, settings: Any, argv: list[str]
) -> None:
    """Print the tables; write them to `path`, and the curves next to it."""
    tables = make_tables(runs, reference, failures)
    print(*(table.markdown() for table in tables), sep="\n\n")
    about = {
        "command": ["python", "-m", "qtrain.pairs.seed_pairs", *argv],
        "versions": runs[-1].versions if runs else {},
        "device": ", ".join(sorted({run.device for run in runs})),
        "settings": as_dict(settings),
    }
    write_json(tables, path, about)
    pages = write_pages(runs, reference, path)
    print("", f"figures     {path}", *(f"curves      {page}" for page in pages), sep="\n")


# ---- what to run ----------------------------------------------------------------------------------------------------


def make_runs(settings: SeedPairsSettings, runs_dir: Path) -> list[PairedRun]:
    """Those of one seed after those of another. UserError for whatever the settings alone tell."""
    overrides = settings.overrides or {}
    recipe = {**read_recipe(settings.recipe, "--recipe"), **overrides}
    if given := [key for key in OWN if key in overrides]:
        raise UserError(f"--overrides: {given[0]} is set by this command: by --schemes, --seeds or --runs_dir.")
    if not recipe.get("eval_ds"):
        raise UserError(f"--recipe: {settings.recipe} names no validation data (eval_ds), whose loss is compared.")
    variants = chosen_variants(split_list(settings.schemes), read_variants(settings.variants))
    # One variant can be compared with a reference of other results, and may be the reference of those.
    if len(variants) < 2 and settings.reference in (None, *variants) and not settings.others:
        raise UserError(
            f"--schemes: {settings.schemes!r} leaves nothing to compare; name more, the --reference, or --others."
        )
    seeds = parse_seeds(settings.seeds)
    data = data_fingerprint(recipe.get("train_ds") or {}, *eval_sets(recipe["eval_ds"], "eval_ds").values())
    return [PairedRun(name, own, seed, recipe, data, runs_dir) for seed in seeds for name, own in variants.items()]


def read_variants(path: str | None) -> dict[str, dict[str, Any]]:
    """Settings by variant. UserError for a name of a scheme, unknown settings, and those that a pair shares."""
    variants, schemes = read_recipe(path, "--variants") if path else {}, set(SCHEMES.names())
    for name, own in variants.items():
        where = f"--variants ({path}): {name}"
        if not isinstance(own, dict):
            raise UserError(f"{where}: a variant is a JSON object of settings, not {json.dumps(own)}.")
        if name in schemes or not re.fullmatch(r"[\w.-]{1,40}", name):
            why = "the name of a scheme" if name in schemes else "not a name"
            raise UserError(f"{where}: it is {why}; name variants with other letters, digits, '_', '-' and '.'.")
        check_fields(PretrainSettings, own, where)
        if shared := [key for key in FIXED if key in own]:
            raise UserError(f"{where}: {shared[0]} is the same in both runs of a pair; set it with --overrides.")
    return variants


def chosen_variants(words: Sequence[str], variants: Mapping[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Settings of each word of --schemes. UserError for one that is neither a scheme nor a variant, or given twice."""
    chosen: dict[str, dict[str, Any]] = {}
    for word in words:
        if word in chosen:
            raise UserError(f"--schemes: {word} is given twice; leave one out.")
        if word in variants:
            chosen[word] = variants[word]
            continue
        name, kwargs = name_and_options(word, "--schemes")
        if variants and name not in set(SCHEMES.names()):
            raise unknown_name("--schemes", "scheme or variant", name, [*variants, *SCHEMES.names()])
        compared_schemes([word])
        chosen[word] = {"quantize": name, "quantize_kwargs": kwargs or None}
    return chosen


def parse_seeds(text: str) -> list[int]:
    words = split_list(text)
    if not words or not all(re.fullmatch(r"\d{1,9}", word) for word in words) or len(set(words)) < len(words):
        raise UserError(f"--seeds: {text!r} is not a list of seeds; write different whole numbers as in 1,2,3.")
    return [int(word) for word in words]


def check_recipes(runs: Sequence[PairedRun]) -> None:
    """UserError for what llm_pretrain.py says of the recipe under each variant that is still to begin, by a dry run in
    this process, which has torch imported already."""
    # One run of each variant: seeds do not change what is refused.
    first = {run.variant: run for run in reversed(runs) if run.begun() is None}
    # Of each variant the first run stayed, in reverse: refusals come in the order of --schemes.
    for run in reversed(first.values()):
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()) as plan:
            path = Path(folder) / "recipe.json"
            path.write_text(json.dumps({**run.recipe, "gpus": 0}))
            try:
                pretrain(["--config", str(path), "--dry_run"])
                if absent := next((line for line in plan.getvalue().splitlines() if PLANNED_WITHOUT in line), None):
                    raise UserError(absent.removeprefix("data").strip().removesuffix(PLANNED_WITHOUT).strip())
            except UserError as error:
                said = str(error).replace(f"--config ({path}): ", "")
                raise UserError(f"--recipe, --schemes ({run.variant}): {said}") from None


if __name__ == "__main__":
    run_script(main)
