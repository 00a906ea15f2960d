"""A row of the table of exclusions, and the conditions that several of its rows share."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from qtrain.optim import OPTIMIZERS, OptimizerSpec
from qtrain.optim.state_layout import HOST_NAMES
from qtrain.quant import LowBitScheme
from qtrain.quant.scheme_map import SchemeMap
from qtrain.quant.schemes.qat import Qat
from qtrain.train.settings.machine import run_world
from qtrain.train.settings.options import Options
from qtrain.train.settings.recompute import kept_8bit, recompute_kinds
from qtrain.train.settings.settings import LanguageSettings


@dataclass(frozen=True)
class Exclusion:
    """A row of the table."""

    option: str
    """The flag, or a key of one, that the message names first: the one to change."""
    other: str
    """What it does not go with."""
    applies: Callable[[Options], object]
    """Whether the settings have both."""
    why: str
    """The reason, as the rest of the sentence that begins with the option; {flag} stands for the value of --flag."""
    fix: str | Callable[[Options], str] = ", or leave it out"
    """The end of the sentence, where it is refused."""
    refused: bool = True
    """False: the option has no effect, which the plan says in a line."""

    def message(self, options: Options) -> str:
        """The sentence, without a full stop; of a note without a fix."""
        fix = self.fix(options) if callable(self.fix) else self.fix
        text = f"{self.option}: {self.why}{fix if self.refused else ''}"
        return re.sub(r"\{([\w.]+)\}", lambda name: _value(options, name[1]), text)


def _value(options: Options, name: str) -> str:
    """A flag's value as a message has it, or with `lora.` an option's of --lora; of a list the first."""
    if name == "low_bit_export":
        return next(iter(options.low_bit_exports))
    value = getattr(options.lora, name[5:]) if name.startswith("lora.") else options.get(name)
    value = value[0] if isinstance(value, list) else value
    return f"{value:g}" if isinstance(value, float) else str(value)


def note(option: str, other: str, applies: Callable[[Options], object], why: str) -> Exclusion:
    """A row of an option that has no effect."""
    return Exclusion(option, other, applies, why, refused=False)


# ---- conditions that several rows share -----------------------------------------------------------------------------


def without(name: str, needed: str) -> Callable[[Options], bool]:
    """Whether a flag is given without the one that it needs."""
    return lambda o: o.has(name) and not getattr(o.settings, needed)


def decayless(key: str) -> Callable[[Options], bool]:
    """Whether a key of --lr_schedule_kwargs is given for a schedule that does not decay."""
    return lambda o: o.key("lr_schedule_kwargs", key) is not None and o.schedule.decay == 0


def both(name: str, also: Callable[[Options], Any]) -> Callable[[Options], bool]:
    """Whether a flag whose default (1, False) stands for nothing, such as tp, is set, and a condition holds."""
    return lambda o: getattr(o.settings, name) > 1 - (name == "optimizer_in_backward") and bool(also(o))


def all_bf16(o: Options) -> bool:
    """Whether the options of a low-bit scheme leave it no low-bit GEMM."""
    scheme = o.scheme.root
    plain = isinstance(scheme, LowBitScheme) and scheme.stored_format is None and not scheme.latent
    return plain and set(scheme.gemm_dtypes().values()) == {"bf16"}


def stores_weights(o: Options) -> bool:
    """Whether weights are stored in low bits."""
    return any(isinstance(part, LowBitScheme) and part.stored_format is not None for part in o.scheme.parts())


def qat_parts(o: Options) -> list[Qat]:
    return [part for part in o.scheme.parts() if isinstance(part, Qat)]


def arithmetics(o: Options) -> set[str]:
    """Of the GEMMs of all linears."""
    return {name for part in o.scheme.parts() if isinstance(part, LowBitScheme) for name in part.gemm_dtypes().values()}


def quantizes_by_name(o: Options) -> bool:
    """Whether --quantize_overrides quantizes linears whose weights stay in high precision."""
    schemes = [scheme for _, scheme in o.scheme.rules] if isinstance(o.scheme, SchemeMap) else []
    return any(isinstance(scheme, LowBitScheme) and scheme.stored_format is None for scheme in schemes)


def is_timm(o: Options) -> bool:
    return not isinstance(o.settings, LanguageSettings)


def is_transformers(o: Options) -> bool:
    return isinstance(o.settings, LanguageSettings) and o.settings.model_impl != "native"


def batches_differ(o: Options) -> bool:
    """Examples are padded, to a length of each micro-batch."""
    multiple = o.get("seq_len_multiple") or 0
    return multiple not in (0, o.get("seq_len"))


def has_adapters(o: Options) -> bool:
    return o.get("lora") is not None


def has_low_bit_base(o: Options) -> bool:
    """Whether --lora makes frozen low-bit codes of the weights."""
    return o.lora is not None and o.lora.low_bit_base is not None


def keeps_8bit(*kinds: str) -> Callable[[Options], bool]:
    """Whether something is kept in 8 bits where one of these kinds is recomputed."""
    return lambda o: bool(kept_8bit(o.settings)) and bool(recompute_kinds(o.settings) & set(kinds))


def streams(o: Options) -> bool:
    """Whether weights pass through the GPU with their gradients: of one process."""
    return "gradients" in o.offload and run_world(o.settings) == 1


def offloads_states(o: Options) -> bool:
    return bool(set(o.settings.offload or ()) & set(HOST_NAMES))


def one_micro_batch(o: Options) -> str:
    micro = o.geometry.micro_batch_size * o.geometry.gradient_accumulation
    return f"; give --gradient_accumulation 1 --micro_batch_size {micro}, or a smaller --batch_size"


def allowed_optimizers(works: Callable[[OptimizerSpec], bool]) -> Callable[[Options], str]:
    """The end of a sentence with the optimizers that work."""

    def allowed(_: Options) -> str:
        return "; allowed: " + ", ".join(n for n in OPTIMIZERS.names() if works(OPTIMIZERS.make(n, {}, "--optim")))

    return allowed
