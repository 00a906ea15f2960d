"""Checks values against a field's declared type and range: in flags, recipes and nested JSON objects alike."""

import dataclasses
import errno
import json
import math
import os
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typeguard

from qtrain.core.errors import UserError, nearest, unknown_name
from qtrain.core.reading import FIFO_SECONDS, read_small, special_file

MAX_INT = 2**63 - 1
"""The largest whole number that is accepted: torch's int64. Larger ones overflow where they meet a float."""


@dataclasses.dataclass(frozen=True)
class Range:
    """Inclusive bounds of a number, for `Annotated[int, Range(1)]`."""

    low: float = -math.inf
    high: float = math.inf

    def __str__(self) -> str:
        if self.high == math.inf:
            return f"at least {self.low:g}"
        if self.low == -math.inf:
            return f"at most {self.high:g}"
        return f"from {self.low:g} to {self.high:g}"


def type_name(annotation: Any) -> str:
    """A type in words for messages: 'a whole number', 'true or false', "one of 'a', 'b'"."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        bounds = [str(a) for a in args[1:] if isinstance(a, Range)]
        return " ".join([type_name(args[0]), *bounds])
    if origin is Literal:
        return "one of " + ", ".join(repr(a) for a in args)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_name(a) for a in args)
    if origin in (list, tuple):
        return f"a list of {_several(args)}"
    names: dict[Any, str] = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    names |= {dict: "a JSON object", type(None): "null"}
    return names.get(origin or annotation, getattr(annotation, "__name__", str(annotation)))


def _several(members: tuple[Any, ...]) -> str:
    """The types of a list's members in words: 'whole numbers', '2 numbers'."""
    names = [type_name(member) for member in members if member is not Ellipsis]
    if len(set(names)) > 1:
        return ", ".join(names)
    kind, at_least, bound = names[0].partition(" at least ")
    if kind in ("a whole number", "a number", "text", "a JSON object"):
        kind = kind.removeprefix("a ") + "s"
    plural = kind + at_least + bound
    return plural if Ellipsis in members or len(members) == 1 else f"{len(members)} {plural}"


def json_type(value: Any) -> str:
    """What a JSON value is, in JSON's words."""
    names = {dict: "an object", list: "a list", tuple: "a list", str: "text", bool: "true or false", type(None): "null"}
    return names.get(type(value), "a number")


def shown(value: Any) -> str:
    """A value for messages: its repr, truncated; a tuple as the list that JSON knows."""
    text = repr(list(value) if type(value) is tuple else value)
    return text if len(text) <= 80 else f"{text[:60]}...{text[-12:]}"


