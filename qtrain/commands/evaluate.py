"""Measure a language model: what to load > data and questions > loss, answers > tasks > table.

python -m qtrain evaluate runs/llm_pretrain/RUN --tasks base
python -m qtrain evaluate Qwen/Qwen2.5-0.5B --data '{"type":"token","dataset_dir":"tinystories_validation"}'

A folder or hub id is measured in --dtype; a checkpoint with the scheme that it was trained with.
"""

import contextlib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from qtrain.core.checks import Range, user_path
from qtrain.core.config import JsonDict, parse
from qtrain.core.errors import UserError
from qtrain.train.settings.evaluation import EvaluationSettings
from qtrain.train.settings.listing import listing

if TYPE_CHECKING:
    from qtrain.bench.tables import Table
    from qtrain.data.stream import Extent, StreamContext
    from qtrain.train.eval.language import EvaluationData
    from qtrain.train.settings.settings import LanguageSettings

NAME = "-m qtrain evaluate"
SEQ_LEN = 2048


@dataclass(frozen=True)
class EvaluateSettings(EvaluationSettings):
    """Measure a language model; the first word without dashes is --model."""

    model: str | None = None
    """Run folder (its export, else its newest checkpoint), checkpoint of one, exported folder, or hub id."""
    tasks: str | None = None
    """Tasks of lm-evaluation-harness, separated by commas; base: ARC, BoolQ, COPA, HellaSwag, OpenBookQA, PIQA,
    WinoGrande."""
    data: JsonDict = None
    """Data for the loss and --accuracy, a JSON object like --eval_ds, several by name too; null: --eval_ds of the run,
    if it is one."""
    sequences: Annotated[int, Range(0)] = 0
    """Sequences of --data, the first of a fixed shuffled order; 0: all."""
    seq_len: Annotated[int, Range(0, 10**7)] = 0
    """Tokens per sequence; 0: that of the run, else 2048."""
    batch_size: Annotated[int, Range(1, 10**5)] = 8
    """Sequences per forward pass."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto: the GPU if there is one, else the CPU."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of an exported folder's model; auto: bf16 on a GPU, fp32 on a CPU."""
    json: str | None = None
    """File for the results; a .csv is written beside it."""


def main(argv: list[str]) -> None:
    evaluate(parse(EvaluateSettings, as_flags(argv), NAME, listing))


def as_flags(argv: list[str]) -> list[str]:
    """The command line with its first word, if that is no flag, as the value of --model."""
    return [f"--model={argv[0]}", *argv[1:]] if argv and not argv[0].startswith("-") else argv


