"""Which linear runs in which scheme.

A `SchemeMap` is a default with rules, globs over the names of linears, of which the last one that matches decides.
`--quantize_overrides`, the choices of `--quantize auto` and what a checkpoint has are such rules, each over the map
before it. The map is resolved once, when linears are swapped: from then on a linear's scheme is an attribute of it
(`LinearChoice`), which `reassign` changes.

As JSON an entry is what `--quantize_overrides` has: a scheme's name, or {"scheme": NAME} with options.
"""

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from qtrain.core.checks import shown
from qtrain.core.errors import UserError
from qtrain.quant.scheme import SCHEMES, Assigned, LowBitScheme, Scheme

FLAG = "--quantize_overrides"

Spec = str | dict[str, Any]
"""An entry as JSON."""


@dataclass(frozen=True)
class SchemeMap(Scheme):
    """`default` for all linears but those that a rule (glob, scheme) matches, by name or `kind_of` it."""

    default: Scheme
    rules: tuple[tuple[str, Scheme], ...]
    reason: str
    """Why a linear stays in high precision that a rule leaves there."""

    def parts(self) -> list[Scheme]:
        return [*self.default.parts(), *(scheme for _, scheme in self.rules)]

    def at(self, name: str) -> Assigned:
        deciding = self.deciding(name)
        return self.default.at(name) if deciding is None else Assigned(deciding[1], self.reason)

    def deciding(self, name: str) -> tuple[str, Scheme] | None:
        """The rule that decides on the linear `name`; None: the default does."""
        # Reversed: the last rule that matches decides.
        return next((rule for rule in reversed(self.rules) if matches(rule[0], name)), None)

    @property
    def root(self) -> Scheme:
        return self.default.root


def matches(pattern: str, name: str) -> bool:
    """Whether a glob matches a linear's name, or its kind."""
    # Equality first: a name may have characters that a glob takes as its own, such as [.
    return name == pattern or fnmatchcase(name, pattern) or fnmatchcase(kind_of(name), pattern)


def kind_of(name: str) -> str:
    """A linear's name without the numbers of layers, as the plan lists it."""
    return ".".join(part for part in name.split(".") if not part.isdigit())


# ---- entries as JSON -------------------------------------------------------------------------------------------------


def spec_of(scheme: Scheme | None) -> Spec:
    """The entry of a scheme; None: of a linear in high precision."""
    if scheme is None:
        return "bf16"
    name = getattr(scheme, "name", "") or SCHEMES.name_of(scheme)
    default = type(scheme)()  # which knows what None stands for
    options = {
        field.name: list(value) if isinstance(value, tuple) else value
        for field in dataclasses.fields(scheme)
        if (value := getattr(scheme, field.name)) != getattr(default, field.name)
    }
    return {"scheme": name, **options} if options else name


def spec_text(spec: Spec) -> str:
    """An entry in one line: int8 {"stochastic_rounding":true}."""
    if isinstance(spec, str):
        return spec
    options = {key: value for key, value in spec.items() if key != "scheme"}
    return f"{spec['scheme']} {json.dumps(options, separators=(',', ':'))}"


def scheme_of(spec: Any, flag: str) -> Scheme:
    """The scheme of an entry. UserError naming `flag` for one that is none."""
    if isinstance(spec, str):
        spec = {"scheme": spec}
    if not isinstance(spec, dict):
        raise UserError(f'{flag}: {shown(spec)} is not allowed; give a scheme, or {{"scheme":NAME}} with its options.')
    name = spec.get("scheme")
    if not isinstance(name, str):
        given = "is missing" if "scheme" not in spec else f"is {shown(name)}"
        raise UserError(f'{flag}: the key "scheme" {given}; it must be the name of a scheme, as --list shows them.')
    try:
        return SCHEMES.make(name, {key: value for key, value in spec.items() if key != "scheme"}, flag)
    except UserError as error:  # a scheme knows its options by the flag that usually has them
        raise UserError(str(error).replace("--quantize_kwargs", flag)) from None


def with_overrides(overrides: Mapping[str, Any] | None, default: Scheme) -> Scheme:
    """`default` with the rules of --quantize_overrides; itself without any. Raises UserError."""
    known: dict[Scheme, Scheme] = {scheme: scheme for scheme in default.parts() if isinstance(scheme, LowBitScheme)}
    rules: list[tuple[str, Scheme]] = []
    for pattern, spec in (overrides or {}).items():
        scheme = _checked(scheme_of(spec, f"{FLAG} ({pattern})"), f"{FLAG} ({pattern})", default)
        # Equal schemes are one object: compiled layers then share their code without comparing options.
        rules.append((pattern, known.setdefault(scheme, scheme)))
    return SchemeMap(default, tuple(rules), f"{FLAG} leaves it") if rules else default


def _checked(scheme: Scheme, flag: str, default: Scheme) -> Scheme:
    if isinstance(scheme, LowBitScheme):
        if scheme.sub_norm and not default.root.sub_norm:
            raise UserError(
                f"{flag}: the norms of {SCHEMES.name_of(scheme)!r} come with --quantize, which adds them everywhere; "
                'give it "sub_norm":false.'
            )
        if scheme.stored_format is None and not scheme.latent and set(scheme.gemm_dtypes().values()) == {"bf16"}:
            raise UserError(f'{flag}: all three GEMMs are in bf16, so nothing is quantized; write "bf16".')
    elif not scheme.leaves_all:
        raise UserError(
            f"{flag}: {SCHEMES.name_of(scheme)!r} chooses schemes for the whole model; name one, or give --quantize "
            f"{SCHEMES.name_of(scheme)}."
        )
    return scheme
