"""The progress of a run: one explicit object, saved with every checkpoint."""

import uuid
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from qtrain.errors import UserError


@dataclass
class TrainState:
    """step: finished optimizer steps; tokens: read so far; data: position of the training stream after them."""

    step: int = 0
    tokens: int = 0
    data: dict[str, Any] | None = None
    best_eval_loss: float | None = None
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def as_meta(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> "TrainState":
        """The state saved in a checkpoint's meta. UserError if its fields are others."""
        known = {f.name for f in fields(cls)}
        if set(meta) != known or not isinstance(meta["step"], int) or not isinstance(meta["tokens"], int):
            raise UserError("--resume: the checkpoint's state is not one of this version; start from its hf/ export.")
        return cls(**meta)
