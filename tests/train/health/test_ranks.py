"""Health samples on several processes: of layers that are split, sharded, or only in memory while they run. They
measure what one process measures, change no bit of the training, and a fallback moves the linear on all of them."""

import contextlib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from benchmarks import faults
from benchmarks.mesh_equality import MIXTURE, TWO_HEADS, UNTIED, prepared_on, state_digests
from qtrain.comm.ranks import rank
from qtrain.core.errors import TrainingStopped
from qtrain.data.batch import Batch
from qtrain.parallel.mesh import make_mesh
from qtrain.quant import SCHEMES, LinearChoice, LowBitLinear
from qtrain.quant.health import probe
from qtrain.quant.health.probe import LinearProbe
from qtrain.quant.tensor_roles import GEMMS
from qtrain.train.assembly import assemble
from qtrain.train.health.monitor import HealthMonitor
from qtrain.train.health.ranks import SampleRanks
from qtrain.train.log.metrics import read_metrics
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import sampled
from tests.processes import PRETRAIN, write_pretraining
from tests.system import Server, flags, losses, only_run, serving, write_model
from tests.test_mixture_runs import WIDE
from tests.worlds import run_ranks

DENSE = {**UNTIED, "hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
"""No linear but the head has more than 64 rows or columns: products are measured in full."""
SEQ_LEN = 24
MODES: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "weights": (2, {"dp_replicate": 2}),
    "zero2": (2, {"dp_shard": 2}),
    "full_shard": (2, {"dp_shard": 2, "reshard_after_forward": "always"}),
    "host": (1, {"offload": ["weights", "gradients"]}),
    "tp": (2, {"tp": 2}),
    "ep": (2, {"dp_replicate": 2, "ep": 2}),
    "ep, tp": (4, {"dp_shard": 2, "tp": 2, "ep": 2}),
    "tp, full_shard": (4, {"tp": 2, "dp_shard": 2, "reshard_after_forward": "always"}),
    "ep, full_shard": (4, {"dp_shard": 4, "ep": 2, "reshard_after_forward": "always"}),
}


def micro_batch(step: int, numbers: Sequence[int]) -> Batch:
    """Random tokens, all of which are trained on: two sequences of each number."""
    generators = [torch.Generator().manual_seed(1000 * step + number) for number in numbers]
    tokens = torch.cat([torch.randint(DENSE["vocab_size"], (2, SEQ_LEN + 1), generator=g) for g in generators])
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].clone())


def train(
    mode: str,
    path: Path | None,
    more: dict[str, Any],
    *,
    fault: bool = False,
    breaks: str = "",
    joined: int = 1,
    steps: int = 3,
) -> dict[str, Any]:
    """On a rank: steps with a sample before each, to `path`; None: without. breaks: of the last rank. joined: as
    many micro-batches are one."""
    settings = {"dp_replicate": 1, "dp_shard": 1, "tp": 1, "ep": 1, "quantize": "int8", **MODES[mode][1], **more}
    mesh = make_mesh(settings["dp_replicate"], settings["dp_shard"], "cpu", settings["tp"], settings["ep"])
    size = {"seq_len": SEQ_LEN, "batch_size": 8, "micro_batch_size": 2 * joined}
    given = LanguageSettings(**{"device": "cpu", "dtype": "fp32", "seed": 1, "health": 1, **size, **settings})
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(Options, "offload_on", lambda self, device: self.offload)  # as on a GPU
        prepared = prepared_on(given, MIXTURE | TWO_HEADS if mode.startswith("ep") else DENSE, mesh)
        if fault:
            stack.enter_context(faults.outlier_channel(layers=[1], norms=["attn_norm"]))
        run = assemble.assemble(prepared, *assemble.build_quantized(prepared))
    forward, found = language_forward(run.model, None), []
    monitor = None if path is None else HealthMonitor(run, forward, path)
    for step in range(steps):
        if step == 1 and breaks and rank() == mesh.world - 1:
            _break(breaks)
        numbers = range(mesh.dp_rank * joined, 4, mesh.dp_size * joined)
        batches = [micro_batch(step, range(number, number + joined)) for number in numbers]
        if monitor is not None:
            try:
                monitor.before_step(batches, step + 1)
            except (RuntimeError, TrainingStopped) as error:
                return {"error": type(error), "text": str(error)}
        gradients = compute_gradients(run.model, forward, run.quantized, batches, step, parallel=run.parallel)
        apply_gradients(run.optimizer, run.quantized, gradients, lr=1e-3, clip_grad_norm=1.0, parallel=run.parallel)
        found.append((gradients.loss, gradients.norm))
    if monitor is not None:
        monitor.close()
    # Digests of what is in host memory would pin it there.
    state = () if mode == "host" else state_digests(run.parallel, run.quantized, run.optimizer)
    return {"steps": found, "schemes": run.quantized.schemes, "state": state}


