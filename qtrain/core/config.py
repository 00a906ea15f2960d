"""Recipe file + flags > one checked, frozen dataclass > config.json of the run.

A script declares its settings as a frozen dataclass: the docstring under a field is its help, and
`Annotated[int, Range(1)]` its range. `parse` reads `--config FILE` first, checks every key, and passes the result to
tyro as the defaults of the flags: so flags win, and `--help` shows the recipe's values. tyro parses; error messages are
reworded. Keys that begin with an underscore (`_comment`, and `_versions` in a run's config.json) are notes and are
skipped, so the config.json of any run is a recipe.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import itertools
import json
import os
import platform
import re
import subprocess
import sys
import typing
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeVar

import tyro

from qtrain import __version__
from qtrain.core.checks import (
    check_fields,
    check_value,
    is_unicode,
    json_type,
    parse_json,
    read_json,
    refuse_empty,
    shown,
    type_name,
)
from qtrain.core.errors import UserError, nearest
from qtrain.core.flags import Answers, Shell, completion_script, parse_flags
from qtrain.core.process import command_line

C = TypeVar("C")


def _json_field(
    what: str, example: str, accepts: Callable[[Any], bool], kind: type
) -> tyro.constructors.PrimitiveConstructorSpec:
    """A field that is written as JSON. what: what it must be; example: how that is written; accepts: whether a value
    other than None is one, read from JSON or in a recipe; kind: the type of the field."""

    def read(arguments: list[str]) -> Any:
        try:
            value = parse_json(arguments[0], "JSON", example)
        except UserError as error:
            raise ValueError(str(error)) from None  # tyro adds the flag's name to a ValueError
        if not accepts(value):
            raise ValueError(f"JSON: {shown(arguments[0])} is not a JSON {what}; write it as {example}.")
        return kind(value)

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=read,
        is_instance=lambda value: value is None or accepts(value),
        str_from_instance=lambda value: [json.dumps(value)],
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple)


_OBJECT = _json_field("object", '{"key":"value"}', lambda value: isinstance(value, dict), dict)
_read_object = _OBJECT.instance_from_str
JsonDict = Annotated[dict[str, Any] | None, _OBJECT]
"""A field that is a JSON object, both as a flag and in a recipe."""

JsonText = Annotated[
    str | dict[str, Any] | None,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="NAME|JSON",
        instance_from_str=lambda given: _read_object(given) if given[0].lstrip().startswith("{") else given[0],
        is_instance=lambda value: value is None or isinstance(value, str | dict),
        str_from_instance=lambda value: [value if isinstance(value, str) else json.dumps(value)],
    ),
]
"""A field that is a name or a JSON object, both as a flag and in a recipe."""


_NAMES = _json_field(
    "list of names",
    '["a","b"]',
    lambda value: _is_list(value) and all(isinstance(name, str) for name in value),
    tuple,
)
JsonNames = Annotated[tuple[str, ...], _NAMES]
"""A field that is a JSON list of names, both as a flag and in a recipe."""
GivenNames = Annotated[tuple[str, ...] | None, _NAMES]
"""The same of a field that may also not be given."""

JsonList = Annotated[tuple[Any, ...] | None, _json_field("list", '[{"key":"value"}]', _is_list, tuple)]
"""A field that is a JSON list, both as a flag and in a recipe."""


def parse(cls: type[C], argv: list[str], prog: str, listing: Callable[[], str] | None = None) -> C:
    """The settings `cls` from `argv` (without the program's name). Raises UserError.

    `--help`, `--version`, `--completion` and, where there is a listing, `--list` print and exit.
    """
    for argument in argv:
        if "\0" in argument:
            raise UserError(f"{shown(argument)}: the command line holds a NUL character.")
        if not is_unicode(argument):
            raise _undecoded(argument)
    answers = [field.name for field in dataclasses.fields(Answers) if listing or field.name != "list"]
    if listing and "--list" in argv:
        _print_and_exit(listing())
    if "--version" in argv:
        found = {"qtrain": __version__, **versions()}
        _print_and_exit(" ".join(f"{name} {version}" for name, version in found.items() if version))
    shell, argv = _take_option(argv, "--completion", "shell")
    if shell:
        shell = check_value("--completion", shell, Shell)
        _print_and_exit(completion_script(cls, shell, Path(sys.argv[0]).name, answers))
    # The recipe becomes the defaults of the flags, so flags win. tyro does not check defaults: check_fields does, and
    # its messages name the file.
    recipe_path, argv = _take_option(argv, "--config", "file")
    recipe = {}
    if recipe_path:
        recipe = check_fields(cls, read_recipe(recipe_path, "--config"), f"--config ({recipe_path})")
    # tyro names unknown flags less well, and takes what follows a switch for a positional argument.
    _refuse_unknown_flags(cls, argv, prog, answers)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            given = parse_flags(cls, argv, prog, recipe, answers)
    except SystemExit as stop:
        if stop.code in (0, None):
            raise
        raise _reworded(cls, argv, errors.getvalue(), prog) from None
    hints = typing.get_type_hints(cls, include_extras=True)
    # tyro checks types; ranges, 64 bits and Unicode are checked here, for flags and recipes alike.
    values = {f.name: check_value(f"--{f.name}", given[f.name], hints[f.name]) for f in _fields(cls)}
    for field in _fields(cls):
        if field.name != "sample_prompts" and values[field.name] != field.default:  # an empty prompt has no text yet
            refuse_empty(f"--{field.name}", values[field.name])
    return cls(**values)


def _print_and_exit(text: str) -> NoReturn:
    print(text)
    sys.exit(0)


def _undecoded(argument: str) -> UserError:
    """The error for an argument that Python could not decode: bytes that are no text, or a locale without UTF-8."""
    try:
        text = os.fsencode(argument).decode("utf-8")
    except UnicodeDecodeError:
        return UserError(f"{shown(argument)}: the command line is not UTF-8 text.")
    return UserError(
        f"{shown(text)}: the locale's encoding, {sys.getfilesystemencoding()}, has no such characters; set "
        "LC_ALL=C.UTF-8, or leave PYTHONUTF8=0 out."
    )


def as_dict(config: Any) -> dict[str, Any]:
    """The settings as a dictionary for JSON, keys in the order of their definition."""
    return {f.name: getattr(config, f.name) for f in _fields(type(config))}


def write_config(config: Any, path: Path, notes: Mapping[str, Any]) -> None:
    """Write the resolved settings with versions and git hash. The file is a recipe itself. notes: keys with an
    underscore in front."""
    record = {**notes, "_versions": versions(), **as_dict(config)}
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


def source_digest() -> str:
    """A digest of this package's source."""
    # Of the source itself: a checkout without git, or with changes, has another digest than the release.
    digest = hashlib.sha256()
    for path in sorted(Path(__file__).parents[1].rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


_COMPUTING = ("torch", "triton", "transformers", "datasets", "tokenizers", "sentencepiece", "numpy", "timm")
_OTHERS = ("tyro", "wandb")


@functools.cache  # git takes as long as all else that a run writes at its start
def versions() -> Mapping[str, str | None]:
    """Versions of the packages that a run uses, and of this code its git hash (None outside a checkout) and the
    `source_digest`, as they are when this is first called."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in (*_COMPUTING, *_OTHERS):
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    git = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        found["git"] = subprocess.run(git, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        found["git"] = None
    return {**found, "source": source_digest()}


def _fields(cls: type) -> list[dataclasses.Field]:
    return [f for f in dataclasses.fields(cls) if f.init]


def _take_option(argv: list[str], option: str, what: str) -> tuple[str | None, list[str]]:
    """Remove `option VALUE` or `option=VALUE` from argv. UserError if it is given twice or without a value."""
    value, rest, arguments = None, [], iter(argv)
    for argument in arguments:
        if argument != option and not argument.startswith(option + "="):
            rest.append(argument)
            continue
        given = argument[len(option) + 1 :] if "=" in argument else next(arguments, "")
        if not given or given.startswith("--"):
            raise UserError(f"{option}: the {what} is missing; write {option} {what.upper()}.")
        if value is not None:
            raise UserError(f"{option}: given twice ({value}, {given}); give one {what}.")
        value = given
    return value, rest


def read_recipe(path: str, flag: str) -> dict[str, Any]:
    """The settings in a recipe, comments left out. UserError naming `flag` for a file that is none."""
    own = Path(__file__).parents[1] / path  # the package has the recipes in it, and users stand in other folders
    shipped = Path(path).parts[:1] == ("configs",) and not Path(path).exists() and own.is_file()
    recipe = read_json(own if shipped else path, flag)
    if not isinstance(recipe, dict):
        raise UserError(f"{flag} ({path}): a recipe is a JSON object, not {json_type(recipe)}.")
    return {k: v for k, v in recipe.items() if not k.startswith("_")}


def _flag_name(argument: str) -> str:
    return argument[2:].split("=", 1)[0].replace("-", "_")


def _refuse_unknown_flags(cls: type, argv: list[str], prog: str, answers: Sequence[str]) -> None:
    hints = typing.get_type_hints(cls)
    known = {f.name for f in _fields(cls)}
    allowed = known | {f"no_{f.name}" for f in _fields(cls) if hints[f.name] is bool} | {"help"}
    for position, argument in enumerate(argv):
        if not argument.startswith("--"):
            continue
        name, following = _flag_name(argument), argv[position + 1 : position + 2]
        if name not in allowed:
            close, elsewhere = nearest(name, known.union(answers)), getattr(cls, "ELSEWHERE", {}).get(name)
            hint = f" {elsewhere}." if elsewhere else f" Did you mean --{close}?" if close else ""
            raise UserError(f"{argument.split('=')[0]}: unknown flag.{hint} All flags: {command_line(prog)} --help")
        has_value = "=" in argument or bool(following and not following[0].startswith("-"))
        if hints.get(name) is bool and has_value:
            raise UserError(f"--{name}: a switch takes no value; write --{name} or --no_{name}.")


def _reworded(cls: type, argv: list[str], box: str, prog: str) -> UserError:
    """tyro's boxed error message as one line."""
    # tyro 1 reports errors to its console only; its structured ones are in a private module.
    lines = [line.strip("│╭╮╰╯ ") for line in box.splitlines()[1:]]
    # A rule ends the message. Where the output is not UTF-8, rules consist of dashes, and one comes first too.
    message = itertools.dropwhile(lambda line: not line.strip("─-"), lines)
    text = " ".join(itertools.takewhile(lambda line: line.strip("─-"), message))
    found = re.search(r"--([\w-]+)", text)
    hints = typing.get_type_hints(cls, include_extras=True)
    name = found.group(1).replace("-", "_") if found else ""
    if name not in hints:
        return UserError(f"{text or 'the command line could not be read'}. All flags: {command_line(prog)} --help")
    given = _given(argv, name)
    if "JSON: " in text:
        return UserError(f"--{name}: {text.split('JSON: ', 1)[1]}")
    if given is None:
        return UserError(f"--{name}: the value is missing; it must be {type_name(hints[name])}.")
    return UserError(f"--{name}: {shown(given)} is not allowed; it must be {type_name(hints[name])}.")


def _given(argv: list[str], name: str) -> str | None:
    """The last value of the flag `name` on the command line; None if no value follows it."""
    for position, argument in reversed(list(enumerate(argv))):
        if argument.startswith("--") and _flag_name(argument) == name:
            if "=" in argument:
                return argument.split("=", 1)[1]
            following = argv[position + 1 : position + 2]
            return following[0] if following and not following[0].startswith("--") else None
    return None
