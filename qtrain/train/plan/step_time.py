"""How long a step takes on N GPUs: one GPU's computation, what the exchange adds to it, and what of that is exposed.

The speed of light is the shortest time of a run's FLOPs, each GEMM at the dense peak of its dtype. Training in full,
without the optimizer's step, ran at a fraction of it that was measured on one H200. Of that time attention has a rate
of its own, and what is read and written between products takes its bytes over the bandwidth. The rest is the products',
whose fraction of the speed of light another GPU, and a model that is larger than the measured ones, are assumed to
reach too. So adapters save a third of the products' time but nothing of the rest, schemes that read more take longer,
and a GPU of less bandwidth is slower.

The exchange's own cost apart from the wire, copies in memory and launches from Python, was measured on two H200s.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple, get_args

import numpy as np
import torch

from qtrain.core.hardware.device import Hardware, datasheet_hardware
from qtrain.parallel.mesh import Mesh
from qtrain.quant import LinearChoice, LowBitScheme
from qtrain.quant.schemes.fp8_tensorwise import Fp8Tensorwise
from qtrain.quant.tensor_roles import HIGH_PRECISION, Gemm
from qtrain.train.log.metrics import IMAGES, TOKENS, SampleUnit
from qtrain.train.plan.cluster import Cost
from qtrain.train.plan.traffic import Traffic

TEACHER = "teacher"
"""The kind of work of a teacher (--distill), which has a forward pass alone."""
Shares = Mapping[LowBitScheme | None, float]
"""Fraction of some linears' FLOPs by the scheme that they run in; None: the model's dtype."""


# ---- the speed of light ---------------------------------------------------------------------------------------------


def shortest_seconds(
    flops: Mapping[str, float],
    shares: Mapping[str, Shares],
    hardware: Hardware,
    dtype: torch.dtype,
    *,
    frozen: bool = False,
    reached: bool = False,
) -> dict[str, float]:
    """Seconds per token at dense peaks, by kind of work. reached: longer where scales of blocks make a GEMM slower.

    shares: of the kinds that consist of linears (`blocks`, `head`); all other kinds, and the GEMMs that a scheme leaves
    in bf16, run in `dtype`. frozen: the linears have no grad_weight, and `flops` does not count it.
    """
    plain = "bf16" if dtype == torch.bfloat16 else "fp32"

    # The three GEMMs of a linear have equal FLOPs: each takes an equal share of the work, at the peak of its dtype.
    def seconds_of(work: float, scheme: LowBitScheme | None) -> float:
        chosen, total = _arithmetics(scheme, frozen), 0.0
        for gemm, name in chosen.items():
            rate = hardware.peak(plain if name == "bf16" else name) * 1e12
            total += work / len(chosen) / rate / (_blocks_rate(scheme, gemm) if reached and name != "bf16" else 1.0)
        return total

    return {
        kind: sum(seconds_of(share * work, scheme) for scheme, share in shares.get(kind, {None: 1.0}).items())
        for kind, work in flops.items()
    }


def _arithmetics(scheme: LowBitScheme | None, frozen: bool) -> dict[Gemm, str]:
    """Of each GEMM of a linear; frozen: it has no grad_weight."""
    every = dict.fromkeys(get_args(Gemm), "bf16") if scheme is None else scheme.gemm_dtypes()
    return {gemm: name for gemm, name in every.items() if not (frozen and gemm == "grad_weight")}


def _blocks_rate(scheme: LowBitScheme | None, gemm: Gemm) -> float:
    a, b = HIGH_PRECISION if scheme is None else scheme.operand_formats(gemm)
    return 1.0 if a is None or b is None else BLOCKS_RATE.get(frozenset((a.granularity, b.granularity)), 1.0)


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


# ---- the step -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Measured:
    """Fractions of the speed of light that one H200 reached."""

    models: str
    """The models that were measured, in words."""
    fractions: dict[str, dict[float, float]]
    """By scheme, then by parameters of the model."""


MEASURED_GPU, MEASURED_SEQUENCE = "h200", 1024
"""The GPU, and tokens a sequence, of the measurements below."""
MEASURED_SCHEME = Fp8Tensorwise(scaling="delayed")
"""Their scheme in low bits. What another one's quantizers move beyond it takes time of its own."""