def _coerce(value: Any, annotation: Any) -> Any:
    """JSON has one number type and no tuples: accept 1 for 1.0 and a list for a tuple, nothing else."""
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _coerce(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return (
            # A value that is a member's already stays as it is: 1 is an int for int | float.
            value
            if any(_matches(value, a) for a in args)
            else next((c for a in args if _matches(c := _coerce(value, a), a)), value)
        )
    if annotation is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is tuple and isinstance(value, list):
        inner = [args[0]] * len(value) if len(args) == 2 and args[1] is Ellipsis else list(args)
        return tuple(_coerce(v, a) for v, a in zip(value, inner, strict=False)) if len(inner) == len(value) else value
    return value


def _matches(value: Any, annotation: Any) -> bool:
    origin, args = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _matches(value, args[0])
    if origin in (typing.Union, types.UnionType):
        return any(_matches(value, a) for a in args)
    if origin is list:
        # typeguard would take the bools in a list of int.
        return isinstance(value, list) and all(_matches(v, args[0]) for v in value)
    if annotation in (int, float) and isinstance(value, bool):
        return False  # a bool is an int in Python, but true is not 1
    try:
        typeguard.check_type(value, annotation, collection_check_strategy=typeguard.CollectionCheckStrategy.ALL_ITEMS)
    except typeguard.TypeCheckError:
        return False
    return True


def check_value(flag: str, value: Any, annotation: Any) -> Any:
    """`value` converted to `annotation`. UserError naming the flag, the value and what is allowed."""
    if not isinstance(value, float):  # its Range refuses inf and NaN
        # First, so that a NUL or a number beyond 64 bits has the same message for every type.
        _check_contents(flag, value)
    value = _coerce(value, annotation)
    bounds = _bounds(annotation)
    if not _matches(value, annotation):
        raise UserError(f"{flag}: {shown(value)} is not allowed; it must be {type_name(annotation)}.")
    numbers = [value] if isinstance(value, int | float) else value if isinstance(value, list | tuple) else []
    for bound in bounds:
        if not all(bound.low <= n <= bound.high for n in numbers):  # NaN fails both comparisons
            raise UserError(f"{flag}: {shown(value)} is out of range; it must be {type_name(annotation)}.")
    return value


def _bounds(annotation: Any) -> list[Range]:
    """The ranges of an annotation, also where it may be something else too, as in Annotated[float, Range(0)] | None."""
    if get_origin(annotation) in (typing.Union, types.UnionType):
        return [bound for member in get_args(annotation) for bound in _bounds(member)]
    return [a for a in getattr(annotation, "__metadata__", ()) if isinstance(a, Range)]


def _check_contents(flag: str, value: Any) -> None:
    """Refuse numbers that do not fit 64 bits, and text that is not Unicode or holds a NUL, which no path or flag can,
    at any depth of a JSON value."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            _check_contents(flag, key)
            _check_contents(f"{flag}.{key}", inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            _check_contents(flag, inner)
    elif isinstance(value, int) and abs(value) > MAX_INT:
        raise UserError(f"{flag}: {shown(value)} is too large; whole numbers are at most {MAX_INT:,}.")
    elif isinstance(value, float) and not math.isfinite(value):
        raise UserError(f"{flag}: {value} is not a finite number.")  # 1e999 in JSON
    elif isinstance(value, str) and not is_unicode(value):
        raise UserError(f"{flag}: {shown(value)} is not valid Unicode text (it holds a lone surrogate).")
    elif isinstance(value, str) and "\0" in value:
        raise UserError(f"{flag}: {shown(value)} holds a NUL character; leave it out.")


def refuse_empty(flag: str, value: Any) -> None:
    """Refuse "" as an option, alone or in a list: as a path it would mean the current folder."""
    if value == "" or (isinstance(value, list | tuple) and "" in value):
        raise UserError(f"{flag}: the value is empty; give one, or leave {flag} out.")


def is_unicode(text: str) -> bool:
    """Whether the text can be encoded: no lone surrogates, of undecodable bytes of the command line or JSON escapes."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def check_fields(cls: type, values: Mapping[str, Any], flag: str) -> dict[str, Any]:
    """`values` checked against the fields of the dataclass `cls`. UserError for unknown, missing and mistyped keys."""
    hints = typing.get_type_hints(cls, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(cls) if f.init}
    for key in values:
        # Unknown keys before missing ones: a typing error makes both, and names its nearest match.
        if key not in fields:
            raise unknown_name(flag, "key", key, fields)
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in values:
            raise UserError(f"{flag}: the key {name!r} is missing; it must be {type_name(hints[name])}.")
    return {key: check_value(f"{flag}.{key}", value, hints[key]) for key, value in values.items()}


def parse_json(text: str, where: str, example: str = '{"key":"value"}') -> Any:
    """Parse JSON. UserError, naming `where` (a flag or file), for duplicate keys and for constants such as NaN.
    example: how what is expected is written."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        seen: dict[str, Any] = {}
        for key, value in pairs:
            if key in seen:
                raise UserError(f"{where}: the key {key!r} is given twice; keep one of them.")
            seen[key] = value
        return seen

    def refuse(constant: str) -> None:
        raise UserError(f"{where}: {constant} is not a JSON number; write a finite number.")

    try:
        return json.loads(text, object_pairs_hook=unique, parse_constant=refuse)
    except (ValueError, RecursionError) as error:  # numbers with thousands of digits, thousands of nested brackets
        plain = text.lstrip()[:1] not in ("{", "[") or "'" in text
        hint = f" Write it as {example}, with double quotes." if plain else ""
        raise UserError(f"{where}: not valid JSON ({str(error)[:100]}). Given: {shown(text)}.{hint}") from None


def user_path(name: str | Path, flag: str) -> Path:
    """A path as the user gave it, with ~ expanded; it need not exist. UserError for one that no file can have, such as
    one that is too long or an unknown ~user, and for one in a folder that must not be read."""
    try:
        path = Path(name).expanduser()
        os.lstat(path)
    except RuntimeError:
        raise UserError(f"{flag}: {shown(str(name))}: there is no such user's folder.") from None
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise UserError(f"{flag}: cannot read {shown(str(name))}: {error.strerror}.") from None
    return path


MAX_JSON = 1 << 26
"""Bytes of the largest JSON file that is read."""


def read_json(path: str | Path, flag: str) -> Any:
    """Read a JSON file. UserError naming `flag` and the file if it is missing or broken."""
    path = user_path(path, flag)
    try:
        text = read_small(path, MAX_JSON, FIFO_SECONDS).decode("utf-8-sig")
    except FileNotFoundError:
        # A link to nowhere, or to itself, is there and does not exist.
        if kind := special_file(path):
            raise UserError(f"{flag}: {path} is {kind}.") from None
        close = nearest(str(path), [str(p) for p in path.parent.glob("*.json")])
        hint = f" Did you mean {close}?" if close else ""
        if path.parent == Path("/dev/fd"):  # bash's <(command), which a launcher does not pass on
            hint = " What <(command) gives can be read by one process only; write it to a file."
        raise UserError(f"{flag}: the file {path} does not exist.{hint}") from None
    except OSError as error:
        hint = f" Give a file in it, such as {path / 'config.json'}." if (path / "config.json").is_file() else ""
        raise UserError(f"{flag}: cannot read {path}: {error.strerror}.{hint}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{flag}: {path} is not UTF-8 text (byte {error.start}).") from None
    return parse_json(text, f"{flag} ({path})")
