"""Training on several GPUs, timed: which cells there are, how a call goes on where the last one stopped."""

import json

import pytest

from qtrain.bench import scaling
from qtrain.bench.scaling import ScalingSettings, main, scaling_cells
from qtrain.core.config import parse
from qtrain.core.errors import UserError


def cells(*flags: str):
    return [*scaling_cells(parse(ScalingSettings, [*flags], "-m qtrain.bench.scaling"))]


def test_every_number_of_gpus_is_checked_before_it_is_timed():
    found = cells("--models", "qwen2.5-0.5b", "--schemes", "int8,bf16", "--layouts", "zero2,ddp,full,hsdp,tp2")
    names = [cell.name for cell in found]
    assert names[:4] == [
        "qwen2.5-0.5b int8 on 1",
        "qwen2.5-0.5b bf16 on 1",
        "check on 2",
        "qwen2.5-0.5b int8 zero2 on 2",
    ]
    assert len(names) == len(set(names)) == 2 + (1 + 8) + (1 + 10) + (1 + 10)  # two GPUs have no hsdp
    of = {cell.name: cell.settings for cell in found}
    assert of["qwen2.5-0.5b int8 ddp on 8"].dp_replicate == 8 and of["qwen2.5-0.5b int8 hsdp on 8"].dp_replicate == 4
    assert of["qwen2.5-0.5b bf16 full on 4"].reshard_after_forward == "always"
    assert all(cell.settings.batch_size * 1024 == 524_288 for cell in found if cell.settings)


def test_dense_models_are_divided_by_layers_and_mixtures_by_experts():
    layouts = ("--gpus", "4", "--layouts", "zero2_int8,tp2,tp4,tp8,ep2,ep4,ep8", "--schemes", "int8")
    names = [cell.row for cell in cells("--models", "qwen2.5-7b,qwen3-30b-a3b", *layouts) if cell.settings]
    assert [name.split()[2] for name in names if "7b" in name] == ["zero2_int8", "tp2", "tp4"]
    assert [name.split()[2] for name in names if "30b" in name] == ["zero2_int8", "ep2", "ep4"]


def test_predictions_need_no_gpu(capsys):
    """A cell that the plan refuses says why."""
    flags = ["--gpus", "1,4", "--models", "qwen2.5-0.5b", "--schemes", "int8", "--layouts", "zero2,tp2,tp4"]
    main([*flags, "--predict", "h200"])
    table = capsys.readouterr().out
    rates = {row.split()[3]: row for row in table.splitlines() if "int8 " in row and "," in row}
    assert rates.keys() == {"|", "zero2", "tp2"} and "Planned for H200" in table
    assert "--tp: 4 does not divide the model's attention heads, 14" in table
    with pytest.raises(UserError, match="h2000"):
        main([*flags, "--predict", "h2000"])


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--gpus", "two"], "--gpus: 'two' is no number of GPUs"),
        (["--layouts", "zero3"], "--layouts"),
        (["--models", "qwen2.5-0.5bb"], "--models"),
        (["--schemes", "int9"], "--schemes"),
    ],
)
def test_mistakes_are_refused_before_anything_runs(flags, says):
    with pytest.raises(UserError, match=says):
        cells(*flags)


def test_a_call_goes_on_where_the_last_one_stopped(tmp_path, monkeypatch, capsys):
    """A cell that fails is a reason in the table, and is not run again either."""
    ran = []

    def run(cell, settings, device):
        ran.append(cell.name)
        if cell.settings is None:
            return {"equal": True, "line": ""}
        if cell.settings.quantize == "bf16":
            return {"reason": "out of memory"}
        return {"tok_s": 1000.0 * cell.gpus * 0.9, "peak_gib": 2.0, "loss": 5.0, "predicted_tok_s": 900.0}

    monkeypatch.setattr(scaling, "run", run)
    path = tmp_path / "out" / "scaling.json"
    flags = ["--gpus", "1,2", "--models", "qwen2.5-0.5b", "--schemes", "int8,bf16", "--layouts", "zero2"]
    flags += ["--device", "cpu", "--json", str(path)]
    main([*flags, "--limit", "1e-9"])
    assert ran == [] and "5 of 5 cells are left" in capsys.readouterr().out
    main(flags)
    assert len(ran) == 5 and "all 5 cells are done" in capsys.readouterr().out
    main(flags)
    assert len(ran) == 5
    table = capsys.readouterr().out
    assert "1,800; 900; 2.0" in table and "100% on 2" in table and "out of memory" in table
    record = json.loads(path.read_text())
    assert len(record["cells"]) == 5 and record["tables"][0]["rows"]


def test_without_a_checkout_nothing_is_checked_and_that_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr(scaling, "ROOT", tmp_path)
    settings = parse(ScalingSettings, [], "-m qtrain.bench.scaling")
    found = scaling.run(scaling.ScalingCell("check on 2", 2), settings, "cpu")
    assert scaling.summary(found).startswith("not checked: benchmarks/mesh_equality.py")


@pytest.mark.sweep
def test_two_processes_on_a_cpu(tmp_path):
    model = tmp_path / "tiny.json"
    shape = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    model.write_text(json.dumps({**shape, "num_hidden_layers": 1, "num_attention_heads": 2}))
    flags = ["--gpus", "2", "--models", f'{model}:{{"micro_batch_size":2}}', "--schemes", "int8", "--layouts", "full"]
    flags += ["--tokens", "128", "--seq_len", "16", "--n_steps", "2", "--warmup_steps", "1", "--no_compile"]
    main([*flags, "--device", "cpu", "--json", str(tmp_path / "scaling.json")])
    check, timed = json.loads((tmp_path / "scaling.json").read_text())["cells"].values()
    assert check["equal"] and timed["tok_s"] > 0 and 3 < timed["loss"] < 5.5
