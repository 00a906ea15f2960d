"""Lists on a command line: NAME,NAME:{"key": value},... Commas inside braces do not separate."""

from collections.abc import Iterable
from typing import Any

from qtrain.bench.benchmark_settings import MAX_SIZE
from qtrain.core.checks import parse_json, shown
from qtrain.core.errors import UserError
from qtrain.quant import SCHEMES, Scheme
from qtrain.quant.schemes.auto import Auto


def split_list(text: str) -> list[str]:
    """The words between commas outside of braces, without empty ones."""
    words, depth = [""], 0
    for character in text:
        depth += {"{": 1, "}": -1}.get(character, 0)
        if character == "," and depth <= 0:
            words.append("")
        else:
            words[-1] += character
    return [word.strip() for word in words if word.strip()]


def name_and_options(word: str, flag: str) -> tuple[str, dict[str, Any]]:
    """NAME or NAME:{JSON object} -> (name, options). UserError naming `flag`."""
    name, colon, text = word.partition(":")
    options = parse_json(text, f"{flag} ({name})") if colon else {}
    if not isinstance(options, dict):
        raise UserError(f"{flag} ({name}): the options after the colon must be a JSON object, not {text!r}.")
    return name, options


def compared_schemes(words: Iterable[str]) -> dict[str, Scheme]:
    """Words NAME or NAME:{JSON object} -> scheme by word. UserError naming --schemes."""
    schemes: dict[str, Scheme] = {}
    for word in words:
        name, kwargs = name_and_options(word, "--schemes")
        schemes[word] = SCHEMES.make(name, kwargs, "--schemes")
        if isinstance(schemes[word], Auto):
            raise UserError("--schemes: auto chooses among schemes itself; name the ones to compare.")
    return schemes


def parse_sizes(text: str, count: int, flag: str) -> tuple[int, ...]:
    """'MxNxK' -> its `count` whole numbers from 1 to MAX_SIZE. UserError naming `flag`."""
    numbers = text.lower().split("x")
    whole = all(n.isascii() and n.isdigit() and len(n) <= len(str(MAX_SIZE)) for n in numbers)
    if len(numbers) != count or not whole or not all(1 <= int(n) <= MAX_SIZE for n in numbers):
        example = "x".join(["4096"] * count)
        raise UserError(
            f"{flag}: {shown(text)} is not a size; write {count} whole numbers from 1 to {MAX_SIZE:,} as in {example}."
        )
    return tuple(map(int, numbers))


def wanted_names(rows: str, skip: str, names: list[str], flag: str) -> set[str]:
    """The names that contain any word of `rows` (empty: all) and none of `skip`, ignoring case.

    UserError for a word of `rows` that is in no name.
    """
    keep, leave = ([word.lower() for word in split_list(text)] for text in (rows, skip))
    for option, words in ((flag, keep), ("--skip", leave)):
        for word in words:
            if not any(word in name.lower() for name in names):
                raise UserError(f"{option}: no row has {shown(word)} in its name; --list shows the rows.")
    found = {
        name
        for name in names
        if (not keep or any(word in name.lower() for word in keep)) and not any(word in name.lower() for word in leave)
    }
    if not found:
        raise UserError(f"{flag}, --skip: together they leave no row; --list shows the rows.")
    return found
