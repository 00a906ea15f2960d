"""The quickstart's two recipes, small: from files to tokens, a trained model, and an export that transformers loads."""

import json
import sysconfig
from pathlib import Path

import pytest
import torch

from qtrain.data.eval_windows import eval_batches
from qtrain.data.stream import StreamContext, dataset_tokenizer
from qtrain.models import build_model, read_model_source
from qtrain.train.eval.language import summed_loss
from qtrain.train.log.metrics import read_metrics
from qtrain.train.step.forward import language_forward
from tests.system import ROOT, contents, flags, once, only_run, serving

STDLIB = Path(sysconfig.get_path("stdlib"))
STEPS = 16
CONTEXT = 64
Runs = dict[str, tuple[str, Path]]
"""What a run printed and its folder, by scheme."""


@pytest.fixture(scope="session")
def runs(tmp_path_factory) -> tuple[Path, Runs]:
    """Tokens of some packages of the standard library, and a run of each scheme on them."""
    return once(tmp_path_factory, "quickstart", run_both)


def run_both(folder: Path) -> tuple[Path, Runs]:
    with serving(folder) as server:
        files = [str(STDLIB / name) for name in ("json", "email", "asyncio", "http", "xml")]
        small = {"files": files, "train_tokenizer": 1000, "validation_fraction": 0.2, "n_procs": 2}
        recipe = str(ROOT / "configs/quickstart_data.json")
        done = server.run("tokenize_data", ["--config", recipe, *flags(**small)])
        assert done.code == 0 and "tokens/s" in done.out, done.err
        small = {
            "n_steps": STEPS,
            "seq_len": CONTEXT,
            "eval_interval": STEPS // 2,
            "eval_sequences": 16,
            "sample_tokens": 6,
        }
        small["device"] = "cpu"
        recipe = str(ROOT / "configs/quickstart.json")
        started = {
            scheme: server.start(
                "llm_pretrain", ["--config", recipe, *flags(**small, quantize=scheme, runs_dir=folder / scheme)]
            )
            for scheme in ("int8", "bf16")
        }
        finished = {scheme: process.wait() for scheme, process in started.items()}
    for outcome in finished.values():
        assert outcome.code == 0, outcome.err
    return folder, {scheme: (outcome.out, only_run(folder / scheme)) for scheme, outcome in finished.items()}


def trained_model(run: Path) -> torch.nn.Module:
    """The native model with the weights of a run's last checkpoint, in plain arithmetic."""
    model = build_model(read_model_source("quickstart"), seed=99)
    saved = contents(max((run / "checkpoints").iterdir()))
    weights = {name.removeprefix("model."): tensor for name, tensor in saved.items() if name.startswith("model.")}
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert set(missing) <= {"lm_head.weight"} and not unexpected  # tied: it is the embedding
    return model.eval()


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_the_loss_falls_and_the_log_tells_the_story(runs, scheme):
    _, found = runs
    out, run = found[scheme]
    records = read_metrics(run / "metrics.jsonl")
    evaluations = {r["step"]: r["eval_loss"] for r in records if "eval_loss" in r}
    assert list(evaluations) == [0, STEPS // 2, STEPS]
    first, middle, last = evaluations.values()
    assert 8 < first < 8.8  # ln 4096 is 8.3
    assert last < middle < first and last < 0.75 * first
    story = [
        "parameters, linears in",
        "run folder",
        "eval_loss",
        "sample: def main(",
        "checkpoint",
        "report",
        "exported",
    ]
    assert [out.index(part) for part in story] == sorted(out.index(part) for part in story)
    assert ("mlp.gate_up 256 -> 1536: quantized" in out) == (scheme == "int8")
    assert out.count("sample:") == 3 * 3


def test_the_schemes_differ_a_little(runs):
    """INT8 is really in force, and it learns what plain arithmetic learns."""
    _, found = runs
    int8, bf16 = ([r["loss"] for r in read_metrics(run / "metrics.jsonl") if "loss" in r] for _, run in found.values())
    assert all(a != b for a, b in zip(int8, bf16, strict=True))
    assert all(abs(a / b - 1) < 0.03 for a, b in zip(int8, bf16, strict=True))


@pytest.mark.parametrize("scheme", ["int8", "bf16"])
def test_transformers_gives_the_logits_and_the_loss_of_the_native_model(runs, scheme, monkeypatch):
    from transformers import AutoModelForCausalLM

    folder, found = runs
    monkeypatch.chdir(folder)
    _, run = found[scheme]
    native = trained_model(run)
    exported = AutoModelForCausalLM.from_pretrained(run / "hf", dtype=torch.float32).eval()
    spec = {"type": "token", "dataset_dir": "data/stdlib_validation"}
    windows = eval_batches(spec, StreamContext(CONTEXT), 8, 16, "--eval_ds").batches
    with torch.no_grad():
        for batch in windows:
            ours, theirs = native(batch.input_ids), exported(batch.input_ids).logits
            assert (ours - theirs).abs().max() <= 1e-3 * ours.abs().max()
        sums = [exported(b.input_ids).logits.log_softmax(-1).gather(2, b.labels[..., None]).sum() for b in windows]
    plain = summed_loss(native, language_forward(native, None), windows).mean
    assert plain == pytest.approx(-sum(sums).item() / sum(b.labels.numel() for b in windows), rel=1e-5)
    logged = [r["eval_loss"] for r in read_metrics(run / "metrics.jsonl") if "eval_loss" in r][-1]
    assert logged == pytest.approx(plain, rel=1e-6 if scheme == "bf16" else 0.01)  # int8 evaluates in int8
    config = json.loads((run / "hf/config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"] and config["vocab_size"] == 4096


def test_the_exported_tokenizer_gives_the_ids_of_training_and_the_text_back(runs, monkeypatch):
    from transformers import AutoTokenizer

    folder, found = runs
    monkeypatch.chdir(folder)
    ours = dataset_tokenizer({"type": "token", "dataset_dir": "data/stdlib_train"}, "--train_ds")
    texts = [
        (STDLIB / "heapq.py").read_text(),
        "  two  spaces\n\tand a tab\n",
        "naïve Ünïcode ▁ 文字 😀",
        "</s> is text",
        "",
    ]
    for _, run in found.values():
        theirs = AutoTokenizer.from_pretrained(run / "hf")
        assert theirs.eos_token_id == ours.eos_id and len(theirs) == ours.vocab_size
        for text in texts:
            ids = theirs(text, add_special_tokens=False)["input_ids"]
            assert ids == ours.encode(text) and theirs.decode(ids) == text
        generation = json.loads((run / "hf/generation_config.json").read_text())
        assert generation["eos_token_id"] == ours.eos_id
