"""A rank of --gpus N ends when its launcher does.

A launcher that is killed (SIGKILL, out of memory) cannot end its ranks, which would wait minutes for the store that it
hosted. So each rank watches its parent process, from before it imports torch. PR_SET_PDEATHSIG would do the same on
Linux alone, and without a message.
"""

import os
import threading
import time

LAUNCHER = "QTRAIN_LAUNCHER"
"""Environment variable: the process id of the launcher, which is the parent of every rank."""
WATCH_SECONDS = 1.0


def watch_launcher() -> None:
    """In a rank of --gpus N: end this process, without saving, once its launcher has ended. Elsewhere nothing."""
    launcher = os.environ.pop(LAUNCHER, "")  # data workers, which inherit the environment, have another parent
    if launcher.isdecimal():
        threading.Thread(target=_watch, args=(int(launcher),), name="launcher watch", daemon=True).start()


def _watch(launcher: int) -> None:
    while os.getppid() == launcher:
        time.sleep(WATCH_SECONDS)
    if os.environ.get("RANK") == "0":  # speaks for all
        text = f"error: the launcher (process {launcher}) was killed; all ranks end. Go on with --resume auto.\n"
        os.write(2, text.encode())  # not print: the main thread may hold the stream's lock
    os._exit(1)
