"""A settings dataclass as the flags that tyro parses, explains in groups by concern, and has shells complete.

`HELP_GROUPS` of the dataclass, if it has one, maps a group's title to the names of its flags. tyro makes a box of a
nested dataclass, so the flags of a group become one; the prefix that nesting would add is left out. The text of a flag
is the docstring under its field.
"""

import contextlib
import copy
import dataclasses
import functools
import io
import itertools
import typing
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal

import tyro

from qtrain.core.registry import field_docs

Shell = Literal["bash", "zsh", "fish"]
Switch = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True)
class Answers:
    """The flags of every command; `config.parse` takes them out before the settings are parsed."""

    config: str | None = None
    """JSON recipe that is read first; flags win over it."""
    list: Switch = False
    """Print every scheme, optimizer, dataset type, tokenizer and model."""
    version: Switch = False
    """Print the versions of qtrain and of the packages it stands on."""
    completion: Shell | None = None
    """Print a script that has the shell complete these flags."""


PYTHON_SCRIPTS = """
# python SCRIPT.py FLAGS is completed by what completes SCRIPT.py.
_qtrain_python() {
  local complete_script="_tyro_${COMP_WORDS[1]##*/}"
  complete_script="${complete_script//[^a-zA-Z0-9_]/_}"
  if (( COMP_CWORD > 1 )) && declare -F "$complete_script" > /dev/null; then
    COMP_WORDS=("${COMP_WORDS[@]:1}")
    COMP_CWORD=$((COMP_CWORD - 1))
    "$complete_script"
  fi
}
complete -o bashdefault -o default -F _qtrain_python python python3
"""
"""For bash, which looks for a completion by the command's first word."""


def parse_flags(cls: type, argv: Sequence[str], prog: str, defaults: Mapping[str, Any], answers: Sequence[str]) -> Any:
    """The values of the flags by name. Exits as tyro does after `--help`, and after writing on stderr what is wrong.

    defaults: by name, in place of those of `cls`. answers: which fields of `Answers` this command has."""
    groups = flag_groups(cls)
    given = _cli(cls, groups, argv, prog, defaults, answers)
    return {name: getattr(getattr(given, _field(i)), name) for i, names in enumerate(groups.values()) for name in names}


def completion_script(cls: type, shell: str, command: str, answers: Sequence[str]) -> str:
    """A script for `shell` that completes the flags of `command`, the name of a script or of a console command."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.suppress(SystemExit):
        _cli(cls, flag_groups(cls), ["--tyro-print-completion", shell], command, {}, answers)
    return said.getvalue() + (PYTHON_SCRIPTS if shell == "bash" and command.endswith(".py") else "")


def flag_groups(cls: type) -> dict[str, list[str]]:
    """Names of fields by the title of their group, in the order of the table; without a table one group."""
    names = [field.name for field in dataclasses.fields(cls) if field.init]
    table = getattr(cls, "HELP_GROUPS", {"": " ".join(names)})
    found = {title: [name for name in group.split() if name in names] for title, group in table.items()}
    assert sorted(itertools.chain(*found.values())) == sorted(names), f"HELP_GROUPS lacks a field of {cls.__name__}"
    return {title: group for title, group in found.items() if group}


def _field(group: int) -> str:
    return f"group_{group}"


def _cli(
    cls: type,
    groups: Mapping[str, Sequence[str]],
    argv: Sequence[str],
    prog: str,
    defaults: Mapping[str, Any],
    answers: Sequence[str],
) -> Any:
    # Classes made here are types to tyro and no annotations to a type checker.
    nested = [("answers", Annotated[_flags(Answers, answers, {}), tyro.conf.arg(name="")])]  # pyrefly: ignore
    for i, (title, names) in enumerate(groups.items()):
        group = Annotated[_flags(cls, names, defaults), tyro.conf.arg(name=title)]  # pyrefly: ignore
        nested.append((_field(i), group))
    return tyro.cli(
        dataclasses.make_dataclass(cls.__name__, nested),
        args=argv,
        prog=prog,
        description=(cls.__doc__ or "").strip(),
        # OmitArgPrefixes: --lr and not --group_3.lr. Comments in the source are not help.
        config=(tyro.conf.HelptextFromCommentsOff, tyro.conf.OmitArgPrefixes),
        use_underscores=True,
    )


def _flags(cls: type, names: Sequence[str], defaults: Mapping[str, Any]) -> type:
    """A dataclass of the fields `names` of `cls`, each with its docstring as help."""
    hints, docs = typing.get_type_hints(cls, include_extras=True), field_docs(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    made: list[tuple[str, Any, Any]] = []
    for name in names:
        factory: Any = fields[name].default_factory
        value = defaults.get(name, fields[name].default)
        if value is not dataclasses.MISSING:
            # A copy each time: the default may be a dict.
            factory = functools.partial(copy.copy, value)
        help_line = tyro.conf.arg(help=docs.get(name))
        made.append((name, Annotated[hints[name], help_line], dataclasses.field(default_factory=factory)))
    return dataclasses.make_dataclass(cls.__name__, made, kw_only=True)
