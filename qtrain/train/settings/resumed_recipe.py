"""The recipe of a run that goes on: its own config.json."""

from pathlib import Path


def with_recipe_of_run(argv: list[str], script: str) -> list[str]:
    """argv with --config of the run of this script that --resume names, if it has no other flags: a run goes on with
    its own settings."""
    flag, joined, value = "".join(argv[:1]).partition("=")
    values = [value] * bool(joined) + argv[1:]
    if flag != "--resume" or len(values) != 1:
        return argv
    path = Path(values[0])
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = run / "config.json"
    # Of another script it would be refused for its settings, before the message that names the script.
    own = run.resolve().parent.name == script and (run / "checkpoints").is_dir() and config.is_file()
    return ["--config", str(config), *argv] if own else argv
