"""The frozen base of adapters: rounded by --lora's "base", or the codes that --model has already."""

from qtrain.core.errors import UserError
from qtrain.models import Lora, read_model_source
from qtrain.quant import LowBitScheme
from qtrain.quant.schemes.frozen_base import base_scheme, keeping_scheme
from qtrain.tensors.stored_weight import rows_divide
from qtrain.train.settings.machine import run_world
from qtrain.train.settings.settings import LanguageSettings

OTHER_BASES = '"base":"dense", or nf4, int8 or fp8'


def frozen_base(lora: Lora | None, settings: LanguageSettings) -> LowBitScheme | None:
    """The scheme of a base that is stored in low bits; None: adapters have none, or there are no adapters. UserError
    where --quantize, --merge or the processes do not go with the base."""
    if lora is None:
        return None
    scheme = None if lora.base in ("none", "dense") else base_scheme(lora.base, settings.quantize)
    asks = lora.merge == "original" or (lora.base == "none" and settings.model_impl == "native")
    if not (settings.pretrained and asks):
        return scheme
    if (declared := read_model_source(settings.model).declared_codes()) is None:
        return scheme
    if lora.merge == "original":
        raise UserError(
            f"--lora.merge: 'original' adds adapters to files in high precision, and those of --model are codes "
            f"({declared.description}); leave it out: the export has the values of the base with the adapters added."
        )
    scheme = keeping_scheme(declared.format, settings.quantize)
    if scheme is not None:
        _check_kept(scheme, settings)
    return scheme


def _check_kept(scheme: LowBitScheme, settings: LanguageSettings) -> None:
    """UserError for flags that a base in a checkpoint's codes does not go with."""
    for name in ("tp", "ep"):
        if getattr(settings, name) > 1:
            raise UserError(
                f"--{name}: the frozen base keeps the codes of --model ({scheme.name}), which it does not divide; "
                f"give --lora {OTHER_BASES}."
            )
    if settings.quantize_kwargs:
        raise UserError(
            f"--quantize_kwargs: the products of a base in the codes of --model ({scheme.name}) have no options; leave "
            f"it out, or give --lora {OTHER_BASES}."
        )
    always = settings.reshard_after_forward == "always" and run_world(settings) > 1
    if always and not rows_divide(scheme.stored_format):
        raise UserError(
            "--reshard_after_forward: the frozen base keeps FP8 codes with a scale per 128x128, which are not divided "
            f"by rows; leave it out, or give --lora {OTHER_BASES}."
        )
