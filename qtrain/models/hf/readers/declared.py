"""What the `quantization_config` of a checkpoint declares: which matrices are codes, and of which format.

It decides before anything is loaded, so that a plan knows what a frozen base keeps. The headers of the files decide
when it is loaded (`hf/coded_files.py`): a matrix that is declared and has no codes is one in high precision.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qtrain.core.checks import check_value
from qtrain.core.errors import UserError, unknown_name
from qtrain.models.hf.readers.reader import MatrixReader
from qtrain.tensors.quantized_tensor import OperandFormat

KEY = "quantization_config"
_MAX_PATTERN = 200
"""Characters of a regular expression: long ones are no names of modules."""


@dataclass(frozen=True)
class NameMatch:
    """Names of modules. linears: all of them; names: equal; endings: the last parts; expressions: from the start."""

    linears: bool = False
    names: tuple[str, ...] = ()
    endings: tuple[str, ...] = ()
    expressions: tuple[re.Pattern[str], ...] = ()

    def __call__(self, module: str) -> bool:
        return (
            self.linears
            or module in self.names
            or module.endswith(self.endings)
            or any(expression.match(module) for expression in self.expressions)
        )


def compiled(pattern: str, where: str) -> re.Pattern[str]:
    """A regular expression over names of modules. UserError for one that is none, or that is long."""
    try:
        if len(pattern) > _MAX_PATTERN:
            raise re.error(f"it is longer than {_MAX_PATTERN} characters")
        return re.compile(pattern)
    except re.error as error:
        raise UserError(f"{where}: {pattern[:40]!r} is no regular expression: {error}.") from None


def left_by_default(skip: Sequence[str] | None) -> NameMatch:
    """The modules that transformers does not convert: those that begin or end with a name of `skip`; None: the head."""
    names = ("lm_head",) if skip is None else tuple(name for name in skip if name)
    starts = tuple(re.compile(re.escape(name) + r"(?:(?<=\.)|(?=\.|$))") for name in names)
    return NameMatch(endings=names, expressions=starts)


@dataclass(frozen=True)
class Group:
    """The matrices of one format."""

    matches: NameMatch
    reader: MatrixReader


@dataclass(frozen=True)
class DeclaredCodes:
    """The matrices in codes: those that a group matches, the first one deciding, and `left` does not."""

    method: str
    """`quant_method`."""
    groups: tuple[Group, ...]
    left: NameMatch

    def reader(self, module: str) -> MatrixReader | None:
        """What reads the weight of a module, by its name in the checkpoint; None: it is in high precision."""
        if self.left(module):
            return None
        return next((group.reader for group in self.groups if group.matches(module)), None)

    @property
    def format(self) -> OperandFormat | None:
        """The format of all codes; None: there are several."""
        formats = {group.reader.format for group in self.groups}
        return formats.pop() if len(formats) == 1 else None

    @property
    def description(self) -> str:
        """For messages: 'fp8: e4m3, a scale per 128x128'."""
        return f"{self.method}: {'; '.join(dict.fromkeys(group.reader.description for group in self.groups))}"


def codes_of_linears(config: Mapping[str, Any], reader: MatrixReader, skip: str, where: str) -> DeclaredCodes:
    """Codes of one format in all linears but those in the list under the key `skip`, as transformers has them."""
    left = check_value(f"{where}.{skip}", config.get(skip), list[str] | None)
    return DeclaredCodes(config["quant_method"], (Group(NameMatch(linears=True), reader),), left_by_default(left))


READERS: dict[str, Callable[[Mapping[str, Any], str], DeclaredCodes | None]] = {}
"""By `quant_method`: (quantization_config, where for messages) -> what it declares; None: weights are in high
precision. Raises UserError."""


def declared_codes(config: Mapping[str, Any], where: str) -> DeclaredCodes | None:
    """What a model's config.json declares; None: its weights are in high precision. where: flag and file. UserError for
    a format that is not read."""
    if (declared := config.get(KEY)) is None:
        return None
    where = f"{where}: {KEY}"
    check_value(where, declared, dict[str, Any])
    method = declared.get("quant_method")
    if method is None and (declared.get("load_in_4bit") or declared.get("load_in_8bit")):
        method = "bitsandbytes"  # files of older versions
    if not isinstance(method, str) or method not in READERS:
        fix = "Start from the model in high precision, or from a checkpoint in one of these formats."
        raise unknown_name(where, "quant_method", str(method)[:40], READERS, fix)
    return READERS[method]({**declared, "quant_method": method}, where)
