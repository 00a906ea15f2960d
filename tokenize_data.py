"""Turn text into token shards that training reads: corpus > tokenizer > shards > manifest.

python tokenize_data.py --dataset tinystories --split train
python tokenize_data.py --files python:stdlib --split train,validation --train_tokenizer 4096 --output_dir data/stdlib

After an interruption the same command resumes where it stopped; the files are the same, byte for byte.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from qtrain.core.process import prepare_process

prepare_process(script=True)  # before imports that take a while

from qtrain.core.checks import Range, user_path
from qtrain.core.checksums import sha256_of
from qtrain.core.config import JsonText, parse
from qtrain.core.errors import UserError, os_errors, unknown_name
from qtrain.core.process import command_line, run_script
from qtrain.data.files import SPLITS, STDLIB
from qtrain.data.hub_rows import reader_of
from qtrain.data.text.corpus import Corpus, HubCorpus, LocalCorpus
from qtrain.data.text.manifest import FILE_NAME, Manifest, read_manifest, write_atomic
from qtrain.data.text.shards import LAYOUTS, shard_dtype
from qtrain.data.text.tokenize import check_finished_shards, tokenize
from qtrain.data.tokenizers.sentencepiece_model import convert_sentencepiece, train_tokenizer
from qtrain.data.tokenizers.tokenizer import FastTokenizer, Tokenizer, load_tokenizer
from qtrain.train.settings.listing import listing

TRAINED = "tokenizer.model"
LATER = {"template": None, "format": "qtrain", "max_tokens": 0}
"""Settings that manifests of earlier versions lack, and what they were."""
QUICKSTART_VOCAB = 4096
"""Ids of the model `quickstart`, which a CPU can train; the scripts' default model takes days there."""


@dataclass(frozen=True)
class TokenizeSettings:
    """Tokenize a dataset of the Hugging Face hub, or local files, into shards for the dataset type `token`."""

    dataset: str | None = None
    """tiny-shakespeare, tinystories, openwebtext, fineweb-edu, c4, c4-realnewslike, climb-10b (--list says licences and
    sizes), any hub dataset ORG/NAME, or a local file or folder."""
    files: tuple[str, ...] = ()
    """Local text instead of a dataset: .txt, .py, .jsonl, .json, .csv, .parquet or .arrow files, compressed ones too
    (.gz, .zst, .bz2, .xz), globs, folders, or python:stdlib."""
    subset: str | None = None
    """Subset (configuration) of the hub dataset."""
    split: str = "train"
    """Split, or several separated by commas; of local files: train, validation (divided by file) or all."""
    text_column: str = "text"
    """Column or key that holds the text."""
    validation_fraction: Annotated[float, Range(0, 1)] = 0.05
    """Share of the local files in the validation split, chosen by a hash of their path; of few files of the
    documents in each, the last ones, and of a single text its last lines."""
    template: JsonText = None
    """Make prompts and answers of columns of --dataset: alpaca, gsm8k, metamathqa, or JSON (docs/finetuning.md).
    Only answers are trained on, which --format llmq can say; null: --text_column."""
    format: Literal["qtrain", "llmq", "llmc", "raw"] = "qtrain"
    """Format of the shards; llmq, llmc: as these programs read them; raw: uint16 ids alone. All train here too."""
    tokenizer: str | None = None
    """llama2, llama3, mistral, qwen2.5, byte, a .model file, a tokenizer.json, a folder or a hub id; none: llama2."""
    train_tokenizer: Annotated[int, Range(0)] = 0
    """Train a sentencepiece tokenizer with this many pieces on the train split instead; 0: do not."""
    n_procs: Annotated[int, Range(0, 1024)] = 0
    """Encoding processes; 0: one per CPU core."""
    shard_tokens: Annotated[int, Range(1000, 200_000_000)] = 100_000_000
    """Tokens per shard at most."""
    max_tokens: Annotated[int, Range(0)] = 0
    """Tokens to write in all at most; 0: all there are, of climb-10b 10 billion."""
    output_dir: str | None = None
    """Folder to write; with several splits _SPLIT is appended; none: <dataset>_<split>."""


