"""What the swap will do to each linear, known before the model has memory, for the plan and its refusals.

`--quantize auto` is resolved here: timed on this device or, where the run resumes, as its checkpoint has it. Of several
processes rank 0 chooses for all: times differ from one to the next, and weights and codes that ranks shard must be of
one scheme.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn

from qtrain.comm.ranks import from_rank_0
from qtrain.core.checks import check_fields
from qtrain.core.errors import UserError, unknown_name
from qtrain.quant import LinearChoice, LowBitScheme, Scheme
from qtrain.quant.choices import layers_text
from qtrain.quant.scheme_map import FLAG, SchemeMap, matches, scheme_of, spec_of, spec_text
from qtrain.quant.schemes.auto import Auto, choose_per_shape, linear_shapes, scheme_per_shape
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.state.checkpoint import read_meta
from qtrain.train.state.recorded_map import changed_schemes

_IN_HIGH_PRECISION = {
    "--quantize": "--quantize bf16",
    "--quantize_schedule": '"bf16" in its place',
    "--lora.base": '"base":"dense"',
}
"""By the flag that names a scheme: what stays in high precision instead."""


def refuse_no_swap(linears: Sequence[LinearChoice], scheme: Scheme, quantize: str, flag: str = "--quantize") -> None:
    """UserError where a low-bit scheme swaps no linear at all: the run would be one in high precision. quantize: its
    name, as `flag` says it."""
    scheme = scheme.root
    if not isinstance(scheme, LowBitScheme) or any(linear.scheme for linear in linears):
        return
    # A scheme with a name is that of a frozen base; --quantize's has none.
    flag = "--lora.base" if scheme.name else flag
    raise UserError(
        f"{flag}: {scheme.name or quantize!r} quantizes none of the model's {len(linears)} {layers_text(linears)}: "
        f"{_reasons(linears) or 'it has none'}. Change that, or stay in high precision with {_IN_HIGH_PRECISION[flag]}."
    )


def warn_high_precision(
    linears: Sequence[LinearChoice], scheme: Scheme, dtype: torch.dtype, rows: Mapping[str, float] | None
) -> list[str]:
    """A line where a low-bit scheme leaves more than half of the linears' FLOPs in high precision; else none.

    rows: of the input of each linear, by its name; None: the same for all.
    """
    if not isinstance(scheme.root, LowBitScheme):
        return []
    left, share = [linear for linear in linears if linear.scheme is None], 1 - _low_bit_share(linears, rows)
    if share <= 0.5:
        return []
    name = "bf16" if dtype == torch.bfloat16 else "fp32"
    return [f"warning: {100 * share:.0f}% of the {layers_text(linears)}' FLOPs stay in {name}: {_reasons(left)}"]


def describe_low_bits(linears: Sequence[LinearChoice], rows: Mapping[str, float] | None) -> str:
    """How much of the linears runs in low bits, in a line. rows: as for `warn_high_precision`."""
    swapped = sum(linear.scheme is not None for linear in linears)
    share = 100 * _low_bit_share(linears, rows)
    return f"low bits in {swapped:,} of {len(linears):,} {layers_text(linears)}, {share:.0f}% of their FLOPs"


def _low_bit_share(linears: Sequence[LinearChoice], rows: Mapping[str, float] | None) -> float:
    """Of the linears' FLOPs; 1 without any."""
    work = [linear.weights * (1 if rows is None else rows.get(linear.name, 0)) for linear in linears]
    left = sum(flops for linear, flops in zip(linears, work, strict=True) if linear.scheme is None)
    return 1 - left / max(sum(work), 1)


def _reasons(linears: Iterable[LinearChoice]) -> str:
    """Why linears are left, each reason once with the number of linears."""
    counts = Counter(linear.reason for linear in linears if linear.reason)
    return "; ".join(f"{count} x {reason}" for reason, count in counts.items())


def shares(linears: Iterable[LinearChoice], work: Mapping[str, float]) -> dict[LowBitScheme | None, float]:
    """The fraction of `work` (by name of the linear) that runs in each scheme; None: in the model's dtype, as what is
    emulated on every device does."""
    found: dict[LowBitScheme | None, float] = {}
    for linear in linears:
        scheme = None if linear.emulated else linear.scheme
        found[scheme] = found.get(scheme, 0.0) + work.get(linear.name, 0.0)
    total = sum(found.values())
    return {scheme: part / total for scheme, part in found.items()} if total else {None: 1.0}


