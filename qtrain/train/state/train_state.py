"""The progress of a run: one explicit object, saved with every checkpoint."""

import uuid
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

from qtrain.core.checks import Range, check_value
from qtrain.core.errors import UserError

OTHER_VERSION = "--resume: the checkpoint's state is not one of this version; start from its hf/ export."
_KINDS = {
    "step": Annotated[int, Range(0)],
    "tokens": Annotated[int, Range(0)],
    "data": dict[str, Any] | None,
    "best_eval_loss": float | None,
    "run_id": str,
}


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
        try:
            if set(meta) != {f.name for f in fields(cls)}:
                raise UserError("other fields")
            for name, kind in _KINDS.items():
                check_value(name, meta[name], kind)
        except (UserError, TypeError):
            raise UserError(OTHER_VERSION) from None
        return cls(**meta)
