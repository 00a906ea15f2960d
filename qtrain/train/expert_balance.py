"""The routers of a mixture of experts between steps: their selection biases, and the load that the log tells."""

import torch.distributed as dist
from torch import nn

from qtrain.comm.mesh import Mesh
from qtrain.models import Decoder


class ExpertBalance:
    """The experts' load in the steps of all ranks; nothing without a mixture. bias_rate: `--router_bias_rate`."""

    def __init__(self, model: nn.Module, mesh: Mesh, bias_rate: float):
        has_experts = isinstance(model, Decoder) and model.expert_load is not None
        self._model = model if has_experts else None
        self._mesh, self._bias_rate = mesh, bias_rate

    def end_step(self) -> None:
        """After an optimizer step; the same on all ranks."""
        if self._model is None:
            return
        if self._mesh.data_world > 1:
            dist.all_reduce(self._model.expert_load.step, group=self._mesh.data_group)
        self._model.end_step(self._bias_rate)

    def metrics(self) -> dict[str, float]:
        """The load since the last call (`ExpertLoad.read`)."""
        return {} if self._model is None else self._model.expert_load.read()