MEASURED = {
    # Within 5% of docs/results/train_steps.json, as H200s differ, less the optimizer's step: compiled, sequence 1024.
    TOKENS: Measured(
        "Qwen2.5 of 0.5B to 7B",
        {
            "fp8_tensorwise": {494e6: 0.386, 1544e6: 0.463, 3086e6: 0.494, 7616e6: 0.547},
            "bf16": {494e6: 0.510, 1544e6: 0.595, 3086e6: 0.609, 7616e6: 0.636},
        },
    ),
    # docs/results/vision.json: 64 images of 224 x 224 a step.
    IMAGES: Measured("ViT-giant", {"fp8_tensorwise": {1135e6: 0.387}, "bf16": {1135e6: 0.465}}),
}

MIXTURES = Measured(
    # docs/results/train_steps.json, bf16 mixtures.json; less the optimizer's step.
    "Qwen3-30B-A3B with 12 layers",
    {"fp8_tensorwise": {8.1e9: 0.398}, "bf16": {8.1e9: 0.539}},
)

BANDWIDTH_REACHED = 0.88
"""Of the datasheet's bandwidth, what a copy in an H200's memory reaches, and quantizers with it: docs/benchmarks.md."""

ATTENTION_RATE = 0.54
"""Of the dense bf16 peak, what attention reaches over forward and backward: such that a step with adapters over one
sequence of 131,072 tokens takes what it was measured to (docs/measured_memory.md), of which attention is 3/4."""
ATTENTION_BACKWARD = 2.5
"""Products of its backward pass over those of its forward pass: it computes q·kᵀ again."""

BLOCKS_RATE = {
    frozenset({"1x128", "128x128"}): 1351 / 1489,
    frozenset({"1x128"}): 1015 / 1489,
    frozenset({"32x32"}): 212 / 1485,
}
"""Rate of products by the blocks of both operands' scales, over that with scales of tensors, or of rows:
docs/benchmarks.md, 8192³."""

GRADIENT_MATRIX_SECONDS, WEIGHT_MATRIX_SECONDS = 0.020e-3, 0.055e-3
PARAMETER_SECONDS = 4.7e-12
"""docs/results/distributed.json: over a step of the 0.5B two H200s take 12 ms (ZeRO-2) and 11 ms (DDP) longer than one,
of which 6 and 11 ms are on the wire; over one of the 7B 201 ms (ZeRO-2), 45 of them on the wire. Taken as launches,
so many per matrix whose gradient is reduced, and whose weight is gathered, and as memory traffic per parameter; about
half of the 7B's is left unexplained."""


TENSOR_PARALLEL = 1.134
"""How much longer halves of all layers take than half of the layers' time: smaller GEMMs, sums of partial products:
docs/results/distributed.json, --tp 2 of the 7B on two H200s, less its wires. Further halves are assumed to cost as much
again."""
CONTENTION = 0.11
"""Seconds that a second of exchange costs the computation that overlaps with it, in multiprocessors and memory
bandwidth: docs/distributed.md, full sharding of the 7B, less the above. There codes are copied within a machine; where
NCCL gathers, between machines and of weights in bf16, as much is assumed, not measured."""


def measured_sol(unit: SampleUnit, parameters: int, *, low_bit: float, moe: bool = False) -> tuple[float, str]:
    """(fraction of the speed of light for a model of this many parameters, what that was measured on). Between the
    measured models it is linear in the logarithm of their size, beyond them that of the nearest. low_bit: the share of
    the shortest time that layers in low bits take."""
    measured = MIXTURES if moe else MEASURED[unit]

    def fraction(scheme: str) -> float:
        sizes, fractions = zip(*measured.fractions[scheme].items(), strict=True)
        return float(np.interp(math.log(parameters), np.log(sizes), fractions))

    shares = {scheme: share for scheme, share in (("fp8_tensorwise", low_bit), ("bf16", 1 - low_bit)) if share}
    source = f"measured on one H200, {measured.models} in {' and '.join(shares)}"
    if len(shares) == 1:
        return fraction(*shares), source
    return 1 / sum(share / fraction(scheme) for scheme, share in shares.items()), source


