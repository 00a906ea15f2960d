"""Losses of a small run in every scheme on a CPU, kept in a file as a guard against drift.

python -m tests.quant.schemes.reference_losses     writes the file anew; say in the commit why the losses have changed
"""

import json
import tempfile
from pathlib import Path

import numpy as np

import llm_pretrain
from qtrain.train.log.metrics import read_metrics
from tests.data.corpora import write_raw
from tests.system import call, flags, only_run, write_model

STEPS = 4
FILE = Path(__file__).with_suffix(".json")
CASES = {
    "int8": {"quantize": "int8"},
    "fp8_tensorwise delayed": {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}},
    "nvfp4": {"quantize": "nvfp4"},
    **{
        name: {"quantize": name}
        for name in ("bf16", "bitnet", "fp8_blockwise", "fp8_rowwise", "fp8_rowwise_gw_hp", "fp8_tensorwise", "int4")
    },
    **{
        name: {"quantize": name}
        for name in ("binary", "int4_weight", "int8_blockwise", "int8_weight", "mxfp8", "qat", "switchback")
    },
    "int8 stochastic": {"quantize": "int8", "quantize_kwargs": {"stochastic_rounding": True}},
}
"""Every scheme but auto, which times others; the first ones run in `make test`."""


def small_run(folder: Path, **settings) -> list[float]:
    """Losses and gradient norms of four steps, and the loss of the evaluation after them."""
    write_model(folder / "tiny.json", hidden_size=64, intermediate_size=128)
    # Neither random nor of a file that another Python would have otherwise.
    numbers = np.arange(6000)
    write_raw(folder / "tokens.bin", (numbers * numbers // 7 + 3 * numbers) % 251)
    data = {"type": "token", "dataset_dir": str(folder / "tokens.bin")}
    shared = {"model": folder / "tiny.json", "train_ds": data, "eval_ds": data, "eval_sequences": 8, "seq_len": 32}
    shared |= {"batch_size": 8, "n_steps": STEPS, "eval_interval": 0, "device": "cpu", "dtype": "fp32"}
    # Such an eps makes the update smooth in the gradient: Adam's signs of small ones are another CPU's last bits.
    shared |= {"lr": 0.03, "optim_kwargs": {"eps": 0.1}, "weight_decay": 0.0}
    done = call(llm_pretrain.main, flags(**shared, **settings, keep_ckpts=0, export=False, runs_dir=folder / "runs"))
    assert done.code == 0, done.err
    records = read_metrics(only_run(folder / "runs") / "metrics.jsonl")
    steps = [r for r in records if "loss" in r]
    return [*(r["loss"] for r in steps), *(r["grad_norm"] for r in steps), records[-1]["eval_loss"]]


def main() -> None:
    found = {}
    for name, settings in CASES.items():
        with tempfile.TemporaryDirectory() as scratch:
            found[name] = [round(loss, 6) for loss in small_run(Path(scratch), **settings)]
        print(name, found[name], flush=True)
    with tempfile.TemporaryDirectory() as scratch:
        plain = small_run(Path(scratch), **CASES["bf16"])
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(losses)}" for name, losses in found.items())
    FILE.write_text(f'{{\n "plain": {json.dumps(plain)},\n "losses": {{\n{lines}\n }}\n}}\n')


if __name__ == "__main__":
    main()
