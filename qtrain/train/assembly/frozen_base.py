"""The frozen base of adapters: rounded by --lora's "base", or the codes that --model has already."""

from qtrain.core.errors import UserError
from qtrain.models import Lora, read_model_source
from qtrain.quant import LowBitScheme
from qtrain.quant.schemes.frozen_base import base_scheme, keeping_scheme
from qtrain.train.settings.settings import LanguageSettings


def frozen_base(lora: Lora | None, settings: LanguageSettings) -> LowBitScheme | None:
    """The scheme of a base that is stored in low bits; None: adapters have none, or there are no adapters. UserError
    where --quantize or --lora.merge do not go with the base."""
    if lora is None:
        return None
    scheme = None if lora.low_bit_base is None else base_scheme(lora.low_bit_base, settings.quantize)
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
    return keeping_scheme(declared.format, settings.quantize)
