"""The weights of a quantized model in high precision, for export."""

from collections.abc import Callable

from torch import Tensor, nn

from qtrain.quant.linear import LowBitLinear
from qtrain.quant.weight_codes import WeightRequest, quantize_weight
from qtrain.tensors.lazy import initial_value
from qtrain.tensors.stored_weight import StoredWeight


def exported_tensors(model: nn.Module) -> dict[str, Callable[[], Tensor]]:
    """Functions that return the exported value of each entry of `state_dict`; tied parameters under every name.

    Values are plain tensors in the parameter's dtype, computed when the function is called, so that a model stored in
    low bits never exists in high precision as a whole. See `exported_weight`.
    """
    exported: dict[str, Callable[[], Tensor]] = {}
    for name, tensor in model.state_dict().items():
        owner = model.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, LowBitLinear) and name.rpartition(".")[2] == "weight":
            # Bound as a default: a closure over the loop's variable would export the last linear for all.
            exported[name] = lambda owner=owner: exported_weight(owner)
        else:
            exported[name] = lambda tensor=tensor: tensor
    return exported


def exported_weight(linear: nn.Linear | LowBitLinear) -> Tensor:
    """A linear's weight in high precision, the values that `output` multiplies with; of a deferred one its initial
    value."""
    if not isinstance(linear, LowBitLinear):
        return initial_value(linear.weight).detach()
    value, scheme = initial_value(linear.weight), linear.scheme
    if isinstance(value, StoredWeight):
        return value.dequantize(value.dtype)
    if not scheme.latent:  # the master weight is what is trained; codes only approximate it
        return value.detach()
    if linear.reduce is not None:  # the scale is that of all processes, which the codes have
        return linear.weight_codes.operands().codes.values(value.dtype)
    return quantize_weight(WeightRequest(scheme, value.detach(), None)).codes.values(value.dtype)
