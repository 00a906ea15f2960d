"""What an export format declares: how it holds a weight's codes and scales, and under which names readers find them.

A format is a frozen dataclass registered in EXPORT_FORMATS, in the file of its family. `quantized_export.py` takes the
codes from training where the format can hold them, makes them by the format's own rule where it cannot, and writes.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from qtrain.core.maybe_none import MaybeNone
from qtrain.core.registry import Registry
from qtrain.kernels.numerics.formats import GRANULARITIES
from qtrain.models.config.model import ModelConfig
from qtrain.tensors.quantized_tensor import OperandFormat, QuantizedTensor


class ExportFormat:
    """A choice of `--export_format`. One without `weight` is dense: its weights are in the model's dtype."""

    weight: OperandFormat | MaybeNone = None
    """What a weight's codes and scales are; None of a dense format."""

    columns_multiple: int = 1
    """What the columns of a weight are a multiple of."""

    rows_multiple: int = 1
    """What its rows are a multiple of."""

    scale_rounding: str = ""
    """How the file rounds scales, for messages; empty: it holds them exactly."""

    loaded_by: str = "AutoModelForCausalLM.from_pretrained loads it"
    """Who reads an export, for the log."""

    package: str | None = None
    """The pip package that writes it; None: none is needed."""

    def refuses_model(self, config: ModelConfig) -> str | None:
        """Why a model cannot be exported so, as the rest of a sentence that begins with the format; None: it can."""
        return None

    def refusal(self, rows: int, columns: int) -> str | None:
        """Why the format cannot hold a weight of this shape; None: it can."""
        for size, multiple, name in (
            (columns, self.columns_multiple, "in-features"),
            (rows, self.rows_multiple, "out-features"),
        ):
            if size % multiple:
                return f"it takes {name} in multiples of {multiple}, not {size}"
        return None


class SafetensorsFormat(ExportFormat, ABC):
    """Codes and scales in safetensors, described by `quantization_config` in config.json."""

    weight: OperandFormat

    @abstractmethod
    def tensors(self, codes: QuantizedTensor, columns: int) -> Mapping[str, Tensor]:
        """The file's tensors of a weight with these codes, by the last part of their names; also of codes on the meta
        device. columns: of the weight."""

    def metadata(self, columns: Mapping[str, int | None], dtype: torch.dtype) -> dict[str, str]:
        """What the header of each file says besides. columns: of every weight in codes, by its name in a dense
        checkpoint; None: the tensor is in high precision. dtype: that of the model."""
        return {}

    @abstractmethod
    def quantization_config(self, left: Sequence[str]) -> dict[str, Any]:
        """The entry of config.json. left: modules whose weights stay in high precision, by name."""


def stored_scale(scale: Tensor) -> Tensor:
    """A scale as files hold it: a power of two (E8M0) as its byte."""
    return scale.view(torch.uint8) if scale.itemsize == 1 else scale


def blocks(fmt: OperandFormat) -> tuple[int, int]:
    """Rows and columns that share a scale, for formats whose blocks are whole."""
    down, across = GRANULARITIES[fmt.granularity]
    return down or 1, across or 1


EXPORT_FORMATS: Registry[ExportFormat] = Registry("export format", ["qtrain.models.hf.formats"])
