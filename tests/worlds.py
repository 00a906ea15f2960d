"""Functions run by several ranks at once: processes forked from the test's, which meet over gloo."""

import faulthandler
import multiprocessing
import os
import pickle
import random
import socket
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any

import torch

from qtrain.comm.ranks import join_world, leave_world
from qtrain.comm.wire import sent

SECONDS = 600
"""How long ranks may take; a rank that waits for one that failed is ended at once."""
LATE_SECONDS = 240
"""After which a rank prints where its threads are, once: before pytest's time limit ends the test."""


def environment(world: int, on_machine: int | None = None) -> list[dict[str, str]]:
    """Each rank's variables, as a launcher sets them. on_machine: how many processes it says that a machine has."""
    port = _free_port()
    common = {"WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if on_machine:
        common["LOCAL_WORLD_SIZE"] = str(on_machine)
    return [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]


def _free_port() -> int:
    """A port below those that the system gives to connections, which other tests open at any moment."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as listener:
            try:
                listener.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def run_ranks(world: int, function: Callable[..., Any], *arguments: Any, on_machine: int | None = None) -> list[Any]:
    """`function(*arguments)` on every rank. Returns what each returned, without tensors; a rank's error fails."""
    import torch._dynamo  # noqa: F401  (else a model on the meta device imports it, in every rank)

    context, pipes, processes = multiprocessing.get_context("fork"), [], []
    for variables in environment(world, on_machine):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_rank, args=(sender, variables, function, arguments))
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    end, results = time.monotonic() + SECONDS, [None] * world
    try:
        waiting = set(range(world))
        while waiting:
            for rank in sorted(waiting):
                if pipes[rank].poll(0.01):
                    try:
                        error, results[rank] = pickle.loads(pipes[rank].recv_bytes())
                    except EOFError:
                        error = f"ended with code {processes[rank].exitcode}"
                    assert not error, f"rank {rank}: {error}"
                    waiting.discard(rank)
            assert time.monotonic() < end, f"ranks {sorted(waiting)} did not end"
    finally:
        for process in processes:
            process.kill()
            process.join()
    return results


def _rank(sender: Any, variables: dict[str, str], function: Callable[..., Any], arguments: tuple) -> None:
    os.environ.update(variables)
    torch.set_num_threads(1)
    faulthandler.dump_traceback_later(LATE_SECONDS, file=sys.__stderr__)
    sent.clear()  # of what the test process itself has sent, to a fake world
    if inductor := sys.modules.get("torch._inductor.config"):
        inductor.compile_threads = 1  # the test process's pool of compilers, if it has one, has no threads in a fork
    outcome: tuple[str, Any] = ("", None)
    try:
        join_world(torch.device("cpu"))
        outcome = ("", function(*arguments))
        leave_world()
    except BaseException:
        outcome = (traceback.format_exc(), None)
    sender.send_bytes(pickle.dumps(outcome))
    sender.close()
    os._exit(0)  # without the test process's own handlers at exit
