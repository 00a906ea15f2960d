"""The five scripts' command lines are answered before torch is imported."""

import json
import subprocess
import sys

from qtrain import SCRIPTS
from tests.system import ROOT

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
