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
from qtrain.core.errors import UserError
from qtrain.core.flags import completion_script
from qtrain.core.process import command_line
from tests.system import ROOT, call

MODULES = (llm_pretrain, llm_finetune, timm_finetune, tokenize_data, benchmark_mm)

ANSWERS = """
import contextlib, importlib, io, json, sys
from qtrain import SCRIPTS
from qtrain.core.errors import UserError

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


@pytest.mark.parametrize(
    ("redirection", "code", "says"),
    [
        (">&-", 0, ""),
        (">/dev/full", 1, "error: stdout cannot be written: No space left on device\n"),
        ("<&- 2>&- | cat", 0, ""),
    ],
)
def test_streams_that_are_closed_or_full(redirection, code, says):
    command = f"set -o pipefail; {sys.executable} llm_pretrain.py --version {redirection}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (code, says)


FIRST_FILE = """
from qtrain.core.process import run_script
run_script(lambda _: print(open('x', 'w').fileno() > 2, file=open('y', 'w')))
"""


def test_a_file_does_not_take_the_descriptor_of_a_closed_stream(tmp_path):
    """What a library prints would land in it."""
    command = f"PYTHONPATH={ROOT} {sys.executable} -c '{FIRST_FILE.replace(chr(39), chr(34))}' >&-"
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    assert (tmp_path / "y").read_text() == "True\n"


@pytest.mark.parametrize(
    ("before", "says"),
    [
        ("LC_ALL=C PYTHONUTF8=0", "the locale's encoding, ascii, has no such characters; set LC_ALL=C.UTF-8"),
        ("mkdir gone; cd gone; rmdir ../gone;", "error: the working directory no longer exists; change to another"),
    ],
)
def test_environments_in_which_nothing_can_run(before, says, tmp_path):
    command = f"{before} {sys.executable} {ROOT}/llm_pretrain.py --model=modèle"
    done = subprocess.run(["bash", "-c", command], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 2 and says in done.stderr and done.stderr.count("\n") == 1, done.stderr


def test_an_installed_command_names_itself(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/qtrain-llm-pretrain"])
    with pytest.raises(UserError, match="All flags: qtrain-llm-pretrain --help"):
        llm_pretrain.main(["--zzz", "1"])
    assert command_line("tokenize_data.py") == "qtrain-tokenize-data"
    monkeypatch.setattr(sys, "argv", ["llm_pretrain.py"])
    assert command_line("tokenize_data.py") == "python tokenize_data.py"


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
        "memory",
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
        [
            "--quantize_kwargs",
            "--quantize_overrides",
            "--quantize_schedule",
            "--quantize_lm_head",
            "--quantize_min_size",
        ],
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
