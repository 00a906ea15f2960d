"""The absmax of a weight, left by the kernel that updates it, so that a quantizer needs no pass over the weight for it.

Whoever quantizes the weight asks an optimizer for it, once; the optimizer's update then writes it in every step, at one
address. It holds until the weight is changed by anything else, which torch's version counters tell.
"""

from collections.abc import Sequence

import torch
from torch import Tensor


class WeightAmax:
    """Of one weight. versions_of: the tensors whose version counters count its changes, itself first."""

    def __init__(self, versions_of: Sequence[Tensor], device: torch.device):
        self.bits = torch.zeros(1, dtype=torch.int32, device=device)
        """int32 [1], the absmax as bits of fp32, NaN above Inf; of the weight as it is stored, in its own dtype."""
        self._versions_of = versions_of
        self._versions: list[int] | None = None

    def record(self) -> None:
        """State that the weight was updated and that `bits` are those of its new value."""
        torch.autograd.graph.increment_version(self._versions_of[0])  # kernels do not
        self._versions = self._present_versions()

    @property
    def known(self) -> bool:
        """Whether `bits` are those of the weight's present value."""
        return self._versions == self._present_versions()

    def _present_versions(self) -> list[int]:
        return [t._version for t in self._versions_of]
