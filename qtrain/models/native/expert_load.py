"""How evenly routers use their experts: counted on the device, read by the host when it logs."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from qtrain.core.hardware.host_copy import HostCopy


class ExpertLoad(nn.Module):
    """Routes of each expert of each mixture, since the last step and since they were last read."""

    def __init__(self, layers: int, experts: int):
        super().__init__()
        self.register_buffer("step", torch.zeros(layers, experts, dtype=torch.int64), persistent=False)
        self.register_buffer("unread", torch.zeros(layers, experts, dtype=torch.int64), persistent=False)

    def reset(self) -> None:
        self.step.zero_()
        self.unread.zero_()

    def count(self, loads: list[Tensor]) -> None:
        """Add a micro-batch's routes, int64 [E] of each mixture."""
        self.step += torch.stack(loads)

    @torch.no_grad()
    def end_step(self, biases: list[Tensor], rate: float) -> None:
        """Of a step that is applied. biases: of the routers, fp32 [E] each; `rate` is added to those of experts with
        less than the mean load, and subtracted from those with more (DeepSeek-V3, arXiv:2412.19437)."""
        if biases and rate:
            load = self.step.float()
            change = rate * (load.mean(dim=1, keepdim=True) - load).sign()
            torch._foreach_add_(biases, list(change.unbind()))
        self.unread += self.step
        self.step.zero_()

    def read(self) -> Callable[[], dict[str, float]]:
        """The metrics of the routes since the last call, which are on their way to the host."""
        load = HostCopy(self.unread)
        self.unread.zero_()
        return lambda: self._metrics(load.read().double())

    @staticmethod
    def _metrics(load: Tensor) -> dict[str, float]:
        """expert_load: the largest load of any expert over its layer's mean; expert_entropy: mean over the layers of
        the load's entropy, over that of equal loads. Empty without a route. load: [layers, experts] on the host."""
        total = load.sum(dim=1, keepdim=True)
        if not bool((total > 0).all()):
            return {}
        share = load / total
        # Over log(E), so in [0, 1]; a single expert has 0 / 0, hence the floor.
        entropy = torch.special.entr(share).sum(dim=1) / max(torch.tensor(share.shape[1]).log().item(), 1e-30)
        # The mean share is 1 / E: times E the largest one is over the mean.
        return {"expert_load": float(share.max() * share.shape[1]), "expert_entropy": float(entropy.mean())}
