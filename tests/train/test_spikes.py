"""--on_spike: what is a spike, and that a run which skips or rewinds is the one that never saw the bad batch."""

import dataclasses
import math
import random
from collections.abc import Collection
from pathlib import Path

import pytest
import torch

import llm_pretrain
from qtrain.parallel.sharding.data_parallel import Gradients, LossAndNorm, StepNumbers
from qtrain.train.log.metrics import read_metrics
from qtrain.train.loop import Training
from qtrain.train.spikes import LEAST_LOSS_DEVIATION, MAX_REWINDS, WARM_UP, WINDOW, SpikeDetector
from tests.cases import sampled
from tests.data.corpora import write_jsonl
from tests.system import call, contents, flags, losses, only_run, write_model
from tests.test_mixture_runs import DEEPSEEK

TEXT = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
DRAW, SAVED = 37, 34
"""The batch, counted from 1, that is spoiled, and the last checkpoint before it."""


def spoil(draws: Collection[int], patch: pytest.MonkeyPatch | None = None, *, leave_out: bool = False) -> None:
    """Labels drawn at random in place of those of the batches that a run draws as number `draws`; or, with `leave_out`,
    runs that do not draw them at all. Without `patch` for good, in a process of its own."""
    next_batches, drawn = Training._next_batches, {}

    def spoiled(self):
        while True:
            found = next_batches(self)
            number = drawn[id(self)] = drawn.get(id(self), 0) + 1
            if number not in draws:
                return found
            if not leave_out:
                generator = torch.Generator().manual_seed(0)
                wrong = [torch.randint(256, batch.labels.shape, generator=generator) for batch, _ in found]
                pairs = zip(found, wrong, strict=True)
                return [(dataclasses.replace(batch, labels=labels), place) for (batch, place), labels in pairs]

    if patch is None:
        Training._next_batches = spoiled
    else:
        patch.setattr(Training, "_next_batches", spoiled)


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_model(Path("experts.json"), **DEEPSEEK)
    write_jsonl(Path("jsonl"))
    return tmp_path


SETTINGS = {
    "model": "tiny.json",
    "train_ds": TEXT,
    "seq_len": 32,
    "batch_size": 16,
    "n_steps": 44,
    "lr": 1e-2,
    "lr_schedule_kwargs": {"warmup": 0, "decay": 0},
    "eval_interval": 0,
    "ckpt_interval": 17,
    "export": False,
    "device": "cpu",
}


LOWER = {"spike_threshold": 5.0}
"""Where the loss still falls when the batch comes. Texts are of Python's library: numbers depend on its version."""
MIXTURE = {"model": "experts.json", "router_bias_rate": 0.01, **LOWER}


def argv(**settings) -> list[str]:
    return flags(**{**SETTINGS, **settings})


def trained(runs: str) -> list[dict]:
    return [r for r in read_metrics(only_run(Path(runs)) / "metrics.jsonl") if "loss" in r]


def path_of(rows: list[dict]) -> list[tuple]:
    """Losses and gradient norms in order."""
    return [(r["loss"], r["grad_norm"]) for r in rows]


def without(draws: Collection[int], runs: str, **settings) -> list[tuple]:
    """Losses of a run that never draws these batches."""
    with pytest.MonkeyPatch.context() as patch:
        spoil(draws, patch, leave_out=True)
        done = call(llm_pretrain.main, argv(**settings, runs_dir=runs))
    assert done.code == 0, done.err
    return path_of(trained(runs))


# ---- what is a spike -------------------------------------------------------------------------------------------------


