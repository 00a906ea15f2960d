"""Lists on a command line: NAME,NAME:{"key": value},... where commas inside braces separate nothing."""

from collections.abc import Iterable
from typing import Any

from qtrain.checks import parse_json
from qtrain.errors import UserError
from qtrain.quant import SCHEMES, Auto, Scheme


def split_list(text: str) -> list[str]:
    """The parts between commas that are outside of braces; empty ones are left out."""
    parts, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth <= 0:
            parts.append("")
        else:
            parts[-1] += character
    return [part.strip() for part in parts if part.strip()]


def name_and_options(word: str, flag: str) -> tuple[str, dict[str, Any]]:
    """NAME or NAME:{JSON object} -> the name and its options. UserError naming `flag`."""
    name, colon, text = word.partition(":")
    options = parse_json(text, f"{flag} ({name})") if colon else {}
    if not isinstance(options, dict):
        raise UserError(f"{flag} ({name}): the options after the colon must be a JSON object, not {text!r}.")
    return name, options


def compared_schemes(words: Iterable[str]) -> dict[str, Scheme]:
    """Schemes as NAME or NAME:{JSON object} -> each by its word. UserError naming --schemes."""
    schemes: dict[str, Scheme] = {}
    for word in words:
        name, kwargs = name_and_options(word, "--schemes")
        schemes[word] = SCHEMES.make(name, kwargs, "--schemes")
        if isinstance(schemes[word], Auto):
            raise UserError("--schemes: auto times schemes itself; name the ones to compare.")
    return schemes


def parse_sizes(text: str, count: int, flag: str) -> tuple[int, ...]:
    """'MxNxK' -> its `count` whole numbers, each at least 1. UserError naming `flag`."""
    parts = text.lower().split("x")
    if len(parts) != count or not all(part.isascii() and part.isdigit() and int(part) for part in parts):
        example = "x".join(["4096"] * count)
        raise UserError(f"{flag}: {text!r} is no size; write {count} whole numbers of at least 1 as in {example}.")
    return tuple(int(part) for part in parts)


def wanted_names(rows: str, skip: str, names: list[str], flag: str) -> set[str]:
    """The names that hold any word of `rows` (empty: all) and none of `skip`; upper and lower case are the same.

    UserError where a word of `rows` is in no name.
    """
    keep, leave = ([word.lower() for word in split_list(text)] for text in (rows, skip))
    for word in keep:
        if not any(word in name.lower() for name in names):
            raise UserError(f"{flag}: no row has {word!r} in its name. Rows: {', '.join(names)}.")
    return {
        name
        for name in names
        if (not keep or any(word in name.lower() for word in keep)) and not any(word in name.lower() for word in leave)
    }
