"""The recipe of a run that goes on: its own config.json."""

from pathlib import Path

DESCRIBES_A_RUN = ("--config", "--model", "--train_ds")
"""Flags that a whole command has: what it leaves out is at its default, and not as the run had it."""


def with_recipe_of_run(argv: list[str], script: str) -> list[str]:
    """argv with --config of the run of this script that --resume names, if it has none of DESCRIBES_A_RUN: a run goes
    on with its own settings, and other flags change some of them."""
    # Both spellings, --flag value and --flag=value.
    words = [piece for word in argv for piece in (word.split("=", 1) if word.startswith("--") else [word])]
    if words.count("--resume") != 1 or words[-1] == "--resume" or not {*words}.isdisjoint(DESCRIBES_A_RUN):
        return argv
    path = Path(words[words.index("--resume") + 1])
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = run / "config.json"
    # Of another script it would be refused for its settings, before the message that names the script.
    own = run.resolve().parent.name == script and (run / "checkpoints").is_dir() and config.is_file()
    return ["--config", str(config), *argv] if own else argv
