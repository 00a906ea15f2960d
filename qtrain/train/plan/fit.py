"""Settings that only move memory, chosen so that a step is the fastest that fits (`--fit auto`, a plan's advice).

They are the micro-batch (with as much accumulation as the batch needs), chunks of the loss and of MLPs, recomputation,
what is in host memory, and layouts of weights' codes. None of them changes a result by more than the order of sums, so
they are the trainer's to choose; the optimizer, the scheme and the length of sequences are the user's. The plan tells
them apart: what they take, and what they add to a step (`Plan.step_seconds`).
"""

import json
import math
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from typing import Any

from qtrain.core.errors import UserError
from qtrain.models.native.loss import chunk_rows
from qtrain.quant.weight_codes import has_two_layouts
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.plan import GIB, Plan
from qtrain.train.settings.exclusions import check_exclusions
from qtrain.train.settings.options import Options
from qtrain.train.settings.recompute import recompute_kinds
from qtrain.train.settings.settings import LanguageSettings, TrainSettings, batch_geometry

LOSS_CHUNKS = (0, 1, 2, 4, 8, 16, 32)
FEWEST_ROWS, MOST_ROWS = 512, 131072
"""Tokens of a chunk of the loss at least, of a micro-batch at most: fewer make slow products, more no faster ones."""
MLP_CHUNKS = (4, 8, 16, 32)
FEWEST_MLP_ROWS = 8192
"""Tokens of a chunk of an MLP at least: products of fewer are slower, and activations of more are what takes memory."""
RECOMPUTED = (
    (),
    ("swiglu",),
    ("norm", "swiglu"),
    ("norm", "swiglu", "qkv"),
    ("norm", "ffn"),
    ("norm", "qkv", "ffn"),
    ("norm", "qkv", "attention", "ffn"),
    ("block",),
)
"""Sets of kinds of `--recompute`, in the order of the bytes that they leave."""
LITTLE_FREE = 0.75
"""Of the device's memory: a plan that takes more is not asked whether it could be faster."""

Flags = Mapping[str, Any]
"""Settings by name that differ from those that were asked for."""


@dataclass(frozen=True)
class Candidate:
    """Settings and their plan."""

    checked: CheckedSettings
    flags: Flags
    plan: Plan

    def command(self) -> str:
        """The flags as a command line has them."""
        words = []
        for name, value in self.flags.items():
            text = str(value) if isinstance(value, int | str) else json.dumps(value, separators=(",", ":"))
            words += [f"--{name}", shlex.quote(text)]
        return " ".join(words)


def candidates(
    checked: CheckedSettings, plan_of: Callable[[CheckedSettings], Plan], *, keep_given: bool = True
) -> Iterator[Candidate]:
    """What the run may be with other settings of memory, but for those that cannot be the fastest that fits.
    keep_given: those that the user has given stay."""
    for alternatives in _groups(checked, keep_given, lambda: plan_of(checked).active is None):
        for group in alternatives:
            found = list(_of_group(checked, group, plan_of))
            yield from found
            if found and found[0].plan.fits and found[0].flags == group[0][0]:
                break  # the fastest of all alternatives


def _of_group(
    checked: CheckedSettings, group: Sequence[Sequence[Flags]], plan_of: Callable[[CheckedSettings], Plan]
) -> Iterator[Candidate]:
    # The first is the fastest of its group, the last takes least: where that does not fit, none does.
    ends = [_candidate(checked, flags, plan_of) for flags in (group[0][0], group[-1][-1])]
    yield from (end for end in ends if end is not None)
    if ends[0] is None or ends[0].plan.fits or ends[1] is None or not ends[1].plan.fits:
        return
    for by_chunks in group:
        first, last = (_candidate(checked, flags, plan_of) for flags in (by_chunks[0], by_chunks[-1]))
        if first is not None and first.plan.fits:
            yield first
            break  # what comes next recomputes more
        if last is not None and last.plan.fits:
            between = (_candidate(checked, flags, plan_of) for flags in by_chunks[1:-1])
            # More chunks only cost more.
            yield next((candidate for candidate in between if candidate is not None and candidate.plan.fits), last)


