"""A user's mistake is one short line that names the flag or file, what was given and what is allowed; nothing is
written. The table runs over both scripts; it lists what real command lines get wrong, one mistake a line."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

import llm_pretrain
import tokenize_data
from qtrain import SCRIPTS
from qtrain.commands import evaluate
from qtrain.models import build_model, export_hf, read_model_source
from tests.data.corpora import write_jsonl, write_llmq, write_parquet, write_raw
from tests.system import ROOT, call, flags, only_run, tree, write_model

MAINS = {"pretrain": llm_pretrain.main, "tokenize": tokenize_data.main, "evaluate": evaluate.main}
TOKENS = {"type": "token", "dataset_dir": "tokens"}
TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
HF = {"type": "hf_text", "dataset": "json", "data_files": "jsonl/*.jsonl", "tokenizer": "byte"}
GOOD = {
    "pretrain": {"model": "tiny.json", "train_ds": TOKENS, "seq_len": 32, "n_steps": 2, "device": "cpu"},
    "evaluate": {"model": "whole", "data": TEXT, "seq_len": 32, "device": "cpu"},
    "tokenize": {"files": ["jsonl"], "split": "all", "tokenizer": "byte", "n_procs": 1, "output_dir": "new"},
}


@dataclass(frozen=True)
class Mistake:
    """A command line that would work but for `settings` (None takes one out) or `words`; what its message must say."""

    says: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    words: tuple[str, ...] = ()
    script: str = "pretrain"

    def argv(self) -> list[str]:
        merged = {**GOOD[self.script], **self.settings}
        return [*flags(**{k: v for k, v in merged.items() if v is not None}), *self.words]


def wrong(*says: str, words: tuple[str, ...] = (), **settings: Any) -> Mistake:
    return Mistake(says, settings, words)


def qat(**options: Any) -> dict[str, Any]:
    return {"quantize": "qat", "quantize_kwargs": options}


def wrong_tokenize(*says: str, words: tuple[str, ...] = (), **settings: Any) -> Mistake:
    return Mistake(says, settings, words, "tokenize")


def wrong_evaluate(*says: str, words: tuple[str, ...] = (), **settings: Any) -> Mistake:
    return Mistake(says, settings, words, "evaluate")


FLAGS = [
    wrong("--bath_size: unknown flag", "Did you mean --batch_size?", words=("--bath_size=4",)),
    wrong("--quantise: unknown flag", "Did you mean --quantize?", words=("--quantise", "int8")),
    wrong("--lora: unknown flag. llm_finetune.py has it", "token shards too", words=("--lora", "{}")),
    wrong("--n_steps: '1e3' is not allowed", "a whole number at least 1", n_steps="1e3"),
    wrong("--n_steps: 0 is out of range", "at least 1", n_steps=0),
    wrong("--batch_size: -4 is out of range", "from 1 to 1e+07", batch_size=-4),
    wrong("--batch_size: the value is missing", "a whole number", words=("--batch_size",)),
    wrong("--seq_len: 1 is out of range", "from 2 to 1e+07", seq_len=1),
    wrong("--lr: nan is out of range", "a number from 0", lr="nan"),
    wrong("--lr: 'fast' is not allowed", "a number", lr="fast"),
    wrong("--z_loss: -1.0 is out of range", z_loss=-1),
    wrong("--clip_grad_norm: inf is out of range", clip_grad_norm="inf"),
    wrong("--seed: -1 is out of range", seed=-1),
    wrong("--keep_ckpts: -1 is out of range", "at least 0", keep_ckpts=-1),
    wrong("--health: -1 is out of range", "at least 0 or null", health=-1),
    wrong("--health: 'often' is not allowed", "a whole number", health="often"),
    wrong("--helth: unknown flag", "Did you mean --health?", words=("--helth=5",)),
    wrong("--health_fallback: '2.5' is not allowed", "at least 0", health_fallback=2.5),
    wrong("--health_fallback: the value is missing", words=("--health_fallback",)),
    wrong("--health_fallback: 2 samples in a row decide", "give --health a number", health=0, health_fallback=2),
    wrong("--n_steps: '99999", "99' is not allowed", n_steps="9" * 5000),
    wrong("--batch_size: 99999", "is too large", batch_size="9" * 400),
    wrong("--seed: -9999", "is too large", seed="-" + "9" * 400),
    wrong("--optim_kwargs.eps: 99999", "is too large", words=('--optim_kwargs={"eps":' + "9" * 400 + "}",)),
    wrong("--optim_kwargs.a.b: 99999", "is too large", words=('--optim_kwargs={"a":[{"b":' + "9" * 400 + "}]}",)),
    wrong("--optim_kwargs.eps: inf is not a finite number", words=('--optim_kwargs={"eps":1e999}',)),
    wrong("'--sample_prompts=a\\udcff': the command line is not UTF-8", words=("--sample_prompts=a\udcff",)),
    wrong("--train_ds.paths: 'r\\ud800'", "not valid Unicode", train_ds={**TEXT, "paths": "r\ud800"}),
    wrong("--train_ds.x: 'r\\udc00'", "not valid Unicode", train_ds={**TEXT, "x": {"r\udc00": 1}}),
    wrong(
        "--train_ds: the dataset 's3://b/x.jsonl' cannot be read",
        "s3fs",
        train_ds={**HF, "data_files": "s3://b/x.jsonl"},
    ),
    wrong("--train_ds (token).dataset_dir: the value is empty", train_ds={"type": "token", "dataset_dir": ""}),
    wrong("--train_ds (token).dataset_dir: the value is empty", train_ds={"type": "token", "dataset_dir": ["a", ""]}),
    wrong("--train_ds (text).paths: the value is empty", train_ds={**TEXT, "paths": ""}),
    wrong("--train_ds (text).tokenizer: the value is empty", train_ds={**TEXT, "tokenizer": ""}),
    wrong("--runs_dir: the value is empty", runs_dir=""),
    wrong("--resume: the value is empty", resume=""),
    wrong("--model: the value is empty", model=""),
    wrong_tokenize("--output_dir: the value is empty", output_dir=""),
    wrong_tokenize("--files: the value is empty", files=["jsonl", ""]),
    wrong("cannot read b.jsonl.gz: Not a gzipped file", train_ds={**TEXT, "paths": "b.jsonl.gz"}),
    wrong("--lr: 'x' is not allowed", words=("--lr=1", "--lr=x")),
    wrong("--dtype: 'fp16' is not allowed", "'auto', 'bf16', 'fp32'", dtype="fp16"),
    wrong("--device: 'gpu' is not allowed", "'auto', 'cuda', 'cpu'", device="gpu"),
    wrong("--model_impl: 'torch' is not allowed", "'native', 'hf'", model_impl="torch"),
    wrong(
        "--activation_checkpointing: 'some' is not allowed",
        "'none', 'selective', 'full'",
        activation_checkpointing="some",
    ),
    wrong("--optimizer_in_backward: ", "cannot be clipped to 1; give --clip_grad_norm 0", optimizer_in_backward=True),
    wrong(
        "--optimizer_in_backward: a micro-batch's gradients are freed",
        "--gradient_accumulation 1 --micro_batch_size 4",
        optimizer_in_backward=True,
        clip_grad_norm=0,
        micro_batch_size=2,
    ),
    wrong("--profile: a switch takes no value", "--no_profile", words=("--profile", "yes")),
    wrong("--compile: a switch takes no value", words=("--compile=true",)),
    wrong("token_ids", "--help", words=("token_ids",)),
    wrong("--train_ds: not valid JSON", 'Write it as {"key":"value"}', words=("--train_ds={'type': 'token'}",)),
    wrong("--train_ds: not valid JSON", 'Write it as {"key":"value"}', words=("--train_ds=tokens",)),
    wrong("--train_ds: the key 'type' is given twice", words=('--train_ds={"type": "token", "type": "text"}',)),
    wrong("--optim_kwargs: NaN is not a JSON number", words=('--optim_kwargs={"eps": NaN}',)),
    wrong("--quantize_kwargs: '[]' is not a JSON object", words=("--quantize_kwargs=[]",)),
]

RECIPES = [
    wrong("--config: the file recipe.json does not exist", "Did you mean recipes.json?", config="recipe.json"),
    wrong("--config (no_json.json): not valid JSON", config="no_json.json"),
    wrong("--config (twice.json): the key 'lr' is given twice", config="twice.json"),
    wrong("--config (list.json): a recipe is a JSON object", config="list.json"),
    wrong("--config (typo.json): unknown key 'batchsize'", "Did you mean 'batch_size'?", config="typo.json"),
    wrong("--config (type.json).n_steps: '10' is not allowed", "a whole number", config="type.json"),
    wrong("--config (nan.json): NaN is not a JSON number", config="nan.json"),
    wrong("--config: binary.json is not UTF-8 text", config="binary.json"),
    wrong("--config: cannot read jsonl: Is a directory", config="jsonl"),
    wrong("--config: cannot read run: Is a directory", "Give a file in it, such as run/config.json", config="run"),
    wrong("--config (deep.json): not valid JSON", config="deep.json"),
    wrong("--config (long.json): not valid JSON", config="long.json"),
    wrong("--config (inf.json).lr: inf is out of range", config="inf.json"),
    wrong("--config (kwargs.json).train_ds: 'token' is not allowed", "a JSON object", config="kwargs.json"),
    wrong("--config: given twice", words=("--config=recipes.json",), config="recipes.json"),
]

MODELS = [
    wrong("--model: unknown model 'qwen2.5-1.5'", "Did you mean 'qwen2.5-1.5b'?", model="qwen2.5-1.5"),
    wrong("--model: the file tinny.json does not exist", "Did you mean tiny.json?", model="tinny.json"),
    wrong("--model: there is no folder ./tiny", model="./tiny"),
    wrong("--model: the folder jsonl has no config.json", model="jsonl"),
    wrong("--model: run is the folder of a run", "python -m qtrain export run --format hf", model="run"),
    wrong("--model (no_json.json): not valid JSON", model="no_json.json"),
    wrong("--model (gpt.json): unknown model_type 'gpt2'", "llama", "--model_impl hf", model="gpt.json"),
    wrong("--model (heads.json): num_attention_heads 3", "num_key_value_heads 2", model="heads.json"),
    wrong("--model (no_vocab.json): the key 'vocab_size' is missing", model="no_vocab.json"),
    wrong("--model (text_size.json): hidden_size: '32' is not allowed", model="text_size.json"),
    wrong("--pretrained: tiny.json is a shape without weights", pretrained=True),
    wrong("no_weights", "neither model.safetensors nor", model="no_weights", pretrained=True),
    wrong("broken_weights/model.safetensors cannot be read", model="broken_weights", pretrained=True),
    wrong("another shape than its config says: model.norm.weight [64]", "expected", model="wide", pretrained=True),
    wrong("lacks the tensors: model.norm.weight", model="short", pretrained=True),
    wrong("--model: there is no folder a//b", model="a//b"),
    wrong("--model (vocab_text.json): transformers refuses", "vocab_size", model="vocab_text.json", model_impl="hf"),
    wrong("--model (gpt3.json): unknown model_type 'gpt3'", "Did you mean 'gptj'?", model="gpt3.json", model_impl="hf"),
]

DATA = [
    wrong("--train_ds: no training data is given", '"type":"token"', train_ds=None),
    wrong(
        "--train_ds: the key 'type' is missing",
        "chat, hf_text, instruct, mix, text, token",
        train_ds={"dataset_dir": "tokens"},
    ),
    wrong("--train_ds: unknown dataset type 'tokens'", "Did you mean 'token'?", train_ds={**TOKENS, "type": "tokens"}),
    wrong("--train_ds (token): unknown key 'dir'", "dataset_dir", train_ds={**TOKENS, "dir": "tokens"}),
    wrong("--train_ds (token): the key 'dataset_dir' is missing", train_ds={"type": "token"}),
    wrong("--train_ds (token).dataset_dir: 7 is not allowed", train_ds={**TOKENS, "dataset_dir": 7}),
    wrong("--train_ds: 'token' does not exist", "Did you mean 'tokens'?", train_ds={**TOKENS, "dataset_dir": "token"}),
    wrong(
        "'jsonl' matches no file with the ending .bin", "tokenize_data.py", train_ds={**TOKENS, "dataset_dir": "jsonl"}
    ),
    wrong("--train_ds: unfinished is not finished", train_ds={**TOKENS, "dataset_dir": "unfinished"}),
    wrong("--train_ds: cut/tokens_00000.bin has", "truncated", train_ds={**TOKENS, "dataset_dir": "cut"}),
    wrong("--train_ds: odd.bin", "uint16", train_ds={**TOKENS, "dataset_dir": "odd.bin"}),
    wrong("--train_ds: llmq.bin has", "its header says", train_ds={**TOKENS, "dataset_dir": "llmq.bin"}),
    wrong("--train_ds: 4 tokens.bin", "seq_len+1 = 33", train_ds={**TOKENS, "dataset_dir": "4 tokens.bin"}),
    wrong("--train_ds", "tokens are too few", "smaller --seq_len", seq_len=1_000_000),
    wrong("--train_ds: tokens", "beyond the model's vocabulary of 100", model="vocab100.json"),
    wrong("--train_ds: the tokenizer 'byte' has 258 ids", "100", model="vocab100.json", train_ds=TEXT),
    wrong("--train_ds (manifest", "not a manifest", train_ds={**TOKENS, "dataset_dir": "manifest"}),
    wrong("--train_ds: it does not say its tokenizer", "--pretrained", train_ds={"type": "text", "paths": "jsonl"}),
    wrong("--train_ds (text).split: 'valid' is not allowed", "'validation'", train_ds={**TEXT, "split": "valid"}),
    wrong("--train_ds: 'josnl' does not exist", "Did you mean 'jsonl'?", train_ds={**TEXT, "paths": "josnl"}),
    wrong("--train_ds: no_json.json, line 1: not valid JSON", train_ds={**TEXT, "paths": "no_json.json"}),
    wrong("has no column 'content'", "text", train_ds={**TEXT, "text_column": "content"}),
    wrong("--train_ds: broken.jsonl, line at byte 0: not valid JSON", train_ds={**TEXT, "paths": "broken.jsonl"}),
    wrong("--train_ds: broken.parquet is not a readable parquet", train_ds={**TEXT, "paths": "broken.parquet"}),
    wrong("--train_ds: empty.txt: no documents", train_ds={**TEXT, "paths": "empty.txt"}),
    wrong("data_files: 'no/*.jsonl' matches no file", train_ds={**HF, "data_files": "no/*.jsonl"}),
    wrong("unknown split of 'jsonl/*.jsonl' 'test'", "train", train_ds={**HF, "split": "test"}),
    wrong("--train_ds (hf_text).shuffle_buffer: 0 is out of range", train_ds={**HF, "shuffle_buffer": 0}),
    wrong("has no column 'body'", "text", train_ds={**HF, "text_column": "body"}),
    wrong("data_files: {'train': 5} is not allowed", train_ds={**HF, "data_files": {"train": 5}}),
    wrong("the dataset 'empty.txt' cannot be read", "empty", train_ds={**HF, "data_files": "empty.txt"}),
    wrong("--train_ds: the column 'id' of 'jsonl/*.jsonl' is not text", train_ds={**HF, "text_column": "id"}),
    wrong("--train_ds: binary.txt is not UTF-8 text", train_ds={**TEXT, "paths": "binary.txt"}),
    wrong("--train_ds: every document is empty", train_ds={**TEXT, "paths": "no_text.jsonl"}),
    wrong("--train_ds.datasets: the list is empty", train_ds={"type": "mix", "datasets": []}),
    wrong("--train_ds.datasets[0].weight: None", "above 0", train_ds={"type": "mix", "datasets": [TEXT]}),
    wrong(
        "--train_ds.datasets[1] (text): unknown key 'path'",
        "Did you mean 'paths'?",
        train_ds={"type": "mix", "datasets": [{**TOKENS, "weight": 1}, {**TEXT, "weight": 1, "path": "jsonl"}]},
    ),
    wrong("--eval_ds: unknown dataset type 'txt'", "text", eval_ds={**TEXT, "type": "txt"}),
    wrong("--eval_ds: 4 tokens.bin", "seq_len+1 = 33", eval_ds={**TOKENS, "dataset_dir": "4 tokens.bin"}),
    wrong("--eval_ds: it holds less than one window", "33 tokens", eval_ds={**TEXT, "paths": "short.txt"}),
    wrong(
        "--train_ds: it does not say its tokenizer",
        "--doc_mask",
        doc_mask=True,
        train_ds={**TOKENS, "dataset_dir": "raw.bin"},
    ),
    wrong(
        "--doc_mask",
        "no end token",
        doc_mask=True,
        train_ds={"type": "token", "dataset_dir": "raw.bin", "tokenizer": "no_eos.json"},
    ),
    wrong(
        "--train_ds: it does not say",
        "--sample_prompts",
        sample_prompts=["a"],
        train_ds={**TOKENS, "dataset_dir": "raw.bin"},
    ),
]

TOKENIZERS = [
    wrong("unknown tokenizer 'lama2'", "Did you mean 'llama2'?", train_ds={**TEXT, "tokenizer": "lama2"}),
    wrong("the tokenizer 'my.model' does not exist", train_ds={**TEXT, "tokenizer": "my.model"}),
    wrong("no_json.json is not a tokenizer.json", train_ds={**TEXT, "tokenizer": "no_json.json"}),
    wrong("broken.model is not a sentencepiece model", train_ds={**TEXT, "tokenizer": "broken.model"}),
    wrong("'jsonl' holds neither tokenizer.json nor", train_ds={**TEXT, "tokenizer": "jsonl"}),
    wrong("names no end-of-text token", train_ds={**TEXT, "tokenizer": "no_eos.json"}),
    wrong("--eval_ds: its tokenizer", "differs from the run's, 'byte'", eval_ds={**TEXT, "tokenizer": "words.json"}),
]

CHOICES = [
    wrong("--quantize: unknown scheme 'int9'", "Did you mean 'int8'?", quantize="int9"),
    wrong(
        "--quantize_kwargs (int8): unknown key 'grad_wieght'",
        "'grad_weight'",
        quantize="int8",
        quantize_kwargs={"grad_wieght": "bf16"},
    ),
    wrong(
        "--quantize_kwargs (int8).output: 'fp8' is not allowed",
        "'int8'",
        quantize="int8",
        quantize_kwargs={"output": "fp8"},
    ),
    wrong(
        "--quantize_kwargs (int8_blockwise).block: '64x64' is not allowed",
        "'32x32', '128x128', '1x128'",
        quantize="int8_blockwise",
        quantize_kwargs={"block": "64x64"},
    ),
    wrong(
        "--quantize_kwargs.history: 32 is not allowed with dynamic scaling",
        '"scaling" to "delayed"',
        quantize="fp8_tensorwise",
        quantize_kwargs={"history": 32},
    ),
    wrong(
        "--quantize_kwargs (int8): unknown key 'scaling'",
        "granularity",
        quantize="int8",
        quantize_kwargs={"scaling": "delayed"},
    ),
    wrong(
        "--quantize_kwargs (fp8_tensorwise).history: 0 is out of range",
        "from 1 to 1024",
        quantize="fp8_tensorwise",
        quantize_kwargs={"scaling": "delayed", "history": 0},
    ),
    wrong(
        "--quantize_kwargs.grad_format: 'e5m2' is not allowed",
        "leave it out",
        quantize="fp8_rowwise",
        quantize_kwargs={"grad_format": "e5m2", "grad_input": "bf16", "grad_weight": "bf16"},
    ),
    wrong(
        "--quantize_kwargs.stochastic_rounding: 'grad_weight' is not allowed",
        "runs in bf16",
        quantize="switchback",
        quantize_kwargs={"stochastic_rounding": ["grad_weight"]},
    ),
    wrong(
        "--quantize_kwargs (int8).stochastic_rounding: ['dx'] is not allowed",
        "'output', 'grad_input', 'grad_weight'",
        quantize="int8",
        quantize_kwargs={"stochastic_rounding": ["dx"]},
    ),
    wrong("--quantize: unknown scheme 'fp8'", "Did you mean", quantize="fp8"),
    wrong("--quantize_kwargs (bf16): unknown key 'output'", quantize_kwargs={"output": "bf16"}),
    wrong("--quantize_min_size: -1 is out of range", "at least 0", quantize_min_size=-1),
    wrong(
        "--quantize_kwargs (int8_weight).activations: 'fp8' is not allowed",
        "'none', 'int8', 'int8_sr'",
        quantize="int8_weight",
        quantize_kwargs={"activations": "fp8"},
    ),
    wrong("--quantize_kwargs (qat).weight: 'int4' is not allowed", "'int4_g32', 'int4_g128'", **qat(weight="int4")),
    wrong("--quantize_kwargs (qat).weight: None is not allowed", "'int4_g32', 'int4_g128'", **qat(weight=None)),
    wrong(
        "--quantize_kwargs (qat).activations: 'bf16' is not allowed", "'none', 'int8', 'fp8'", **qat(activations="bf16")
    ),
    wrong("--quantize_kwargs (qat): unknown key 'weights'", "Did you mean 'weight'?", **qat(weights="int8")),
    wrong(
        "--quantize_kwargs.activations: 'fp8' does not go with int8 weights",
        "allowed: none, int8. It goes with int4_g32, int4_g128, fp8_row.",
        **qat(weight="int8", activations="fp8"),
    ),
    wrong(
        "--quantize_kwargs.activations: 'int8' does not go with nvfp4 weights",
        **qat(weight="nvfp4", activations="int8"),
    ),
    wrong("--quantize: unknown scheme 'qat4'", "Did you mean 'qat'?", quantize="qat4"),
    wrong(
        "--quantize_schedule",
        ".activations: 'int8' does not go with fp8_row weights; allowed: none, fp8. It goes with int4_g32",
        quantize_schedule='[[0,"bf16"],[0.5,{"scheme":"qat","weight":"fp8_row","activations":"int8"}]]',
    ),
    wrong("--quantize_schedule: qat follows itself", quantize_schedule='[[0,"qat"],[0.5,{"scheme":"qat"}]]'),
    wrong(
        "--quantize_overrides (*.qkv).activations: 'fp8' does not go with nvfp4 weights",
        quantize_overrides={"*.qkv": {"scheme": "qat", "weight": "nvfp4", "activations": "fp8"}},
    ),
    wrong("stochastic_rounding", '"backward":"int8"', quantize="bitnet", quantize_kwargs={"stochastic_rounding": True}),
    wrong(
        "--quantize_kwargs (auto).candidates: 'int8' is not allowed",
        quantize="auto",
        quantize_kwargs={"candidates": "int8"},
    ),
    wrong(
        "--quantize_kwargs.candidates: unknown scheme 'int9'",
        "Did you mean 'int8'?",
        quantize="auto",
        quantize_kwargs={"candidates": ["bf16", "int9"]},
    ),
    wrong(
        "--quantize_kwargs.candidates: 'int8_weight' cannot be chosen by speed",
        quantize="auto",
        quantize_kwargs={"candidates": ["int8_weight"]},
    ),
    wrong("--quantize_kwargs.candidates: the list is empty", quantize="auto", quantize_kwargs={"candidates": []}),
    wrong("--optim: unknown optimizer 'adam'", "Did you mean 'adamw'?", optim="adam"),
    wrong("--optim_kwargs (adamw).betas: [0.9] is not allowed", "a list", optim_kwargs={"betas": [0.9]}),
    wrong("--optim_kwargs (adamw).betas", "out of range", "0.999999", optim_kwargs={"betas": [1, 1]}),
    wrong("--lr_schedule_kwargs: unknown key 'warm_up'", "Did you mean 'warmup'?", lr_schedule_kwargs={"warm_up": 0.1}),
    wrong(
        "--lr_schedule_kwargs: warmup and decay are 100 + 0 steps of a run of 2; give fewer, or more --n_steps",
        lr_schedule_kwargs={"warmup": 100},
    ),
    wrong(
        "--lr_schedule_kwargs.decay: 1.5 is neither a fraction of the steps, at most 1, nor a whole number",
        lr_schedule_kwargs={"decay": 1.5},
    ),
    wrong(
        "--lr_schedule_kwargs.stable: inverse_sqrt counts in steps of the warm-up",
        lr_schedule_kwargs={"warmup": 0, "stable": "inverse_sqrt"},
    ),
    wrong("stable: 'wsd' is not allowed", "one of 'constant', 'inverse_sqrt'", lr_schedule_kwargs={"stable": "wsd"}),
    wrong("--lr_schedule_kwargs", "more than the whole run", lr_schedule_kwargs={"warmup": 0.6, "decay": 0.6}),
    wrong("decay_type: 'cos' is not allowed", "'cosine'", lr_schedule_kwargs={"decay_type": "cos"}),
    wrong("--batch_size: 8 is not micro_batch_size x", "3 x auto", batch_size=8, micro_batch_size=3),
    wrong("--batch_size: 8 is not", "2 x 2", batch_size=8, micro_batch_size=2, gradient_accumulation=2),
    wrong("--batch_size: 2 is not", "auto x 4", batch_size=2, gradient_accumulation=4),
    wrong("--trackers: unknown tracker 'ml_flow'", "Did you mean 'mlflow'?", trackers=["ml_flow"]),
    wrong("--trackers: unknown tracker 'tensorbord'", "Did you mean 'tensorboard'?", trackers=["tensorbord"]),
    wrong("--run_name: 'a/b' cannot name a folder", "letters", run_name="a/b"),
    wrong("--run_name: the value is empty", run_name=""),
    wrong("--run_name: 'xxx", "at most 100", run_name="x" * 300),
    wrong("--runs_dir: cannot write", "empty.txt", runs_dir="empty.txt"),
    wrong("--hellaswag_file: cannot read no.jsonl", hellaswag=True, hellaswag_file="no.jsonl"),
    wrong("--hellaswag_file: broken.jsonl is not a .jsonl file", hellaswag=True, hellaswag_file="broken.jsonl"),
    wrong("--hellaswag_file (no_label.jsonl, line 1)", "label", hellaswag=True, hellaswag_file="no_label.jsonl"),
    wrong("--hellaswag_file: empty.txt holds no questions", hellaswag=True, hellaswag_file="empty.txt"),
    wrong("--hellaswag_file", "--hellaswag", hellaswag_file="jsonl/0.jsonl"),
]

LENGTH_AND_END = [  # of a run: epochs, schedule, time, early stopping, what is kept and exported
    wrong("--n_epochs: -1 is out of range", "at least 0", n_epochs=-1),
    wrong("--n_epochs: '1.5' is not allowed", "a whole number", n_epochs=1.5),
    wrong("--n_steps, --n_epochs: 3 epochs are ", "steps, not 2; give one of them", n_epochs=3),
    wrong("--n_epochs: the size of data of type 'mix' is not known", "give --n_steps", n_epochs=1, n_steps=None,
          train_ds={"type": "mix", "datasets": [{**TOKENS, "weight": 1}]}),
    wrong("--n_epochs: 1 epochs of", "less than one batch of 1,000,000", n_epochs=1, n_steps=None, batch_size=10**6),
    wrong("--n_steps: '1.5' is not allowed", "or null", n_steps=1.5),
    wrong("--max_hours: 0.0 is out of range", "from 0.001", max_hours=0),
    wrong("--max_hours: nan is out of range", max_hours="nan"),
    wrong("--max_hours: '4h' is not allowed", "a number", max_hours="4h"),
    wrong("--max_hours: it saves where it stops, and --keep_ckpts 0 saves nothing", max_hours=1, keep_ckpts=0),
    wrong("--keep_best: it compares losses on --eval_ds; give that", keep_best=True),
    wrong("--keep_best: it saves checkpoints, and --keep_ckpts 0", keep_best=True, keep_ckpts=0, eval_ds=TOKENS),
    wrong("--keep_best: a switch takes no value", words=("--keep_best=3",)),
    wrong("--early_stopping: -2 is out of range", "at least 0", early_stopping=-2),
    wrong("--early_stopping: it compares losses on --eval_ds; give that", early_stopping=3),
    wrong("--early_stop: unknown flag", "Did you mean --early_stopping?", words=("--early_stop", "3")),
    wrong("--lr_schedule_kwargs.warmup: 2.5 is neither a fraction", lr_schedule_kwargs={"warmup": 2.5}),
    wrong("--lr_schedule_kwargs.warmup: -1", "at least 0", lr_schedule_kwargs={"warmup": -1}),
    wrong("--lr_schedule_kwargs.warmup: '150' is not allowed", "a number", lr_schedule_kwargs={"warmup": "150"}),
    wrong("--lr_schedule_kwargs: warmup and decay are 2 + 2 steps of a run of 2; give fewer",
          lr_schedule_kwargs={"warmup": 2, "decay": 2}),
    wrong("--gpus: all counts the GPUs of this machine, and --device cpu has none; give a number", gpus="all"),
    wrong("--gpus: 'al' is not allowed", "a whole number from 0 to 1024 or one of 'all'", gpus="al"),
    wrong("--gpus: 2000 is out of range", gpus=2000),
    wrong("--freeze_embedding_layer: a switch takes no value", words=("--freeze_embedding_layer", "yes")),
    wrong("--export: a switch takes no value; write --export or --no_export", words=("--export=false",)),
    wrong("--train_ds: it does not say its tokenizer", train_ds={**HF, "tokenizer": None}),
    wrong("bad_records: 'ignore' is not allowed", "'stop', 'skip'", train_ds={**TEXT, "bad_records": "ignore"}),
    wrong("--bad_records: unknown flag", words=("--bad_records=skip",)),
]  # fmt: skip

BROKEN_FILES = [  # of what a user has by downloading, copying, converting
    wrong("--config: ", "File name too long", config="x" * 5000 + ".json"),
    wrong("--config (nul.json).model: 'a\\x00b' holds a NUL character", config="nul.json"),
    wrong("'--lr=\\x001': the command line holds a NUL character", words=("--lr=\0001",)),
    wrong("--runs_dir: cannot read", "File name too long", runs_dir="y" * 300),
    wrong("--resume: cannot read", "File name too long", resume="y" * 5000),
    wrong("--model: '~nobody-has-this-name/x': there is no such user's folder", model="~nobody-has-this-name/x"),
    wrong("--train_ds: '~nobody-has-this", train_ds={**TEXT, "paths": "~nobody-has-this-name/x.txt"}),
    wrong("--train_ds: '~nobody-has-this", train_ds={**TOKENS, "dataset_dir": "~nobody-has-this-name/x"}),
    wrong("--train_ds: '~nobody-has-this", train_ds={**TEXT, "tokenizer": "~nobody-has-this-name/x"}),
    wrong("--train_ds (text).paths: ['jsonl', 5] is not allowed", train_ds={**TEXT, "paths": ["jsonl", 5]}),
    wrong("layer_types: 5 is not allowed", "'sliding_attention', 'full_attention'", model="types.json"),
    wrong("layer_types: [{}] is not allowed", model="types2.json"),
    wrong("layer_types: ['odd'] is not allowed", model="types3.json"),
    wrong("layer_types names 1 layers; num_hidden_layers is 2", model="types4.json"),
    wrong("weight_map: None is not allowed", "a JSON object", model="index_list", pretrained=True),
    wrong("weight_map: {'model.norm.weight': 5} is not allowed", model="index_number", pretrained=True),
    wrong("lacks in one.safetensors the tensors: model.embed", model="index_other", pretrained=True),
    wrong("model.norm.weight is stored as I64; only floating-point", model="whole_numbers", pretrained=True),
    wrong("--model (broken_generation/generation_config.json): not valid JSON", model="broken_generation"),
    wrong("--model (list_generation/generation_config.json): [] is not allowed", model="list_generation"),
    wrong("--model (type.list.json): unknown model_type", model="type.list.json", model_impl="hf"),
    wrong("transformers refuses its config: KeyError: 'nope'", model="act.json", model_impl="hf"),
    wrong("transformers refuses its weights: Safetensor", model="broken_weights", pretrained=True, model_impl="hf"),
    wrong("--seq_len: 65 tokens are more than the 64 positions in the table of GPT2LMHeadModel", model="positions.json",
          model_impl="hf", seq_len=65),
    wrong("broken_template/chat_template.jinja cannot be read as text",
          train_ds={**TEXT, "tokenizer": "broken_template"}),
    wrong("no_unk.json is not a tokenizer.json: WordLevel error", train_ds={**TEXT, "tokenizer": "no_unk.json"}),
    wrong("nested.jsonl, line at byte 0: not valid JSON", train_ds={**TEXT, "paths": "nested.jsonl"}),
    wrong("latin.parquet, row ", "of row group 0: not UTF-8 text", train_ds={**TEXT, "paths": "latin.parquet"}),
    wrong("cannot read damaged.parquet: ", train_ds={**TEXT, "paths": "damaged.parquet"}),
    wrong("'cut.jsonl.gz' cannot be read: Compressed file ended", train_ds={**HF, "data_files": "cut.jsonl.gz"}),
    wrong("'broken.jsonl.xz' cannot be read: Corrupt input data", train_ds={**HF, "data_files": "broken.jsonl.xz"}),
    wrong("the weights are too large to be added",
          train_ds={"type": "mix", "datasets": [{**TOKENS, "weight": 1e308}, {**TEXT, "weight": 1e308}]}),
    wrong("its shards do not have", "tokens together", train_ds={**TOKENS, "dataset_dir": "twice"}),
    wrong("not a .jsonl file (maximum recursion", hellaswag=True, hellaswag_file="nested.jsonl"),
    wrong("endings: 'cd' is not allowed", "a list of text", hellaswag=True, hellaswag_file="endings.jsonl"),
    wrong("an ending is empty", hellaswag=True, hellaswag_file="no_ending.jsonl"),
    wrong("OverflowError", hellaswag=True, hellaswag_file="infinite_label.jsonl"),
    wrong("no complete checkpoint", resume="infinite_step"),
    wrong("--resume: odd_run/metrics.jsonl is not a file; move it away", resume="odd_run"),
    wrong_tokenize("--output_dir: cannot read", "File name too long", output_dir="z" * 300),
    wrong_tokenize("--train_tokenizer: 1099511627776 pieces", tokenizer=None, train_tokenizer=2**40),
    wrong_tokenize("cursor.source.document: 'x' is not allowed", output_dir="odd_cursor"),
]  # fmt: skip

RESUME = [
    wrong("--resume: no/such cannot be loaded", "no such folder", resume="no/such"),
    wrong("--resume: jsonl cannot be loaded", "no complete checkpoint", resume="jsonl"),
    wrong("--resume: empty.txt cannot be loaded", resume="empty.txt"),
    wrong("--resume: incomplete/00000002 cannot be loaded", "COMPLETE", resume="incomplete/00000002"),
    wrong("--n_steps: 1 is less than the 2 steps", resume="RUN", n_steps=1),
    wrong("--resume", "shape", "settings of the run", resume="RUN", model="wider.json"),
    wrong("--resume", "layers.2.", "Use the run's settings", resume="RUN", model="deeper.json"),
    wrong("--resume", "torch.float32", "torch.bfloat16", resume="RUN", dtype="bf16"),
    wrong("--seq_len: cannot resume: ", "had --seq_len 32, this one has 16", resume="RUN", seq_len=16),
    wrong("--train_ds: cannot resume", resume="RUN", train_ds=TEXT),
    wrong("--seed: cannot resume: ", "Give --seed 42", resume="RUN", seed=7),
    wrong("--seed: cannot resume", resume="FIRST", seed=7),
    wrong(
        "vocabulary of 100",
        "That run had --model 'tiny.json', not 'vocab100.json'",
        resume="RUN",
        model="vocab100.json",
    ),
]

TOKENIZE = [
    wrong_tokenize("--dataset, --files: neither is given", files=None),
    wrong_tokenize("--dataset, --files: both are given", dataset="tinystories"),
    wrong_tokenize("--dataset: unknown dataset 'tinystory'", "'tinystories'", files=None, dataset="tinystory"),
    wrong_tokenize("--split: unknown split of local files 'valid'", "Did you mean 'validation'?", split="train,valid"),
    wrong_tokenize("--subset: local files have no subsets", subset="en"),
    wrong_tokenize("--files: 'josnl' does not exist", "Did you mean 'jsonl'?", files=["josnl"]),
    wrong_tokenize("--files: 'no/*.txt' matches no file", files=["no/*.txt"]),
    wrong_tokenize("--tokenizer, --train_tokenizer: both are given", train_tokenizer=500),
    wrong_tokenize("--train_tokenizer: 10 pieces cannot be trained", "at least", tokenizer=None, train_tokenizer=10),
    wrong_tokenize("--train_tokenizer: 90000 pieces", "at most", tokenizer=None, train_tokenizer=90_000),
    wrong_tokenize("--train_tokenizer: -1 is out of range", tokenizer=None, train_tokenizer=-1),
    wrong_tokenize("--tokenizer: unknown tokenizer 'bytes'", "Did you mean 'byte'?", tokenizer="bytes"),
    wrong_tokenize("--tokenizer: 'no_eos.json' names no end-of-text token", tokenizer="no_eos.json"),
    wrong_tokenize("--shard_tokens: 500000000 is out of range", "2e+08", shard_tokens=500_000_000),
    wrong_tokenize("--validation_fraction: 5.0 is out of range", "from 0 to 1", validation_fraction=5),
    wrong_tokenize("--output_dir: jsonl exists and holds other files", output_dir="jsonl"),
    wrong_tokenize(
        "--output_dir: tokens was made", "--tokenizer 'byte', not", tokenizer="words.json", output_dir="tokens"
    ),
    wrong_tokenize("--output_dir", "empty.txt", output_dir="empty.txt"),
    wrong_tokenize("none of the 2 files is in the split 'validation'", split="validation", validation_fraction=0),
    wrong_tokenize("has no column 'content'", "text", text_column="content"),
    wrong_tokenize("--text_colum: unknown flag", "--text_column", words=("--text_colum=x",)),
    wrong_tokenize("--config (typo.json): unknown key 'batchsize'", config="typo.json"),
]

EVALUATION = [  # in training, and of `python -m qtrain evaluate`
    wrong("--final_eval: 'half' is not allowed", "'sample', 'all'", final_eval="half"),
    wrong("--final_eval all: there is nothing to evaluate on", "--eval_ds", final_eval="all"),
    wrong("--accuracy: questions come from --eval_ds", accuracy=3),
    wrong("--accuracy: --eval_ds holds no prompts", "instruct or chat", accuracy=3, train_ds=TEXT, eval_ds=TEXT),
    wrong("it does not say its tokenizer", "--accuracy", accuracy=3, train_ds={**TOKENS, "dataset_dir": "raw.bin"}),
    wrong("--lm_eval base needs the package 'lm_eval'", "pip install", lm_eval="base"),
    wrong("--lm_eval: it evaluates the exported model", "--no_export", lm_eval="base", export=False),
    wrong_evaluate("--model: nothing to evaluate is named", model=None),
    wrong_evaluate("--model: unknown model 'hole'", model="hole"),
    wrong_evaluate("--model: there is no folder runs/none/at/all", model="runs/none/at/all"),
    wrong_evaluate("--model: incomplete/00000002 cannot be loaded", "COMPLETE", model="incomplete/00000002"),
    wrong_evaluate("tiny.json is a shape without weights", "--model", model="tiny.json"),
    wrong_evaluate("--data, --tasks: nothing to measure is given", data=None),
    wrong_evaluate("--model: there is no folder runs/none/at/all", model="runs/none/at/all", data=None),
    wrong_evaluate("--data: unknown dataset type 'txt'", data={**TEXT, "type": "txt"}),
    wrong_evaluate("beyond the model's vocabulary of 258", data={**TOKENS, "dataset_dir": "ids300.bin"}),
    wrong_evaluate("--sequences: -1 is out of range", sequences=-1),
    wrong_evaluate("--tasks: no task is given", tasks=" ,"),
    wrong_evaluate("--hellaswag_file: it needs --hellaswag", hellaswag_file="jsonl/0.jsonl"),
    wrong_evaluate("--json: x.csv would be overwritten", json="x.csv"),
]

SHARDS = [  # formats of other programs, datasets by name, folders of the hub
    wrong("names no dataset", "OWNER/NAME/FOLDER", train_ds={**TOKENS, "dataset_dir": "hf://datasets/a"}),
    wrong("is a whole repository", "hf://datasets/a/b/FOLDER", train_ds={**TOKENS, "dataset_dir": "hf://datasets/a/b"}),
    wrong_tokenize("--format: 'npy' is not allowed", "'llmq'", format="npy"),
    wrong_tokenize("--template: it makes prompts of columns", "--dataset", template="gsm8k", format="llmq"),
    wrong_tokenize(
        "--template: shards of --format qtrain", "use llmq", files=None, dataset="q.jsonl", template="gsm8k"
    ),
    wrong_tokenize(
        "--template: unknown template 'gsm9k'",
        "Did you mean 'gsm8k'?",
        **{"files": None, "dataset": "q.jsonl", "split": "train", "template": "gsm9k", "format": "llmq"},
    ),
    wrong_tokenize("--template: not valid JSON", words=('--template={"prompt":',)),
    wrong_tokenize("--max_tokens: -1 is out of range", max_tokens=-1),
    wrong_tokenize("unknown dataset 'tiny-shakespear'", "'tiny-shakespeare'", files=None, dataset="tiny-shakespear"),
    wrong_tokenize(
        "none of the 2 files is in the split 'train'", "between 0 and 1", split="train", validation_fraction=1
    ),
]

MISTAKES = [
    *EVALUATION,
    *SHARDS,
    *FLAGS,
    *RECIPES,
    *MODELS,
    *DATA,
    *TOKENIZERS,
    *CHOICES,
    *LENGTH_AND_END,
    *BROKEN_FILES,
    *RESUME,
    *TOKENIZE,
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Good and broken files of every kind, and a finished run: the working folder of every mistake."""
    here = tmp_path_factory.mktemp("bad_input")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(here)
        write_jsonl(here / "jsonl")
        write_parquet(here / "parquet", files=1)
        _write_models()
        _write_small_files()
        _write_tokens()
        assert call(llm_pretrain.main, flags(**GOOD["pretrain"], ckpt_interval=1, export=False)).code == 0
        _write_broken_files()
        shutil.copytree(only_run(Path("runs")) / "checkpoints", "incomplete")
        shutil.rmtree("incomplete/00000001")
        Path("incomplete/00000002/COMPLETE").unlink()
    return here


