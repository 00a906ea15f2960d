"""benchmark_mm.py: its commands parse and do what they say; bad input is one message; a wrong result ends in error."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

import benchmark_mm
from qtrain.bench import case, matmul_rows
from qtrain.core.config import parse
from qtrain.core.errors import UserError

ROOT = Path(__file__).parent.parent


def run(tmp_path, *flags: str) -> dict:
    path = tmp_path / "figures.json"
    benchmark_mm.main(["--device", "cpu", "--budget_ms", "1", "--json", str(path), *flags])
    return json.loads(path.read_text())


def test_the_documented_command_parses():
    argv = ["--a_column_major", "--b_column_major"]
    settings = parse(benchmark_mm.BenchmarkSettings, argv, "benchmark_mm.py")
    assert settings.a_column_major and settings.b_column_major


def test_products(tmp_path, capsys):
    record = run(tmp_path, "--shapes", "32x16x128,16x16x256", "--rows", "int8,bf16", "--skip", "1x128,32x32")
    (table,) = record["tables"]
    assert table["columns"] == ["32x16x128", "16x16x256"]
    names = [row["name"] for row in table["rows"]]
    assert names[0] == "BF16 cuBLAS" and "INT8 Triton, rowwise" in names and names[-1].startswith("peak INT8")
    assert all("value" in cell or cell["reason"] for row in table["rows"] for cell in row["cells"].values())
    assert record["settings"]["shapes"] == "32x16x128,16x16x256" and record["versions"]["torch"]
    out = capsys.readouterr()
    assert "| INT8 Triton, rowwise" in out.out and "INT8 Triton, rowwise, 16x16x256" in out.err


def test_layouts_and_models(tmp_path):
    shape = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48}
    (tmp_path / "tiny.json").write_text(json.dumps(shape | {"num_hidden_layers": 1, "num_attention_heads": 2}))
    flags = ["--model", str(tmp_path / "tiny.json"), "--tokens", "64", "--rows", "int8 triton, plain"]
    (table,) = run(tmp_path, *flags, "--a_column_major", "--b_column_major")["tables"]
    assert table["title"].startswith("Matrix products Aᵀ·B,")
    assert table["columns"] == ["qkv 64x96x32", "o_proj 64x32x32", "gate_up 64x96x32", "down_proj 64x32x48"]
    assert all("value" in cell for cell in table["rows"][0]["cells"].values())


def test_all_tables(tmp_path):
    flags = ["--tables", "linears,quantizers,mm", "--shapes", "16x16x32", "--rows", "int8 rowwise,bf16 cublas"]
    flags += ["--quantizer_shapes", "16x128", "--linear_shapes", "32x48", "--tokens", "32"]
    tables = run(tmp_path, *flags, "--schemes", 'bf16,int8:{"stochastic_rounding":true}')["tables"]
    assert [table["title"].split(",")[0].split()[0] for table in tables] == ["Matrix", "Quantizers", "Linears"]
    assert [row["name"] for row in tables[2]["rows"]] == ["bf16", 'int8:{"stochastic_rounding":true}']


@pytest.mark.parametrize(
    "flags,message",
    [
        (["--shapes", "12x13"], "--shapes: '12x13' is not a size"),
        (["--shapes", ","], "--shapes: it is empty"),
        (["--shapes", "9" * 5000 + "x1x1"], "is not a size; write 3 whole numbers from 1 to 10,000,000"),
        (["--shapes", "99999999999x1x1"], "is not a size"),
        (["--model", "quickstart", "--tokens", "1" + "0" * 15], "--tokens: 1000000000000000 is out of range"),
        (["--rows", "int8", "--skip", "int8"], "--rows, --skip: together they leave no row"),
        (["--skip", "nothing"], "--skip: no row has 'nothing'"),
        (["--tables", "mn"], "--tables: unknown table 'mn'. Did you mean 'mm'"),
        (["--tables", ""], "--tables: the value is empty"),
        (["--rows", "int9"], "--rows: no row has 'int9'"),
        (["--model", "qwen9"], "--model: unknown model 'qwen9'"),
        (["--tables", "linears", "--schemes", "int9"], "--schemes: unknown scheme 'int9'"),
        (["--tables", "linears", "--schemes", "auto"], "--schemes: auto chooses among schemes itself"),
        (["--tables", "linears", "--linear_shapes", "5"], "--linear_shapes: '5' is not a size"),
        (["--tables", "quantizers", "--quantizer_shapes", "1x2x3"], "--quantizer_shapes: '1x2x3' is not a size"),
        (["--tables", "grouped", "--grouped_shapes", "1x2x3"], "--grouped_shapes: '1x2x3' is not a size"),
        (["--tables", "attention", "--attention_shapes", "1x8x3x2x64"], "1x8x3x2x64: 3 heads are no multiple of 2"),
        (["--a_colum_major"], "Did you mean --a_column_major"),
        (["--budget_ms", "0"], "--budget_ms: 0.0 is out of range"),
    ],
)
def test_bad_input(tmp_path, flags, message):
    with pytest.raises(UserError) as error:
        run(tmp_path, *flags)
    assert message in str(error.value) and not list(tmp_path.iterdir())


def test_bad_input_from_a_shell(tmp_path):
    command = [sys.executable, str(ROOT / "benchmark_mm.py"), "--shapes", "1x2"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("error: --shapes: ") and not list(tmp_path.iterdir())


def test_a_wrong_result_ends_in_error(tmp_path, capsys, monkeypatch):
    """The other rows are timed all the same, the figures are written, and the exit status says it."""
    monkeypatch.setattr(matmul_rows, "int8_mm", lambda a, b: matmul_rows.torch._int_mm(a, b.t()) + 1)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--shapes", "32x32x64", "--rows", "plain", "--skip", "int4")
    assert stop.value.code == 1
    out = capsys.readouterr()
    assert "wrong result, not timed" in out.out and "a result was wrong" in out.err
    rows = {
        row["name"]: row["cells"]["32x32x64"]
        for row in json.loads((tmp_path / "figures.json").read_text())["tables"][0]["rows"]
    }
    assert "value" in rows["INT8 cuBLAS, plain"] and "reason" in rows["INT8 Triton, plain"]


def test_nothing_that_could_be_timed_ends_in_error(tmp_path, capsys, monkeypatch):
    def fails(*_):
        raise RuntimeError("no kernel image")

    monkeypatch.setattr(case, "measure", fails)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path, "--shapes", "32x32x64", "--rows", "INT8")
    out = capsys.readouterr()
    assert stop.value.code == 1 and "no kernel image" in out.out
    assert out.err.endswith("error: nothing could be timed; see the footnotes\n")


def test_list(capsys):
    with pytest.raises(SystemExit):
        benchmark_mm.main(["--list"])
    out = capsys.readouterr().out
    assert "schemes (--quantize)" in out and "INT8 Triton, rowwise" in out and "e4m3 1x128, both layouts, SR" in out
