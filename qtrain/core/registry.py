"""Named choices that describe themselves: schemes, optimizers, datasets, tokenizers.

An entry is a frozen dataclass. Its name is the word on the command line, its fields are the keys of its JSON options
(checked by type and range). The first line of its docstring and the docstrings under its fields are what `--list`
prints. A registry may name the modules of its entries instead of being filled by whoever imports them: it imports them
when it is first asked.
"""

import ast
import dataclasses
import functools
import importlib
import inspect
import itertools
import textwrap
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from qtrain.core.checks import check_fields, refuse_empty, type_name
from qtrain.core.errors import UserError, unknown_name

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps a name to a dataclass type. `kind` is the word for an entry, as in 'unknown scheme'. modules: those that
    register entries, imported on first use."""

    def __init__(self, kind: str, modules: Sequence[str] = ()):
        self.kind = kind
        self._modules = list(modules)
        self._registered: dict[str, type[T]] = {}

    @property
    def _entries(self) -> dict[str, type[T]]:
        while self._modules:
            # Taken out first: a module that asks the registry while it is imported must not be imported again.
            importlib.import_module(self._modules.pop(0))
        return self._registered

    def register(self, name: str) -> Callable[[type[T]], type[T]]:
        """Class decorator that adds a dataclass under `name`."""

        def add(cls: type[T]) -> type[T]:
            assert name not in self._registered, f"{self.kind} {name!r} is registered twice"
            # It is the entry's line in --list.
            assert cls.__doc__, f"{self.kind} {name!r} has no docstring"
            self._registered[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        return sorted(self._entries)

    def name_of(self, entry: T) -> str:
        """The name that an entry's type is registered under."""
        return next(name for name, cls in self._entries.items() if cls is type(entry))

    def get(self, name: str, flag: str) -> type[T]:
        """The dataclass type called `name`; UserError naming `flag` and the nearest match when there is none."""
        if name not in self._entries:
            raise unknown_name(flag, self.kind, name, self._entries)
        return self._entries[name]

    def make(self, name: str, options: Mapping[str, Any], flag: str, options_flag: str | None = None) -> T:
        """Build the entry `name` from JSON `options`, checked against its fields. `flag` is named in errors;
        options_flag in those about options, if they come by another flag."""
        cls, where = self.get(name, flag), f"{options_flag or flag} ({name})"
        checked = check_fields(cls, options, where)
        for key, value in checked.items():
            refuse_empty(f"{where}.{key}", value)
        return cls(**checked)

    def make_typed(self, spec: Mapping[str, Any], flag: str) -> T:
        """Build the entry that `spec["type"]` names from the other keys of `spec`."""
        if "type" not in spec:
            raise UserError(f"{flag}: the key 'type' is missing; allowed: {', '.join(self.names())}.")
        return self.make(str(spec["type"]), {key: value for key, value in spec.items() if key != "type"}, flag)

    def describe(self) -> list[tuple[str, str]]:
        """(name, first line of the docstring) of every entry, sorted by name."""
        return [(name, inspect.cleandoc(self._entries[name].__doc__ or "").splitlines()[0]) for name in self.names()]

    def options(self, name: str) -> list[tuple[str, str]]:
        """(key, its docstring, allowed values and default) of every JSON option of the entry `name`."""
        cls: Any = self._entries[name]
        hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
        found = []
        for field in dataclasses.fields(cls):
            default = "required" if field.default is dataclasses.MISSING else f"default {field.default!r}"
            doc = [docs[field.name]] if field.name in docs else []
            found.append((field.name, "; ".join([*doc, type_name(hints[field.name]), default])))
        return found


@functools.cache  # a command line asks once for each group of its flags
def field_docs(cls: type) -> Mapping[str, str]:
    """The docstring under each field of a dataclass, those of its bases included, on one line."""
    found: dict[str, str] = {}
    # Python keeps no docstrings of fields: they are read from the source. A subclass's replaces its base's.
    for base in filter(dataclasses.is_dataclass, reversed(cls.__mro__)):
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(definition, ast.ClassDef)
        for field, below in itertools.pairwise(definition.body):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(doc))):
                    found[name] = " ".join(doc.split())
    return found