def low_bit_share(
    by_kind: Mapping[str, Shares], seconds: Mapping[str, float], plain: Mapping[str, float], frozen: bool
) -> float:
    """`low_bit` of `measured_sol`: of the shortest time what is left without that of the GEMMs in high precision, to
    which their share of attention counts. by_kind: of layers and head; plain: `seconds` if nothing was quantized."""

    def high_precision(shares: Shares) -> float:
        found = {scheme: list(_arithmetics(scheme, frozen).values()) for scheme in shares}
        return sum(share * found[scheme].count("bf16") / len(found[scheme]) for scheme, share in shares.items())

    high = sum(high_precision(shares) * plain.get(kind, 0.0) for kind, shares in by_kind.items())
    high /= sum(plain.get(kind, 0.0) for kind in by_kind)
    return max(round(1 - high * sum(plain.values()) / sum(seconds.values()), 9), 0.0)


@dataclass(frozen=True)
class BetweenProducts:
    """Bytes per token that are read and written between products (`models/cost/step_traffic.py`)."""

    run: float
    measured: float
    """If everything trains in `MEASURED_SCHEME` and nothing is recomputed, as in the runs of `MEASURED`."""
    flops: Mapping[str, float]
    """FLOPs per token of such a run."""

    def products_sol(self, sol: float, shares: Mapping[str, Shares], dtype: torch.dtype) -> float:
        """The fraction of the speed of light that products but attention's reached in a run that as a whole reached
        `sol`."""
        gpu = datasheet_hardware(MEASURED_GPU)
        shortest = shortest_seconds(self.flops, shares, gpu, dtype)
        products = sum(s for kind, s in shortest.items() if kind != "attention")
        others = sum(attention_seconds(shortest)) + self.measured / (BANDWIDTH_REACHED * gpu.memory_bandwidth)
        left = sum(shortest.values()) / sol - others
        return min(products / left, 1.0) if left > 0 else 1.0


class Passes(NamedTuple):
    """Seconds of one GPU's micro-batches of a step."""

    forward: float
    backward: float
    """With what it recomputes."""


def attention_seconds(seconds: Mapping[str, float]) -> Passes:
    """Of a sample; without what is recomputed. seconds: the shortest time by kind, forward and backward."""
    forward = seconds.get("attention", 0.0) / 3 / ATTENTION_RATE
    return Passes(forward, ATTENTION_BACKWARD * forward)


def compute_seconds(
    seconds: Mapping[str, float], samples: int, sol: float, again: Mapping[str, float], frozen: bool = False
) -> Passes:
    """What every kind of work takes at the fraction `sol` of its shortest time. seconds: that per sample by kind;
    samples: tokens or images; again: by kind, the share of the forward pass that backward recomputes; frozen: linears
    of layers and the head have no grad_weight."""
    forward = backward = 0.0
    for kind, s in seconds.items():
        # Forward is one of three equal parts (forward, grad_input, grad_weight), or of two.
        part = s if kind == TEACHER else s / (2 if frozen and kind in ("blocks", "head") else 3)
        forward += part
        backward += s - part + again.get(kind, 0.0) * part
    return Passes(samples * forward / sol, samples * backward / sol)


def token_seconds(
    seconds: Mapping[str, float],
    samples: int,
    sol: float,
    again: Mapping[str, float],
    frozen: bool,
    moved: float,
    bandwidth: float,
) -> Passes:
    """`compute_seconds` of a language model: sol is that of products, attention has its own rate, and `moved` bytes per
    token take their share of the bandwidth, of which a third is the forward pass's."""
    products = {kind: s for kind, s in seconds.items() if kind != "attention"}
    forward, backward = compute_seconds(products, samples, sol, again, frozen)
    attention, between = attention_seconds(seconds), moved / (BANDWIDTH_REACHED * bandwidth)
    return Passes(
        forward + samples * (attention.forward + between / 3),
        backward + samples * (attention.backward + again.get("attention", 0.0) * attention.forward + between * 2 / 3),
    )