def _break(what: str) -> None:
    """This process has too little memory, as it sees before, where it measures, or within its passes."""

    def fail(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    owner, name = {
        "memory": (SampleRanks, "_fits"),
        "measuring": (probe, "tensor_sums"),
        "passes": (probe.LinearProbe, "__call__"),
    }[what]
    pytest.MonkeyPatch().setattr(owner, name, fail if what != "memory" else lambda *_: False)


def ranks(mode: str, path: Path | None, more: dict[str, Any], **how: Any) -> list[dict[str, Any]]:
    return run_ranks(MODES[mode][0], partial(train, **how), mode, path, more)


def linears(path: Path, step: int = 1) -> dict[str, dict[str, Any]]:
    """The rows of the linears at a step."""
    rows = [row for row in read_metrics(path) if row.get("scheme") and row["step"] == step]
    assert len(rows) == len({row["linear"] for row in rows}) > 0, "rank 0 alone writes"
    return {row["linear"]: row for row in rows}


CASES = [(mode, "int8") for mode in MODES if mode != "one"]
CASES += [("zero2", "fp8_tensorwise"), ("full_shard", "fp8_tensorwise"), ("full_shard", "int8_weight")]
CASES += [("tp", "fp8_tensorwise"), ("ep", "fp8_tensorwise"), ("tp", "bitnet")]


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "scheme"), CASES)
def test_training_is_that_without_samples(tmp_path, mode, scheme):
    on, off = (ranks(mode, path, {"quantize": scheme}) for path in (tmp_path / "health.jsonl", None))
    assert on == off
    rows = [row for step in (1, 2, 3) for row in linears(tmp_path / "health.jsonl", step).values()]
    for row in rows:
        seen = {"bitnet": {"x", "w"}, "int8_weight": set()}.get(scheme, {"x", "w", "dy"})
        assert row.keys() & {"x", "w", "dy"} == seen and len(row["products"]) == (3 if seen else 1), row
    # Where ranks have codes in place of weights, nothing runs in high precision.
    found = [row["gradient"] for row in rows if "gradient" in row]
    exact = scheme == "int8_weight" or (mode in ("weights", "tp", "ep") and scheme != "bitnet")
    assert bool(found) == exact
    for gradient in found:
        assert 0.9 < gradient["cosine"] <= 1.0001 and 0.8 < gradient["norm_ratio"] < 1.2


@pytest.mark.parametrize("mode", sampled([m for m in MODES if m != "one"], lambda mode: mode != "full_shard"))
def test_a_fault_is_named_and_a_fallback_moves_the_linear_on_all_ranks(tmp_path, mode):
    found = ranks(mode, tmp_path / "health.jsonl", {"health_fallback": 2}, fault=True)
    for of_rank in found:
        assert of_rank["schemes"]["layers.1.attn.qkv"] == "fp8_rowwise" and of_rank == found[0]
    (told,) = (row for row in read_metrics(tmp_path / "health.jsonl") if "moved_to" in row)
    text = "step 1: layers.1.attn.qkv output: the product is off by 100% since step 1; moved to fp8_rowwise"
    assert told["warning"] == text


SHARDED = [(mode, scheme) for mode in ("zero2", "full_shard") for scheme in ("int8", "fp8_tensorwise", "int4")]


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "scheme"), SHARDED)
def test_sharded_weights_are_measured_as_one_process_does(tmp_path, mode, scheme):
    """Of the first rank's tokens: the same numbers, and the same ones of other schemes."""
    for name in (mode, "one"):
        ranks(name, tmp_path / f"{name}.jsonl", {"quantize": scheme, "deterministic": True})
    for step in (1, 2, 3):
        one, other = (linears(tmp_path / f"{name}.jsonl", step) for name in ("one", mode))
        for row in one.values():
            row.pop("gradient", None)
        assert other == one


