"""The scripts with --cp: with --deterministic the bits of one process on any number of processes, and checkpoints that
any --cp resumes; without it losses of one process; and refusals.

Without it, in fp32 the sums over a micro-batch's tokens are in another order than one process's: 1e-5 relative. In low
bits a value near the border of a code falls to the other side, of gradients that int8 rounds stochastically any does.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.cases import sampled
from tests.data.corpora import write_questions
from tests.processes import PRETRAIN, write_pretraining
from tests.system import contents, flags, losses, only_run, serving, write_model
from tests.test_many_processes import FINETUNE, FULLY
from tests.test_mixture_runs import DEEPSEEK

SETTINGS = {**PRETRAIN, "optim": "adamw", "batch_size": 4, "micro_batch_size": 2}
"""With --deterministic."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MIXTURE = {"model": "mixture.json", "router_bias_rate": 0.01, "router_balance_loss": 0.01, "router_z_loss": 0.01}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """Starts scripts in a folder with models and text."""
    folder = tmp_path_factory.mktemp("context")
    write_pretraining(folder)
    write_model(folder / "heads.json", max_position_embeddings=512, **HEADS)
    write_model(
        folder / "window.json", max_position_embeddings=512, **{**HEADS, "sliding_window": 9, "model_type": "mistral"}
    )
    write_model(folder / "mixture.json", **DEEPSEEK)
    write_questions(folder / "questions.jsonl")
    with serving(folder) as server:
        server.folder = folder
        yield server


def run(server, world: int, runs: Path, script: str = "llm_pretrain", **settings: Any) -> Path:
    """The run folder of a whole run on `world` processes. Only rank 0 may say anything."""
    done = server.run_ranks(world, script, flags(**settings, runs_dir=runs))
    assert [outcome.code for outcome in done] == [0] * world, "\n".join(outcome.err for outcome in done)
    assert all("error" not in outcome.err for outcome in done) and all(outcome.out == "" for outcome in done[1:])
    return only_run(runs, script)


def assert_close(one: Path, other: Path, relative: float) -> None:
    """Losses and evaluation losses within `relative`, norms within ten times that; the same tokens and data positions;
    all tensors of the last checkpoint of the same shapes; exported weights."""
    for a, b in zip(losses(one), losses(other), strict=True):
        assert a[0] == b[0] and a[3:6] == b[3:6]
        for index, limit in ((1, relative), (2, 10 * relative), (6, relative)):
            assert a[index] == b[index] or b[index] == pytest.approx(a[index], rel=limit), (index, a, b)
    a, b = ({n: t.shape for n, t in saved(folder).items()} for folder in (one, other))
    assert a == b and len(a) > 10
    a, b = (load_file(next(folder.glob("hf/*.safetensors"))) for folder in (one, other))
    assert {n: t.shape for n, t in a.items()} == {n: t.shape for n, t in b.items()}
    for name, tensor in a.items():
        assert (tensor - b[name]).norm() <= 100 * relative * tensor.norm(), name


def assert_first_step(one: Path, other: Path) -> None:
    """The loss and norm of the first step, whose codes are those of one process."""
    (_, a, *_), (_, b, *_) = losses(one), losses(other)
    assert a[:1] == b[:1] == (1,) and b[1:3] == pytest.approx(a[1:3], rel=1e-6), (a, b)


def saved(folder: Path, step: int = 4) -> dict[str, torch.Tensor]:
    found = contents(folder / "checkpoints" / f"{step:08d}")
    return {name: tensor for name, tensor in found.items() if not name.startswith("rng.")}


def assert_equal(one: Path, other: Path) -> None:
    """Bit for bit."""
    assert [row[:7] for row in losses(one)] == [row[:7] for row in losses(other)]
    a, b = saved(one), saved(other)
    assert a.keys() == b.keys() and len(a) > 10
    assert not [name for name in a if not torch.equal(a[name], b[name])]


DOCUMENTS = {"doc_mask": True, "batch_size": 8}
CASES = {
    "bf16, documents": (2, 1e-5, {**DOCUMENTS, "sample_prompts": ["def "], "sample_tokens": 4}),
    "fp8_rowwise, fully sharded": (4, 5e-3, {**FULLY, "quantize": "fp8_rowwise"}),
    "fp8_tensorwise, documents": (4, 5e-3, {**DOCUMENTS, "quantize": "fp8_tensorwise"}),
    "int8, head too": (2, 1e-2, {"quantize": "int8", "quantize_lm_head": True, "loss_chunks": 2}),
    "delayed, HSDP": (
        4,
        5e-3,
        {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "dp_replicate": 2},
    ),
    "stored in INT8, recomputed": (
        2,
        5e-3,
        {"quantize": "int8_weight", "activation_checkpointing": "selective", "doc_mask": True},
    ),
    "MLPs in chunks": (2, 1e-5, {"activation_checkpointing": "full", "mlp_chunks": 2, "z_loss": 1e-3}),
    "a sliding window": (2, 1e-5, {"model": "window.json"}),
    "one key-value head for two ranks": (2, 1e-5, {"model": "tiny.json", **FULLY}),
    "a mixture of experts with latent attention": (2, 1e-5, MIXTURE),
}


SHORT = ("bf16, documents", "fp8_rowwise, fully sharded", "a mixture of experts with latent attention")


@pytest.mark.parametrize("case", sampled([*CASES], lambda case: case not in SHORT))
def test_ranks_that_share_sequences_train_as_one_process(server, case, tmp_path):
    world, relative, settings = CASES[case]
    settings = {**SETTINGS, "model": "heads.json", "deterministic": False, **settings}
    one = run(
        server, 1, tmp_path / "one", **{k: v for k, v in settings.items() if k not in {**FULLY, "dp_replicate": 2}}
    )
    many = run(server, world, tmp_path / "many", **settings, cp=2)
    assert_close(one, many, relative)
    if settings.get("quantize") != "int8":  # which rounds gradients stochastically
        assert_first_step(one, many)
    log = (many / "train.log").read_text()
    assert "; sequences over groups of 2" in log and "of activations" in log


SAME_BITS = {
    "bf16, documents": DOCUMENTS,
    "fp8_rowwise, recomputed": {"quantize": "fp8_rowwise", "optim": "adamw_8bit", "activation_checkpointing": "full"},
    "int8, rounded stochastically": {"quantize": "int8", "gradient_wire": "exact", "optim": "muon"},
    "delayed": {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed"}, "doc_mask": True},
    "one key-value head for two ranks": {"model": "tiny.json", "quantize": "int8", "quantize_lm_head": True},
    "a mixture of experts with latent attention": MIXTURE,
}


@pytest.mark.parametrize("case", sampled([*SAME_BITS], lambda case: case not in ("delayed", "bf16, documents")))
def test_any_number_of_processes_gives_the_bits_of_one(server, case, tmp_path):
    """Also a run that begins on two processes and goes on with four fully sharded ones."""
    settings = {**SETTINGS, "model": "heads.json", **SAME_BITS[case]}
    one = run(server, 1, tmp_path / "one", **settings)
    two = run(server, 2, tmp_path / "two", **settings, cp=2)
    assert_equal(one, two)
    assert_equal(one, run(server, 4, tmp_path / "four", **settings, cp=2, **FULLY))
    shutil.rmtree(two / "checkpoints/00000004")
    again = {**settings, "cp": 2, "dp_replicate": 2, "resume": two}
    done = server.run_ranks(4, "llm_pretrain", flags(**again, runs_dir=tmp_path / "two"))
    assert {outcome.code for outcome in done} == {0} and "resumed at step 2" in done[0].out, done[0].err
    assert_equal(one, two)


@pytest.mark.parametrize(("world", "cp"), sampled([(1, 1), (4, 4)], lambda world, _: world == 4))
def test_a_run_goes_on_with_another_cp(server, world, cp, tmp_path):
    settings = {**SETTINGS, "model": "heads.json", "quantize": "fp8_rowwise"}
    one = run(server, 1, tmp_path / "one", **settings)
    many = run(server, 2, tmp_path / "many", **settings, cp=2)
    shutil.rmtree(many / "checkpoints/00000004")
    done = server.run_ranks(world, "llm_pretrain", flags(**settings, cp=cp, runs_dir=tmp_path / "many", resume=many))
    assert {outcome.code for outcome in done} == {0} and "resumed at step 2" in done[0].out, done[0].err
    assert_equal(one, many)


FINETUNED = {
    "packed examples": {"quantize": "int8", "seq_len_multiple": 0},
    "padded examples": {"seq_len_multiple": 8},
    "LoRA in fp8_tensorwise": {"quantize": "fp8_tensorwise", "lora": {"r": 2}, **FULLY},
}


@pytest.mark.parametrize("case", sampled([*FINETUNED], lambda _: True))
def test_ranks_that_share_examples_fine_tune_as_one_process(server, case, tmp_path):
    settings = {**FINETUNE, "model": "heads.json", "optim": "adamw", "deterministic": False, **FINETUNED[case]}
    one = run(server, 1, tmp_path / "one", "llm_finetune", **{k: v for k, v in settings.items() if k not in FULLY})
    many = run(server, 2, tmp_path / "many", "llm_finetune", **settings, cp=2)
    assert_close(one, many, 1e-5 if "quantize" not in settings else 1e-2)


@pytest.mark.parametrize("case", sampled(["packed examples", "LoRA in fp8_tensorwise"], lambda case: "LoRA" in case))
def test_fine_tuning_in_order_has_the_bits_of_one_process(server, case, tmp_path):
    """Adapters too, where nothing before the first layer trains."""
    settings = {**FINETUNE, "model": "heads.json", "optim": "adamw", **FINETUNED[case]}
    one = run(server, 1, tmp_path / "one", "llm_finetune", **{k: v for k, v in settings.items() if k not in FULLY})
    assert_equal(one, run(server, 2, tmp_path / "many", "llm_finetune", **settings, cp=2))


@pytest.mark.sweep
def test_updates_within_the_backward_pass_and_changes_of_schemes(server, tmp_path):
    settings = {**SETTINGS, "model": "heads.json", "deterministic": False, "batch_size": 2, "clip_grad_norm": 0}
    settings |= {"quantize_schedule": '[[0,"fp8_rowwise"],[2,"fp8_tensorwise"]]'}
    one = run(server, 1, tmp_path / "one", **settings)
    settings |= {"cp": 2, "dp_replicate": 2}  # sharded weights fix the map of schemes
    after = run(server, 2, tmp_path / "after", **settings)
    assert_close(one, after, 5e-3)
    within = run(server, 2, tmp_path / "within", **settings, optimizer_in_backward=True)
    assert_equal(after, within)


@pytest.mark.parametrize("deterministic", [True, False])
def test_health_samples_are_taken_together(server, deterministic, tmp_path):
    """Measures of rank 0's tokens; training is the same with them."""
    settings = {**SETTINGS, "model": "heads.json", "quantize": "fp8_tensorwise", "cp": 2, "dp_replicate": 2}
    settings["deterministic"] = deterministic
    plain = run(server, 2, tmp_path / "plain", **settings, health=0)
    sampled_run = run(server, 2, tmp_path / "sampled", **settings, health=2)
    assert_equal(plain, sampled_run)
    lines = [json.loads(line) for line in (sampled_run / "health.jsonl").read_text().splitlines()]
    found = [line for line in lines if line.get("linear") == "layers.0.attn.qkv"]
    assert len(found) >= 2 and all(0 < line["products"]["output"] < 0.1 for line in found)
    assert any("gradient" in line for line in lines)


def test_what_cannot_be_shared_is_refused_in_one_line(server, tmp_path):
    settings = {**SETTINGS, "model": "heads.json", "cp": 2}
    for world, changes, message in (
        (1, {}, "--cp: 2 does not divide the 1 process of the run; allowed: 1."),
        (3, {"batch_size": 6}, "--cp: 2 does not divide the 3 processes of the run; allowed: 1, 3."),
        (
            2,
            {"seq_len": 33},
            "--cp: 2 does not divide the 33 tokens of a sequence; give --seq_len 32, or another --cp.",
        ),
        (3, {"cp": 3, "seq_len": 33}, "--cp: 3 ranks cannot share the model's 4 attention heads"),
        (2, {"tp": 2}, "--cp: 2, but ranks of --tp 2 split the tokens"),
    ):
        done = server.run_ranks(world, "llm_pretrain", flags(**{**settings, **changes}, runs_dir=tmp_path))
        told = [outcome.err for outcome in done if outcome.err]
        assert {outcome.code for outcome in done} <= {2, -9} and not list(tmp_path.iterdir())  # the others are ended
        assert told and all(message in err and err.count("\n") == 1 for err in told), told
