"""A trained model in a low-bit format: the codes that training multiplied with where the format can hold them, else
codes that the format's own rule makes.

A linear may fuse several tensors of a checkpoint (q, k, v), which then share what it has one of, such as NVFP4's tensor
scale. New codes are made of the fused weight too: readers fuse those tensors again, and then want one scale.
"""

import functools
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError
from qtrain.models.config.hf_layout import TensorSlice, layout
from qtrain.models.hf.formats.format import EXPORT_FORMATS, ExportFormat, SafetensorsFormat
from qtrain.models.hf.io import MAX_SHARD_BYTES, ExportableTokenizer, export_hf
from qtrain.models.hf.source import ModelSource
from qtrain.models.hf.tensor_files import write_tensors
from qtrain.models.native.decoder import Decoder
from qtrain.quant import LowBitLinear
from qtrain.quant.choices import shared_weights
from qtrain.quant.export import exported_tensors
from qtrain.quant.export_codes import Rows, check_ternary, held_codes, new_codes, take_rows, trained_codes, why_new
from qtrain.quant.merged_linear import MergedLinear, merged_codes
from qtrain.tensors.quantized_tensor import QuantizedTensor

HEAD = "lm_head"


@dataclass
class HeldCodes:
    """What became of the weights in an export."""

    why_new: dict[str, str | None] = field(default_factory=dict)
    """Each matrix, by name -> why its codes are new; None: they are those that training multiplied with."""

    @property
    def matrices(self) -> int:
        return len(self.why_new)

    @property
    def equal(self) -> int:
        """Matrices with the codes that training multiplied with."""
        return sum(why is None for why in self.why_new.values())

    def describe(self) -> str:
        """A line for the log."""
        if self.equal == self.matrices:
            return f"all {self.matrices:,} matrices hold the codes that training multiplied with"
        reasons = Counter(why for why in self.why_new.values() if why is not None)
        why = "; ".join(f"{count:,} x {reason}" for reason, count in reasons.items())
        return f"{self.equal:,} of {self.matrices:,} matrices hold the codes that training multiplied with; new: {why}"


Card = Callable[[Mapping[str, Any] | None, HeldCodes | None], str]
"""(quantization_config, what became of the codes) -> the text of README.md."""


@dataclass(frozen=True)
class ExportOptions:
    """What an export has beside the weights, and which of these stay as they are."""

    tokenizer: ExportableTokenizer | None = None
    left: Collection[str] = (HEAD,)
    """Linears that stay in high precision, by name; embeddings, routers and a head that shares the embedding's matrix
    always do."""
    trained_positions: int = 0
    """As for `export_hf`."""
    card: Card | None = None


PLAIN = ExportOptions()


class WeightsInCodes:
    """The tensors of a native decoder's checkpoint, each either in codes of `fmt` or in high precision. left: linears
    that stay in high precision, by name. UserError, naming `flag`, for a weight that the format cannot hold."""

    def __init__(
        self, model: Decoder, fmt: ExportFormat, left: Collection[str] = (HEAD,), flag: str = "--export_format"
    ):
        self._name = f"{flag}: {EXPORT_FORMATS.name_of(fmt)!r}"
        self.model, self.fmt, self.held = model, fmt, HeldCodes()
        self.entries = {entry.hf_name: entry for entry in layout(model.config)}
        shared = shared_weights(model)
        self._linears: dict[str, Any] = {
            f"{name}.weight": module
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear | LowBitLinear) and name not in left and id(module.weight) not in shared
        }
        if fmt.weight is None:
            self._linears = {}
        values = exported_tensors(model)
        # Consecutive tensors are often rows of one parameter.
        self.high_precision = functools.lru_cache(maxsize=1)(lambda name: values[name]())
        self._trained = functools.lru_cache(maxsize=1)(self._trained_codes)
        self._new = functools.lru_cache(maxsize=1)(self._new_codes)
        self._parameters = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        if why := fmt.refuses_model(model.config):
            raise UserError(f"{self._name} {why}; use another format.")
        for entry in self.entries.values():
            if self.in_codes(entry) and (why := fmt.refusal(*self.shape(entry))):
                raise UserError(f"{self._name} cannot hold {entry.hf_name}: {why}; use another format.")

    def in_codes(self, entry: TensorSlice) -> bool:
        return entry.name in self._linears

    def shape(self, entry: TensorSlice) -> tuple[int, ...]:
        return (entry.stop,) if entry.name is None else entry.shape(self._parameters[entry.name].shape)

    def dtype(self) -> torch.dtype:
        """Of what stays in high precision."""
        return self._parameters["embed_tokens.weight"].dtype

    def left(self) -> list[str]:
        """Names of modules whose matrices stay in high precision, in a checkpoint's words."""
        names = [e.hf_name for e in self.entries.values() if not self.in_codes(e) and len(self.shape(e)) > 1]
        if self.model.config.tie_word_embeddings:
            names.append(f"{HEAD}.weight")  # no tensor of the checkpoint, but a linear of its readers
        return [name.removesuffix(".weight") for name in names if name != "model.embed_tokens.weight"]

    def plain(self, entry: TensorSlice) -> Tensor:
        """A tensor in high precision."""
        if entry.name is None:
            return torch.zeros(entry.stop, dtype=self.dtype())
        return entry.of(self.high_precision(entry.name))

    def codes(self, entry: TensorSlice) -> QuantizedTensor:
        """A matrix in codes; `held` then says whose they are."""
        rows, wanted = Rows(entry.start, entry.start + self.shape(entry)[0], self.shape(entry)[1]), self.fmt.weight
        trained = self._trained(entry.name)
        if (held := held_codes(trained, rows, wanted)) is not None:
            self.held.why_new[entry.hf_name] = None
            return held
        self.held.why_new[entry.hf_name] = None if self._merged(entry.name) else why_new(trained, wanted)
        if wanted.fmt == "ternary":  # each tensor by itself: those of another model may differ in scale
            check_ternary(self.plain(entry), wanted, self._name, entry.hf_name)
            return new_codes(self.plain(entry), wanted)
        new = take_rows(self._new(entry.name), rows, wanted)
        assert new is not None, f"{wanted} holds its own codes"
        return new

    def _merged(self, name: str) -> bool:
        """Whether adapters have trained through the rounding to this format."""
        linear = self._linears[name]
        return isinstance(linear, MergedLinear) and linear.trained == self.fmt.weight

    def _new_codes(self, name: str) -> QuantizedTensor:
        value, wanted = self.high_precision(name), self.fmt.weight
        if self._merged(name):
            return merged_codes(value, wanted, self._linears[name].key.to(value.device))
        return new_codes(value, wanted)

    def _trained_codes(self, name: str) -> list[QuantizedTensor]:
        linear = self._linears[name]
        return trained_codes(linear) if isinstance(linear, LowBitLinear) else []


