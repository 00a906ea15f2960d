"""The values that a native decoder's parameters begin with, one parameter at a time: drawn from a seed, or read from a
source's safetensors."""

import hashlib
from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels.numerics.formats import GRANULARITIES
from qtrain.models.config.hf_layout import TensorSlice, is_ignored, layout
from qtrain.models.hf.coded_files import CodedFiles
from qtrain.models.hf.io import (
    files_of_tensors,
    opened_tensors,
    refuse_nonfinite,
    refuse_tensors,
    tensor_headers,
    weights_folder,
)
from qtrain.models.hf.source import ModelSource
from qtrain.models.native.decoder import Decoder
from qtrain.tensors.partition import Partition
from qtrain.tensors.stored_weight import STORED_FORMATS, StoredWeight

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class DrawnValues:
    """Matrices from normal(0, std) as transformers draws them, biases of 0 and norms of 1.

    Every parameter has its own generator, on its device, seeded by (seed, name), so its values do not depend on the
    other parameters. They are drawn in fp32, so a bf16 model is the rounded fp32 model. A rank that holds a part of a
    parameter draws all of it, and keeps its part.
    """

    def __init__(self, model: Decoder, seed: int):
        self._std, self._seed, self._partition = model.config.initializer_range, seed, model.partition

    @torch.no_grad()
    def fill(self, name: str, target: Tensor) -> None:
        """Give `target` the value of the parameter `name`, or of the part of it that this rank holds."""
        if target.ndim < 2:
            target.fill_(0.0 if name.endswith("bias") else 1.0)
            return
        generator, part = named_generator(self._seed, name, target.device), self._partition(name)
        shape = part.full_shape(target.shape) if part else target.shape
        full = torch.empty(shape, dtype=torch.float32, device=target.device)
        full.normal_(0.0, self._std, generator=generator)
        target.copy_(part.take(full) if part else full)


