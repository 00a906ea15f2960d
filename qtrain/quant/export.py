"""The weights of a quantized model in high precision, for export."""

from collections.abc import Callable

from torch import Tensor, nn

from qtrain.quant.linear import LowBitLinear
from qtrain.tensors.deferred import initial_value


def exported_tensors(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Functions that return the exported value of each entry of `state_dict`; tied parameters under every name.

    Values are plain tensors in the parameter's dtype, computed when the function is called, so that a model stored in
    low bits never exists in high precision as a whole. See `LowBitScheme.exported_weight`.
    """
    exported: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in model.state_dict().items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, LowBitLinear) and name.rpartition(".")[2] == "weight":
            exported[name] = lambda owner=owner: exported_weight(owner)
        else:
            exported[name] = lambda tensor=tensor: tensor
    return exported


def exported_weight(linear: nn.Module) -> Tensor:
    """A linear's weight in high precision; of a deferred one its initial value."""
    if not isinstance(linear, LowBitLinear):
        return initial_value(linear.weight).detach()
    if linear.scheme.latent and linear.group is not None:  # the scale is that of all ranks, which the codes have
        return linear.low_bit_weight.operands().rows.dequantize(linear.weight.dtype)
    return linear.scheme.exported_weight(initial_value(linear.weight))
