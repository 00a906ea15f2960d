"""A weight that lives as low-bit codes and scales, without a copy in high precision.

`StoredWeight` looks like a [N, K] tensor of its outward dtype (bf16 or fp32): it is an nn.Parameter with a plain
`.grad`, `state_dict` and `to` know it, and any operation that reads it gets its dequantized values. What it holds are
two plain tensors, which are also what checkpoints hold:

    format   codes                          scale fp32             bytes an element
    int8     int8 [N, K]                    [N], one a row         1
    int4     uint8 [N, K / 2], two a byte   [N, K / 128] (*)       0.53
    e4m3     float8 [N, K]                  [N], one a row         1
    nf4      uint8 [N, K / 2], two a byte   [N, K / 64] (*)        0.56

(*) one for each group of 128 (64) along K; the last group may be shorter. nf4 is for weights that do not train.

It is changed by `store_` only, which requantizes it, with stochastic rounding where a key is given: an update smaller
than half a code would otherwise be lost every time (Gupta et al. 2015, arXiv:1502.02551). An in-place operation of
PyTorch on it is an error, for it would change a dequantized copy that is thrown away.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_any, tree_map_only

from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.quantize.nf4 import dequantize_nf4, nf4_table, quantize_nf4
from qtrain.kernels.quantize.operators import dequantize, quantize

GRANULARITY = {"int8": "rowwise", "int4": "1x128", "e4m3": "rowwise", "nf4": "1x64"}
BYTES = {"int8": 1.0, "int4": 0.5 + 4 / 128, "e4m3": 1.0, "nf4": 0.5 + 4 / 64}
"""Bytes an element, by format. A row's scale is not counted, a group's is."""

_aten = torch.ops.aten
_ALIASES = {_aten.detach.default, _aten.alias.default}
_LIKE = {
    _aten.empty_like.default,
    _aten.zeros_like.default,
    _aten.ones_like.default,
    _aten.full_like.default,
    _aten.rand_like.default,
    _aten.randn_like.default,
    _aten.new_empty.default,
    _aten.new_zeros.default,
    _aten.new_ones.default,
    _aten.new_full.default,
}


class StoredWeight(Tensor):
    """A [N, K] weight stored in a format of `GRANULARITY`. Make one with `from_value`."""

    codes: Tensor
    scale: Tensor
    format: str

    # Operations arrive at __torch_dispatch__ only: below autograd, where a tensor's values are asked for.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, format: str, shape: torch.Size, dtype: torch.dtype):
        assert format in GRANULARITY and dtype in (torch.bfloat16, torch.float32), f"{format} as {dtype}"
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, format: str, shape: torch.Size, dtype: torch.dtype):
        self.codes, self.scale, self.format = codes, scale, format

    @classmethod
    def from_value(cls, value: Tensor, format: str) -> "StoredWeight":
        """Store `value` [N, K], rounded to nearest; its dtype becomes the outward one."""
        with torch.no_grad():
            codes, scale = _codes(value.detach(), format)
        return cls(codes, scale.contiguous(), format, value.shape, value.dtype)

    @property
    def inner(self) -> dict[str, Tensor]:
        """The tensors that it consists of, by name: what a checkpoint holds."""
        return {"codes": self.codes, "scale": self.scale}

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Its values as a plain tensor [N, K]; code * scale is computed in fp32 and rounded once."""
        if self.format == "nf4":
            return dequantize_nf4(self.codes, self.scale, nf4_table(self.device), self.shape[1], dtype)
        return dequantize(self.codes, self.scale, self.format, GRANULARITY[self.format], list(self.shape), dtype)

    @torch.no_grad()
    def store_(
        self, value: Tensor, key: Tensor | None = None, role: int = ROUNDED_TENSORS.index("update")
    ) -> "StoredWeight":
        """Requantize to `value` [N, K] in place. key, role: stochastic rounding (`kernels.philox`); None: nearest."""
        codes, scale = _codes(value, self.format, key, role)
        self.codes.copy_(codes)
        self.scale.copy_(scale)
        torch.autograd.graph.increment_version(self)  # so that codes derived from it count as stale
        return self

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.format, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any):
        format, dtype = context
        return cls(inner["codes"], inner["scale"], format, outer_size, dtype)

    def _with(self, codes: Tensor, scale: Tensor, dtype: torch.dtype | None = None) -> "StoredWeight":
        return StoredWeight(codes, scale, self.format, self.shape, dtype or self.dtype)

    def __repr__(self) -> str:
        return f"StoredWeight({self.format}, shape={tuple(self.shape)}, dtype={self.dtype}, device={self.device})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default:
            return _copy(args[0], args[1])
        first = args[0] if args else None
        if isinstance(first, StoredWeight):
            if func in _ALIASES or (func is _aten.view.default and tuple(args[1]) == tuple(first.shape)):
                alias = first._with(first.codes, first.scale)
                return return_and_correct_aliasing(func, args, kwargs, alias)
            if func is _aten.clone.default:
                return first._with(first.codes.clone(), first.scale.clone())
            if func is _aten._to_copy.default and _keeps_format(kwargs):
                moved = {k: kwargs[k] for k in ("device", "non_blocking") if kwargs.get(k) is not None}
                codes, scale = (_aten._to_copy.default(inner, **moved) for inner in (first.codes, first.scale))
                return first._with(codes, scale, kwargs.get("dtype"))
            if func in _LIKE:  # a plain tensor: an optimizer's state, a gradient
                device = kwargs.get("device") or first.device
                shape_only = torch.empty(first.shape, dtype=first.dtype, device="meta")
                return func(shape_only, *args[1:], **{**kwargs, "device": device})
        _refuse_writes(func, args, kwargs)
        args, kwargs = tree_map_only(StoredWeight, lambda w: w.dequantize(w.dtype), (args, kwargs))
        return func(*args, **kwargs)


@torch.library.custom_op("qtrain::read_again", mutates_args=())
def read_again(part: Tensor, after: Tensor) -> Tensor:
    """A copy of a weight's scale or codes, made once `after` exists: what it is dequantized from for `grad_input`,
    after dy.

    From the part itself, a compiler would see one operation in forward and backward, do it once, and keep the
    dequantized weight of every layer from one to the other.
    """
    return part.clone()


@read_again.register_fake
def _(part: Tensor, after: Tensor) -> Tensor:
    return torch.empty_like(part)


def _codes(value: Tensor, format: str, key: Tensor | None = None, role: int = 0) -> tuple[Tensor, Tensor]:
    if format == "nf4":
        return quantize_nf4(value)
    return quantize(value, format, GRANULARITY[format], key, role)


def _keeps_format(kwargs: dict[str, Any]) -> bool:
    return kwargs.get("dtype") in (None, torch.bfloat16, torch.float32)


def _copy(target: Tensor, source: Tensor) -> Tensor:
    """target.copy_(source), where one of them is stored: code by code between two of one format, else by value."""
    if not isinstance(target, StoredWeight):
        assert isinstance(source, StoredWeight)
        return target.copy_(source.dequantize(target.dtype))
    if isinstance(source, StoredWeight) and source.format == target.format and source.shape == target.shape:
        target.codes.copy_(source.codes)
        target.scale.copy_(source.scale)
        return target
    value = source.dequantize() if isinstance(source, StoredWeight) else source.to(target.device, torch.float32)
    return target.store_(value.expand(target.shape))


def _refuse_writes(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """TypeError where `func` would write to a stored weight."""
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and tree_any(lambda value: isinstance(value, StoredWeight), given.get(argument.name)):
            raise TypeError(f"{func} cannot write to a weight stored in low bits; compute its value and store_ it")