def _candidate(checked: CheckedSettings, flags: Flags, plan_of: Callable[[CheckedSettings], Plan]) -> Candidate | None:
    """None where the flags do not go with the rest."""
    try:
        changed = _changed(checked, flags)
        return Candidate(changed, flags, plan_of(changed))
    except UserError:
        return None


def fastest(found: Iterator[Candidate] | list[Candidate]) -> Candidate | None:
    """The fastest that fits, of equal ones that which takes least; None: none fits."""
    fitting = [candidate for candidate in found if candidate.plan.fits]
    return min(fitting, key=lambda c: (c.plan.step_seconds, c.plan.memory_taken), default=None)


def fit(checked: CheckedSettings, plan_of: Callable[[CheckedSettings], Plan]) -> tuple[CheckedSettings, list[str]]:
    """The settings of `--fit auto`, and lines that say what was chosen and what it costs. UserError where nothing
    fits."""
    found = list(candidates(checked, plan_of))
    chosen = fastest(found)
    if chosen is None:
        raise _nothing_fits(found, checked.settings)
    free = min(found, key=lambda c: c.plan.step_seconds)  # as if there were no limit
    slower = chosen.plan.step_seconds / free.plan.step_seconds - 1
    fitting = sum(candidate.plan.fits for candidate in found)
    lines = [
        f"fit     {chosen.command() or 'no flag'}: the fastest of {fitting} settings that fit, of {len(found)}; "
        f"by the plan a step takes {chosen.plan.step_seconds:.2f} s"
        + (f", {100 * slower:.1f}% more than without a limit ({free.command()})" if slower > 1e-4 else "")
    ]
    if chosen.plan.host:
        rate = (chosen.plan.hardware.host_bandwidth or 0.0) / 1e9
        names = ", ".join(chosen.plan.host)
        lines.append(f"        {names} in host memory: the link carries {rate:.1f} GB/s each way")
    return chosen.checked, lines


def flags_within(checked: CheckedSettings, limit: float, plan_of: Callable[[CheckedSettings], Plan]) -> str | None:
    """The flags of the fastest run that takes at most `limit` bytes; None: none does."""
    found = candidates(checked, plan_of, keep_given=False)
    best = fastest([candidate for candidate in found if candidate.plan.memory_taken <= limit])
    return None if best is None else best.command()


def advice(checked: CheckedSettings, plan: Plan, plan_of: Callable[[CheckedSettings], Plan]) -> tuple[str, ...]:
    """What to change in a run with this plan: flags with which it fits, or with which it is faster."""
    if plan.fits and plan.memory_taken > LITTLE_FREE * (plan.hardware.memory_bytes or math.inf):
        return ()
    found = list(candidates(checked, plan_of, keep_given=False))
    best = fastest(found)
    if best is None:
        return (_smallest(found),) if found else ()
    if not plan.fits:
        return (f"{best.command()} takes {best.plan.memory_taken / GIB:.1f} GiB",)
    have = plan.hardware.memory_bytes
    gain = plan.step_seconds / best.plan.step_seconds - 1
    if gain < 0.02 or have is None:
        return ()
    free = (have - plan.memory_taken) / GIB
    return (
        f"{free:.1f} GiB are free: by the plan {best.command()} is {100 * gain:.0f}% faster and takes "
        f"{best.plan.memory_taken / GIB:.1f} GiB",
    )