def named_generator(seed: int, name: str, device: torch.device) -> torch.Generator:
    """A generator on `device`, seeded by a hash of (seed, name)."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return torch.Generator(device).manual_seed(int.from_bytes(digest[:8]) >> 1)  # seeds are int64: 63 bits


class LoadedValues:
    """What a source's safetensors hold, converted to the parameters' dtype. Buffers of the model are among it. Matrices
    in codes (`readers/`) are dequantized one at a time, or given as they are.

    UserError naming tensors that are missing, that the architecture does not have, that have another shape, or that are
    codes of another format: before any is read.
    """

    def __init__(self, model: Decoder, source: ModelSource):
        self._where, self._config = f"--pretrained ({source.name})", model.config
        self._files = files_of_tensors(weights_folder(source), self._where)
        self._partition = model.partition
        slices = {entry.hf_name: entry for entry in layout(model.config)}
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self._coded = self._coded_files(source, slices, tensors)
        own = slices.keys() | (set() if self._coded is None else self._coded.parts)
        extra = {name for name in self._files.keys() - own if not is_ignored(name, model.config)}
        # Some files store the tied matrix twice.
        self._tied_head = model.config.tie_word_embeddings and _HEAD in extra
        if self._tied_head:
            extra.remove(_HEAD)
            slices[_HEAD] = TensorSlice(_HEAD, _HEAD)
        plain = {name: entry for name, entry in slices.items() if self._coded is None or name not in self._coded}
        refuse_tensors(self._where, "lacks the tensors", plain.keys() - self._files.keys())
        refuse_tensors(self._where, "has tensors that this architecture does not", extra)
        self._check(plain.values(), tensors)
        self._slices: dict[str, dict[Path, list[TensorSlice]]] = {}
        for hf_name, entry in plain.items():
            self._slices.setdefault(entry.name, {}).setdefault(self._files[hf_name], []).append(entry)
        self._matrices: dict[str, list[TensorSlice]] = {}
        """Those in codes, by parameter."""
        for hf_name in slices.keys() - plain.keys():
            self._matrices.setdefault(slices[hf_name].name, []).append(slices[hf_name])

    def _coded_files(
        self, source: ModelSource, slices: dict[str, TensorSlice], tensors: dict[str, Tensor]
    ) -> CodedFiles | MaybeNone:
        if (declared := source.declared_codes()) is None:
            return None
        shapes = {name: self._full_shape(e, tensors) for name, e in slices.items() if e.name and e.name != _EMBEDDING}
        matrices = {name: (shape[0], shape[1]) for name, shape in shapes.items() if len(shape) == 2}
        return CodedFiles(declared, self._files, matrices, self._where)

    def _full_shape(self, entry: TensorSlice, tensors: dict[str, Tensor]) -> tuple[int, ...]:
        """Of the checkpoint's tensor."""
        part, target = self._partition(entry.name), tensors[entry.name]
        return entry.shape(part.full_shape(target.shape) if part else target.shape)

    def _check(self, slices: Collection[TensorSlice], tensors: dict[str, Tensor]) -> None:
        headers, wrong = tensor_headers((entry.hf_name for entry in slices), self._files, self._where), []
        for entry in slices:
            dtype, shape = headers[entry.hf_name]
            if shape != (expected := self._full_shape(entry, tensors)):
                wrong.append(f"{entry.hf_name} {list(shape)} (expected {list(expected)})")
            elif "F" not in dtype or (self._coded is not None and dtype.startswith("F8")):
                # F32, BF16, F8_E4M3, ...; whole numbers are codes of another format
                scales = [] if self._coded is None else self._coded.lacking(entry.hf_name)
                refuse_tensors(self._where, "lacks the tensors", scales)
                raise UserError(
                    f"{self._where}: {entry.hf_name} is stored as {dtype}; only floating-point weights load."
                )
        refuse_tensors(self._where, "has tensors of another shape than its config says", wrong)

    @torch.no_grad()
    def fill(self, name: str, target: Tensor) -> None:
        """Give `target` the value of the parameter or buffer `name`, or of the part of it that this rank holds; a
        buffer that the source does not have keeps its value."""
        part = self._partition(name)
        for file, members in self._slices.get(name, {}).items():
            with opened_tensors(file, self._where, str(target.device)) as opened:
                for entry in members:
                    stored = opened.get_tensor(entry.hf_name)
                    refuse_nonfinite(self._where, entry.hf_name, stored)
                    _write(target, stored, entry, part)
        for entry in self._matrices.get(name, ()):
            _write(target, self._coded.values(entry.hf_name, target.dtype, str(target.device)), entry, part)
        if name == _EMBEDDING and self._tied_head:
            self._compare_tied_head(target, part)

    @torch.no_grad()
    def codes(
        self, name: str, format: str, *, shape: torch.Size, dtype: torch.dtype, device: torch.device
    ) -> StoredWeight | None:
        """The parameter `name` as a weight stored in `format`, with the codes that the source has of it; None unless
        all of its tensors are in this format, and on this process."""
        entries, wanted = self._matrices.get(name, []), STORED_FORMATS[format]
        if name in self._slices or not entries or self._partition(name) is not None:
            return None
        group = GRANULARITIES[wanted.granularity][0]
        if group is None or any(
            self._coded.format(entry.hf_name) != wanted or entry.start % group for entry in entries
        ):
            return None
        stored = StoredWeight.empty(shape, format, dtype, device)
        for entry in entries:
            rows = entry.shape(shape)[0]
            codes = self._coded.codes(entry.hf_name, str(device))
            stored.codes[entry.start : entry.start + rows].copy_(codes.codes)
            # Blocks of several rows begin with a tensor's first row.
            stored.scale[entry.start // group : -(-(entry.start + rows) // group)].copy_(codes.scale)
        return stored

    def _compare_tied_head(self, embedding: Tensor, part: Partition | None) -> None:
        head = torch.empty_like(embedding)
        self.fill(_HEAD, head)
        if not torch.equal(head, embedding):
            raise UserError(
                f"{self._where}: lm_head.weight differs from the embedding, but the config says tie_word_embeddings. "
                "Set tie_word_embeddings to false in its config.json."
            )


def _write(target: Tensor, stored: Tensor, entry: TensorSlice, part: Partition | None) -> None:
    """Write a checkpoint's tensor into a parameter, or what of it a tensor rank holds."""
    if part is None:
        entry.of(target).copy_(stored)
        return
    if not part.held:  # a term that one rank adds for all: the others' stays zero
        target.zero_()
    for start, at, length in part.pieces():
        if part.dim == 0:  # the rows of this piece that the entry has
            low, high = max(start, entry.start), min(start + length, entry.start + stored.shape[0])
            if low < high:
                target[at + low - start : at + high - start].copy_(stored[low - entry.start : high - entry.start])
        else:
            target.narrow(part.dim, at, length).copy_(stored.narrow(part.dim, start, length))
