"""A weight stored as low-bit codes and scales, without a copy in high precision.

`StoredWeight` behaves like a [N, K] tensor of its outward dtype (bf16 or fp32): it is an nn.Parameter with a plain
`.grad`, `state_dict` and `to` handle it, and any operation that reads it gets its dequantized values. It holds two
plain tensors, which are also what checkpoints hold:

    format        codes                            scale fp32                bytes per element
    int8          int8 [N, K]                      [N], one per row          1
    int4          uint8 [N, K / 2], two per byte   [N, K / 128] (*)          0.53
    int4_g32      uint8 [N, K / 2], two per byte   [N, K / 32] (*)           0.63
    e4m3          float8 [N, K]                    [N], one per row          1
    e4m3_blocks   float8 [N, K]                    [N / 128, K / 128] (*)    1
    nf4           uint8 [N, K / 2], two per byte   [N, K / 64] (*)           0.56
    ternary       uint8 [N, K / 4], four per byte  [N], one per row          0.25

(*) one per group along K (and N); the last group may be shorter. int8, int4 and e4m3 are for weights that train too.

Only `store_` changes it: it requantizes, with stochastic rounding if a key is given, because rounding to nearest loses
every update smaller than half a code (Gupta et al. 2015, arXiv:1502.02551). An in-place operation of PyTorch on it
is an error: it would change a dequantized temporary.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_any, tree_map_only

from qtrain.kernels.compiler import operator
from qtrain.kernels.numerics.formats import GRANULARITIES
from qtrain.kernels.numerics.philox import ROUNDED_TENSORS
from qtrain.kernels.optim.update_rules import LowBitWeight
from qtrain.kernels.quantize.nf4 import quantize_nf4
from qtrain.kernels.quantize.operators import quantize
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

STORED_FORMATS: dict[str, OperandFormat] = {
    "int8": OperandFormat("int8", "rowwise"),
    "int4": OperandFormat("int4", "1x128"),
    "int4_g32": OperandFormat("int4", "1x32"),
    "e4m3": OperandFormat("e4m3", "rowwise"),
    "e4m3_blocks": OperandFormat("e4m3", "128x128"),
    "nf4": OperandFormat("nf4", "1x64"),
    "ternary": OperandFormat("ternary", "rowwise"),
}


def rows_divide(format: str) -> bool:
    """Whether a weight may be cut between any two rows: no scale covers several."""
    return GRANULARITIES[STORED_FORMATS[format].granularity][0] == 1


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


class StoredWeight(Tensor, LowBitWeight):
    """A [N, K] weight stored in a format of `STORED_FORMATS`; `from_value` quantizes one."""

    codes: Tensor
    scale: Tensor
    format: str

    # Operations are intercepted in __torch_dispatch__ only: below autograd, where values are read.
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, codes: Tensor, scale: Tensor, format: str, shape: torch.Size, dtype: torch.dtype):
        assert format in STORED_FORMATS and dtype in (torch.bfloat16, torch.float32), f"{format} as {dtype}"
        return Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=codes.device)

    def __init__(self, codes: Tensor, scale: Tensor, format: str, shape: torch.Size, dtype: torch.dtype):
        self.codes, self.scale, self.format = codes, scale, format

    def with_tensors(self, tensors: Sequence[Tensor], dtype: torch.dtype | None = None) -> "StoredWeight":
        """The same weight with its codes and scale, as `inner` has them, elsewhere. dtype: another outward one."""
        codes, scale = tensors
        return StoredWeight(codes, scale, self.format, self.shape, dtype or self.dtype)

    @classmethod
    def from_value(cls, value: Tensor, format: str) -> "StoredWeight":
        """Store `value` [N, K], rounded to nearest; its dtype becomes the outward one."""
        with torch.no_grad():
            codes, scale = _codes(value.detach(), format)
        return cls(codes, scale.contiguous(), format, value.shape, value.dtype)

    @classmethod
    def empty(
        cls, shape: torch.Size, format: str, dtype: torch.dtype, device: torch.device | None = None
    ) -> "StoredWeight":
        """Uninitialized codes and scales of a weight of this shape."""
        stored = QuantizedTensor.empty(STORED_FORMATS[format], shape, device)
        return cls(stored.codes, stored.scale, format, shape, dtype)

    @property
    def inner(self) -> dict[str, Tensor]:
        """The plain tensors by name, as a checkpoint holds them."""
        return {"codes": self.codes, "scale": self.scale}

    @property
    def quantized(self) -> QuantizedTensor:
        """The codes and scales as `output` reads them."""
        return QuantizedTensor(self.codes, self.scale, STORED_FORMATS[self.format])

    @torch.no_grad()
    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values as a plain tensor [N, K]; code * scale is computed in fp32 and rounded once."""
        return self.quantized.dequantize(dtype)[:, : self.shape[1]]  # two codes a byte: an odd K has one more

    @torch.no_grad()
    def store_(
        self, value: Tensor, key: Tensor | None = None, role: int = ROUNDED_TENSORS.index("update")
    ) -> "StoredWeight":
        """Requantize `value` [N, K] in place; with a Philox key, stochastically."""
        codes, scale = _codes(value, self.format, key, role)
        self.codes.copy_(codes)
        self.scale.copy_(scale)
        torch.autograd.graph.increment_version(self)  # codes derived from it are stale now
        return self

    # The protocol by which torch.compile traces a subclass as its plain tensors.
    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scale"], (self.format, self.dtype)

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, outer_size: Any, outer_stride: Any):
        format, dtype = context
        return cls(inner["codes"], inner["scale"], format, outer_size, dtype)

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
                alias = first.with_tensors((first.codes, first.scale))
                return return_and_correct_aliasing(func, args, kwargs, alias)
            if func is _aten.clone.default:
                return first.with_tensors((first.codes.clone(), first.scale.clone()))
            # Between devices, or bf16 and fp32 outside: the codes are the same, only the outward dtype changes.
            if func is _aten._to_copy.default and kwargs.get("dtype") in (None, torch.bfloat16, torch.float32):
                moved = {k: kwargs[k] for k in ("device", "non_blocking") if kwargs.get(k) is not None}
                tensors = [_aten._to_copy.default(inner, **moved) for inner in (first.codes, first.scale)]
                return first.with_tensors(tensors, kwargs.get("dtype"))
            if func in _LIKE:  # a plain tensor: an optimizer's state, a gradient
                device = kwargs.get("device") or first.device
                shape_only = torch.empty(first.shape, dtype=first.dtype, device="meta")
                return func(shape_only, *args[1:], **{**kwargs, "device": device})
        _refuse_writes(func, args, kwargs)
        # Everything else reads values: right for any operation, and slow, for the whole weight is made.
        args, kwargs = tree_map_only(StoredWeight, lambda w: w.dequantize(w.dtype), (args, kwargs))
        return func(*args, **kwargs)