def offload_seconds(
    host: Mapping[str, int],
    bandwidth: float,
    forward: float,
    backward: float,
    micro_batches: int,
    embedding: float = 0.0,
) -> float:
    """Of a step, what one GPU waits for copies to and from host memory. host: bytes there by the names of --offload;
    bandwidth: bytes per second each way; forward, backward: seconds of a micro-batch's passes; embedding: bytes of it
    among the weights.

    States cross the link both ways at once while nothing else runs, and so do weights that train, whose gradients come
    with them. Residuals go out during a micro-batch's forward pass and come back during its backward pass, weights come
    in both; the sum of gradients comes and goes during the backward pass, but does not come in the first. A pass waits
    for what takes longer than it. Nothing overlaps with the embedding's copy, the first of a micro-batch, nor with that
    of its gradient, the last."""
    residuals, weights, gradients = (host.get(name, 0) for name in ("residuals", "weights", "gradients"))
    at_step = sum(host.values()) - residuals - (0 if gradients else weights)
    ends = embedding * (bool(weights) + bool(gradients))
    weights, gradients = (max(size - embedding, 0) for size in (weights, gradients))
    forward_wait = max(max(residuals, weights) / bandwidth - forward, 0.0)
    first_wait = max(max(residuals + weights, gradients) / bandwidth - backward, 0.0)
    backward_wait = max((residuals + weights + gradients) / bandwidth - backward, 0.0)
    waits = micro_batches * forward_wait + first_wait + (micro_batches - 1) * backward_wait
    return (at_step + micro_batches * ends) / bandwidth + waits


def exchange_overhead(traffic: Traffic, mesh: Mesh, reshards: bool = False) -> float:
    """Seconds of the exchange that are not on the wire. With full sharding memory is read and written in every
    micro-batch."""
    if mesh.world == 1:
        return 0.0
    if traffic.experts is not None:
        part, expert_mesh = traffic.experts.part(mesh.ep), mesh.expert_mesh
        part_overhead = exchange_overhead(part, Mesh(expert_mesh.replicate, expert_mesh.shard), reshards)
        return part_overhead + exchange_overhead(replace(traffic, experts=None), mesh, reshards)
    if traffic.group is not None:
        return exchange_overhead(replace(traffic, group=None), Mesh(mesh.replicate, mesh.shard), reshards)
    # Without shards, as in DDP, no weights are gathered.
    per_matrix = GRADIENT_MATRIX_SECONDS + WEIGHT_MATRIX_SECONDS * (mesh.shard > 1)
    times = traffic.micro_batches if reshards else 1
    return traffic.matrices * per_matrix + times * traffic.parameters * PARAMETER_SECONDS


def tp_overhead(compute: float, ranks: int) -> float:
    """What computing a part of every layer takes longer than its share of `compute` seconds."""
    return compute * (TENSOR_PARALLEL ** math.log2(ranks) - 1)


def exposed_seconds(costs: Mapping[str, Cost], compute: float, reshards: bool) -> float:
    """Seconds on the wire that a GPU waits for, where `compute` seconds of computation may overlap.

    Gradients and weights are exchanged after the last micro-batch, so nothing overlaps. With full sharding layers are
    gathered, and gradients reduced, while another layer computes: what takes longer than that is exposed, and at least
    what collectives cost the computation meanwhile."""
    # ZeRO-2 communicates after the last micro-batch, when nothing is left to compute.
    every = sum(cost.seconds for cost in costs.values())
    if not reshards:
        return every
    overlapping = costs["gradients"].seconds + costs["weights of layers"].seconds
    return every - overlapping + max(CONTENTION * overlapping, overlapping - compute)
