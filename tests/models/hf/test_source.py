"""What --model may name, and what it is told when it names nothing."""

import json

import pytest

from qtrain.core.errors import UserError
from qtrain.models import read_model_source
from tests.models.families import FAMILIES


def test_shipped_names_ignore_case_and_lose_their_comment():
    source = read_model_source("Qwen2.5-0.5B")
    assert source.config["hidden_size"] == 896 and "_comment" not in source.config
    assert source.folder is None and source.hub_id is None


def test_file_and_folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(FAMILIES["llama2"]))
    assert read_model_source(str(tmp_path / "config.json")).folder is None
    assert read_model_source(str(tmp_path)).folder == tmp_path
    assert read_model_source(str(tmp_path)).config == FAMILIES["llama2"]


def bad(tmp_path, name: str) -> str:
    with pytest.raises(UserError) as caught:
        read_model_source(name.replace("TMP", str(tmp_path)))
    return str(caught.value)


def test_names_that_stand_for_nothing(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "broken.json").write_text("{")
    (tmp_path / "shape.json").write_text("{}")
    message = bad(tmp_path, "qwen2.5-0.5")
    assert message.startswith("--model") and "Did you mean 'qwen2.5-0.5b'" in message and "owner/name" in message
    assert "no config.json" in bad(tmp_path, "TMP/empty")
    assert "there is no folder" in bad(tmp_path, "./nowhere")
    assert "there is no folder" in bad(tmp_path, "a/b/c")
    assert "JSON object" in bad(tmp_path, "TMP/list.json")
    assert "not valid JSON" in bad(tmp_path, "TMP/broken.json")
    assert "shape.json" in bad(tmp_path, "TMP/shap.json")


def test_a_folder_of_models_names_one(tmp_path):
    """The folder that was given to `export --output`."""
    (tmp_path / "exports" / "ct_int8").mkdir(parents=True)
    (tmp_path / "exports" / "ct_int8" / "config.json").write_text("{}")
    assert f"It holds models: give one, such as {tmp_path}/exports/ct_int8." in bad(tmp_path, "TMP/exports")


def test_a_folder_of_runs_names_an_export_and_no_recipe(tmp_path):
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    for name in ("config.json", "metrics.jsonl"):
        (run / name).write_text("{}")
    assert "It holds models" not in bad(tmp_path, "TMP/runs")
    (run / "hf").mkdir()
    (run / "hf" / "config.json").write_text("{}")
    assert f"It holds models: give one, such as {run}/hf." in bad(tmp_path, "TMP/runs")


def test_a_hub_id_that_cannot_be_reached_says_so(monkeypatch):
    import qtrain.core.hub

    monkeypatch.setattr(qtrain.core.hub, "hub_reachable", lambda: False)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="could not be reached"):
        read_model_source("nobody/no-such-model-here")
