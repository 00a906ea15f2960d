"""Held-out loss of trained models before and after each export, and the size of the export on disk.

python tokenize_data.py --config configs/quickstart_data.json
python -m benchmarks.export_losses --n_steps 300 --compile --json export_losses.json

One model is trained per scheme, in bf16. Its newest checkpoint is then exported densely, in every format that holds the
scheme's codes, and as GGUF Q8_0, and losses are measured on the same held-out windows:

    in its scheme   the run as it trained: low-bit products of codes of weights and of activations
    dequantized     the same codes of weights, dequantized, products in bf16
    transformers    the export as transformers loads it, which for some formats quantizes activations too
    qtrain          the export as --model of qtrain loads it: codes dequantized, products in bf16

A cell without a figure has a footnote that says why: a package is missing, or the reader refuses the file.
"""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from subprocess import PIPE
from typing import Annotated, Literal

import torch
from torch import nn

from qtrain.bench.arguments import compared_schemes, split_list
from qtrain.bench.tables import Cell, Table, check_json, write_asked
from qtrain.bench.training_cell import reason_of
from qtrain.commands.export import tokenizer_of
from qtrain.core.checks import Range, user_path
from qtrain.core.config import JsonDict, parse
from qtrain.core.errors import UserError
from qtrain.core.process import run_script
from qtrain.data.batch import Batch
from qtrain.data.eval_windows import eval_batches
from qtrain.data.stream import StreamContext
from qtrain.models import ExportOptions, build_model, check_exports, left_by_training, read_formats, read_model_source
from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat
from qtrain.models.hf.formats.table import kept
from qtrain.models.hf.gguf_export import FILE
from qtrain.models.hf.impl import HfModel
from qtrain.models.hf.readers.declared import KEY, READERS
from qtrain.pairs.runs import pretrain
from qtrain.quant import Scheme
from qtrain.quant.export_codes import trained_codes, values_of
from qtrain.train.assembly.exports import export_folders
from qtrain.train.assembly.measured import MeasuredModel
from qtrain.train.eval.language import summed_loss
from qtrain.train.settings.listing import listing
from qtrain.train.settings.machine import choose_device
from qtrain.train.settings.settings import Count
from qtrain.train.state.run import Run
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import export_weights

DENSE, ALWAYS = "hf", ("hf", "gguf_q8_0")
COLUMNS = ("codes", "in its scheme", "dequantized", "transformers", "qtrain", "MB", "of bf16")