def _write_models() -> None:
    write_model(Path("tiny.json"))
    write_model(Path("vocab100.json"), vocab_size=100)
    write_model(Path("wider.json"), intermediate_size=96)
    write_model(Path("deeper.json"), num_hidden_layers=3)
    write_model(Path("gpt.json"), model_type="gpt2")
    write_model(Path("heads.json"), num_attention_heads=3, num_key_value_heads=2, hidden_size=48)
    write_model(Path("gpt3.json"), model_type="gpt3")
    write_model(Path("vocab_text.json"), model_type="gpt2", vocab_size="258")
    write_model(Path("no_vocab.json"), vocab_size=None)
    write_model(Path("text_size.json"), hidden_size="32")
    for name in ("no_weights", "broken_weights"):
        Path(name).mkdir()
        write_model(Path(name, "config.json"))
    Path("broken_weights/model.safetensors").write_bytes(b"\x10" * 100)
    source = read_model_source("tiny.json")
    export_hf(build_model(source), source, Path("whole"))
    Path("whole/checksums.json").unlink()  # its copies are changed
    for name in ("wide", "short"):
        shutil.copytree("whole", name)
    tensors = load_file("whole/model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(64)}, "wide/model.safetensors")
    save_file({k: v for k, v in tensors.items() if k != "model.norm.weight"}, "short/model.safetensors")


def _write_broken_files() -> None:
    Path("nul.json").write_text('{"model": "a\\u0000b"}')
    sliding = {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8}
    for name, kinds in (("types", 5), ("types2", [{}]), ("types3", ["odd"]), ("types4", ["full_attention"])):
        write_model(Path(f"{name}.json"), **sliding, layer_types=kinds)
    write_model(Path("type.list.json"), model_type=["gpt2"])
    write_model(Path("act.json"), model_type="gpt2", activation_function="nope")
    write_model(Path("positions.json"), model_type="gpt2")
    tensors = load_file("whole/model.safetensors")
    index = {"index_list": [], "index_number": {"weight_map": {"model.norm.weight": 5}}}
    index["index_other"] = {"weight_map": dict.fromkeys(tensors, "one.safetensors")}
    for name in (*index, "whole_numbers", "broken_generation", "list_generation", "broken_template"):
        shutil.copytree("whole", name)
    for name, content in index.items():
        Path(name, "model.safetensors.index.json").write_text(json.dumps(content))
    save_file({"model.norm.weight": tensors["model.norm.weight"]}, "index_other/one.safetensors")
    whole_numbers = {**tensors, "model.norm.weight": torch.ones(32, dtype=torch.int64)}
    save_file(whole_numbers, "whole_numbers/model.safetensors")
    Path("broken_generation/generation_config.json").write_text("{")
    Path("list_generation/generation_config.json").write_text("[]")
    shutil.copy("tokens/tokenizer.json", "broken_template")
    Path("broken_template/chat_template.jinja").write_bytes(b"\xff\xfe")
    Tokenizer(WordLevel({"a": 0, "</s>": 1}, unk_token="[UNK]")).save("no_unk.json")
    Path("nested.jsonl").write_text('{"text": ' + "[" * 100_000 + "\n")
    texts = pyarrow.table({"text": ["a" * 50] * 20})
    pyarrow.parquet.write_table(texts, "latin.parquet", compression="none", use_dictionary=False)
    data = Path("latin.parquet").read_bytes()
    Path("latin.parquet").write_bytes(data.replace(b"a" * 50, b"\xe9" * 50))
    Path("damaged.parquet").write_bytes(data[:4] + b"\xff" * 200 + data[204:])
    Path("cut.jsonl.gz").write_bytes(gzip.compress(b'{"text": "abc"}\n' * 5000)[:60])
    Path("broken.jsonl.xz").write_bytes(b"\xfd7zXZ\0broken")
    question = {"ctx": "a b", "endings": ["c", "d"], "label": 0}
    changes = {"endings": {"endings": "cd"}, "no_ending": {"endings": ["c", ""]}, "infinite_label": {"label": 1e999}}
    for name, change in changes.items():
        Path(f"{name}.jsonl").write_text(json.dumps({**question, **change}) + "\n")
    manifest = json.loads(Path("tokens/manifest.json").read_text())
    cursor = {"source": {"document": "x"}, "documents": 0, "tokens": 0}
    odd = {"twice": {"shards": manifest["shards"] * 2}, "odd_cursor": {"complete": False, "cursor": cursor}}
    for name, change in odd.items():
        shutil.copytree("tokens", name)
        Path(name, "manifest.json").write_text(json.dumps({**manifest, **change}))
    run = only_run(Path("runs"))
    for name in ("odd_run", "infinite_step"):
        shutil.copytree(run, name)
    Path("odd_run/metrics.jsonl").unlink()
    Path("odd_run/metrics.jsonl").mkdir()
    for checkpoint in Path("infinite_step/checkpoints").iterdir():
        (checkpoint / "COMPLETE").write_text('{"step": 1e999, "saved_at": 1, "files": {}}')


def _write_small_files() -> None:
    Path("run").mkdir()
    for name in ("config.json", "metrics.jsonl"):
        Path("run", name).write_text("{}")
    Path("recipes.json").write_text("{}")
    Path("no_json.json").write_text('{"a": ')
    Path("twice.json").write_text('{"lr": 1, "lr": 2}')
    Path("list.json").write_text("[1]")
    Path("typo.json").write_text('{"batchsize": 4}')
    Path("type.json").write_text('{"n_steps": "10"}')
    Path("nan.json").write_text('{"lr": NaN}')
    Path("deep.json").write_text("[" * 100_000)
    Path("long.json").write_text('{"n_steps": ' + "9" * 5000 + "}")
    Path("b.jsonl.gz").write_bytes(b"x")
    Path("inf.json").write_text('{"lr": 1e999}')
    Path("kwargs.json").write_text('{"train_ds": "token"}')
    Path("no_text.jsonl").write_text('{"text": ""}\n' * 5)
    for name in ("binary.json", "binary.txt"):
        Path(name).write_bytes(b"\xff\xfe\x00\x80" * 100)
    Path("empty.txt").touch()
    Path("short.txt").write_text("short")
    Path("broken.jsonl").write_text('{"text": \n')
    Path("broken.parquet").write_bytes(b"PAR1 and no more")
    Path("broken.model").write_bytes(b"\x07\x07\x07")
    Path("no_label.jsonl").write_text(json.dumps({"ctx": "a", "endings": ["b", "c"]}) + "\n")
    words = Tokenizer(WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.save("no_eos.json")
    words.add_special_tokens(["</s>"])
    words.save("words.json")


def _write_tokens() -> None:
    argv = flags(**{**GOOD["tokenize"], "output_dir": "tokens"})
    assert call(tokenize_data.main, argv).code == 0
    shutil.copytree("tokens", "cut")
    shard = Path("cut/tokens_00000.bin")
    shard.write_bytes(shard.read_bytes()[:-100])
    shutil.copytree("tokens", "unfinished")
    manifest = json.loads(Path("unfinished/manifest.json").read_text())
    Path("unfinished/manifest.json").write_text(json.dumps({**manifest, "complete": False, "shards": []}))
    Path("manifest").mkdir()
    Path("manifest/manifest.json").write_text('{"files": []}')
    write_raw(Path("raw.bin"), np.arange(2000) % 250)
    write_raw(Path("4 tokens.bin"), np.arange(4))
    write_raw(Path("ids300.bin"), np.arange(2000) % 300)
    Path("odd.bin").write_bytes(b"123")
    write_llmq(Path("llmq.bin"), np.arange(2000), None)
    Path("llmq.bin").write_bytes(Path("llmq.bin").read_bytes()[:-8])


def name_of(mistake: Mistake) -> str:
    return f"{mistake.script}-{mistake.says[0]}"


@pytest.mark.parametrize("mistake", MISTAKES, ids=name_of)
def test_a_mistake_is_one_short_line_and_changes_nothing(folder, mistake, monkeypatch):
    monkeypatch.chdir(folder)
    run = str(only_run(Path("runs")))
    argv = [w.replace("RUN", run).replace("FIRST", f"{run}/checkpoints/00000001") for w in mistake.argv()]
    before = tree(folder)
    outcome = call(MAINS[mistake.script], argv)
    assert outcome.code == 2, f"not refused: {outcome}"
    message = outcome.err.removesuffix("\n")
    assert message.startswith("error: ") and "\n" not in message, outcome.err
    assert len(message) < 400, f"{len(message)} characters: {message}"
    assert all(part in message for part in mistake.says), message
    assert tree(folder) == before


def test_the_table_is_long_enough_and_the_command_lines_are_right_without_the_mistake(folder, monkeypatch):
    """So each mistake is refused for its own reason."""
    monkeypatch.chdir(folder)
    assert len(MISTAKES) >= 60
    before = tree(folder)
    for train_ds in (TOKENS, TEXT, HF):
        settings = {**GOOD["pretrain"], "train_ds": train_ds, "dry_run": True}
        assert call(llm_pretrain.main, flags(**settings)).code == 0
    assert call(evaluate.main, flags(**GOOD["evaluate"])).code == 0
    assert tree(folder) == before


# ---- in processes of their own ---------------------------------------------------------------------------------------


def script(name: str, argv: list[str], folder: Path, **environment: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(ROOT / name), *argv]
    return subprocess.run(command, cwd=folder, env={**os.environ, **environment}, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("name", "mistake", "message"),
    [
        pytest.param(
            "llm_pretrain.py",
            wrong(batch_size=8, micro_batch_size=3),
            "error: --batch_size: 8 is not micro_batch_size x gradient_accumulation x devices (3 x auto x 1); "
            "give two of the three, such that the first divides the batch.\n",
            marks=pytest.mark.sweep,  # seconds of imports
        ),
        (
            "tokenize_data.py",
            wrong_tokenize(words=("--n_procs", "two")),
            "error: --n_procs: 'two' is not allowed; it must be a whole number from 0 to 1024.\n",
        ),
    ],
)
def test_the_shell_sees_exit_code_2_and_one_line_on_stderr(folder, name, mistake, message):
    before = tree(folder)
    done = script(name, mistake.argv(), folder)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
    assert tree(folder) == before


@pytest.mark.parametrize(
    ("name", "module"),
    [*((name, "tyro") for name in SCRIPTS), ("llm_finetune", "torch"), ("timm_finetune", "torch")],
)
def test_ctrl_c_during_the_imports(name, module, tmp_path):
    """A stand-in for tyro, which comes before the command line is parsed, or torch, which comes after, is interrupted
    while it is imported."""
    (tmp_path / f"{module}.py").write_text("raise KeyboardInterrupt")
    outcome = script(f"{name}.py", [], tmp_path, PYTHONPATH=str(tmp_path))
    assert outcome.returncode in (130, -signal.SIGINT) and outcome.stderr == "interrupted\n"
