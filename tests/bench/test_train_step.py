"""Training steps, model x scheme: each cell apart, one that fails is a reason, the seven rows in one command."""

import json
import math
import subprocess

import pytest
import torch

from qtrain.bench import train_step, training_cell
from qtrain.bench.train_step import TrainStepSettings, main, step_cells
from qtrain.bench.training_cell import run_apart, time_training
from qtrain.core.config import parse
from qtrain.core.errors import UserError
from qtrain.train.assembly import language_architecture
from qtrain.train.step.in_backward import OptimizerInBackward

SEVEN = (
    'bf16,\nint8:{"grad_input":"bf16","grad_weight":"bf16"}, int8:{"grad_weight":"bf16"},'
    'int8:{"stochastic_rounding":false},'
    'int8:{"grad_input":"bf16","grad_weight":"bf16","stochastic_rounding":true},'
    'int8:{"grad_weight":"bf16","stochastic_rounding":true},int8:{"stochastic_rounding":true}'
)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> str:
    path = tmp_path_factory.mktemp("models") / "tiny.json"
    shape = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    shape |= {"num_hidden_layers": 1, "num_attention_heads": 2}
    path.write_text(json.dumps(shape))
    return str(path)


def settings(*flags: str) -> TrainStepSettings:
    return parse(TrainStepSettings, [*flags], "-m qtrain.bench.train_step")


def cells(tiny: str, *flags: str):
    small = ["--batch_size", "2", "--seq_len", "16", "--n_steps", "2", "--no_compile", "--device", "cpu"]
    return step_cells(settings("--models", tiny, *small, *flags))


def test_a_cell(tiny):
    (cell,) = cells(tiny, "--schemes", "int8").values()
    result = time_training(cell, 1)
    assert result["tok_s"] == pytest.approx(2 * 16 / (result["step_ms"] / 1000))
    assert result["sol"] > 0 and result["peak_gib"] > 0 and 3 < result["loss"] < 5.5  # about log 64


class Sensors:
    """An energy counter that moves by 6 J between two readings."""

    available, readings = False, 0

    def __init__(self, device: torch.device):
        pass

    def joules(self) -> float:
        self.readings += 1
        return 6.0 * self.readings


def test_energy(tiny, monkeypatch):
    """Means over the timed steps; columns where a GPU tells, and none where it does not."""
    (cell,) = cells(tiny, "--schemes", "bf16").values()
    assert not {"watts", "joules_token"} & time_training(cell, 1).keys()
    monkeypatch.setattr(training_cell, "GpuSensors", Sensors)
    result = time_training(cell, 1)
    assert result["joules_token"] == 6 / (2 * 2 * 16) and 0 < result["watts"] < 6 / (result["step_ms"] / 1000)
    table = train_step.step_table({("tiny", "bf16"): result}, "steps")
    assert table.rows["tiny bf16"]["J/token"].text == "0.0938" and "W" in table.columns
    del result["watts"], result["joules_token"]
    assert "J/token" not in train_step.step_table({("tiny", "bf16"): result}, "steps").columns


def test_adapters_on_a_stored_base(tiny):
    (cell,) = cells(tiny + ':{"lora":{"r":2,"base":"nf4"}}', "--schemes", "bf16").values()
    assert cell.lora == {"r": 2, "base": "nf4"}
    result = time_training(cell, 1)
    assert result["tok_s"] > 0 and math.isfinite(result["loss"])
    (whole,) = cells(tiny, "--schemes", "bf16").values()
    assert result["planned_gib"] < time_training(whole, 1)["planned_gib"]


def test_the_optimizer_within_the_backward_pass(tiny, monkeypatch):
    """It takes the steps, and the losses are those of ordinary ones."""
    finished = []

    class Watched(OptimizerInBackward):
        def finish(self):
            finished.append(self)
            return super().finish()

    monkeypatch.setattr(training_cell, "OptimizerInBackward", Watched)
    options = [{"clip_grad_norm": 0}, {"clip_grad_norm": 0, "optimizer_in_backward": True}]
    models = ",".join(f"{tiny}:{json.dumps(o)}" for o in options)
    ordinary, within = (time_training(c, 3) for c in cells(models, "--schemes", "bf16", "--optim", "adamw").values())
    assert ordinary["loss"] == within["loss"] and len(finished) == 3 + 2