def check_overrides(linears: Sequence[LinearChoice], scheme: Scheme) -> None:
    """UserError for a rule of --quantize_overrides that names no linear, or that none of those it decides on can
    follow."""
    if not isinstance(scheme, SchemeMap):
        return
    for pattern, own in scheme.rules:
        if not any(matches(pattern, linear.name) for linear in linears):
            fused = "; q, k and v are one linear here, qkv, as gate and up are, gate_up"
            fix = f"Globs are matched with whole names{fused * any(n.name.endswith('.qkv') for n in linears)}."
            names = {name for linear in linears for name in (linear.name, f"*.{linear.name.rpartition('.')[2]}")}
            raise unknown_name(FLAG, "linear", pattern, names, fix)
        decided = [linear for linear in linears if scheme.deciding(linear.name) == (pattern, own)]
        if decided and not own.leaves_all and not any(linear.scheme for linear in decided):
            raise UserError(
                f"{FLAG} ({pattern}): {spec_text(spec_of(own))} quantizes none of the {len(decided)} linears that it "
                f"decides on: {_reasons(decided)}. Take it out, or name other linears."
            )


def resumed_map(checked: CheckedSettings, linears: Sequence[LinearChoice]) -> CheckedSettings:
    """`checked` with the map of the checkpoint that the run resumes from, if it was made from the same settings:
    linears may have been reassigned since. linears: by the settings alone."""
    if checked.folder.resumed_from is None:
        return checked
    meta = read_meta(checked.folder.resumed_from)
    changed = changed_schemes(meta.get("schemes"), checked.settings, {n.name: n.spec for n in linears})
    if not changed:
        return checked
    rules = tuple((name, scheme_of(spec, "--resume")) for name, spec in changed.items())
    return dataclasses.replace(checked, scheme=SchemeMap(checked.scheme, rules, "reassigned in the run"))


def resolve_auto_scheme(
    checked: CheckedSettings, model: nn.Module, head: nn.Module | None, tokens: int
) -> tuple[CheckedSettings, list[str]]:
    """(`checked` with the scheme of each shape of linear, lines for the plan); unchanged and none but for `auto`.

    model: on the meta device; head: its output head; tokens: of a micro-batch. The choice goes into the settings'
    `quantize_kwargs.chosen`, and so into config.json and every checkpoint.
    """
    scheme, settings, resumed_from = checked.scheme.root, checked.settings, checked.folder.resumed_from
    if not isinstance(scheme, Auto):
        return checked, []
    saved = (read_meta(resumed_from).get("quantize_kwargs") or {}) if resumed_from else {}
    if "chosen" in saved:
        # A resumed run keeps its schemes: its states and codes have their formats.
        scheme = dataclasses.replace(scheme, **check_fields(Auto, {"chosen": saved["chosen"]}, "--resume"))
    overridden = checked.scheme if isinstance(checked.scheme, SchemeMap) else None

    def leave(name: str, linear: nn.Module) -> bool:
        decided = overridden is not None and overridden.deciding(name) is not None
        return decided or (linear is head and not settings.quantize_lm_head)

    shapes = linear_shapes(model, leave, settings.quantize_min_size)
    # One choice for all ranks: timings differ between them.
    chosen, lines = from_rank_0(
        lambda: choose_per_shape(
            scheme,
            shapes,
            tokens=tokens,
            accumulation=checked.geometry.gradient_accumulation,
            dtype=checked.dtype,
            device=checked.device,
        )
    )
    if checked.device.type == "cuda":  # the timed linears do not count into the run's peak
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(checked.device)
    kwargs = {"candidates": list(scheme.candidates), "chosen": chosen}
    per_shape: Scheme = scheme_per_shape(scheme, shapes, chosen)
    if overridden is not None:
        per_shape = dataclasses.replace(overridden, default=per_shape)
    settings = dataclasses.replace(settings, quantize_kwargs=kwargs)
    return dataclasses.replace(checked, settings=settings, scheme=per_shape), lines
