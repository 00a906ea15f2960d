"""Which formats hold the codes that a scheme trained with: a function over the two declarations."""

from collections.abc import Iterable
from typing import NamedTuple

from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat
from qtrain.quant.export_codes import trained_formats, why_not_held
from qtrain.quant.scheme import LowBitScheme, Scheme


class KeptCodes(NamedTuple):
    """Whether an export has the codes that training multiplied with."""

    equal: bool
    text: str
    """As the table has it: "equal", or what differs."""


def kept(scheme: Scheme, fmt: ExportFormat) -> KeptCodes:
    """Of the matrices that a scheme has in low bits; shapes may still be such that a format's blocks do not fit."""
    if fmt.weight is None:
        return KeptCodes(False, "dense")
    trained = trained_formats(scheme) if isinstance(scheme, LowBitScheme) else []
    if not trained:
        return KeptCodes(False, "trained in high precision")
    reasons = [why_not_held(own, fmt.weight) for own in trained]
    if None not in reasons:
        return KeptCodes(False, "refused" if fmt.weight.fmt == "ternary" else str(reasons[0]))
    repeated = trained[reasons.index(None)].granularity != fmt.weight.granularity
    notes = ["scales repeated"] * repeated + [fmt.scale_rounding] * bool(fmt.scale_rounding)
    return KeptCodes(True, f"equal ({', '.join(notes)})" if notes else "equal")


def keeping(schemes: Iterable[LowBitScheme]) -> list[str]:
    """The formats that hold the codes of all of these schemes, those of the same elements and without notes first."""
    schemes = list(schemes)
    order: dict[str, tuple] = {}
    for name in EXPORT_FORMATS.names():
        fmt = EXPORT_FORMATS.make(name, {}, "--export_format")
        held = [kept(scheme, fmt) for scheme in schemes]
        if held and all(k.equal for k in held):
            others = sum(trained_formats(scheme)[0].fmt != fmt.weight.fmt for scheme in schemes)
            order[name] = others, sum(k.text != "equal" for k in held), len(name), name
    return sorted(order, key=order.__getitem__)
