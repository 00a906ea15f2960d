"""What users attach to a linear: hooks, attributes, buffers and submodules. They stay with it when it becomes a module
of another kind (`swap`, `reassign`)."""

from torch import nn

MODULE = frozenset(vars(nn.Module()))
HOOKS = tuple(name for name in MODULE if "hook" in name)
LINEAR = frozenset({"in_features", "out_features", "weight", "bias", "groups"})
LOW_BIT_LINEAR = LINEAR | {
    *("reduce", "scheme", "key", "weight_key", "weight_codes", "codes_only", "gathered", "weight_amax", "exchange"),
    *("probe", "gradient_sum", "in_high_precision", "x_scale", "x_amax", "dy_scale", "dy_amax"),
}
"""The names that a linear, and a low-bit linear, have for themselves."""
CONV = frozenset(
    {"in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups", "padding_mode"}
    | {"transposed", "output_padding", "_reversed_padding_repeated_twice", "weight", "bias"}
)
"""The same of a convolution, in high precision and in low bits."""
COMPILED = "_compiled_call_impl"
"""Of `module.compile()`: it calls the old module."""


def attached(linear: nn.Module, own: frozenset[str]) -> list[str]:
    """The attributes, buffers and submodules of a linear besides its `own`."""
    names = [*vars(linear), *linear._buffers, *linear._modules]
    return [name for name in names if name not in own | MODULE | {COMPILED}]


def carry_attachments(old: nn.Module, new: nn.Module, own: frozenset[str]) -> None:
    """Give `new` what is attached to `old`, whose own names are `own`. Hooks are the same objects: their handles still
    remove them."""
    for name in HOOKS:
        setattr(new, name, getattr(old, name))
    for name in attached(old, own):
        if name in old._buffers:
            new.register_buffer(name, old._buffers[name], name not in old._non_persistent_buffers_set)
        else:
            setattr(new, name, getattr(old, name))


def own_names(linear: nn.Module) -> frozenset[str]:
    """The names that a linear or a convolution in high precision has for itself."""
    return LINEAR if isinstance(linear, nn.Linear) else CONV


def cannot_swap(linear: nn.Module) -> str | None:
    """Why a linear or a convolution cannot become a low-bit one; None: it can."""
    if extra := linear._parameters.keys() - {"weight", "bias"}:
        return f"its weight is computed from others ({', '.join(sorted(extra))})"
    if "forward" in vars(linear):
        return "its forward pass is replaced"
    if taken := [name for name in attached(linear, own_names(linear)) if name in LOW_BIT_LINEAR]:
        return f"its attribute {taken[0]!r} is one that a low-bit linear has for itself"
    return None
