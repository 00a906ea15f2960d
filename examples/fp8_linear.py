"""An FP8 linear from its three GEMMs, with the kernels as functions: `python -m examples.fp8_linear`.

    output       Y  [M, N] = X  [M, K] · W [N, K]ᵀ
    grad_input   dX [M, K] = dY [M, N] · W [N, K]
    grad_weight  dW [N, K] = dY [M, N]ᵀ · X [M, K]

FP8 tensor cores read both operands along the dimension that is summed over. So each tensor is quantized twice: by its
rows for the product that sums over columns, and transposed for the one that sums over rows.
"""

import torch
from torch import Tensor, nn

from qtrain.kernels.gemm.scaled_mm import scaled_mm
from qtrain.kernels.quantize.operators import quantize_dual


class Fp8LinearFunction(torch.autograd.Function):
    """x [M, K], weight [N, K] -> y [M, N]."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        # Codes, a scale per row; codes of the transpose, a scale per row of that. A scale multiplies.
        x8, x_scale, x8_t, x_scale_t = quantize_dual(x, "e4m3", "rowwise", "rowwise")  # [M, K], [M], [K, M], [K]
        w8, w_scale, w8_t, w_scale_t = quantize_dual(weight, "e4m3", "rowwise", "rowwise")
        ctx.save_for_backward(x8_t, x_scale_t, w8_t, w_scale_t)  # codes, a byte an element
        return scaled_mm(x8, w8, x_scale, w_scale, x.dtype)  # sums over K

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        x8_t, x_scale_t, w8_t, w_scale_t = ctx.saved_tensors
        dy8, dy_scale, dy8_t, dy_scale_t = quantize_dual(dy, "e4m3", "rowwise", "rowwise")
        dx = scaled_mm(dy8, w8_t, dy_scale, w_scale_t, dy.dtype, fast_accum=False)  # sums over N
        dw = scaled_mm(dy8_t, x8_t, dy_scale_t, x_scale_t, dy.dtype, fast_accum=False)  # sums over M
        return dx, dw


class Fp8Linear(nn.Linear):
    """`nn.Linear` whose three GEMMs run in FP8."""

    def forward(self, x: Tensor) -> Tensor:
        y = Fp8LinearFunction.apply(x.reshape(-1, x.shape[-1]), self.weight)
        return y.view(*x.shape[:-1], -1) + (0 if self.bias is None else self.bias)


def relative_error(found: Tensor, true: Tensor) -> float:
    return float((found.double() - true).norm() / true.norm())


def main() -> dict[str, float]:
    """Compares each GEMM with fp64. Returns the relative errors."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    linear = Fp8Linear(512, 768, device=device, dtype=torch.bfloat16)
    x = torch.randn(256, 512, device=device, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(256, 768, device=device, dtype=torch.bfloat16)
    y = linear(x)
    y.backward(dy)
    with torch.no_grad():
        true = {
            "output": x.double() @ linear.weight.double().T + linear.bias.double(),
            "grad_input": dy.double() @ linear.weight.double(),
            "grad_weight": dy.double().T @ x.double(),
        }
    found = {"output": y, "grad_input": x.grad, "grad_weight": linear.weight.grad}
    errors = {name: relative_error(value.detach(), true[name]) for name, value in found.items() if value is not None}
    for name, error in errors.items():
        print(f"{name:12s} relative error {error:.4f}")
    return errors


if __name__ == "__main__":
    main()
