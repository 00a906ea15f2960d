"""Recipe and flags: precedence, help, and one short message for every mistake."""

import dataclasses
import importlib.util
import json
from typing import Annotated, Literal

import pytest

from qtrain import __version__
from qtrain.core.checks import Range, check_value
from qtrain.core.config import JsonDict, parse, versions, write_config
from qtrain.core.errors import UserError
from qtrain.core.process import run_script


@dataclasses.dataclass(frozen=True)
class Settings:
    """Settings of a test."""

    train_ds: JsonDict = None
    """Training data."""
    batch_size: Annotated[int, Range(1)] = 4
    """Sequences per step."""
    lr: Annotated[float, Range(0, 10)] = 3e-4
    """Peak rate."""
    mode: Literal["none", "full"] = "none"
    """What to do."""
    compile: bool = False
    """Compile."""
    model: str | None = None
    """A model."""
    trackers: tuple[str, ...] = ()
    """Trackers."""


def run(*argv: str) -> Settings:
    return parse(Settings, list(argv), "script.py")


def recipe(tmp_path, text: str) -> str:
    path = tmp_path / "recipe.json"
    path.write_text(text)
    return str(path)


@pytest.mark.parametrize("key", ["lr", "batch_size"])
@pytest.mark.parametrize("number", ["9" * 400, "-" + "9" * 400, "1e999", "-1e999"])
def test_a_recipes_number_that_fits_no_machine_number(tmp_path, key, number):
    with pytest.raises(UserError, match=rf"^--config .*recipe\.json\)\.{key}: (-?inf|-?9999)") as caught:
        run("--config", recipe(tmp_path, f'{{"{key}": {number}}}'))
    assert len(str(caught.value)) < 400


def test_ranges_and_members_of_nested_types():
    assert check_value("--x", 0.5, Annotated[float, Range(0.1, 1)] | None) == 0.5
    assert check_value("--x", None, Annotated[float, Range(0.1, 1)] | None) is None
    for value, kind in ((0, Annotated[float, Range(0.1, 1)] | None), (["a"] * 9 + [5], list[str]), ([True], list[int])):
        with pytest.raises(UserError, match=r"^--x: .* it must be "):
            check_value("--x", value, kind)


@pytest.mark.parametrize(("environment", "prefix"), [({"RANK": "x"}, ""), ({"RANK": "1"}, "")])
def test_one_process_speaks_whatever_its_rank_is_called(environment, prefix, monkeypatch, capsys):
    """RANK alone, as some schedulers set it, names no other process that could speak."""
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)

    def main(argv: list[str]) -> None:
        print("said")
        raise UserError(f"--a: two\nlines and {'x' * 5000}")

    with pytest.raises(SystemExit):
        run_script(main)
    said = capsys.readouterr()
    assert said.out == "said\n" and said.err.count("\n") == 1
    assert said.err.startswith("error: --a: two lines and xxx") and len(said.err) < 200


def test_version(capsys):
    with pytest.raises(SystemExit) as stop:
        run("--version")
    assert stop.value.code == 0 and capsys.readouterr().out.startswith(f"qtrain {__version__} python 3.")


def test_flags_in_both_spellings():
    assert run("--batch_size", "100_000").batch_size == 100_000
    assert run("--batch-size=8").batch_size == 8
    assert run("--compile").compile and not run("--no_compile").compile
    assert run("--train_ds", '{"type": "token", "n": {"a": [1, 2.5, null]}}').train_ds["n"] == {"a": [1, 2.5, None]}
    assert run("--model=--odd").model == "--odd"
    assert run("--trackers", "wandb", "trackio").trackers == ("wandb", "trackio")
    assert run("--lr", "1").lr == 1.0


def test_flags_win_over_recipe(tmp_path):
    path = recipe(
        tmp_path, '{"_comment": "x", "batch_size": 16, "lr": 1, "trackers": ["a"], "train_ds": {"type": "t"}}'
    )
    settings = run("--config", path, "--batch_size", "2")
    assert settings == Settings(train_ds={"type": "t"}, batch_size=2, lr=1.0, trackers=("a",))


def test_help_shows_the_recipes_values(tmp_path, capsys):
    path = recipe(tmp_path, '{"batch_size": 77}')
    with pytest.raises(SystemExit) as stop:
        run(f"--config={path}", "--help")
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "77" in text and "--batch_size" in text and "Sequences per step." in text and "--config" in text


