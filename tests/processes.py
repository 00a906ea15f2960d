"""Runs of several processes: a tiny pretraining run, started as a user starts it."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from tests.data.corpora import functions, write_raw
from tests.system import PYTHON_FIRST, ROOT, flags, write_model

TOKENS = {"type": "token", "dataset_dir": "tokens", "tokenizer": "byte"}
SHARED = {"device": "cpu", "deterministic": True, "lr": 0.01, "ckpt_interval": 2, "keep_ckpts": 9}
PRETRAIN = {
    **SHARED,
    "model": "tiny.json",
    "train_ds": TOKENS,
    "eval_ds": TOKENS,
    "eval_sequences": 4,
    "seq_len": 32,
    "batch_size": 12,
    "micro_batch_size": 1,
    "n_steps": 4,
    "optim": "adamw_8bit",
}


def write_pretraining(folder: Path) -> None:
    """The model and the tokens of PRETRAIN."""
    write_model(folder / "tiny.json", max_position_embeddings=512)
    text = "\n".join(functions()[:36]).encode()
    write_raw(folder / "tokens" / "0.bin", torch.frombuffer(bytearray(text[:6000]), dtype=torch.uint8).numpy())


def launched(folder: Path, *words: str, **settings: Any) -> subprocess.Popen:
    """llm_pretrain.py as a user starts it, in a folder."""
    return subprocess.Popen(
        [sys.executable, str(ROOT / "llm_pretrain.py"), *flags(**settings), *words],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**PYTHON_FIRST, "OMP_NUM_THREADS": "1"},
    )


def ranks_of(process: subprocess.Popen) -> list[int]:
    """The processes that a launcher started, by rank."""
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    by_rank = {}
    for pid in map(int, children):
        found = re.search(rb"\0RANK=(\d+)\0", b"\0" + Path(f"/proc/{pid}/environ").read_bytes())
        if found:
            by_rank[int(found[1])] = pid
    return [by_rank[rank] for rank in sorted(by_rank)]
