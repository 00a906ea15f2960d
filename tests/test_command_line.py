"""The scripts' command lines: answered before torch is imported, `--help` in groups, completed by shells."""

import json
import re
import shutil
import subprocess
import sys

import pytest

import benchmark_mm
import llm_finetune
import llm_pretrain
import timm_finetune
import tokenize_data
from qtrain import SCRIPTS
from qtrain.flags import completion_script
from tests.system import ROOT, call

MODULES = (llm_pretrain, llm_finetune, timm_finetune, tokenize_data, benchmark_mm)

ANSWERS = """
import contextlib, importlib, io, json, sys
from qtrain import SCRIPTS
from qtrain.errors import UserError

HEAVY = ("torch", "triton", "transformers", "timm", "datasets", "torchvision", "lm_eval")
COMMANDS = (["--help"], ["--version"], ["--bathc_size", "3"], ["--device", "tpu"], ["--config", "none.json"])
answers = {}
for name in SCRIPTS:
    main = importlib.import_module(name).main
    for argv in COMMANDS:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                main(list(argv))
        except UserError as error:
            answers[f"{name} {argv[0]}"] = str(error)
        except SystemExit:
            answers[f"{name} {argv[0]}"] = said.getvalue()
    answers[name] = [module for module in HEAVY if module in sys.modules]
print(json.dumps(answers))
"""


def test_a_command_line_is_answered_before_torch_is_imported():
    done = subprocess.run([sys.executable, "-c", ANSWERS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answers = json.loads(done.stdout)
    for name in SCRIPTS:
        assert answers[name] == [], f"{name} imported them before it had parsed its arguments"
        assert answers[f"{name} --help"].startswith("usage:") and answers[f"{name} --version"].startswith("qtrain ")
        assert "unknown flag" in answers[f"{name} --bathc_size"] and "does not exist" in answers[f"{name} --config"]
        assert "--device" in answers[f"{name} --device"]


@pytest.mark.parametrize("script", MODULES[:3], ids=lambda module: module.__name__)
def test_help_of_a_training_script_is_in_groups(script):
    boxes = re.split(r"^ (.*options) *\n -+ *\n", call(script.main, ["--help"]).out, flags=re.MULTILINE)[1:]
    titles = [title.removesuffix(" options") for title in boxes[::2]]
    assert titles == [
        "options",
        "model",
        "data",
        "quantization",
        "optimizer",
        "schedule",
        "evaluation",
        "checkpoint and run folder",
        "hardware and process",
        "many processes",
        "plan",
        "logging",
    ]
    flags = {
        title: re.findall(r"^  --(\w+)", box, re.MULTILINE) for title, box in zip(titles, boxes[1::2], strict=True)
    }
    assert flags["options"] == ["config", "list", "version", "completion"]
    assert {"quantize", "quantize_kwargs"} <= {*flags["quantization"]} and {"eval_ds"} <= {*flags["evaluation"]}
    assert max(map(len, flags.values())) <= 12


def test_shells_complete_flags_and_values(tmp_path):
    """bash, for a script that python runs and for a command of an installed package, as its completion asks for it."""
    if not shutil.which("bash"):
        pytest.skip("needs bash")
    asks = [
        ("_qtrain_python", "python ./llm_pretrain.py --quantize_"),
        ("_qtrain_python", "python llm_pretrain.py --batch_size 3 --activation_checkpointing f"),
        ("_qtrain_python", "python another.py --quantize_"),
        ("_tyro_qtrain_llm_pretrain", "qtrain-llm-pretrain --eval_i"),
    ]
    lines = []
    for command in ("llm_pretrain.py", "qtrain-llm-pretrain"):
        lines.append(completion_script(llm_pretrain.PretrainSettings, "bash", command, ["config"]))
    for function, words in asks:
        lines.append(f"COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); COMPREPLY=(); {function}")
        lines.append('echo "${COMPREPLY[@]}"')
    done = subprocess.run(["bash"], input="\n".join(lines), capture_output=True, text=True)
    assert done.stderr == ""
    assert [line.split() for line in done.stdout.splitlines()] == [
        ["--quantize_kwargs", "--quantize_lm_head", "--quantize_min_size"],
        ["full"],
        [],
        ["--eval_interval"],
    ]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_every_script_prints_a_completion(shell):
    last = ("hellaswag_file", "answer_tokens", "n_epochs", "shard_tokens", "png")
    for script, flag in zip(MODULES, last, strict=True):
        done = call(script.main, ["--completion", shell])
        assert (done.code, done.err) == (0, "") and "script.py" in done.out and flag in done.out
    refused = call(llm_pretrain.main, ["--completion", "tcsh"])
    assert refused.code == 2 and refused.err.startswith("error: --completion: 'tcsh' is not allowed;")
