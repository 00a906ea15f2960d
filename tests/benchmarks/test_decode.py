"""The benchmark of generation runs, with a row for each scheme and batch."""

import json

from benchmarks import decode
from tests.models.generation.test_fused_step import MODELS


def test_rows_and_figures(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(MODELS["qwen2"]))
    out = tmp_path / "decode.json"
    flags = ["--schemes", "bf16,int8", "--batches", "1,2", "--context", "4", "--steps", "6", "--device", "cpu"]
    decode.main(["--model", str(tmp_path), *flags, "--json", str(out)])
    rows = json.loads(out.read_text())["tables"][0]["rows"]
    assert [row["name"] for row in rows] == ["bf16, 1", "bf16, 2", "int8, 1", "int8, 2"]
    assert all(row["cells"]["tok/s"]["value"] > 0 for row in rows)
    assert "int8, 2" in capsys.readouterr().out