def test_written_config_is_a_recipe(tmp_path):
    settings = run("--batch_size", "3", "--train_ds", '{"type": "byte"}')
    write_config(settings, tmp_path / "config.json", {"_command": ["script.py", "--batch_size", "3"]})
    assert run("--config", str(tmp_path / "config.json")) == settings
    record = json.loads((tmp_path / "config.json").read_text())
    assert record["_versions"]["torch"] == versions()["torch"] and record["_command"][0] == "script.py"


FLAG_MISTAKES = [
    (["--batch_sizes", "4"], "--batch_sizes: unknown flag. Did you mean --batch_size?"),
    (["--batch_size", "abc"], "--batch_size: 'abc' is not allowed; it must be a whole number at least 1"),
    (["--batch_size", "1.5"], "--batch_size: '1.5' is not allowed"),
    (["--batch_size", "0"], "--batch_size: 0 is out of range; it must be a whole number at least 1"),
    (["--batch_size"], "--batch_size: the value is missing"),
    (["--lr", "nan"], "--lr: nan is out of range; it must be a number from 0 to 10"),
    (["--lr=-1"], "--lr: -1.0 is out of range"),
    (["--lr=inf"], "--lr: inf is out of range"),
    (["--mode", "ful"], "--mode: 'ful' is not allowed; it must be one of 'none', 'full'"),
    (["--compile", "True"], "--compile: a switch takes no value"),
    (["--compile=no"], "--compile: a switch takes no value"),
    (["--train_ds", "{"], "--train_ds: not valid JSON"),
    (["--train_ds", "[1]"], "--train_ds: '[1]' is not a JSON object"),
    (["--train_ds", '{"a": 1, "a": 2}'], "--train_ds: the key 'a' is given twice"),
    (["--train_ds", '{"a": NaN}'], "--train_ds: NaN is not a JSON number"),
    (["stray"], "stray"),
    (["--config"], "--config: the file is missing"),
    (["--config", "a", "--config", "b"], "--config: given twice"),
    (["--config", "no/such.json"], "--config: the file no/such.json does not exist"),
]


@pytest.mark.parametrize("argv,message", FLAG_MISTAKES, ids=lambda v: " ".join(v) if isinstance(v, list) else "")
def test_flag_mistakes(argv, message):
    with pytest.raises(UserError) as error:
        run(*argv)
    assert message in str(error.value) and "\n" not in str(error.value)


RECIPE_MISTAKES = [
    ('{"batch_sise": 4}', "unknown key 'batch_sise'. Did you mean 'batch_size'?"),
    ('{"batch_size": "4"}', "batch_size: '4' is not allowed; it must be a whole number at least 1"),
    ('{"batch_size": 4.0}', "batch_size: 4.0 is not allowed"),
    ('{"batch_size": true}', "batch_size: True is not allowed"),
    ('{"batch_size": -4}', "batch_size: -4 is out of range"),
    ('{"batch_size": 4, "batch_size": 5}', "the key 'batch_size' is given twice"),
    ('{"compile": 1}', "compile: 1 is not allowed; it must be true or false"),
    ('{"train_ds": "token"}', "train_ds: 'token' is not allowed; it must be a JSON object"),
    ('{"trackers": "wandb"}', "trackers: 'wandb' is not allowed; it must be a list"),
    ('{"lr": NaN}', "NaN is not a JSON number"),
    ("[1]", "a recipe is a JSON object"),
    ("{", "not valid JSON"),
    ("", "not valid JSON"),
]


@pytest.mark.parametrize("text,message", RECIPE_MISTAKES)
def test_recipe_mistakes(tmp_path, text, message):
    path = recipe(tmp_path, text)
    with pytest.raises(UserError) as error:
        run("--config", path)
    assert message in str(error.value) and path in str(error.value) and "\n" not in str(error.value)


def test_a_similar_file_is_suggested(tmp_path):
    recipe(tmp_path, "{}")
    with pytest.raises(UserError, match=r"Did you mean .*recipe\.json\?"):
        run("--config", str(tmp_path / "recipes.json"))


def test_the_versions_of_a_run_name_what_draws_its_images_reads_its_flags_and_tracks_it():
    expected = {name for name in ("timm", "tyro", "wandb") if importlib.util.find_spec(name)}
    assert "tyro" in expected and expected <= versions().keys()
