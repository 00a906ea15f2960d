"""How one matrix [N, K] of a checkpoint is read from its tensors: as codes and scales in our own layout, or as values.

A family of formats has a file of its own here; `declared.py` chooses by `quantization_config`, and `hf/coded_files.py`
reads the files. Nothing of a file is executed: tensors are safetensors, and what describes them is JSON.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from qtrain.kernels.numerics.formats import FORMATS, GRANULARITIES
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

AT_ONCE = 1 << 24
"""Elements that are dequantized at once, with 12 bytes of temporaries each."""

FLOATS = ("F32", "BF16", "F16")
"""Dtypes of scales, as safetensors names them."""
EXPONENTS = ("U8", "F8_E8M0")
"""Dtypes of power-of-two scales: the exponent + 127."""


class Unreadable(Exception):
    """Why a matrix cannot be read, as the rest of a sentence that begins with its name."""


class Part(NamedTuple):
    """What a tensor of a matrix may be. shapes: None stands for any length."""

    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int | None, ...], ...]

    def why_not(self, dtype: str, shape: tuple[int, ...]) -> str | None:
        """Why a tensor is not this part; None: it may be."""
        if dtype not in self.dtypes:
            return f"is stored as {dtype} (expected {' or '.join(self.dtypes)})"
        for allowed in self.shapes:
            if len(allowed) == len(shape) and all(a in (None, n) for a, n in zip(allowed, shape, strict=True)):
                return None
        expected = " or ".join(str([("any" if n is None else n) for n in allowed]) for allowed in self.shapes)
        return f"has the shape {list(shape)} (expected {expected})"


class MatrixReader(ABC):
    """Reads the matrices of one format."""

    format: OperandFormat
    """What `codes` returns."""

    refused: ClassVar[Mapping[str, str]] = {}
    """Tensors of a matrix that make it another format, by the last part of their names -> what they are."""

    @abstractmethod
    def parts(self, n: int, k: int) -> dict[str, Part]:
        """The tensors of a matrix [n, k], by the last part of their names."""

    @abstractmethod
    def codes(self, parts: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        """Codes and fp32 scales in `format`, exactly those of the file. Raises Unreadable."""

    def values(self, parts: Mapping[str, Tensor], n: int, k: int, dtype: torch.dtype) -> Tensor:
        """code * scale [n, k], computed in fp32 and rounded once. Raises Unreadable."""
        codes = self.codes(parts, n, k)
        refuse_nonfinite_scale(codes.scale)
        return dequantize_by_rows(codes, k, dtype)

    @property
    def description(self) -> str:
        """For messages: 'e4m3, a scale per 128x128'."""
        group = {"rowwise": "row", "tensorwise": "tensor"}.get(self.format.granularity, self.format.granularity)
        return f"{self.format.fmt}, a scale per {group}"

    @property
    def marks(self) -> list[str]:
        """The tensors that only a matrix in this format has."""
        return [name for name in self.parts(128, 128) if name != "weight"]


def refuse_nonfinite_scale(scale: Tensor) -> None:
    if not bool(torch.isfinite(scale).all()):
        raise Unreadable("has a scale that is NaN or Inf: the file is damaged, or its training had diverged")


def dequantize_by_rows(codes: QuantizedTensor, k: int, dtype: torch.dtype) -> Tensor:
    """Values [n, k], some whole groups of rows at a time."""
    n, group = len(codes.codes), GRANULARITIES[codes.format.granularity][0] or 1
    rows = max(1, AT_ONCE // max(1, k * group)) * group
    values = torch.empty(n, k, dtype=dtype, device=codes.codes.device)
    for start in range(0, n, rows):
        part = codes._replace(
            codes=codes.codes[start : start + rows], scale=codes.scale[start // group : (start + rows) // group]
        )
        values[start : start + rows] = part.dequantize(dtype)[:, :k]  # packed rows may be padded
    return values


def numbers(scale: Tensor) -> Tensor:
    """Scales in fp32; a byte is an exponent."""
    return torch.exp2(scale.float() - 127) if scale.dtype == torch.uint8 else scale.float()


def blocks_of(granularity: str, n: int, k: int) -> tuple[int, int]:
    """Groups down and across a matrix [n, k] that share a scale."""
    rows, columns = GRANULARITIES[granularity]
    return -(-n // (rows or n)), -(-k // (columns or k))


class EightBits(MatrixReader):
    """e4m3 or int8 codes, one per element, with a scale per tensor, row or block."""

    refused: ClassVar = {"weight_zero_point": "zero points", "weight_g_idx": "an order of columns"}

    def __init__(self, fmt: str, granularity: str, scale: str, dtypes: tuple[str, ...] = FLOATS):
        """granularity: in the file; scale: the last part of the name of the scales; dtypes: of them."""
        self._granularity, self._scale, self._dtypes = granularity, scale, dtypes
        # A scale of the tensor is one for each row: q, k and v have several, and are one linear here.
        self.format = OperandFormat(fmt, "rowwise" if granularity == "tensorwise" else granularity)

    def parts(self, n: int, k: int) -> dict[str, Part]:
        dtype = {"e4m3": "F8_E4M3", "int8": "I8"}[self.format.fmt]
        if self._granularity == "tensorwise":
            shapes: tuple[tuple[int | None, ...], ...] = ((), (1,), (1, 1))
        elif self._granularity == "rowwise":
            shapes = ((n, 1), (n,))
        else:
            shapes = (blocks_of(self._granularity, n, k),)
        return {"weight": Part((dtype,), ((n, k),)), self._scale: Part(self._dtypes, shapes)}

    def codes(self, parts: Mapping[str, Tensor], n: int, k: int) -> QuantizedTensor:
        scale = numbers(parts[self._scale])
        if self.format.granularity == "rowwise":
            scale = scale.reshape(-1).expand(n).contiguous()
        return QuantizedTensor(parts["weight"], scale, self.format)


def check_ternary(codes: Tensor) -> None:
    if bool((codes > FORMATS["ternary"].max).any()):
        raise Unreadable("has codes that are not ternary")