@operator("read_again", fake=lambda tensor: torch.empty_like(tensor))
def read_again(tensor: Tensor, after: Tensor) -> Tensor:
    """A copy of a weight's scale or codes that depends on `after`: `grad_input` dequantizes the weight after dy.

    Without it a compiler merges the dequantization of forward and backward into one, and keeps every layer's
    dequantized weight in memory between them.
    """
    return tensor.clone()


def _codes(value: Tensor, format: str, key: Tensor | None = None, role: int = 0) -> tuple[Tensor, Tensor]:
    if format == "nf4":
        return quantize_nf4(value)
    return quantize(value, STORED_FORMATS[format].fmt, STORED_FORMATS[format].granularity, key, role)


def _copy(target: Tensor, source: Tensor) -> Tensor:
    """target.copy_(source) where one is a stored weight: codes are copied between equal formats, else values."""
    if not isinstance(target, StoredWeight):
        assert isinstance(source, StoredWeight)
        return target.copy_(source.dequantize(target.dtype))
    if isinstance(source, StoredWeight) and source.format == target.format and source.shape == target.shape:
        target.codes.copy_(source.codes)  # exact: requantizing would round again
        target.scale.copy_(source.scale)
        return target
    value = source.dequantize() if isinstance(source, StoredWeight) else source.to(target.device, torch.float32)
    return target.store_(value.expand(target.shape))


def _refuse_writes(func: Any, args: tuple, kwargs: dict[str, Any]) -> None:
    """TypeError where `func` would write to a stored weight."""
    # Positional and by name, as the schema calls them.
    given = {argument.name: value for argument, value in zip(func._schema.arguments, args, strict=False)} | kwargs
    for argument in func._schema.arguments:
        writes = argument.alias_info is not None and argument.alias_info.is_write
        if writes and tree_any(lambda value: isinstance(value, StoredWeight), given.get(argument.name)):
            raise TypeError(f"{func} cannot write to a weight stored in low bits; compute its value and store_ it")
