"""Recipe file + flags > one checked, frozen dataclass > config.json of the run.

A script declares its settings as a frozen dataclass: the docstring under a field is its help, and
`Annotated[int, Range(1)]` its range. `parse` reads `--config FILE` first, checks every key of it, and hands the result
to tyro as the defaults of the flags: so flags win, and `--help` shows the recipe's values. tyro parses; the wording of
errors is ours. Keys that begin with an underscore (`_comment`, and `_versions` in a run's config.json) are notes and
are skipped, which makes the config.json of any run a recipe.
"""

import contextlib
import dataclasses
import io
import itertools
import json
import platform
import re
import subprocess
import sys
import typing
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, TypeVar

import tyro

from qtrain.checks import check_fields, check_value, parse_json, read_json, shown, type_name
from qtrain.errors import TrainingStopped, UserError, nearest

C = TypeVar("C")


def _json_object(words: list[str]) -> dict[str, Any]:
    try:
        value = parse_json(words[0], "JSON")
    except UserError as error:
        raise ValueError(str(error)) from None  # tyro adds the flag's name to a ValueError
    if not isinstance(value, dict):
        raise ValueError(f"JSON: {shown(words[0])} is not a JSON object; write it in braces.")
    return value


JsonDict = Annotated[
    dict[str, Any] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_json_object,
        is_instance=lambda value: value is None or isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
"""A field that holds a JSON object, in the flag and in the recipe alike."""


def parse(cls: type[C], argv: list[str], prog: str) -> C:
    """The settings `cls` from `argv` (without the program's name). Raises UserError; `--help` prints and exits."""
    recipe_path, argv = _take_option(argv, "--config")
    defaults = cls(**_read_recipe(cls, recipe_path)) if recipe_path else None
    _refuse_unknown_flags(cls, argv, prog)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            config = tyro.cli(
                cls,
                args=argv,
                prog=prog,
                default=defaults,
                description=f"{(cls.__doc__ or '').strip()}\n\n--config FILE reads a JSON recipe first; flags win. "
                "--list prints every scheme, optimizer, dataset, tokenizer and model.",
                config=(tyro.conf.HelptextFromCommentsOff,),
                use_underscores=True,
            )
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise _reworded(cls, argv, errors.getvalue(), prog) from None
    hints = typing.get_type_hints(cls, include_extras=True)
    values = {f.name: check_value(f"--{f.name}", getattr(config, f.name), hints[f.name]) for f in _fields(cls)}
    return cls(**values)


def run_script(main: Callable[[list[str]], None], interrupted: str = "interrupted") -> None:
    """Run a script's main on the command line; an error that is a message is printed on stderr, without traceback.

    `interrupted` is what Ctrl-C is answered with, where main does not answer it."""
    try:
        main(sys.argv[1:])
    except (UserError, TrainingStopped) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        sys.exit(130)


def as_dict(config: Any) -> dict[str, Any]:
    """The settings as a JSON-able dictionary, keys in the order of their definition."""
    return {f.name: getattr(config, f.name) for f in _fields(type(config))}


def write_config(config: Any, path: Path, command: list[str]) -> None:
    """Write the resolved settings with versions and git hash; the file is itself a recipe."""
    record = {"_command": command, "_versions": versions(), **as_dict(config)}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def versions() -> dict[str, str | None]:
    """Versions of what decides a run's numbers, and the git hash of this code (None outside a checkout)."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in ("torch", "triton", "transformers", "datasets", "tokenizers", "sentencepiece", "numpy"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found["git"] = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found["git"] = None
    return found


def _fields(cls: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init]


def _take_option(argv: list[str], option: str) -> tuple[str | None, list[str]]:
    """Remove `option VALUE` or `option=VALUE` from argv; given twice or without a value it is refused."""
    value, rest, words = None, [], iter(argv)
    for word in words:
        if word != option and not word.startswith(option + "="):
            rest.append(word)
            continue
        given = word[len(option) + 1 :] if "=" in word else next(words, "")
        if not given or given.startswith("--"):
            raise UserError(f"{option}: the file is missing; write {option} FILE.")
        if value is not None:
            raise UserError(f"{option}: given twice ({value}, {given}); one recipe per run.")
        value = given
    return value, rest


def _read_recipe(cls: type, path: str) -> dict[str, Any]:
    recipe = read_json(path, "--config")
    if not isinstance(recipe, dict):
        raise UserError(f"--config ({path}): a recipe is a JSON object, not {type(recipe).__name__}.")
    return check_fields(cls, {k: v for k, v in recipe.items() if not k.startswith("_")}, f"--config ({path})")


def _flag_name(word: str) -> str:
    return word[2:].split("=", 1)[0].replace("-", "_")


def _refuse_unknown_flags(cls: type, argv: list[str], prog: str) -> None:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in _fields(cls)}
    allowed = known | {f"no_{f.name}" for f in _fields(cls) if hints[f.name] is bool} | {"help"}
    for position, word in enumerate(argv):
        if word.startswith("--") and _flag_name(word) not in allowed:
            close = nearest(_flag_name(word), known)
            hint = f" Did you mean --{close}?" if close else ""
            raise UserError(f"{word.split('=')[0]}: unknown flag.{hint} All flags: python {prog} --help")
        if word.startswith("--") and hints.get(_flag_name(word)) is bool:
            name, value = _flag_name(word), word.split("=", 1)[1] if "=" in word else argv[position + 1 : position + 2]
            if "=" in word or (value and not value[0].startswith("-")):
                raise UserError(f"--{name}: a switch takes no value; write --{name} or --no_{name}.")


def _reworded(cls: type, argv: list[str], box: str, prog: str) -> UserError:
    """tyro's boxed complaint as one line in our wording."""
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    # A rule ends the complaint; where the output is no UTF-8, rules are dashes and one stands above it too.
    complaint = itertools.dropwhile(lambda line: not line.strip("─-"), lines)
    text = " ".join(itertools.takewhile(lambda line: line.strip("─-"), complaint))
    found = re.search(r"--([\w-]+)", text)
    hints = typing.get_type_hints(cls, include_extras=True)
    name = found.group(1).replace("-", "_") if found else ""
    if name not in hints:
        return UserError(f"{text or 'the command line could not be read'}. All flags: python {prog} --help")
    given = _given(argv, name)
    if "JSON: " in text:
        return UserError(f"--{name}: {text.split('JSON: ', 1)[1]}")
    if given is None:
        return UserError(f"--{name}: the value is missing; it must be {type_name(hints[name])}.")
    return UserError(f"--{name}: {shown(given)} is not allowed; it must be {type_name(hints[name])}.")


def _given(argv: list[str], name: str) -> str | None:
    """What the command line gives for the flag `name`, the last time, which counts; None when no value follows it."""
    for position, word in reversed(list(enumerate(argv))):
        if word.startswith("--") and _flag_name(word) == name:
            if "=" in word:
                return word.split("=", 1)[1]
            following = argv[position + 1 : position + 2]
            return following[0] if following and not following[0].startswith("--") else None
    return None