def main(argv: list[str]) -> None:
    settings = parse(TokenizeSettings, argv, "tokenize_data.py", listing)

    # ---- corpus: whatever can be refused is refused before anything is written ---------------------------------------
    check_choices(settings)
    splits = list(dict.fromkeys(settings.split.split(",")))
    corpora = {split: open_corpus(settings, split) for split in splits}
    folders = {split: output_folder(settings, split, several=len(splits) > 1) for split in splits}
    manifests = {split: begin_or_resume(settings, split, corpora[split], folders[split]) for split in splits}

    # ---- tokenizer ---------------------------------------------------------------------------------------------------
    model: bytes | None = None
    if settings.train_tokenizer:
        model = saved_tokenizer(folders.values()) or train(settings, corpora)
        converted = convert_sentencepiece(model, TRAINED, "--train_tokenizer")
        tokenizer: Tokenizer = FastTokenizer(TRAINED, *converted, sentencepiece_model=model)
    else:
        tokenizer = load_tokenizer(settings.tokenizer or "llama2", "--tokenizer")
    if tokenizer.eos_id is None:
        raise UserError(f"--tokenizer: {tokenizer.name!r} names no end-of-text token, which separates documents.")
    if settings.format == "raw" and tokenizer.vocab_size > 1 << 16:
        raise UserError(
            f"--format: raw ids are uint16, and {tokenizer.name!r} has {tokenizer.vocab_size:,}; use another format."
        )

    # ---- shards ------------------------------------------------------------------------------------------------------
    for split in splits:
        manifest, folder = manifests[split], folders[split]
        if manifest.complete:
            print(f"{folder} is complete already: {manifest.tokens:,} tokens in {len(manifest.shards)} shards.")
            continue
        if manifest.tokenizer:
            check_tokenizer(manifest, tokenizer, folder)
            print(f"{folder}: resuming after {len(manifest.shards)} finished shards, {manifest.tokens:,} tokens.")
        else:
            prepare_folder(folder, manifest, tokenizer, model, settings)
        n_procs, corpus = settings.n_procs or available_cores(), corpora[split]
        for line in corpus.notes:
            print(f"{folder}: {line}", flush=True)
        limit = settings.max_tokens or corpus.max_tokens
        manifest, speed = tokenize(corpus, tokenizer, folder, manifest, settings.shard_tokens, n_procs, limit)
        print(
            f"{folder}: {manifest.tokens:,} tokens of {manifest.documents:,} documents in {len(manifest.shards)} "
            f"shards, {speed:,.0f} tokens/s with {n_procs} processes."
        )

    # ---- next --------------------------------------------------------------------------------------------------------
    flags = f"""--train_ds '{{"type":"token","dataset_dir":"{folders[splits[0]]}"}}'"""
    if "validation" in splits[1:]:
        flags += f""" --eval_ds '{{"type":"token","dataset_dir":"{folders["validation"]}"}}'"""
    if tokenizer.vocab_size <= QUICKSTART_VOCAB:
        flags = f"--model quickstart {flags}"
    print(f"Train on it: {command_line('llm_pretrain.py')} {flags}")


def available_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def check_choices(settings: TokenizeSettings) -> None:
    if bool(settings.dataset) == bool(settings.files):
        given = "both are given" if settings.files else "neither is given"
        raise UserError(f"--dataset, --files: {given}; give one of the two, for example --files {STDLIB}.")
    if settings.subset and settings.files:
        raise UserError("--subset: local files have no subsets; leave it out.")
    if settings.train_tokenizer and settings.tokenizer:
        raise UserError("--tokenizer, --train_tokenizer: both are given; give one of the two.")
    if settings.template is not None and settings.files:
        raise UserError("--template: it makes prompts of columns, which --files have not; give --dataset instead.")
    if settings.template is not None and settings.format != "llmq":
        raise UserError(f"--template: shards of --format {settings.format} cannot say what is trained on; use llmq.")
    for split in settings.split.split(","):
        if settings.files and split not in SPLITS:
            raise unknown_name("--split", "split of local files", split, SPLITS)


def open_corpus(settings: TokenizeSettings, split: str) -> Corpus:
    if settings.files:
        return LocalCorpus(list(settings.files), split, settings.validation_fraction, settings.text_column, "--files")
    template = None
    if settings.template is not None:
        from qtrain.data.examples.instruct_dataset import make_template  # which imports torch

        template = make_template(settings.template, "--template")
    return HubCorpus(settings.dataset or "", settings.subset, split, settings.text_column, "--dataset", template)