def _groups(
    checked: CheckedSettings, keep_given: bool, dense: Callable[[], bool]
) -> Iterator[list[list[list[dict[str, Any]]]]]:
    """Flags by which settings differ from those of `checked`: for each micro-batch and what is in host memory a group
    of what is recomputed, the least first, each with chunks of the loss, the fewest first; and this for each choice of
    layouts of weights' codes, the fastest first. dense: whether the model is no mixture, asked of long micro-batches
    only."""
    settings = checked.settings
    rows = getattr(settings, "seq_len", 1)
    given = keep_given and (settings.micro_batch_size or settings.gradient_accumulation)
    # The sum over a micro-batch depends on its size; an optimizer in the backward pass sees one.
    fixed = given or settings.deterministic or settings.optimizer_in_backward
    per_rank = settings.batch_size // checked.geometry.world
    sizes = [n for n in range(1, per_rank + 1) if per_rank % n == 0 and (n == 1 or n * rows <= MOST_ROWS)]

    unchunked = {} if keep_given else {"mlp_chunks": 0}
    kinds, layouts = _recomputed(settings, keep_given), _weight_codes(checked, keep_given)
    places = list(_moved(checked, keep_given))
    block = [found for found in kinds if "block" in recompute_kinds(replace(settings, **found))]

    def flags(micro: int | None, recomputed: Flags, chunks: int, moved: Flags) -> dict[str, Any]:
        found = {**unchunked, **recomputed, "loss_chunks": chunks, **moved}
        if micro is not None:
            found["micro_batch_size"] = micro
            found["gradient_accumulation"] = settings.gradient_accumulation and per_rank // micro
        return {key: value for key, value in found.items() if value != getattr(settings, key, value)}

    for micro in [None] if fixed else sizes:
        tokens = (micro or per_rank) * rows
        mlp_chunks = _mlp_chunks(settings, (micro or checked.geometry.micro_batch_size) * rows, keep_given, dense)
        chunked = [{**found, "mlp_chunks": chunks} for found in block for chunks in mlp_chunks]
        for names, moved in places:
            # Layers' inputs are worth their way where they are all that is kept.
            if recomputed := (block if "residuals" in names else kinds) + chunked:
                yield [
                    [
                        [flags(micro, found, n, {**moved, **codes}) for n in _chunks(settings, tokens, keep_given)]
                        for found in recomputed
                    ]
                    for codes in layouts
                ]


def _moved(checked: CheckedSettings, keep_given: bool) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    """Each choice of what is in host memory, with the flags by which it differs from that of `checked`: one more state
    after the other, layers' inputs, and the weights that --lora freezes; or after all states those that train, of
    several processes the sums of gradients."""
    settings, options = checked.settings, dict(checked.settings.optim_kwargs or {})
    if checked.device.type == "cpu" or (keep_given and (settings.offload is not None or "offload" in options)):
        yield (), {}
        return
    options.pop("offload", None)
    elsewhere = {} if settings.optim_kwargs is None else {"optim_kwargs": options or None}
    states, own = checked.optimizer.host_names, _own_decoder(settings)
    alone = own and checked.mesh.world == 1
    frozen = alone and getattr(settings, "lora", None) is not None
    layers = [*(["residuals"] if own else []), *(["weights"] if frozen else [])]
    chosen = [(*states[:count], *subset) for subset in _subsets(layers) for count in range(len(states) + 1)]
    if alone and not frozen:
        chosen += [(*states, *subset, "weights", "gradients") for subset in _subsets(layers)]
    if own and checked.mesh.shard > 1 and settings.reshard_after_forward != "never":
        chosen += [(*states, *subset, "gradients") for subset in _subsets(layers)]
    for names in chosen:
        sharded = {"reshard_after_forward": "always"} if "gradients" in names and not alone else {}
        yield names, {} if set(names) == checked.offload else {"offload": names, **sharded, **elsewhere}


