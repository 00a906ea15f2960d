"""Importing the package leaves Python as it is; and a CPU run goes through without what Windows lacks (SIGUSR1, fcntl,
resource, folders that can be opened)."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.system import ROOT, flags, only_run, write_model

WINDOWS = """
import json, os, runpy, signal, sys, types
import torch, multiprocessing.resource_tracker, tempfile, subprocess, psutil  # these use what is taken away
for name in ("SIGUSR1", "SIGUSR2", "SIGHUP", "SIGALRM"):
    delattr(signal, name)
for name in ("O_DIRECTORY", "sched_getaffinity", "getuid", "geteuid"):
    delattr(os, name)
sys.modules.update(fcntl=None, resource=None, pwd=None, grp=None)
psutil.Process = lambda: types.SimpleNamespace(memory_info=lambda: types.SimpleNamespace(peak_wset=3 << 30))
real_open, real_fsync = os.open, os.fsync
def windows_open(path, mode, *rest, **more):
    if isinstance(path, (str, os.PathLike)) and os.path.isdir(path):
        raise PermissionError(13, "Permission denied", str(path))
    return real_open(path, mode, *rest, **more)
def windows_fsync(descriptor):
    import ctypes
    assert ctypes.CDLL(None).fcntl(getattr(descriptor, "fileno", lambda: descriptor)(), 3) & 3, "not open for writing"
    real_fsync(descriptor)
import shutil
os.open, os.fsync, shutil._use_fd_functions = windows_open, windows_fsync, False
for script, *argv in json.loads(sys.argv[1]):
    sys.argv = [script, *argv]
    runpy.run_path(script, run_name="__main__")
"""


def run_as_on_windows(commands: list[list[str]], folder: Path) -> subprocess.CompletedProcess:
    """One after the other in one process, whose imports take most of the time. Each: a script and its arguments."""
    command = [sys.executable, "-c", WINDOWS, json.dumps([[str(ROOT / script), *argv] for script, *argv in commands])]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)


def test_tokenize_train_and_resume(tmp_path):
    (tmp_path / "a.txt").write_text("Some text to train on. " * 200)
    tokenize = flags(files="a.txt", split="all", tokenizer="byte", n_procs=1, output_dir="tokens")
    settings = {"model": write_model(tmp_path / "m.json"), "seq_len": 32, "batch_size": 2, "device": "cpu"}
    settings |= {"train_ds": {"type": "token", "dataset_dir": "tokens"}, "ckpt_interval": 2}
    begin, resume = flags(**settings, n_steps=2, num_workers=1), flags(**settings, n_steps=4, resume="auto")
    outcome = run_as_on_windows(
        [["tokenize_data.py", *tokenize], ["llm_pretrain.py", *begin], ["llm_pretrain.py", *resume]], tmp_path
    )
    assert outcome.returncode == 0, outcome.stderr
    assert "resumed at step 2" in outcome.stdout
    run = only_run(tmp_path / "runs")
    assert (run / "checkpoints" / "00000004").is_dir() and (run / "hf" / "config.json").is_file()


IMPORTS = """
import sys
hook, finders = sys.excepthook, list(sys.meta_path)
import qtrain, qtrain.core.config, qtrain.models, qtrain.data, qtrain.train.loop
added = [finder for finder in sys.meta_path if finder not in finders and type(finder).__module__.startswith("qtrain")]
assert sys.excepthook is hook and not added, added
from qtrain.core.process import prepare_process
prepare_process()
prepare_process()
added = [finder for finder in sys.meta_path if type(finder).__module__.startswith("qtrain")]
assert sys.excepthook is hook and len(added) == 1
import torchvision.ops
"""


def test_importing_the_package_changes_nothing_for_other_programs():
    """Only `prepare_process`, which a program calls itself, lets torchvision be imported with a CPU build of torch."""
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


RESTARTING = """
import os, time
from qtrain.core.errors import Restart
from qtrain.core.process import run_script

def main(argv):
    if "--memory_limit" not in argv:
        raise Restart("out of memory, starts again", ("--memory_limit", "3"))
    print(argv)

run_script(main)
"""


def test_a_run_that_can_go_on_with_other_flags_becomes_that_run(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(RESTARTING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), "--model", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "out of memory, starts again\n")
    assert done.stdout == "['--model', 'x', '--memory_limit', '3']\n"


LAUNCHING = RESTARTING.replace(
    "    if ",
    """    from qtrain.comm.launch import launch
    launch(2)
    if os.environ["RANK"] == "0" and "--memory_limit" not in argv:
        time.sleep(100)  # in a collective, as ranks that still have memory
    if """,
)


def test_ranks_of_which_one_can_go_on_with_other_flags_are_all_started_again(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(LAUNCHING)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, str(script), "--model", "x"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "out of memory, starts again\n")
    assert done.stdout == "['--model', 'x', '--memory_limit', '3']\n"


MISSING = """
import sys
from qtrain.core.process import prepare_process
prepare_process(script=True)
import {module}
"""


def test_a_package_that_is_not_installed_is_one_line():
    """As with a Python that is not the one of `make setup`; a module that an installed package lacks is a traceback."""

    def imported(module: str) -> subprocess.CompletedProcess:
        code = MISSING.format(module=module)
        return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    done = imported("no_such_package.module")
    assert done.returncode == 2 and done.stderr.startswith("error: the package 'no_such_package' is not installed for ")
    assert len(done.stderr.splitlines()) == 1 and ".venv/bin/activate" in done.stderr
    for module in ("json.no_such_module", "qtrain.no_such_module"):
        done = imported(module)
        assert done.returncode == 1 and "Traceback" in done.stderr