def evaluate(settings: EvaluateSettings) -> None:
    # Imported here: torch and what needs it take seconds, which a mistyped flag should not have to wait for.
    from qtrain.bench.tables import about_run, check_json, write_json
    from qtrain.data.eval_windows import eval_sets, set_flag
    from qtrain.data.stream import StreamContext, dataset_tokenizer, tokenizer_needed
    from qtrain.train.assembly.measured import MeasuredModel
    from qtrain.train.eval.language import LanguageEvaluation, load_evaluation
    from qtrain.train.eval.lm_eval import check_lm_eval, run_lm_eval
    from qtrain.train.settings.machine import choose_device
    from qtrain.train.step.forward import language_forward

    # ---- what to load, and what to ask: whatever can be refused is refused here --------------------------------------
    if settings.model is None:
        raise UserError("--model: nothing to evaluate is named; give a run folder, a checkpoint, a folder or a hub id.")
    if settings.hellaswag_file and not settings.hellaswag:
        raise UserError("--hellaswag_file: it needs --hellaswag.")
    if settings.json:
        check_json(user_path(settings.json, "--json"))
    device = choose_device(settings.device)
    measured = MeasuredModel.find(settings.model, "--model")
    trained, config = measured.settings, measured.source.config
    data = settings.data if settings.data is not None or trained is None else trained.eval_ds
    if not (data or settings.tasks or settings.hellaswag or settings.sample_prompts):
        raise UserError("--data, --tasks: nothing to measure is given; give one of them, or --hellaswag.")
    check_lm_eval(settings.tasks, "--tasks")
    named = (dataset_tokenizer(spec, set_flag("--data", name)) for name, spec in eval_sets(data, "--data").items())
    tokenizer = next(filter(None, named), None) or measured.tokenizer()
    if tokenizer is None and trained is not None and trained.train_ds:
        tokenizer = dataset_tokenizer(trained.train_ds, "--train_ds of the run")
    seq_len = settings.seq_len or (trained.seq_len if trained else SEQ_LEN)
    vocab_size = config.get("vocab_size")
    ctx = StreamContext(seq_len, tokenizer=tokenizer, vocab_size=vocab_size, micro_batch_size=settings.batch_size)
    asked = load_evaluation(settings, ctx, data, "--data", settings.sequences, _trained_on(trained, ctx))
    if settings.tasks and tokenizer is None and measured.exported is None:
        raise tokenizer_needed("--data", "--tasks")
    flag = "--data" if settings.data is not None else "--eval_ds of the run"
    what = [*_losses(asked, eval_sets(data, "--data"), flag, seq_len), *_other_measures(settings)]
    print("; ".join([f"measured: {measured.describe(device, settings.dtype)}", *what]))
    for note in asked.notes:
        print(note)

    # ---- measure -----------------------------------------------------------------------------------------------------
    with measured.loaded(device, settings.dtype) as (model, run):
        doc_mask = trained is not None and trained.doc_mask
        forward = language_forward(model, tokenizer.eos_id if doc_mask and tokenizer else None)
        results = LanguageEvaluation(model, forward, asked, settings)()
        for prompt, continuation in results.pop("samples", ()):
            print(f"sample: {prompt} [>] {continuation}")
        if settings.tasks:
            with measured.as_folder(run, tokenizer) as folder:
                results |= run_lm_eval(settings.tasks, folder, device.type, "--tasks")

    # ---- table -------------------------------------------------------------------------------------------------------
    table = results_table(settings.model, results)
    if table.rows:
        print(table.markdown())
    if settings.json:
        write_json([table], Path(settings.json), about_run(settings, device.type))


def _losses(asked: "EvaluationData", specs: Mapping[str, Mapping[str, Any]], flag: str, seq_len: int) -> Iterator[str]:
    """The data of each loss, and how much of them."""
    from qtrain.data.eval_windows import set_flag

    for name, spec in specs.items():
        count = asked.sets[name].sequences
        sequences = "all sequences" if count is None else f"{count:,} sequence{'s' * (count != 1)}"
        given = json.dumps(spec, separators=(",", ":"))
        yield f"loss on {set_flag(flag, name)} {given}: {sequences} x {seq_len:,} tokens"


def _other_measures(settings: EvaluateSettings) -> Iterator[str]:
    for name in ("accuracy", "tasks", "hellaswag"):
        if value := getattr(settings, name):
            yield f"--{name}" if value is True else f"--{name} {value}"


def _trained_on(trained: "LanguageSettings | None", ctx: "StreamContext") -> "Sequence[Extent]":
    """What the model's run trained on, as far as it is still there."""
    from qtrain.data.stream import open_stream

    if trained is None or trained.train_ds is None:
        return ()
    with contextlib.suppress(UserError):
        return open_stream(trained.train_ds, ctx, "--train_ds").reads
    return ()


def results_table(model: str, results: dict[str, float]) -> "Table":
    """One row a measure, with the standard error of the harness's."""
    from qtrain.bench.tables import Cell, Table

    table = Table(model, "", ["value", "stderr"])
    for name, value, error in _rows(results):
        table.put(name, "value", Cell(value, text=f"{value:.4f}"))
        if error is not None:
            table.put(name, "stderr", Cell(error, text=f"{error:.4f}"))
    return table


def _rows(results: dict[str, float]) -> Iterator[tuple[str, float, float | None]]:
    """(name, value, its standard error) of each measure."""
    for name, value in results.items():
        if loss := re.fullmatch(r"eval_(?:(.+)_)?loss", name):  # of all data, or of a set by name
            set_prefix = f"{loss[1]}/" if loss[1] else ""
            yield f"{set_prefix}loss", value, None
            yield f"{set_prefix}perplexity", math.exp(min(value, 700.0)), None  # more is no float
        elif "_stderr" not in name:
            metric, comma, kind = name.partition(",")
            yield name.removeprefix("lm_eval/"), value, results.get(f"{metric}_stderr{comma}{kind}")
