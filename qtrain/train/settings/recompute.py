"""What a run's flags ask to recompute: the kinds of --recompute, or those that --activation_checkpointing names."""

from qtrain.models import RECOMPUTE_SETS
from qtrain.models.native.recompute import Kinds, as_kinds
from qtrain.train.settings.settings import LanguageSettings, TrainSettings


def recompute_kinds(settings: TrainSettings) -> Kinds:
    """UserError for a kind that is unknown."""
    given = settings.recompute if isinstance(settings, LanguageSettings) else ()
    return as_kinds(given) if given else RECOMPUTE_SETS[settings.activation_checkpointing]