def export_quantized(
    model: Decoder, source: ModelSource, folder: Path | str, fmt: SafetensorsFormat, options: ExportOptions = PLAIN
) -> HeldCodes:
    """Write a folder that readers of `fmt` load, as `export_hf` writes a dense one. UserError, before anything is
    written, for weights of a shape that the format cannot hold."""
    weights = WeightsInCodes(model, fmt, options.left)
    config = fmt.quantization_config(weights.left())

    def write(_: nn.Module, where: Path) -> dict[str, Any]:
        _write_codes(weights, fmt, where)
        dtype = str(weights.dtype()).removeprefix("torch.")
        return {"torch_dtype": dtype, "quantization_config": config}

    card, positions = options.card, options.trained_positions
    text = None if card is None else lambda: card(config, weights.held)
    export_hf(model, source, folder, options.tokenizer, trained_positions=positions, write_weights=write, card=text)
    return weights.held


def _write_codes(weights: WeightsInCodes, fmt: SafetensorsFormat, folder: Path) -> None:
    """Write the tensors of every weight, one matrix at a time."""
    names = dict(_tensor_names(weights, fmt))
    made = functools.lru_cache(maxsize=1)(
        lambda hf_name: fmt.tensors(weights.codes(weights.entries[hf_name]), weights.shape(weights.entries[hf_name])[1])
    )

    def on(device: str, name: str) -> Tensor:
        entry, part = names[name]
        if device == "meta" and not part:
            return torch.empty(weights.shape(entry), dtype=weights.dtype(), device=device)
        if device == "meta":
            return _empty(weights, fmt, entry)[part]
        tensor = made(entry.hf_name)[part] if part else weights.plain(entry)
        return tensor.to(device, copy=True).contiguous()

    columns = {name: weights.shape(e)[1] if weights.in_codes(e) else None for name, e in weights.entries.items()}
    write_tensors(names, on, folder, MAX_SHARD_BYTES, fmt.metadata(columns, weights.dtype()))


def _tensor_names(weights: WeightsInCodes, fmt: SafetensorsFormat) -> Iterator[tuple[str, tuple[TensorSlice, str]]]:
    """(name in the file, (tensor of a dense checkpoint, part of its codes; empty: the tensor itself))."""
    for hf_name, entry in weights.entries.items():
        if not weights.in_codes(entry):
            yield hf_name, (entry, "")
            continue
        for part in _empty(weights, fmt, entry):
            yield f"{hf_name.removesuffix('weight')}{part}", (entry, part)


def _empty(weights: WeightsInCodes, fmt: SafetensorsFormat, entry: TensorSlice) -> dict[str, Tensor]:
    """The tensors of a matrix in codes, on the meta device."""
    n, k = weights.shape(entry)
    return dict(fmt.tensors(QuantizedTensor.empty(fmt.weight, (n, k), "meta"), k))