def test_the_seven_rows(tiny):
    found = cells(tiny, "--schemes", SEVEN)
    assert len(found) == 7
    kwargs = [cell.quantize_kwargs for cell in found.values()]
    assert kwargs[1] == {"grad_input": "bf16", "grad_weight": "bf16"} and kwargs[6] == {"stochastic_rounding": True}


def test_a_model_has_settings_of_its_own(tiny):
    found = cells(f'{tiny},{tiny}:{{"batch_size":8,"micro_batch_size":4}}', "--schemes", "bf16")
    assert [(c.batch_size, c.micro_batch_size) for c in found.values()] == [(2, 0), (8, 4)]


@pytest.mark.parametrize(
    "flags,message",
    [
        (("--schemes", "int9"), "unknown scheme 'int9'.*int8"),
        (("--schemes", 'int8:{"sr":true}'), "unknown key 'sr'"),
        (("--models", "qwen"), "--models: unknown model 'qwen'"),
        (("--models", 'qwen2.5-7b:{"batch":1}'), "unknown key 'batch'.*batch_size"),
        (("--models", ","), "nothing to time"),
        (("--micro_batch_size", "5"), "--batch_size"),
        (("--optim", "adamv"), "adamw"),
        (("--models", 'qwen2.5-7b:{"optimizer_in_backward":true}'), "--clip_grad_norm 0"),
    ],
)
def test_bad_input(flags, message):
    with pytest.raises(UserError, match=message):
        step_cells(settings(*flags))


def test_out_of_memory_is_a_reason(tiny, monkeypatch):
    def no_room(*args, **kwargs):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(language_architecture, "build_model", no_room)
    (cell,) = cells(tiny, "--schemes", "int8").values()
    assert time_training(cell, 1)["reason"].startswith("out of memory")


def test_a_table(tiny, monkeypatch, capsys, tmp_path):
    """Speed over the first scheme of the same model; a cell without figures keeps its row and its reason."""
    speeds = iter([100.0, 150.0, None])

    def cell(settings, warmup_steps):
        speed = next(speeds)
        if speed is None:
            return {"reason": "out of memory, with 139.0 GiB in use"}
        keys = ("sol", "mfu", "step_ms", "peak_gib", "planned_gib", "loss")
        return {"tok_s": speed, **dict.fromkeys(keys, 0.5)}

    monkeypatch.setattr(train_step, "run_apart", cell)
    path = tmp_path / "figures.json"
    main(["--models", tiny, "--schemes", "bf16,int8,fp8_rowwise", "--device", "cpu", "--json", str(path)])
    out = capsys.readouterr().out
    assert "1.50x" in out and "[1] out of memory, with 139.0 GiB in use" in out
    rows = json.loads(path.read_text())["tables"][0]["rows"]
    assert [row["cells"]["tok/s"].get("value") for row in rows] == [100.0, 150.0, None]


def test_a_process_apart(tiny, monkeypatch):
    """A cell's process that dies is a reason; the others go on."""
    (cell,) = cells(tiny, "--schemes", "bf16").values()
    assert run_apart(cell, 1)["tok_s"] > 0
    died = subprocess.CompletedProcess([], 1, stdout="", stderr="Traceback\n  ...\nRuntimeError: no such kernel\n")
    monkeypatch.setattr(training_cell.subprocess, "run", lambda *args, **kwargs: died)
    assert run_apart(cell, 1) == {"reason": "RuntimeError: no such kernel"}
    died.stderr, died.returncode = "", -9
    assert run_apart(cell, 1)["reason"].startswith("SIGKILL")


def test_a_step_that_no_graph_has_is_marked():
    figures = {"sol": None, "mfu": None, "step_ms": 4.0, "peak_gib": 1.0, "planned_gib": 1.0, "reserved_gib": 2.0}
    results = {("m", name): {"tok_s": 5000.0, "recorded": name == "graphs", **figures} for name in ("graphs", "eager")}
    table = train_step.step_table(results, "steps")
    assert "|  5,000 |" in (text := table.markdown()) and "| 5,000* |" in text
    assert table.record()["rows"][1]["cells"]["tok/s"]["recorded"] is False