@pytest.mark.parametrize("scheme", sampled(["fp8_tensorwise", "int8"], lambda scheme: scheme == "int8"))
def test_numbers_are_those_of_whole_linears(tmp_path, scheme):
    """Scales that end at a rank's part are finer: of the rows of x and dy, and of the columns of w, that are split."""
    ranks("one", tmp_path / "one.jsonl", {"quantize": scheme}, steps=1)
    on, off = (ranks("tp", path, {"quantize": scheme}, steps=2) for path in (tmp_path / "tp.jsonl", None))
    assert on == off, "a sample changes nothing"
    one, tp = (linears(tmp_path / f"{mode}.jsonl") for mode in ("one", "tp"))
    assert one.keys() == tp.keys()
    for name, row in one.items():
        of_parts, column = tp[name], name.endswith(("qkv", "gate_up"))
        split = {"dy": column, "x": not column, "w": not column and scheme == "int8"}
        for tensor, finer in split.items():
            for measure in ("amax", "crest"):
                assert of_parts[tensor][measure] == pytest.approx(row[tensor][measure], rel=0.05)
            for measure in ("flushed", "flushed_sum", "error"):
                close = {"rel": 0.5, "abs": 0.01} if finer else {"rel": 0.02, "abs": 1e-3}
                if (tensor, measure) == ("dy", "flushed") and name.endswith("qkv"):
                    # A first token attends to itself alone: the gradient of its q, half of qkv, is 0 or, by the order
                    # of sums, so small that it is flushed.
                    close["abs"] += 0.5 / SEQ_LEN
                assert of_parts[tensor][measure] == pytest.approx(row[tensor][measure], **close), (name, tensor)
        # All rows and columns are sampled, of one process and of parts.
        for gemm, error in row["products"].items():
            assert of_parts["products"][gemm] == pytest.approx(error, rel=0.3), (name, gemm)
        if "gradient" in row:
            assert of_parts["gradient"]["cosine"] == pytest.approx(row["gradient"]["cosine"], abs=2e-3)


def _summed() -> list[float]:
    """On two ranks of --tp: terms of a product that partly cancel."""
    mesh = make_mesh(1, 1, "cpu", 2)
    linear = LowBitLinear(torch.nn.Linear(8, 8), SCHEMES.make("int8", {}, "--quantize"), torch.zeros(3).long())
    one = LinearProbe(LinearChoice("o_proj", 8, 8, None, linear.scheme), linear, split=("output",))
    one.own.terms["output"] = torch.tensor([3.0, 1.0] if mesh.tp_rank == 0 else [-1.0, 1.0]).view(2, 1, 1)
    found = SampleRanks(linear, SimpleNamespace(), SimpleNamespace(mesh=mesh)).add({"o_proj": one}, {})
    return found["o_proj"].products[0, GEMMS.index("output")].tolist()


def test_terms_of_a_product_are_added_before_its_error_is_taken():
    """3 - 1 is off by 1 + 1; each rank counts the sum."""
    assert run_ranks(2, _summed) == [[2.0, 8.0, 8.0]] * 2


@pytest.mark.sweep
@pytest.mark.parametrize("deterministic", [False, True])
def test_of_experts_numbers_are_those_of_all_ranks(tmp_path, deterministic):
    """With --deterministic those of the first rank's tokens, at the experts of all."""
    joined = 1 if deterministic else 2
    ranks("ep", tmp_path / "ep.jsonl", {"deterministic": deterministic})
    run_ranks(1, partial(train, joined=joined), "ep", tmp_path / "one.jsonl", {"dp_replicate": 1, "ep": 1})
    one, ep = (linears(tmp_path / f"{name}.jsonl") for name in ("one", "ep"))
    names = [name for name in one if "experts" in name]
    assert one.keys() == ep.keys() and names
    for name in names:
        for tensor in ("x", "w", "dy"):
            for measure in ("flushed", "flushed_sum", "error"):
                assert ep[name][tensor][measure] == pytest.approx(one[name][tensor][measure], rel=0.02, abs=1e-4)
        # Gradients are rounded stochastically, on each rank with bits of its own.
        assert ep[name]["products"] == pytest.approx(one[name]["products"], rel=0.2)
    if not deterministic:
        paths = (tmp_path / f"{name}.jsonl" for name in ("one", "ep"))
        one_load, ep_load = (next(r["experts"]["load"] for r in read_metrics(path) if "experts" in r) for path in paths)
        assert ep_load == one_load