def output_folder(settings: TokenizeSettings, split: str, several: bool) -> Path:
    if settings.output_dir:
        return user_path(f"{settings.output_dir}_{split}" if several else settings.output_dir, "--output_dir")
    if settings.dataset:
        base = settings.dataset.split("/")[-1]
        base = (base.split("*")[0].split(".")[0] or "text") if reader_of(base) else base
        name = "_".join(filter(None, [base, settings.subset]))
    else:
        name = "stdlib" if settings.files[0] == STDLIB else Path(settings.files[0].split("*")[0]).stem or "text"
    return Path(f"{name}_{split}")


def begin_or_resume(settings: TokenizeSettings, split: str, corpus: Corpus, folder: Path) -> Manifest:
    """A new manifest, or that of an interrupted run of the same command in `folder`."""
    asked: dict[str, Any] = {
        "dataset": settings.dataset,
        "files": list(settings.files),
        "subset": settings.subset,
        "split": split,
        "text_column": settings.text_column,
        "validation_fraction": settings.validation_fraction,
        "tokenizer": None if settings.train_tokenizer else settings.tokenizer or "llama2",
        "train_tokenizer": settings.train_tokenizer,
        "shard_tokens": settings.shard_tokens,
        "corpus": corpus.fingerprint,
        "template": settings.template,
        "format": settings.format,
        "max_tokens": settings.max_tokens,
    }
    if not folder.exists() or (folder.is_dir() and not any(folder.iterdir())):
        return Manifest(settings=asked)
    if not (folder / FILE_NAME).is_file():
        raise UserError(f"--output_dir: {folder} exists and holds other files; give another folder.")
    manifest = read_manifest(folder, "--output_dir")
    for key, value in asked.items():
        earlier = manifest.settings.get(key, LATER.get(key))
        if earlier != value:
            how = (
                "from files that have changed since" if key == "corpus" else f"with --{key} {earlier!r}, not {value!r}"
            )
            raise UserError(f"--output_dir: {folder} was made {how}. Give another folder, or delete this one.")
    check_finished_shards(folder, manifest)
    return manifest


def saved_tokenizer(folders: Iterable[Path]) -> bytes | None:
    """The .model file that an earlier run of the same command trained."""
    return next(((folder / TRAINED).read_bytes() for folder in folders if (folder / TRAINED).is_file()), None)


def train(settings: TokenizeSettings, corpora: dict[str, Corpus]) -> bytes:
    """The .model file of a tokenizer trained on the train split, whichever splits are written: commands that write the
    splits separately train the same tokenizer."""
    split = "train" if settings.dataset or settings.split != "all" else "all"
    corpus = corpora.get(split) or open_corpus(settings, split)
    print(f"training a tokenizer of {settings.train_tokenizer} pieces on the split {split!r}", flush=True)
    return train_tokenizer(corpus.sample(), settings.train_tokenizer, "--train_tokenizer")


def check_tokenizer(manifest: Manifest, tokenizer: Tokenizer, folder: Path) -> None:
    if manifest.tokenizer["fingerprint"] != tokenizer.fingerprint():
        raise UserError(
            f"--tokenizer: {tokenizer.name!r} is not the tokenizer that {folder} was begun with. Give another "
            "--output_dir, or delete the folder."
        )


def prepare_folder(
    folder: Path, manifest: Manifest, tokenizer: Tokenizer, model: bytes | None, settings: TokenizeSettings
) -> None:
    """Create the folder with the tokenizer's files, so that the dataset is self-contained, and the manifest, last."""
    with os_errors(f"--output_dir: cannot write {folder}", end=""):
        temporary = folder.with_name(folder.name + ".tmp")
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        tokenizer.save_hf(temporary)
        if model is not None:
            write_atomic(temporary / TRAINED, model)
        names = ("name", "vocab_size", "bos_id", "eos_id")
        manifest.tokenizer = {n: getattr(tokenizer, n) for n in names} | {"fingerprint": tokenizer.fingerprint()}
        manifest.tokenizer["files"] = {path.name: sha256_of(path) for path in sorted(temporary.iterdir())}
        manifest.layout = settings.format if settings.format in LAYOUTS else "raw"
        manifest.dtype = shard_dtype(manifest.layout, tokenizer.vocab_size)
        manifest.masked = settings.template is not None
        manifest.write(temporary)
        temporary.replace(folder)


def command() -> None:
    """The console command of an installed package."""
    run_script(main, interrupted="stopped; the same command resumes after the last finished shard")


if __name__ == "__main__":
    command()