def _subsets(names: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return chain.from_iterable(combinations(names, count) for count in range(len(names) + 1))


def _weight_codes(checked: CheckedSettings, keep_given: bool) -> list[Flags]:
    """The layouts of weights' codes, the fastest first."""
    if (keep_given and checked.settings.weight_codes != "both") or not has_two_layouts(checked.scheme):
        return [{}]
    return [{"weight_codes": codes} for codes in ("both", "one")]


def _own_decoder(settings: TrainSettings) -> bool:
    return isinstance(settings, LanguageSettings) and settings.model_impl == "native"


def _recomputed(settings: TrainSettings, keep_given: bool) -> list[dict[str, Any]]:
    """The flags of what is recomputed."""
    kinds = recompute_kinds(settings)
    if keep_given and kinds:
        return [{}]
    if not isinstance(settings, LanguageSettings):
        return [{"activation_checkpointing": name} for name in ("none", "full")]
    by_name: dict[str, Any] = {"activation_checkpointing": "none"}  # a set of kinds that has a name is not given twice
    sets: list[dict[str, Any]] = [{**by_name, "recompute": chosen} for chosen in RECOMPUTED]
    found = [{} if frozenset(flags["recompute"]) == kinds else flags for flags in sets]
    return [flags for flags in found if _allows(replace(settings, **flags), "--keep_8bit")]


def _allows(settings: TrainSettings, option: str) -> bool:
    """Whether what excludes `option` lets it be."""
    try:
        check_exclusions(Options(settings), option=option)
    except UserError:
        return False
    return True


def _mlp_chunks(settings: TrainSettings, tokens: int, keep_given: bool, dense: Callable[[], bool]) -> list[int]:
    """Chunks that MLPs may run in besides none, the fewest first."""
    if not isinstance(settings, LanguageSettings) or not _own_decoder(settings) or (keep_given and settings.mlp_chunks):
        return []
    numbers = [chunks for chunks in MLP_CHUNKS if tokens // chunks >= FEWEST_MLP_ROWS]
    if not numbers:
        return []
    chunked = replace(settings, activation_checkpointing="none", recompute=("block",), mlp_chunks=numbers[0])
    return numbers if _allows(chunked, "--mlp_chunks") and dense() else []


def _chunks(settings: TrainSettings, tokens: int, keep_given: bool) -> list[int]:
    own = getattr(settings, "loss_chunks", 0)
    if not isinstance(settings, LanguageSettings) or (keep_given and own):
        return [own]
    numbers = [chunks for chunks in LOSS_CHUNKS if chunks < 2 or tokens // chunks >= FEWEST_ROWS]
    # The largest chunks first; 0, which lets the size decide, has its place among them.
    return sorted(numbers, key=lambda chunks: (-chunk_rows(tokens, chunks, large=True), chunks))


def _changed(checked: CheckedSettings, flags: Flags) -> CheckedSettings:
    """`checked` with other settings of memory. UserError where these do not go with the rest."""
    settings = replace(checked.settings, **flags)
    options = Options(settings, checked.script, checked.scheme)
    check_exclusions(options)
    return replace(
        checked,
        settings=settings,
        geometry=batch_geometry(settings, checked.geometry.devices),
        optimizer=options.optimizer.with_offload(options.offload_on(checked.device)),
        offload=options.offload_on(checked.device),
    )


def _smallest(found: list[Candidate]) -> str:
    least = min(found, key=lambda c: c.plan.memory_taken)
    plan = least.plan
    pinned = f" and {plan.host_bytes / GIB:.1f} GiB of pinned host memory" if plan.host else ""
    pinned += f", of which {plan.host_limit / GIB:.1f} may be pinned" if plan.host_bytes > plan.host_limit else ""
    return (
        f"the least that settings of memory reach is {plan.memory_taken / GIB:.1f} GiB{pinned} ({least.command()}), "
        f"most at {plan.moment}; take a smaller --model, --optim adamw_8bit, or more GPUs"
    )


def _nothing_fits(found: list[Candidate], settings: TrainSettings) -> UserError:
    have = (found[0].plan.hardware.memory_bytes or math.inf) / GIB
    limit = f" (--memory_limit {settings.memory_limit:g})" if settings.memory_limit else ""
    return UserError(f"--fit: nothing fits into {have:.1f} GiB{limit}; {_smallest(found)}.")