def curve(steps: int, seed: int) -> list[tuple[float, float]]:
    """Losses and gradient norms as of a real run: falling, with normal noise, norms with a heavy tail."""
    draw = random.Random(seed)
    return [
        (2.5 + 8 * math.exp(-step / 50) + draw.gauss(0, 0.03), 0.5 * math.exp(draw.gauss(0, 0.3)))
        for step in range(steps)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_a_clean_run_of_thousands_of_steps_has_none(seed):
    detector = SpikeDetector(10.0)
    assert not any(detector.check(step, *values) for step, values in enumerate(curve(3000, seed)))


@pytest.mark.parametrize(("loss", "norm", "what"), [(4.0, 0.5, "loss"), (2.6, 40.0, "gradient norm")])
def test_a_value_far_above_the_median_is_one_and_does_not_hide_the_next(loss, norm, what):
    detector = SpikeDetector(10.0)
    for step, values in enumerate(curve(300, 0)):
        assert detector.check(step, *values) is None
    for step in range(300, 310):
        spike = detector.check(step, loss, norm)
        assert spike.what == what and spike.value == (loss if what == "loss" else norm) and spike.score > 10
        assert f"the {what} {spike.value:.4g} is" in str(spike)
    assert detector.check(310, 2.5, 0.5) is None
    assert detector.check(311, 0.1, 0.001) is None  # far below is none


def test_the_score_is_of_the_median_absolute_deviation():
    """Of 2, 2.1, 2.2, ... 6 the median is 4 and the median absolute deviation 1."""
    detector = SpikeDetector(10.0, [{"step": n, "loss": 2 + n / 10, "grad_norm": 1.0} for n in range(41)])
    assert detector.check(41, 4 + 1.4826 * 9.9, 1.0) is None
    spike = SpikeDetector(10.0, [{"step": n, "loss": 2 + n / 10, "grad_norm": 1.0} for n in range(41)]).check(
        41, 4 + 1.4826 * 10.1, 1.0
    )
    assert spike.median == pytest.approx(4) and spike.score == pytest.approx(10.1)


def test_a_loss_that_hardly_varies_has_a_least_deviation():
    detector = SpikeDetector(10.0, [{"step": n, "loss": 2.0, "grad_norm": 1.0} for n in range(WARM_UP)])
    assert detector.check(WARM_UP, 2.0 * (1 + 9 * LEAST_LOSS_DEVIATION), 1.0) is None
    assert detector.check(WARM_UP, 2.0 * (1 + 11 * LEAST_LOSS_DEVIATION), 1.0).what == "loss"


def test_there_is_none_before_the_warm_up_but_what_is_not_finite():
    detector = SpikeDetector(10.0)
    for step in range(WARM_UP - 1):
        detector.check(step, 2.0, 1.0)
    assert detector.check(WARM_UP - 1, 50.0, 1e6) is None
    assert str(detector.check(WARM_UP, math.nan, 1.0)) == "the loss is nan"
    assert str(detector.check(WARM_UP, 2.0, math.inf)) == "the gradient norm is inf"
    assert detector.check(WARM_UP, 2.0, 1.0) is None  # they are not compared with


def test_a_resumed_run_compares_with_the_steps_before():
    rows = [{"step": n, "loss": loss, "grad_norm": norm} for n, (loss, norm) in enumerate(curve(300, 3))]
    rows.insert(100, {"step": 99, "eval_loss": 9.0})
    rows.insert(250, {"step": 249, "loss": None, "grad_norm": 1.0, "spike": {"step": 249}})
    rows.insert(251, {"step": 250, "loss": 9.0, "grad_norm": 1.0, "spike": {"step": 250}})
    straight = SpikeDetector(10.0)
    for row in rows:
        if row.get("loss") is not None:
            straight.check(row["step"], row["loss"], row["grad_norm"])
    resumed = SpikeDetector(10.0, rows[-2 * WINDOW :])
    assert resumed.check(300, 4.0, 1.0) == straight.check(300, 4.0, 1.0) is not None
    resumed.forget_after(WARM_UP - 2)
    assert resumed.check(301, 4.0, 1.0) is None  # too few are left


# ---- runs ------------------------------------------------------------------------------------------------------------


def test_a_clean_run_is_the_same_with_and_without(here):
    done = call(llm_pretrain.main, argv(on_spike="rewind", n_steps=200, ckpt_interval=100, runs_dir="on"))
    assert done.code == 0 and "on_spike" not in done.out, done.err
    assert call(llm_pretrain.main, argv(runs_dir="off")).code == 0
    assert path_of(trained("on"))[:44] == path_of(trained("off"))


DELAYED = {"quantize": "fp8_tensorwise", "quantize_kwargs": {"scaling": "delayed", "history": 16}}


@pytest.mark.parametrize(
    "settings",
    sampled(
        [
            {"micro_batch_size": 4},
            DELAYED,
            {"optim": "muon", **LOWER},
            MIXTURE,
        ],
        lambda chosen: "micro_batch_size" not in chosen,
    ),
    ids=str,
)
def test_a_skipped_batch_leaves_no_trace(here, monkeypatch, settings):
    spoil({DRAW}, monkeypatch)
    done = call(llm_pretrain.main, argv(**settings, on_spike="skip", log_interval=4))
    assert done.code == 0, done.err
    rows = {r["step"]: r for r in trained("runs")}
    assert list(rows) == sorted([*range(4, 45, 4), DRAW])  # a spike is logged where nothing is due
    assert rows[DRAW]["spike"]["action"] == "skip" and rows[DRAW]["spike"]["what"] == "loss"
    assert rows[DRAW]["spike"]["score"] > 5 and rows[DRAW]["spike"]["value"] == rows[DRAW]["loss"]
    assert not any("spike" in row for step, row in rows.items() if step != DRAW)
    assert f"warning: step {DRAW}: --on_spike: the loss" in done.out and "the batch is skipped" in done.out
    monkeypatch.undo()
    monkeypatch.chdir(here)
    expected = without({DRAW}, "other", **settings)
    # It counts as a step: those after it are one later.
    assert all(
        (row["loss"], row["grad_norm"]) == expected[step - 1 - (step > DRAW)]
        for step, row in rows.items()
        if step != DRAW
    )


@pytest.mark.parametrize(
    "settings",
    sampled(
        [
            {"async_checkpoint": True, **DELAYED},
            {"optim": "muon", **LOWER},
            {"optimizer_in_backward": True, "clip_grad_norm": 0.0},
            {"quantize": "int8", "quantize_kwargs": {"stochastic_rounding": True}, "optim": "adamw_8bit"},
            {"optim": "torch.AdamW"},
            {"optim": "galore_adamw"},
            {"optim": "adamw_schedule_free", **LOWER},
            MIXTURE,
        ],
        lambda chosen: "async_checkpoint" not in chosen and "optimizer_in_backward" not in chosen,
    ),
    ids=str,
)
def test_a_rewound_run_is_the_one_without_the_data_since_the_checkpoint(here, monkeypatch, settings):
    spoil({DRAW}, monkeypatch)
    done = call(llm_pretrain.main, argv(**settings, on_spike="rewind"))
    assert done.code == 0, done.err
    rows = trained("runs")
    assert [r["step"] for r in rows] == [*range(1, 45)]
    assert [r["step"] for r in rows if "spike" in r] == [SAVED + 1]
    assert rows[SAVED]["spike"]["step"] == DRAW and rows[SAVED]["spike"]["action"] == "rewind"
    assert f"warning: step {DRAW}: --on_spike: the loss" in done.out and f"back to step {SAVED}" in done.out
    tokens = [r["tokens"] for r in rows]
    assert tokens == [512 * n for n in range(1, 45)]  # trained on, not read
    monkeypatch.undo()
    monkeypatch.chdir(here)
    assert path_of(rows) == without(range(SAVED + 1, DRAW + 1), "other", **settings)
    saved = [only_run(Path(runs)) / "checkpoints/00000044" for runs in ("runs", "other")]
    one, other = map(contents, saved)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_before_the_first_checkpoint_a_rewinding_run_skips(here, monkeypatch):
    spoil({DRAW}, monkeypatch)
    done = call(llm_pretrain.main, argv(on_spike="rewind", ckpt_interval=50, **LOWER))
    assert done.code == 0 and "the batch is skipped" in done.out, done.err


def test_a_run_that_has_gone_back_too_often_stops(here, monkeypatch):
    spoil(range(DRAW, 1000), monkeypatch)
    done = call(llm_pretrain.main, argv(on_spike="rewind"))
    assert done.code == 1 and "Traceback" not in done.err
    assert done.out.count(f"back to step {SAVED}") == MAX_REWINDS
    assert f"{MAX_REWINDS} returns to that checkpoint have not helped" in done.err
    assert f"Resume with --resume {only_run(Path('runs'))}/checkpoints/{SAVED:08d}" in done.err
    assert trained("runs")[-1]["step"] == SAVED


def test_a_run_that_has_skipped_too_many_in_a_row_stops_and_saves(here, monkeypatch):
    spoil(range(DRAW, 1000), monkeypatch)
    done = call(llm_pretrain.main, argv(on_spike="skip", ckpt_interval=0, n_steps=60))
    assert done.code == 1 and "10 batches in a row have been skipped" in done.err
    assert [p.name for p in (only_run(Path("runs")) / "checkpoints").iterdir()] == [f"{DRAW + 9:08d}"]


def test_a_run_that_stops_saves_the_weights_before_the_spike_and_can_pass_over_it(here, monkeypatch):
    with pytest.MonkeyPatch.context() as patch:
        spoil({DRAW}, patch)
        done = call(llm_pretrain.main, argv(on_spike="stop"))
    checkpoint = only_run(Path("runs")) / f"checkpoints/{DRAW - 1:08d}"
    assert done.code == 1 and f"step {DRAW}: the loss" in done.err and f"--resume {checkpoint}" in done.err
    with pytest.MonkeyPatch.context() as patch:
        spoil({1}, patch)  # the first that the resumed run draws is the same batch
        resumed = call(llm_pretrain.main, argv(on_spike="skip", resume=checkpoint))
    assert resumed.code == 0 and f"warning: step {DRAW}: --on_spike" in resumed.out, resumed.err
    spoil({DRAW}, monkeypatch)
    assert call(llm_pretrain.main, argv(on_spike="skip", runs_dir="whole")).code == 0
    assert losses(only_run(Path("runs"))) == losses(only_run(Path("whole")))


@pytest.mark.parametrize("action", sampled(["skip", "rewind", "stop", "off"], lambda action: action != "rewind"))
def test_a_gradient_that_is_not_finite_is_a_spike_too(here, monkeypatch, action):
    """Where the run stops, as it does without the flag, nothing is saved."""
    import qtrain.train.loop as loop

    compute, calls = loop.compute_gradients, []

    def broken(*args, **kwargs):
        gradients = compute(*args, **kwargs)
        calls.append(1)
        if len(calls) != 25:
            return gradients
        numbers = StepNumbers(gradients.loss, math.inf, gradients.tokens)
        return Gradients(lambda: numbers, LossAndNorm(torch.tensor(gradients.loss), torch.tensor(math.inf)))

    monkeypatch.setattr(loop, "compute_gradients", broken)
    done = call(llm_pretrain.main, argv(on_spike=action, n_steps=30))
    if action in ("skip", "rewind"):
        assert done.code == 0 and "step 25: --on_spike: the gradient norm is inf" in done.out, done.err
    else:
        assert done.code == 1 and "step 25: the gradient norm is inf. All weights" in done.err
        assert [p.name for p in (only_run(Path("runs")) / "checkpoints").iterdir()] == ["00000017"]
