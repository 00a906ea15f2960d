"""The recipe of a run that goes on: its own config.json."""

from pathlib import Path


def with_recipe_of_run(argv: list[str], script: str) -> list[str]:
    """argv with --config of the run of this script that --resume names, if no --config is given: a run goes on with its
    own settings, other flags change some of them."""
    # Both spellings, --flag value and --flag=value.
    words = [piece for word in argv for piece in (word.split("=", 1) if word.startswith("--") else [word])]
    if words.count("--resume") != 1 or "--config" in words or words[-1] == "--resume":
        return argv
    path = Path(words[words.index("--resume") + 1])
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    config = run / "config.json"
    # Of another script it would be refused for its settings, before the message that names the script.
    own = run.resolve().parent.name == script and (run / "checkpoints").is_dir() and config.is_file()
    return ["--config", str(config), *argv] if own else argv
