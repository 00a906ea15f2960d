"""--gpus N: start N processes of the same command on this machine, as torchrun would, and end when they end.

Rank 0's output goes to the screen; the others write their warnings there and everything to their logs in the run
folder. When a process ends by itself with an error, or is killed, the others are ended at once, and this process exits
with that process's code. When this process is killed, the ranks end themselves (`qtrain.core.process`).

The ranks are started first of all, before this process has imported torch, which takes as long as their own imports:
what is refused later, rank 0 refuses.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from qtrain.core.errors import UserError
from qtrain.core.process import GROUP_SIGNALS, LAUNCHER, RESTART_CODE, RESTART_FILE

GRACE_SECONDS = 30
"""How long a process that was asked to end may take, before it is killed."""


def count_gpus(gpus: int | Literal["all"], device: str) -> int:
    """The number that --gpus stands for; in a process that a launcher started, all are its ranks. UserError where there
    are no GPUs."""
    if gpus != "all":
        return gpus
    import torch

    from qtrain.comm.ranks import launched_world

    if "WORLD_SIZE" in os.environ:
        return launched_world()
    if device == "cpu" or not torch.cuda.device_count():
        none = "--device cpu has none" if device == "cpu" else "torch sees none"
        raise UserError(f"--gpus: all counts the GPUs of this machine, and {none}; give a number.")
    return torch.cuda.device_count()


def check_gpus(gpus: int, device: str) -> None:
    """UserError for a --gpus that another launcher contradicts, or that this machine does not have."""
    import torch

    from qtrain.comm.ranks import launched_world

    if "WORLD_SIZE" in os.environ and gpus and gpus != launched_world():
        raise UserError(
            f"--gpus: {gpus}, but the launcher started WORLD_SIZE={launched_world()} processes; leave --gpus out."
        )
    if gpus <= 1 or ("WORLD_SIZE" in os.environ and LAUNCHER not in os.environ):
        return
    if device != "cpu" and (found := torch.cuda.device_count()) < gpus:
        fix = "" if found else f"; --device cpu runs {gpus} processes on the CPU"
        raise UserError(f"--gpus: {gpus} is more than the {found} that torch sees on this machine{fix}.")


def launch(gpus: int | Literal["all"], device: str = "auto") -> None:
    """Return at once in a process that trains. In the one that the user started with --gpus N, run N of them and exit
    with their exit code."""
    if "WORLD_SIZE" not in os.environ and (count := count_gpus(gpus, device)) > 1:
        sys.exit(run_processes(count, [sys.executable, *sys.argv]))


def run_processes(count: int, command: Sequence[str]) -> int:
    """Run `command` as `count` ranks, again with more flags where one of them asks for it (`Restart`). Returns the exit
    code of the first that failed; 0 if none did."""
    with tempfile.TemporaryDirectory(prefix="qtrain-") as folder:
        asked = Path(folder, "restart.json")
        while (code := _run_once(count, command, asked)) == RESTART_CODE and asked.exists():
            restart = json.loads(asked.read_text())
            asked.unlink()
            print(restart["message"], file=sys.stderr, flush=True)
            command = [*command, *restart["flags"]]
    return code


def _run_once(count: int, command: Sequence[str], restart_file: Path) -> int:
    listener = socket.create_server(("127.0.0.1", 0))
    # Else each rank would take all cores.
    threads = os.environ.get("OMP_NUM_THREADS") or str(max(1, (os.cpu_count() or 1) // count))
    common = {
        **os.environ,
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(listener.getsockname()[1]),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "OMP_NUM_THREADS": threads,
        LAUNCHER: str(os.getpid()),
        RESTART_FILE: str(restart_file),
    }
    processes = [
        subprocess.Popen(command, env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)
    ]
    for number in GROUP_SIGNALS:  # a Ctrl-C reaches the processes from the terminal, which is the same press to them
        signal.signal(number, lambda signum, _: _send(processes, signum))
    store = _store(listener)
    while True:
        codes = [process.poll() for process in processes]
        failed = [(rank, code) for rank, code in enumerate(codes) if code]  # None still runs, 0 has ended well
        if failed or all(code == 0 for code in codes):
            break
        time.sleep(0.1)
    del store  # the ranks have ended
    if failed:
        return _end(processes, *failed[0])
    return 0


def _store(listener: socket.socket) -> object:
    """The ranks' store. Hosted here, as torchrun's agent does, it outlives every rank: the others still learn who
    hangs."""
    import torch.distributed as dist

    port = listener.getsockname()[1]
    given = {"is_master": True, "wait_for_workers": False, "master_listen_fd": listener.detach()}
    return dist.TCPStore("127.0.0.1", port, **given)


def _end(processes: Sequence[subprocess.Popen], rank: int, code: int) -> int:
    """End what still runs after rank `rank` has ended with `code`. Returns the exit code of the run."""
    if code > 128:  # stopped by a signal after saving: the others are doing the same
        _wait(processes, GRACE_SECONDS)
    if any(process.poll() is None for process in processes):
        if code < 0:
            print(f"error: rank {rank} was killed by {signal.Signals(-code).name}; all ranks end.", file=sys.stderr)
        _wait(processes, 1)  # ranks that fail alike say so within this time; only the first message is of use
        for process in processes:
            if process.poll() is None:
                process.kill()
        _wait(processes, GRACE_SECONDS)
    return code if code > 0 else 128 - code  # as a shell: 128 + the signal's number


def _wait(processes: Sequence[subprocess.Popen], seconds: float) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end and any(process.poll() is None for process in processes):
        time.sleep(0.05)


def _send(processes: Sequence[subprocess.Popen], number: int) -> None:
    for process in processes:
        if process.poll() is None:
            process.send_signal(number)
