"""What a run's flags ask of what backward reads: what it recomputes (--recompute, or the kinds that
--activation_checkpointing names), and what is kept in 8 bits (--keep_8bit)."""

from qtrain.models import RECOMPUTE_SETS
from qtrain.models.native.recompute import Kinds, as_8bit, as_kinds
from qtrain.train.settings.settings import LanguageSettings, TrainSettings


def recompute_kinds(settings: TrainSettings) -> Kinds:
    """UserError for a kind that is unknown."""
    given = settings.recompute if isinstance(settings, LanguageSettings) else ()
    return as_kinds(given) if given else RECOMPUTE_SETS[settings.activation_checkpointing]


def kept_8bit(settings: TrainSettings) -> frozenset[str]:
    """UserError for a tensor that is unknown."""
    return as_8bit(settings.keep_8bit) if isinstance(settings, LanguageSettings) else frozenset()