@pytest.mark.sweep
def test_tensor_groups_that_share_experts_measure_other_linears_apart(tmp_path):
    """The tokens of the first group alone, as where each has all experts."""
    for ep in (1, 2):
        ranks("ep, tp", tmp_path / f"{ep}.jsonl", {"ep": ep}, steps=1)
    alone, shared = (linears(tmp_path / f"{ep}.jsonl") for ep in (1, 2))
    names = [name for name in alone if "experts" not in name]
    assert alone.keys() == shared.keys() and len(names) == 6
    for name in names:
        for tensor in ("x", "w", "dy"):
            assert shared[name][tensor]["error"] == pytest.approx(alone[name][tensor]["error"], rel=1e-3)
        assert shared[name]["products"] == pytest.approx(alone[name]["products"], rel=1e-3)


@pytest.mark.sweep
@pytest.mark.parametrize(("mode", "breaks"), [("tp", "measuring"), ("full_shard", "measuring"), ("zero2", "memory")])
def test_where_one_rank_cannot_measure_all_go_on_without_samples(tmp_path, mode, breaks):
    plain = ranks(mode, None, {})
    assert ranks(mode, tmp_path / "health.jsonl", {}, breaks=breaks) == plain
    assert {row["step"] for row in read_metrics(tmp_path / "health.jsonl")} == {1}


@pytest.mark.sweep
def test_where_a_ranks_passes_fail_it_ends_and_no_other_one_waits(tmp_path):
    lost, ended = ranks("tp", tmp_path / "health.jsonl", {}, breaks="passes")
    assert ended == {
        "error": TrainingStopped,
        "text": "step 2: a health sample takes more memory than is free; --health 0 takes none.",
    }
    assert lost["error"] is RuntimeError, "of the collective, when the process has ended"


# ---- whole runs ------------------------------------------------------------------------------------------------------

FAULT = """
from benchmarks import faults
fault = faults.outlier_channel(layers=[1], norms=["attn_norm"])
fault.__enter__()
"""
RUNS: dict[str, dict[str, Any]] = {
    "full_shard": {"reshard_after_forward": "always"},
    "zero2": {"quantize": "int8", "optim": "muon"},
    "tp": {"tp": 2, "model": "two_heads.json"},
    "ep": {"ep": 2, "model": "mixture.json"},
}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("processes")
    write_pretraining(folder)
    write_model(folder / "two_heads.json", num_key_value_heads=2)
    write_model(folder / "mixture.json", **WIDE)
    with serving(folder) as server:
        yield server


def run_on_two(server: Server, runs: Path, patch: str = "", **settings: Any) -> Path:
    """The folder of a run of llm_pretrain.py."""
    words = flags(**{**PRETRAIN, "quantize": "int8", "export": False, **settings, "runs_dir": runs})
    done = server.run_ranks(2, "llm_pretrain", words, patches=dict.fromkeys(range(2), patch))
    assert [outcome.code for outcome in done] == [0, 0], "\n".join(outcome.err for outcome in done)
    assert done[1].out == ""
    return only_run(runs)


@pytest.mark.sweep
def test_a_sample_does_not_run_the_optimizer_in_its_backward_pass(server, tmp_path):
    settings = {"optimizer_in_backward": True, "clip_grad_norm": 0, "deterministic": False, "batch_size": 2}
    off, on = (run_on_two(server, tmp_path / f"{n}", health=n, **settings, **RUNS["full_shard"]) for n in (0, 1))
    assert losses(off) == losses(on) and (on / "health.jsonl").exists()


@pytest.mark.sweep
@pytest.mark.parametrize("mode", RUNS)
def test_a_resumed_run_goes_on_with_the_moved_linear(server, tmp_path, mode):
    settings = {"n_steps": 6, "health": 2, "health_fallback": 2, **RUNS[mode]}
    whole = run_on_two(server, tmp_path / "whole", FAULT, **settings)
    assert '"moved_to": "fp8_rowwise"' in (whole / "health.jsonl").read_text()
    again = run_on_two(server, tmp_path / "again", FAULT, **settings, resume=whole / "checkpoints/00000004")
    assert losses(again) == losses(whole)
    assert (again / "health.jsonl").read_text() == (whole / "health.jsonl").read_text()
