"""What is measured of a language model: the same flags while it trains and afterwards (`python -m qtrain evaluate`)."""

from dataclasses import dataclass
from typing import Annotated

from qtrain.core.checks import Range


@dataclass(frozen=True)
class EvaluationSettings:
    """Questions and prompts; nothing is asked unless it is given."""

    sample_prompts: tuple[str, ...] = ()
    """At every evaluation, let the model continue these texts and log what it writes."""
    sample_tokens: Annotated[int, Range(0)] = 64
    """Tokens that continue each of --sample_prompts."""
    hellaswag: bool = False
    """At every evaluation, measure accuracy on HellaSwag (choosing one of four endings)."""
    hellaswag_file: str | None = None
    """Local .jsonl file of HellaSwag questions; None: download them from the hub."""
    hellaswag_limit: Annotated[int, Range(0)] = 0
    """Use the first N HellaSwag questions; 0: all."""
    accuracy: Annotated[int, Range(0)] = 0
    """At every evaluation, let the model answer N questions of the evaluation data (type instruct or chat) and compare
    final answers; 0: none."""
    answer_tokens: Annotated[int, Range(1)] = 256
    """Longest answer to a question of --accuracy, in tokens."""