@dataclass(frozen=True)
class ExportLossSettings:
    """Train a model per scheme, export it, and compare held-out losses before and after."""

    model: str = "llama-100m"
    """Shape of the models, as for llm_pretrain.py."""
    schemes: str = "int8,fp8_blockwise,fp8_rowwise,bitnet,nvfp4"
    """Schemes separated by commas; NAME:{JSON} sets a scheme's options, as bitnet:{"sub_norm":false}."""
    train_ds: JsonDict = None
    """Training data, as for llm_pretrain.py; null: data/stdlib_train, which the quickstart makes."""
    eval_ds: JsonDict = None
    """Held-out data; null: data/stdlib_validation."""
    n_steps: Count = 300
    """Steps of each training."""
    batch_size: Count = 64
    """Sequences per step."""
    seq_len: Count = 512
    """Tokens per sequence, of held-out windows too."""
    lr: float = 1e-3
    """Peak learning rate."""
    sequences: Count = 256
    """Held-out windows, the same ones for all; all that there are, if there are fewer."""
    eval_batch: Annotated[int, Range(1, 10**4)] = 16
    """Windows per forward pass."""
    compile: bool = False
    """Train with torch.compile."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    seed: int = 0
    """Of the models and of the order of training data."""
    output: str | None = None
    """Folder that keeps runs and exports; none: a temporary one."""
    json: str | None = None
    """File for the figures."""


@dataclass(frozen=True)
class Measurement:
    """What all losses are measured with."""

    settings: ExportLossSettings
    device: torch.device
    windows: Sequence[Batch]

    def loss(self, model: nn.Module) -> Cell:
        value = summed_loss(model, language_forward(model, None), self.windows).mean
        return Cell(value, text=f"{value:.4f}")

    def attempt(self, load: Callable[[], nn.Module]) -> Cell:
        """The loss of a model that is loaded, or why there is none."""
        try:
            return self.loss(load())
        except UserError as error:
            return Cell(reason=str(error))
        except Exception as error:  # readers of other packages raise errors of any type
            return Cell(reason=f"{type(error).__name__}: {' '.join(str(error).split())[:160]}")


def main(argv: list[str]) -> None:
    settings = parse(ExportLossSettings, argv, "-m benchmarks.export_losses", listing)
    if settings.json:
        check_json(user_path(settings.json, "--json"))
    device = choose_device(settings.device)
    schemes = compared_schemes(split_list(settings.schemes))
    if not schemes:
        raise UserError("--schemes: nothing to train; name at least one scheme.")
    vocab_size = read_model_source(settings.model).model_config().vocab_size
    ctx = StreamContext(settings.seq_len, vocab_size=vocab_size, micro_batch_size=settings.eval_batch)
    data = dataset(settings.eval_ds, "validation")
    found = eval_batches(data, ctx, settings.eval_batch, settings.sequences, "--eval_ds")
    measurement = Measurement(settings, device, found.batches)
    title = f"Held-out loss of {settings.model} before and after exports, {settings.n_steps} steps of training"
    notes = [f"{found.n_sequences} windows of {settings.seq_len} tokens; MB of weights' files, and share of `hf`, bf16"]
    table = Table(title, "nats a token", COLUMNS, notes)
    keep = contextlib.nullcontext(settings.output) if settings.output else tempfile.TemporaryDirectory()
    with keep as runs:
        for word, scheme in schemes.items():
            print(f"{word}: training", flush=True)
            run = trained(settings, word, user_path(runs, "--output"))
            if isinstance(run, Cell):
                table.put(word, "in its scheme", run)
                continue
            for name, cells in rows(measurement, scheme, run):
                for column, cell in cells.items():
                    table.put(f"{word}, {name}", column, cell)
                shown = (f"{column} {cell.shown() or cell.reason}" for column, cell in cells.items())
                print(f"{word}, {name}: {', '.join(shown)}", flush=True)
    print(table.markdown())
    write_asked([table], settings, device)


def dataset(given: dict | None, split: str) -> dict:
    return given or {"type": "token", "dataset_dir": f"data/stdlib_{split}"}


def trained(settings: ExportLossSettings, word: str, runs: Path) -> Path | Cell:
    """The folder of a new run in the scheme `word`; a cell that says why it failed."""
    name, colon, options = word.partition(":")
    values = {
        "model": settings.model, "quantize": name, "dtype": "bf16", "device": settings.device, "seed": settings.seed,
        "train_ds": json.dumps(dataset(settings.train_ds, "train")), "seq_len": settings.seq_len, "lr": settings.lr,
        "batch_size": settings.batch_size, "n_steps": settings.n_steps, "run_name": f"export_{name}",
        "runs_dir": runs / "".join(c if c.isalnum() else "_" for c in word), "ckpt_interval": 0, "keep_ckpts": 1,
    }  # fmt: skip
    flags = [f"--{key}={value}" for key, value in values.items()] + ["--no_export"] + ["--compile"] * settings.compile
    done = pretrain([*flags, *([f"--quantize_kwargs={options}"] if colon else [])], stdout=PIPE, stderr=PIPE, text=True)
    if done.returncode:
        sys.stderr.write(done.stderr)
        return Cell(reason=f"training failed: {reason_of(done)[:160]}")
    return max((values["runs_dir"] / "llm_pretrain").iterdir())  # names begin with the time


def rows(measurement: Measurement, scheme: Scheme, run: Path) -> Iterator[tuple[str, dict[str, Cell]]]:
    """(format, its cells) of each export of a run."""
    measured = MeasuredModel.find(str(run), "--model", prefer_checkpoint=True)
    with measured.loaded(measurement.device, "bf16") as (model, restored):
        assert restored is not None  # it is a run
        before = {"in its scheme": measurement.loss(model)}
        refused = write_exports(measured, scheme, restored)
        codes = {name: trained_codes(linear)[0] for name, linear in restored.quantized.by_name().items()}
    before["dequantized"] = measurement.loss(dequantized(measurement, run / DENSE, codes))
    del codes, model, restored
    dense = weights_size(run / DENSE)
    for name in formats_of(scheme):
        fmt = EXPORT_FORMATS.make(name, {}, "--schemes")
        held = {"codes": Cell(text=whose_codes(scheme, fmt))}
        if name in refused:
            yield name, {**held, **before, "MB": Cell(reason=refused[name])}
            continue
        folder, size = run / name, weights_size(run / name)
        readers = {"transformers": by_transformers, "qtrain": by_qtrain}
        after = {c: measurement.attempt(partial(read, folder, measurement.device)) for c, read in readers.items()}
        of_bf16 = Cell(size / dense, text=f"{100 * size / dense:.0f}%")
        yield name, {**held, **before, **after, "MB": Cell(size / 1e6), "of bf16": of_bf16}


def whose_codes(scheme: Scheme, fmt: ExportFormat) -> str:
    found = kept(scheme, fmt)
    return found.text if found.equal or fmt.weight is None else f"new: {found.text}"


def formats_of(scheme: Scheme) -> list[str]:
    """The dense format and GGUF Q8_0, and between them those that hold the scheme's codes."""
    makes = {name: EXPORT_FORMATS.make(name, {}, "--schemes") for name in EXPORT_FORMATS.names()}
    keeping = [name for name, fmt in makes.items() if kept(scheme, fmt).equal and name not in ALWAYS]
    return [ALWAYS[0], *keeping, *ALWAYS[1:]]


