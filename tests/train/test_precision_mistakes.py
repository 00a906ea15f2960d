"""A mistake about --quantize_schedule, qat or --distill is one short line that names the flag, what was given and what
is allowed; nothing is written."""

import json
from pathlib import Path
from typing import Any

import pytest

import llm_pretrain
from tests.data.corpora import write_jsonl
from tests.system import call, flags, only_run, tree, write_model
from tests.train.test_schedule_runs import SETTINGS


def schedule(*entries: Any, **more: Any) -> dict[str, Any]:
    return {"quantize_schedule": json.dumps([[0, "bf16"], *entries]), **more}


def qat(**options: Any) -> dict[str, Any]:
    return {"quantize": "qat", "quantize_kwargs": options}


def distill(**options: Any) -> dict[str, Any]:
    return {"distill": {"teacher": "wide", **options}}


SCHEDULES = [
    ({"quantize_schedule": "[[0,"}, "--quantize_schedule: not valid JSON"),
    ({"quantize_schedule": '{"0":"bf16"}'}, '--quantize_schedule: \'{"0":"bf16"}\' is not a JSON list'),
    ({"quantize_schedule": "5"}, "--quantize_schedule: '5' is not a JSON list; write it as ["),
    ({"quantize_schedule": "[]"}, "--quantize_schedule: the first entry must begin at 0, as in [["),
    ({"quantize_schedule": '[[1,"int8"]]'}, "--quantize_schedule: the first entry must begin at 0"),
    (schedule("int8"), "--quantize_schedule ('int8'): an entry is a list of two"),
    (schedule([0.5]), "--quantize_schedule ([0.5]): an entry is a list of two, [when, scheme]"),
    (schedule([0.5, 5]), '5 is not allowed; give a scheme, or {"scheme":NAME} with its options'),
    (schedule([0.5, None]), "None is not allowed; give a scheme"),
    (schedule([0.5, ["int8"]]), "['int8'] is not allowed; give a scheme"),
    (schedule(["0.5", "int8"]), "'0.5' is not allowed; give a share of the steps below 1, or a number of steps"),
    (schedule([True, "int8"]), "True is not allowed; give a share"),
    (schedule([-0.5, "int8"]), "-0.5 is not allowed; give a share"),
    (schedule([1.5, "int8"]), "1.5 is not allowed; give a share"),
    (schedule([8, "int8"]), "--quantize_schedule: int8 begins after 8 steps, and there are 8; let it begin earlier"),
    (schedule([0.01, "int8"]), "int8 begins after 0 of 8 steps, and the entry before it after 0"),
    (schedule([4, "int8"], [0.5, "qat"]), "qat begins after 4 of 8 steps, and the entry before it after 4"),
    (schedule([0.5, "int8"], [0.25, "qat"]), "give entries in the order of their beginning, at least a step apart"),
    (schedule([0.5, "qat4"]), "unknown scheme 'qat4'. Did you mean 'qat'?"),
    (schedule([0.5, {"weight": "int8"}]), 'the key "scheme" is missing; it must be the name of a scheme'),
    (schedule([0.5, {"scheme": "qat", "wieght": "int8"}]), "unknown key 'wieght'. Did you mean 'weight'?"),
    (schedule([0.5, {"scheme": "qat", "weight": "int4"}]), "'int4' is not allowed; it must be one of 'int4_g32'"),
    (schedule([0.5, "auto"]), "'auto' chooses schemes for the whole model; name one"),
    (schedule([0.5, "int8_weight"]), "weights stored in low bits are parameters of another kind"),
    (schedule([0.5, "int8"], quantize="qat"), "--quantize: 'qat' and --quantize_schedule both say which scheme"),
    (
        schedule([0.5, "int8"], quantize_kwargs={"stochastic_rounding": True}),
        "--quantize_kwargs: they are options of --quantize, and the entries of --quantize_schedule have their own",
    ),
    (
        schedule([0.5, "qat"], quantize_min_size=999),
        "--quantize_schedule: 'qat' quantizes none of the model's 9 linears",
    ),
    (
        {"resume": "RUN", **schedule([4, "bitnet"])},
        "That run had --quantize_schedule None, not [[0, 'bf16'], [4, 'bitnet']]",
    ),
]
QAT = [
    (qat(weight=5), "--quantize_kwargs (qat).weight: 5 is not allowed; it must be one of 'int4_g32'"),
    (qat(weight=["int8"]), "--quantize_kwargs (qat).weight: ['int8'] is not allowed"),
    (qat(activations=True), "--quantize_kwargs (qat).activations: True is not allowed; it must be one of 'none'"),
    (qat(weight="int4_g128"), "8 x int4_g128 takes in-features in multiples of 128"),
    (qat(activations="int8", weight="fp8_row"), "'int8' does not go with fp8_row weights; allowed: none, fp8"),
]
DISTILL = [
    ({"distill": "wide"}, "--distill: not valid JSON (Expecting value: line 1 column 1 (char 0)). Given: 'wide'."),
    ({"distill": "[1]"}, "--distill: '[1]' is not a JSON object; write it as {"),
    ({"distill": {"weight": 0.5}}, "--distill: the key 'teacher' is missing; it must be text"),
    ({"distill": {"teachr": "wide"}}, "--distill: unknown key 'teachr'. Did you mean 'teacher'?"),
    (distill(teacher=5), "--distill.teacher: 5 is not allowed; it must be text"),
    (distill(teacher=""), "--distill.teacher: the value is empty"),
    (distill(weight=1.5), "--distill.weight: 1.5 is out of range; it must be a number from 0 to 1"),
    (distill(weight=-0.1), "--distill.weight: -0.1 is out of range"),
    (distill(weight="half"), "--distill.weight: 'half' is not allowed; it must be a number from 0 to 1"),
    (distill(weight=True), "--distill.weight: True is not allowed"),
    (distill(weight=float("nan")), "--distill: NaN is not a JSON number"),
    (distill(temperature=0), "--distill.temperature: 0.0 is out of range; it must be a number from 0.01 to 100"),
    (distill(temperature=1e9), "--distill.temperature: 1000000000.0 is out of range"),
    (distill(temprature=2), "--distill: unknown key 'temprature'. Did you mean 'temperature'?"),
    (distill(teacher="timm"), "the key 'model_type' is missing; it must be text. A teacher must be a language model"),
    (distill(teacher="vit"), "unknown model_type 'vit'. Allowed: bitnet, "),
    (distill(teacher="broken"), "--distill.teacher (broken/config.json): not valid JSON"),
    (distill(teacher="jsonl"), "--distill.teacher: the folder jsonl has no config.json"),
    (distill(teacher="llama-100m"), "--distill.teacher: llama-100m is a shape without weights; give a hub id or a"),
    ({"distil": "{}"}, "--distil: unknown flag. Did you mean --distill?"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Data, a model, a run of it, and folders that are no teachers."""
    folder = tmp_path_factory.mktemp("mistakes")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        write_model(Path("tiny.json"), max_position_embeddings=512)
        write_jsonl(Path("jsonl"))
        configs = {"timm": '{"architecture":"vit_tiny"}', "vit": '{"model_type":"vit","hidden_size":64}', "broken": "{"}
        for name, config in configs.items():
            Path(name).mkdir()
            Path(name, "config.json").write_text(config)
        done = call(llm_pretrain.main, flags(**{**SETTINGS, "n_steps": 2}))
        assert done.code == 0, done.err
    return folder


@pytest.mark.parametrize(("settings", "says"), [*SCHEDULES, *QAT, *DISTILL], ids=lambda value: str(value)[:60])
def test_it_is_one_line_and_nothing_is_written(settings, says, folder, monkeypatch):
    monkeypatch.chdir(folder)
    if settings.get("resume"):
        settings = {**settings, "resume": str(only_run(Path("runs")))}
    before = tree(folder)
    done = call(llm_pretrain.main, flags(**{**SETTINGS, **settings}))
    assert done.code == 2, f"not refused: {done}"
    message = done.err.removesuffix("\n")
    assert message.startswith("error: ") and "\n" not in message and len(message) < 400, done.err
    assert says in message, message
    assert tree(folder) == before
