"""Which formats hold the codes that a scheme trained with: a function over the two declarations."""

from collections.abc import Iterable
from typing import NamedTuple

from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat
from qtrain.quant.export_codes import trained_formats, why_not_held
from qtrain.quant.scheme import SCHEMES, LowBitScheme, Scheme


class Kept(NamedTuple):
    """Whether an export has the codes that training multiplied with."""

    equal: bool
    text: str
    """As the table has it: "equal", or what differs."""


def kept(scheme: Scheme, fmt: ExportFormat) -> Kept:
    """Of the matrices that a scheme has in low bits; shapes may still be such that a format's blocks do not fit."""
    if fmt.weight is None:
        return Kept(False, "dense")
    trained = trained_formats(scheme) if isinstance(scheme, LowBitScheme) else []
    if not trained:
        return Kept(False, "trained in high precision")
    reasons = [why_not_held(own, fmt.weight) for own in trained]
    if None not in reasons:
        return Kept(False, reasons[0])
    repeated = trained[reasons.index(None)].granularity != fmt.weight.granularity
    notes = ["scales repeated"] * repeated + [fmt.scale_rounding] * bool(fmt.scale_rounding)
    return Kept(True, f"equal ({', '.join(notes)})" if notes else "equal")


def keeping(schemes: Iterable[Scheme]) -> list[str]:
    """The formats that hold the codes of all of these schemes; those that hold them as they are come first."""
    schemes = list(schemes)
    made = {name: EXPORT_FORMATS.make(name, {}, "--export_format") for name in EXPORT_FORMATS.names()}
    found = {name: [kept(scheme, fmt) for scheme in schemes] for name, fmt in made.items()}
    equal = [name for name, each in found.items() if each and all(k.equal for k in each)]
    return sorted(equal, key=lambda name: (max(len(k.text) for k in found[name]), name))


def exports_table() -> str:
    """Scheme x format in Markdown, for the documentation; schemes with their default options."""
    formats = {name: EXPORT_FORMATS.make(name, {}, "--export_format") for name in EXPORT_FORMATS.names()}
    formats = {name: fmt for name, fmt in formats.items() if fmt.weight is not None}
    schemes = {name: SCHEMES.make(name, {}, "--quantize") for name in SCHEMES.names() if name not in ("auto", "bf16")}
    lines = [f"| format | {' | '.join(f'`{name}`' for name in schemes)} |", "|---" * (len(schemes) + 1) + "|"]
    for name, fmt in formats.items():
        lines.append(f"| `{name}` | {' | '.join(kept(scheme, fmt).text for scheme in schemes.values())} |")
    return "\n".join(lines) + "\n"
