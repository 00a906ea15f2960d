"""The weights of a quantized model as a model of high precision would hold them."""

from collections.abc import Callable

from torch import Tensor, nn

from qtrain.quant.linear import LowBitLinear


def exported_tensors(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """What makes the exported value of each parameter and persistent buffer, by its name in `state_dict`; tied ones
    under every name.

    Values are plain tensors in the parameter's dtype, each made when it is asked for, so that a model stored in low
    bits is never whole in high precision. See `LowBitScheme.exported_weight`.
    """
    made: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in model.state_dict().items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, LowBitLinear) and name.rpartition(".")[2] == "weight":
            made[name] = lambda owner=owner: exported_weight(owner)
        else:
            made[name] = lambda tensor=tensor: tensor
    return made


def exported_weight(linear: nn.Module) -> Tensor:
    """A linear's weight as a model of high precision would hold it."""
    return linear.scheme.exported_weight(linear.weight) if isinstance(linear, LowBitLinear) else linear.weight.detach()