def write_exports(measured: MeasuredModel, scheme: Scheme, run: Run) -> dict[str, str]:
    """Write RUN/FORMAT for each format. Returns why some cannot be written."""
    folder, folders, refused = measured.checkpoint.parent.parent, {}, {}
    model, linears = measured.outline(torch.device("cpu"), native=True)
    for name in formats_of(scheme):
        try:
            check_exports(model, linears, read_formats([name], "--schemes"), "--schemes")
            folders[name] = folder / name
        except UserError as error:
            refused[name] = str(error)
    with export_weights(run) as whole:
        options = ExportOptions(tokenizer_of(measured), left_by_training(linears), measured.settings.seq_len)
        lines = export_folders(whole, measured.source, folders, options, measured.card(str(folder), []), "--schemes")
    print("\n".join(line for line in lines if line.startswith("codes")), flush=True)
    return refused


def weights_size(folder: Path) -> int:
    """Bytes of the files of weights."""
    return sum(path.stat().st_size for path in folder.iterdir() if path.suffix in (".safetensors", ".gguf"))


def dequantized(measurement: Measurement, dense: Path, codes: dict) -> nn.Module:
    """The dense export with the values of `codes`, by linear, in the place of its weights."""
    model = by_qtrain(dense, measurement.device)
    with torch.no_grad():
        for name, held in codes.items():
            weight = model.get_parameter(f"{name}.weight")
            weight.copy_(values_of(held, weight))
    return model


def by_qtrain(folder: Path, device: torch.device) -> nn.Module:
    if (folder / FILE).is_file():
        raise UserError("qtrain reads no GGUF")
    source = read_model_source(str(folder))
    method = source.config.get(KEY, {}).get("quant_method")
    if method is not None and method not in READERS:
        raise UserError(f"qtrain reads no {method}")
    return build_model(source, device=device, dtype=torch.bfloat16, pretrained=True)


def by_transformers(folder: Path, device: torch.device) -> nn.Module:
    from transformers import AutoConfig, AutoModelForCausalLM

    options = {}
    if (folder / FILE).is_file():  # its config is that of the dense export, of which GGUF holds a part
        options = {"gguf_file": FILE, "config": AutoConfig.from_pretrained(folder.parent / DENSE)}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options)
    return HfModel(model.to(device))


if __name__ == "__main__":
    run_script(main)
