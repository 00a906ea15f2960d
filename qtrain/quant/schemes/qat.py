"""Quantization-aware training: latent weights, rounded in the forward pass to the codes of the export that is served.

    output       y  = Q(x) · Q(w)ᵀ
    grad_input   dx = dy · Q(w)         in the model's dtype
    grad_weight  dw = dyᵀ · Q(x)        in the model's dtype, for the latent w

Q(w) are the values of the codes that an export of the same format holds, rounded to nearest even once per optimizer
step; Q(x) is x, or its 8-bit codes with one scale per token. The straight-through estimator passes the gradients of
Q(w) to w and those of Q(x) to x. Scales are those of an absmax, so nothing is clipped and no gradient is masked.

`output` runs on 8-bit tensor cores where both operands have 8-bit codes; else codes are dequantized for it, as they are
for both gradients. What backward keeps of x are its codes, if it has any.

A linear whose in-features are no multiple of a group stays in high precision, as no served format holds it.

Source: Jacob et al. 2018, arXiv:1712.05877; straight-through: Bengio et al. 2013, arXiv:1308.3432.
"""

from dataclasses import dataclass
from typing import Literal

import torch

from qtrain.core.errors import UserError
from qtrain.core.hardware.capabilities import lacks_fp8
from qtrain.kernels.numerics.formats import GRANULARITIES
from qtrain.quant.scheme import SCHEMES, LowBitScheme
from qtrain.quant.schemes.nvfp4 import NVFP4
from qtrain.quant.tensor_roles import FormatPair, Gemm
from qtrain.tensors.quantized_tensor import OperandFormat

WEIGHTS: dict[str, OperandFormat] = {
    "int4_g32": OperandFormat("int4", "1x32"),
    "int4_g128": OperandFormat("int4", "1x128"),
    "int8": OperandFormat("int8", "rowwise"),
    "fp8_row": OperandFormat("e4m3", "rowwise"),
    "nvfp4": NVFP4,
}
ACTIVATIONS: dict[str, OperandFormat] = {
    "int8": OperandFormat("int8", "rowwise"),
    "fp8": OperandFormat("e4m3", "rowwise"),
}
SERVED: dict[str, tuple[str, ...]] = {
    "int4_g32": ("none", "int8", "fp8"),
    "int4_g128": ("none", "int8", "fp8"),
    "int8": ("none", "int8"),
    "fp8_row": ("none", "fp8"),
    "nvfp4": ("none",),
}
"""The activations with which each weight is served."""


@SCHEMES.register("qat")
@dataclass(frozen=True)
class Qat(LowBitScheme):
    """quantization-aware training for an export: weights rounded in forward, activations too; backward in bf16"""

    weight: Literal["int4_g32", "int4_g128", "int8", "fp8_row", "nvfp4"] = "int4_g32"
    activations: Literal["none", "int8", "fp8"] = "none"

    latent = True

    def __post_init__(self) -> None:
        """UserError for activations that the weights are not served with."""
        if self.activations not in SERVED[self.weight]:
            others = [weight for weight, allowed in SERVED.items() if self.activations in allowed]
            raise UserError(
                f"--quantize_kwargs.activations: {self.activations!r} does not go with {self.weight} weights; allowed: "
                f"{', '.join(SERVED[self.weight])}. It goes with {', '.join(others)}."
            )

    @property
    def has_groups(self) -> bool:
        """Whether each scale is that of a group within a row, and of nothing else."""
        fmt = WEIGHTS[self.weight]
        return GRANULARITIES[fmt.granularity][1] is not None and fmt.scale_dtype is torch.float32

    def gemm_dtypes(self) -> dict[Gemm, str]:
        # An 8-bit weight is served with activations in its own arithmetic, or in high precision.
        eight_bits = self.activations != "none" and self.weight in ("int8", "fp8_row")
        return {"output": self.activations if eight_bits else "bf16", "grad_input": "bf16", "grad_weight": "bf16"}

    def low_bit_formats(self, gemm: Gemm) -> tuple[OperandFormat, OperandFormat]:
        assert gemm == "output", "gradients run in high precision"
        return ACTIVATIONS[self.activations], WEIGHTS[self.weight]

    def operand_formats(self, gemm: Gemm) -> FormatPair:
        x = ACTIVATIONS.get(self.activations)
        if gemm == "output":
            return x, WEIGHTS[self.weight]
        # dy in high precision, times what `output` reads of the other operand, dequantized.
        codes = WEIGHTS[self.weight] if gemm == "grad_input" else x
        return None, codes and codes._replace(sum_dim=0)

    def refusal(self, in_features: int, out_features: int, device: torch.device) -> str | None:
        group = GRANULARITIES[WEIGHTS[self.weight].granularity][1]
        if group and in_features % group:
            return f"{self.weight} takes in-features in multiples of {group}"
        if self.gemm_dtypes()["output"] != "bf16":
            return super().refusal(in_features, out_features, device)
        # Quantizing to FP8 needs the device's conversions, even where products are in high precision.
        return lacks_fp8(device) if self.activations == "fp8" or self.weight in ("fp8_row", "nvfp4") else None
