"""The matrices of a checkpoint that are codes, found by the headers of its files and read one at a time."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.models.hf.io import by_file, opened_tensors, refuse_nonfinite, refuse_tensors, tensor_headers
from qtrain.models.hf.readers.declared import KEY, DeclaredCodes
from qtrain.models.hf.readers.reader import MatrixReader, Unreadable, refuse_nonfinite_scale
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor

T = TypeVar("T")

_FOR_INFERENCE = ("input_scale", "k_scale", "v_scale", "q_scale", "output_scale")
"""Last parts of the names of tensors that no weight depends on: scales of activations and of the KV cache."""


class _Matrix(NamedTuple):
    """A matrix in codes, [n, k]. parts: the last part of a tensor's name -> its full name."""

    reader: MatrixReader
    parts: dict[str, str]
    n: int
    k: int


class CodedFiles:
    """files: name of each tensor -> its file; shapes: of every matrix that a linear of the architecture may read, by
    name. UserError naming a tensor that is missing, or that is none of its format; nothing but headers is read."""

    def __init__(
        self, declared: DeclaredCodes, files: Mapping[str, Path], shapes: Mapping[str, tuple[int, int]], where: str
    ):
        self._declared, self._files, self._where = declared, files, where
        self._matrices = {
            name: matrix for name, (n, k) in shapes.items() if (matrix := self._matrix(name, n, k)) is not None
        }
        if not self._matrices:
            raise UserError(
                f"{where}: its config.json has a {KEY} ({declared.description}), but none of its matrices is codes. "
                "Take it out of the config, or name the checkpoint that it belongs to."
            )
        self._check()

    def __contains__(self, name: str) -> bool:
        """Whether the matrix of this name is codes."""
        return name in self._matrices

    @property
    def parts(self) -> set[str]:
        """Names of the tensors that belong to matrices in codes, and of those that no weight depends on."""
        own = {name for matrix in self._matrices.values() for name in matrix.parts.values()}
        return own | {name for name in self._files if name.endswith(_FOR_INFERENCE)}

    def values(self, name: str, dtype: torch.dtype, device: str) -> Tensor:
        """The matrix [n, k], dequantized."""
        matrix = self._matrices[name]
        return self._read(name, device, lambda parts: matrix.reader.values(parts, matrix.n, matrix.k, dtype))

    def codes(self, name: str, device: str) -> QuantizedTensor:
        """Its codes and scales, as the file has them."""
        matrix = self._matrices[name]

        def read(parts: Mapping[str, Tensor]) -> QuantizedTensor:
            codes = matrix.reader.codes(parts, matrix.n, matrix.k)
            refuse_nonfinite_scale(codes.scale)
            return codes

        return self._read(name, device, read)

    def lacking(self, name: str) -> list[str]:
        """The tensors that a declared matrix would have besides its codes."""
        module = name.removesuffix("weight")
        reader = self._declared.reader(module.removesuffix("."))
        return [] if reader is None else [module + mark for mark in reader.marks]

    def format(self, name: str) -> OperandFormat:
        """What `codes` returns."""
        return self._matrices[name].reader.format

    def _matrix(self, name: str, n: int, k: int) -> _Matrix | None:
        """A matrix that is codes by its declaration and the names of its tensors; None: it is in high precision."""
        module = name.removesuffix("weight")
        reader = self._declared.reader(module.removesuffix("."))
        if reader is None:
            return None
        for part, what in reader.refused.items():
            if module + part in self._files:
                raise UserError(f"{self._where}: {module}{part}: {what} are not read.")
        marks = [module + mark for mark in reader.marks]
        if name in self._files and not any(mark in self._files for mark in marks):
            return None  # `LoadedValues` refuses it unless it is in high precision
        return _Matrix(reader, {part: module + part for part in reader.parts(n, k)}, n, k)

    def _check(self) -> None:
        needed = {part for matrix in self._matrices.values() for part in matrix.parts.values()}
        refuse_tensors(self._where, "lacks the tensors", needed - self._files.keys())
        headers = tensor_headers(needed, self._files, self._where)
        for matrix in self._matrices.values():
            for part, wanted in matrix.reader.parts(matrix.n, matrix.k).items():
                if why := wanted.why_not(*headers[matrix.parts[part]]):
                    raise UserError(f"{self._where}: {matrix.parts[part]} {why}.")

    def _read(self, name: str, device: str, use: Callable[[Mapping[str, Tensor]], T]) -> T:
        """What `use` makes of a matrix's tensors on `device`. UserError for what it cannot read."""
        matrix: _Matrix = self._matrices[name]
        parts: dict[str, Tensor] = {}
        by_name = {full: part for part, full in matrix.parts.items()}
        for file, members in by_file(by_name, self._files).items():
            with opened_tensors(file, self._where, device) as opened:
                parts |= {by_name[member]: opened.get_tensor(member) for member in members}
        for part, tensor in parts.items():
            refuse_nonfinite(self._where, matrix.parts[part], tensor)
        try:
            return use(parts)
        except Unreadable as error:
            raise UserError(f"{self._where}: {name} {error}.") from None
