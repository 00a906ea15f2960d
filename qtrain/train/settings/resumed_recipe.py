"""The recipe of a run that goes on: its own config.json."""

from pathlib import Path


def with_recipe_of_run(argv: list[str], script: str) -> list[str]:
    """argv with --config of the run of this script that --resume names, if no recipe is given: a run goes on with its
    own settings, and flags win."""
    flags = [word.partition("=") for word in argv]
    at = [number for number, (flag, _, _) in enumerate(flags) if flag == "--resume"]
    if len(at) != 1 or any(flag == "--config" for flag, _, _ in flags):
        return argv
    path = Path(flags[at[0]][2] or "".join(argv[at[0] + 1 : at[0] + 2]))
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = run / "config.json"
    # Of another script it would be refused for its settings, before the message that names the script.
    own = run.resolve().parent.name == script and (run / "checkpoints").is_dir() and config.is_file()
    return ["--config", str(config), *argv] if own else argv
