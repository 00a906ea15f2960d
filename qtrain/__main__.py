"""python -m qtrain NAME ...: the commands of `qtrain/commands`, a module each."""

import importlib

from qtrain.core.process import prepare_process

prepare_process(script=True)  # before imports that take a while

from qtrain.commands import COMMANDS
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.process import run_script


def main(argv: list[str]) -> None:
    name, *rest = argv or ["--help"]
    if name in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        print("usage: python -m qtrain NAME ...\n")
        print("\n".join(f"  {known:{width}}  {what}" for known, what in COMMANDS.items()))
        return
    if name not in COMMANDS:
        if name.startswith("-"):
            raise UserError(f"{name}: the name of a command comes first: {', '.join(COMMANDS)}.")
        raise unknown_name("python -m qtrain", "command", name, COMMANDS)
    importlib.import_module(f"qtrain.commands.{name}").main(rest)


if __name__ == "__main__":
    run_script(main)
