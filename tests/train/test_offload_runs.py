"""Whole runs with parts in host memory (`--offload`): losses and checkpoints are those without, bit for bit, as on a
GPU, of which the host's memory is not the device's."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import llm_finetune
import llm_pretrain
from qtrain.optim import offload
from qtrain.optim.elementwise import LowBitOptimizer
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import OFFLOAD_NAMES
from tests.cases import sampled
from tests.data.corpora import write_jsonl
from tests.system import call, contents, flags, losses, only_run, write_model


@pytest.fixture(autouse=True)
def as_on_a_gpu(tmp_path, monkeypatch) -> None:
    """What has no effect on a CPU takes it; and states are in several buckets."""
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    monkeypatch.setattr(Options, "offload_on", lambda self, device: self.offload)
    monkeypatch.setattr(LowBitOptimizer, "states_on_host", property(lambda self: bool(self.options.offload)))
    monkeypatch.setattr(offload, "BUCKET_BYTES", 40_000)


def run(name: str, names: tuple[str, ...] | None, **settings) -> Path:
    """The folder of a finished run. names: of --offload."""
    data = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    chosen = {"model": "tiny.json", "train_ds": data, "seq_len": 32, "n_steps": 4, "export": False, "batch_size": 4}
    chosen |= {"micro_batch_size": 2, "device": "cpu", "runs_dir": name, "optim_kwargs": {"master": "fp32"}}
    argv = flags(**{**chosen, **settings}) + ([] if names is None else [f"--offload={json.dumps(names)}"])
    done = call(llm_pretrain.main, argv)
    assert done.code == 0, done.err
    return only_run(Path(name))


def assert_same_run(one: Path, other: Path, steps: int = 5, but: str | None = None) -> None:
    """but: a tensor of the checkpoints that may differ."""
    assert losses(one)[-steps:] == losses(other)[-steps:]
    saved, also = (contents(folder / "checkpoints/00000004") for folder in (one, other))
    assert saved.keys() == also.keys()
    apart = [key for key in saved if not torch.equal(saved[key], also[key])]
    assert [key for key in apart if key != but] == []


ALL, BOTH = OFFLOAD_NAMES, ("weights", "gradients")
"""BOTH: what goes together in a run in which all weights train."""
ALONE = ("m", "v", "master", "residuals")
CASES = [(dtype, names) for dtype in ("fp32", "bf16") for names in (*((name,) for name in ALONE), BOTH, ALL)]
SAMPLE = [("fp32", ("residuals",)), ("bf16", ("master",)), ("fp32", BOTH), ("bf16", ALL)]


@pytest.mark.parametrize(("dtype", "names"), sampled(CASES, lambda *case: case not in SAMPLE), ids=str)
def test_a_run_is_that_with_everything_on_the_device(dtype, names):
    settings = {"dtype": dtype, "activation_checkpointing": "full"}
    assert_same_run(run("without", None, **settings), run("with", names, **settings))


@pytest.mark.parametrize(
    ("before", "after"), [(("m", "residuals"), ("v", "master")), (ALL, None), (None, ("v", *BOTH))], ids=str
)
def test_it_is_resumed_with_other_parts_there(before, after):
    """From a checkpoint in the middle."""
    settings = {"dtype": "bf16", "ckpt_interval": 2}
    whole, first = run("whole", None, **settings), run("first", before, **settings)
    rest = run("rest", after, **settings, resume=str(first / "checkpoints/00000002"))
    assert_same_run(whole, rest, steps=2)


def test_weights_in_host_memory_are_saved_in_the_background_and_exported(monkeypatch):
    """With an embedding and a head of their own."""
    write_model(Path("tiny.json"), tie_word_embeddings=False)
    settings = {"dtype": "bf16", "ckpt_interval": 2, "export": True, "quantize": "fp8_tensorwise"}
    whole, moved = run("whole", None, **settings), run("moved", BOTH, **settings, async_checkpoint=True)
    assert_same_run(whole, moved)
    one, other = (load_file(folder / "hf/model.safetensors") for folder in (whole, moved))
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def tune(name: str, names: tuple[str, ...], **settings) -> Path:
    """The folder of a finished run of adapters on NF4."""
    data = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    chosen = {"model": "tiny.json", "pretrained": False, "train_ds": data, "seq_len": 64, "n_steps": 4, "batch_size": 2}
    chosen |= {"device": "cpu", "runs_dir": name, "lora": {"r": 2, "base": "nf4"}, "dtype": "bf16", "lr": 1e-2}
    done = call(llm_finetune.main, [*flags(**{**chosen, **settings}), f"--offload={json.dumps(names)}"])
    assert done.code == 0, done.err
    return only_run(Path(name), "llm_finetune")


def test_adapters_on_weights_in_host_memory_train_resume_and_export_the_same():
    names = ("weights", "residuals", "m", "v")
    whole, moved = tune("whole", (), ckpt_interval=2), tune("moved", names, ckpt_interval=2)
    rest = tune("rest", ("weights",), resume=str(moved / "checkpoints/00000002"))
    assert_same_run(whole, moved)
    assert_same_run(whole, rest, steps=2)
    exported = [load_file(folder / "hf/model.safetensors") for folder in (whole, moved, rest)]
    for other in exported[1:]:
        assert other.keys() == exported[0].keys()
        assert all(torch.equal(other[key], exported[0][key]) for key in other)


def test_layers_in_chunks_take_their_inputs_and_weights_from_the_host():
    """512 tokens in two chunks, of adapters; and where the optimizer runs in the backward pass, of all weights."""
    settings = {"seq_len": 256, "activation_checkpointing": "full", "mlp_chunks": 2}
    assert_same_run(tune("there", (), **settings), tune("moved", ("weights", "residuals"), **settings))
    settings |= {"micro_batch_size": 4, "clip_grad_norm": 0, "dtype": "bf16"}
    after, within = (run(str(way), None, optimizer_in_backward=way, **settings) for way in (False, True))
    assert_same_run(after, within)
    assert_same_run(after, run("host", ("residuals",), **settings))


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [False, True])
def test_on_a_gpu_too_compiled_or_recorded(graphs):
    """Pinned memory, and streams of their own; of adapters, and of a run in which all weights train. The state
    of the CPU's generator, of which no value of these runs is drawn, differs after compiling."""
    same = {"steps": 9, "but": "rng.0.torch"}
    settings = {"device": "cuda", "compile": True, "cuda_graphs": graphs, "n_steps": 8, "ckpt_interval": 4}
    settings |= {"activation_checkpointing": "full"}
    assert_same_run(tune("without", (), **settings), tune("with", ("weights", "residuals", "m"), **settings), **same)
    chunked = {**settings, "mlp_chunks": 2, "seq_len": 256}
    assert_same_run(tune("chunks", (), **chunked), tune("and", ("weights", "residuals"), **chunked), **same)
    assert_same_run(run("all", None, **settings), run("moved", ALL, **settings), **same)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            '["mater"]',
            "--offload: unknown name 'mater'. Did you mean 'master'? Allowed: gradients, m, master, residuals, v, ",
        ),
        ("m", "--offload: not valid JSON"),
        ('{"m":1}', "is not a JSON list of names"),
        ("[1]", "--offload: '[1]' is not a JSON list of names"),
    ],
)
def test_a_name_that_there_is_not_is_refused(given, says):
    done = call(llm_pretrain.main, [f"--offload={given}", "--device=cpu"])
    assert done.code == 2 and says in done.err and done.err.count("\n") == 1
