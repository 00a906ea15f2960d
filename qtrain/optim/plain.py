"""This project's optimizers as functions of parameters, like the classes of torch.optim.

    optimizer = AdamW8bit(model.parameters(), lr=1e-3, weight_decay=0.1)
    optimizer = Muon(model, lr=2e-2)

They are torch optimizers: schedulers, `state_dict`, closures and hooks work as with any other. bf16 weights without a
master copy are rounded stochastically.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

from torch import Tensor, nn

from qtrain.optim.matrix_optimizer import MatrixOptimizerSpec
from qtrain.optim.optimizer import Optimizer
from qtrain.optim.registry import OPTIMIZERS, parameter_groups

Parameters = nn.Module | Iterable[Tensor] | Iterable[Mapping[str, Any]] | Iterable[tuple[str, Tensor]]


class OptimizerFunction(Protocol):
    """An optimizer over parameters, groups of them, (name, parameter) pairs, or all trainable ones of a model.

    A model's are grouped: matrices are decayed, norms and biases are not, and optimizers of matrices (Muon, GaLore,
    APOLLO) find the hidden layers, which is why these take nothing but a model. seed: of stochastic rounding and random
    projections. options: those of `--optim_kwargs`. Raises UserError for an unknown or impossible option, TypeError for
    an optimizer of matrices without a model.
    """

    __name__: str

    def __call__(
        self, params: Parameters, lr: float, *, weight_decay: float = 0.0, seed: int = 0, **options: Any
    ) -> Optimizer: ...


def optimizer_function(name: str, shown: str) -> OptimizerFunction:
    """The optimizer `name` of OPTIMIZERS; shown: its name in Python."""

    def build(params: Parameters, lr: float, *, weight_decay: float = 0.0, seed: int = 0, **options: Any) -> Optimizer:
        spec = OPTIMIZERS.make(name, options, shown)
        if isinstance(params, nn.Module):
            return spec.build(parameter_groups(params, weight_decay), lr, seed)
        if isinstance(spec, MatrixOptimizerSpec):
            raise TypeError(f"{shown} treats matrices of hidden layers in their own way; give it the model itself.")
        return spec.build(_groups(params, weight_decay), lr, seed)

    build.__name__ = build.__qualname__ = shown
    build.__doc__ = f"{(OPTIMIZERS.get(name, shown).__doc__ or '').strip()}. See `OptimizerFunction`."
    return build


def _groups(params: Iterable[Any], weight_decay: float) -> list[dict[str, Any]]:
    """Parameters, pairs or groups as torch's optimizers take them, as groups with every key that ours read."""
    given = list(params)
    if not given:
        raise ValueError("optimizer got an empty parameter list")
    if not isinstance(given[0], Mapping):
        given = [{"params": given}]
    common = {"weight_decay": weight_decay, "hidden": False, "parts": ()}
    return [{**common, **group, "params": [_tensor(p) for p in _listed(group["params"])]} for group in given]


def _listed(params: Tensor | Iterable[Any]) -> list[Any]:
    return [params] if isinstance(params, Tensor) else list(params)


def _tensor(parameter: Tensor | tuple[str, Tensor]) -> Tensor:
    return parameter[1] if isinstance(parameter, tuple) else parameter
