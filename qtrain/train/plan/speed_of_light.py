"""The speed of light: the shortest time of a run's FLOPs, each GEMM at the dense peak of its dtype."""

from collections.abc import Iterable, Mapping

import torch

from qtrain.core.hardware import Hardware
from qtrain.quant import LinearChoice, LowBitScheme

Shares = Mapping[LowBitScheme | None, float]
"""Fraction of some linears' FLOPs by the scheme that they run in; None: the model's dtype."""


def shortest_seconds(
    flops: Mapping[str, float],
    shares: Mapping[str, Shares],
    hardware: Hardware,
    dtype: torch.dtype,
    *,
    frozen: bool = False,
) -> dict[str, float]:
    """Seconds per token at dense peaks, by kind of work.

    shares: of the kinds that consist of linears (`blocks`, `head`); all other kinds, and the GEMMs that a scheme leaves
    in bf16, run in `dtype`. frozen: the linears have no grad_weight, and `flops` does not count it.
    """
    plain = "bf16" if dtype == torch.bfloat16 else "fp32"

    def seconds_of(work: float, scheme: LowBitScheme | None) -> float:
        gemms = {} if scheme is None else scheme.gemm_dtypes()
        names = [name for gemm, name in gemms.items() if not (frozen and gemm == "grad_weight")] or [plain]
        rates = [hardware.peak(plain if name == "bf16" else name) * 1e12 for name in names]
        return sum(work / len(rates) / rate for rate in rates)

    return {
        kind: sum(seconds_of(share * work, scheme) for scheme, share in shares.get(kind, {None: 1.0}).items())
        for kind, work in flops.items()
    }


def emulated_arithmetics(linears: Iterable[LinearChoice], hardware: Hardware) -> tuple[str, ...]:
    """The arithmetics of the linears' GEMMs that the device lacks; "grouped": only for products of experts."""
    found = set()
    for linear in linears:
        for name in set(linear.scheme.gemm_dtypes().values() if linear.scheme else ()) - {"bf16"}:
            if hardware.emulates(name):
                found.add(name)
            elif linear.emulated:
                found.add(f"grouped {name}")
    return tuple(sorted(found))
