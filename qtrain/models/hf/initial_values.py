"""The values that a native decoder's parameters begin with, one parameter at a time: drawn from a seed, or read from a
source's safetensors."""

import hashlib
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from qtrain.core.errors import UserError
from qtrain.models.config.hf_layout import TensorSlice, is_ignored, layout
from qtrain.models.hf.io import files_of_tensors, opened_tensors, refuse_nonfinite, refuse_tensors, weights_folder
from qtrain.models.hf.source import ModelSource
from qtrain.models.native.decoder import Decoder
from qtrain.tensors.partition import Partition

_HEAD, _EMBEDDING = "lm_head.weight", "embed_tokens.weight"


class InitialValues(Protocol):
    def fill(self, name: str, target: Tensor) -> None:
        """Give `target` the value of the parameter `name`, or of the part of it that this rank holds."""


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
    """What a source's safetensors hold, converted to the parameters' dtype. Buffers of the model are among it.

    UserError naming tensors that are missing, that the architecture does not have, that have another shape, or that are
    codes of another format: before any is read.
    """

    def __init__(self, model: Decoder, source: ModelSource):
        self._where, self._config = f"--pretrained ({source.name})", model.config
        self._files = files_of_tensors(weights_folder(source), self._where)
        self._partition = model.partition
        slices = {entry.hf_name: entry for entry in layout(model.config)}
        extra = {name for name in self._files.keys() - slices.keys() if not is_ignored(name, model.config)}
        # Some files store the tied matrix twice.
        self._tied_head = model.config.tie_word_embeddings and _HEAD in extra
        if self._tied_head:
            extra.remove(_HEAD)
            slices[_HEAD] = TensorSlice(_HEAD, _HEAD)
        refuse_tensors(self._where, "lacks the tensors", slices.keys() - self._files.keys())
        refuse_tensors(self._where, "has tensors that this architecture does not", extra)
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        self._check(slices.values(), tensors)
        self._slices: dict[str, dict[Path, list[TensorSlice]]] = {}
        for hf_name, entry in slices.items():
            self._slices.setdefault(entry.name, {}).setdefault(self._files[hf_name], []).append(entry)

    def _check(self, slices: Any, tensors: dict[str, Tensor]) -> None:
        by_file: dict[Path, list[TensorSlice]] = {}
        for entry in slices:
            by_file.setdefault(self._files[entry.hf_name], []).append(entry)
        wrong = []
        for file, members in sorted(by_file.items()):
            with opened_tensors(file, self._where) as opened:
                missing = {entry.hf_name for entry in members} - set(opened.keys())
                refuse_tensors(self._where, f"lacks in {file.name} the tensors", missing)
                for entry in members:
                    # Shape and dtype are in the file's header: nothing is loaded yet.
                    stored = opened.get_slice(entry.hf_name)
                    shape, dtype = tuple(stored.get_shape()), stored.get_dtype()
                    part, target = self._partition(entry.name), tensors[entry.name]
                    expected = entry.shape(part.full_shape(target.shape) if part else target.shape)
                    if shape != expected:
                        wrong.append(f"{entry.hf_name} {list(shape)} (expected {list(expected)})")
                    elif "F" not in dtype:  # F32, BF16, F8_E4M3, ...; whole numbers are codes of another format
                        raise UserError(
                            f"{self._where}: {entry.hf_name} is stored as {dtype}; only floating-point weights load."
                        )
        refuse_tensors(self._where, "has tensors of another shape than its config says", wrong)

    @torch.no_grad()
    def fill(self, name: str, target: Tensor) -> None:
        """As `InitialValues.fill`; a buffer that the source does not have keeps its value."""
        part = self._partition(name)
        for file, members in self._slices.get(name, {}).items():
            with opened_tensors(file, self._where, str(target.device)) as opened:
                for entry in members:
                    stored = opened.get_tensor(entry.hf_name)
                    refuse_nonfinite(self._where, entry.hf_name, stored)
                    _write(target, stored, entry, part)
        if name == _EMBEDDING and self._tied_head:
            self._compare_tied_head(target, part)

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
