"""Attention of each sequence's newest token over its cache of keys and values, with what comes before it.

One launch computes, from a row of the fused qkv projection: RMSNorm of the heads of q and k (Qwen3), rotary positions,
the new key's and value's place in the cache, and softmax(scale · q · kᵀ) · v over the keys so far. Memory-bound: it
reads the cache once.

    q1 cos - q2 sin, q2 cos + q1 sin       halves of a head, as `models/native/rope.py`; fp32, rounded to the dtype

A CTA takes the query heads of one KV head (GQA) and one part of the keys; parts have equal lengths, whatever the
length, and the last CTA of a head to arrive merges them in a fixed order: each has its highest score, the sum of
exp(score - highest), and the values weighted by those. The new key is in registers; the CTA of part 0 adds it and
stores it.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from qtrain.core.hardware.capabilities import has_dependent_launch, shared_memory, sm_count
from qtrain.kernels.arrivals import arrival_counters, arrives_last
from qtrain.kernels.autotune import forced
from qtrain.kernels.compiler import tl, triton
from qtrain.kernels.decode.dependent_launch import prefetch_rows, start_next, wait_for_previous

MOST_PARTS = 16
BLOCKS = ((128, 8, 3), (64, 4, 3), (64, 4, 2), (32, 4, 2))
"""Keys that a CTA reads at once, warps, and stages of the loads' pipeline: the first that fits is taken."""
SPARE_BYTES = 3072
"""Of shared memory, for sums over warps."""
PREFETCHED = 128
"""Keys of a CTA's part that are loaded into L2 while the kernel before still runs."""


class Heads(NamedTuple):
    """What q and k go through, and how attention is scaled."""

    scale: float
    window: int = 0
    """Keys that a query sees, its own included; 0: all before it."""
    q_norm: Tensor | None = None
    """RMSNorm's weights [D] of each head; None: they are not normed."""
    k_norm: Tensor | None = None
    eps: float = 0.0


def cached_attention_ref(
    qkv: Tensor, keys: Tensor, values: Tensor, at: Tensor, cos: Tensor, sin: Tensor, heads: Heads
) -> Tensor:
    """qkv [B, (H + 2 KV) D] of tokens at the places `at`, int64 [B] -> [B, H·D]; stores the new keys and values.

    keys, values: the cache [B, KV, T, D] in qkv's dtype, with all places before `at`. cos, sin: fp32 [T, D/2].
    """
    batch, kv_heads, places, d = keys.shape
    q, k, v = qkv.unflatten(1, (-1, d)).split([qkv.shape[1] // d - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    q, k = (_rotated(t, w, heads.eps, cos[at], sin[at]) for t, w in ((q, heads.q_norm), (k, heads.k_norm)))
    rows = torch.arange(batch, device=at.device)
    keys[rows, :, at], values[rows, :, at] = k, v
    place = torch.arange(places, device=at.device)
    seen = place <= at[:, None]
    if heads.window:
        seen &= place > at[:, None] - heads.window
    q = q.unflatten(1, (kv_heads, -1)).float()  # [B, KV, H / KV, D]
    scores = (q @ keys.float().transpose(2, 3) * heads.scale).masked_fill(~seen[:, None, None], -torch.inf)
    return (scores.softmax(-1) @ values.float().nan_to_num()).flatten(1).to(qkv.dtype)


def _rotated(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """x [B, heads, D], cos and sin [B, D/2] -> normed and rotated, in x's dtype."""
    value = x.float()
    if weight is not None:
        value = torch.nn.functional.rms_norm(value, value.shape[-1:], weight.float(), eps)
    first, second = value.chunk(2, dim=-1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def cached_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, at: Tensor, cos: Tensor, sin: Tensor, heads: Heads
) -> Tensor:
    """`cached_attention_ref`, all contiguous; head sizes that are no power of two take the reference."""
    d = keys.shape[3]
    if not qkv.is_cuda or forced() == "ref" or d & (d - 1) or d < 32:
        return cached_attention_ref(qkv, keys, values, at, cos, sin, heads)
    return launch_cached_attention(qkv, keys, values, at, cos, sin, heads)


# ---- kernel ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Spec:
    """What the kernel is compiled for, as one constexpr."""

    kv_heads: int
    group: int
    """Query heads of a KV head."""
    rows: int
    """Those, rounded up to what tensor cores take."""
    half: int
    """D / 2."""
    parts: int
    norm: bool
    block: int
    prefetched: int
    """Keys that are loaded into L2 while the kernel before still runs; 0: the launch is not a dependent one."""


@triton.jit
def _load_rotated(qkv_ptr, offset, mask, norm_ptr, eps, cos, sin, SPEC: tl.constexpr):
    """Both halves [rows, D/2] of heads that begin at `offset` [rows, 1] of a row of qkv."""
    pair = tl.arange(0, SPEC.half)[None]
    first = tl.load(qkv_ptr + offset + pair, mask, 0.0).to(tl.float32)
    second = tl.load(qkv_ptr + offset + SPEC.half + pair, mask, 0.0).to(tl.float32)
    if SPEC.norm:
        inverse = tl.rsqrt((tl.sum(first * first, 1) + tl.sum(second * second, 1)) / (2 * SPEC.half) + eps)[:, None]
        first *= inverse * tl.load(norm_ptr + pair).to(tl.float32)
        second *= inverse * tl.load(norm_ptr + SPEC.half + pair).to(tl.float32)
    dtype = qkv_ptr.dtype.element_ty
    return (first * cos - second * sin).to(dtype), (second * cos + first * sin).to(dtype)


@triton.jit
def _cached_attention_kernel(
    # qkv [B, (H + 2 KV) D]; keys, values [B, KV, T, D]; at [B]; cos, sin [T, D/2]; out [B, H·D].
    qkv_ptr, keys_ptr, values_ptr, at_ptr, cos_ptr, sin_ptr, q_norm_ptr, k_norm_ptr, out_ptr,
    # fp32 [B·KV, parts, rows, D] and [2, B·KV, parts, rows]: each part's values, then its highest score and sum. int32
    # [B·KV], zero.
    part_ptr, stats_ptr, arrived_ptr,
    places, scale, window, eps, SPEC: tl.constexpr,
):  # fmt: skip
    D: tl.constexpr = 2 * SPEC.half
    ROWS: tl.constexpr = SPEC.rows
    PARTS: tl.constexpr = SPEC.parts
    PRECISION: tl.constexpr = "ieee" if qkv_ptr.dtype.element_ty == tl.float32 else "tf32"
    program, part = tl.program_id(0), tl.program_id(1)
    batch, kv = program // SPEC.kv_heads, program % SPEC.kv_heads
    at = tl.load(at_ptr + batch).to(tl.int32)
    head, pair, dim = tl.arange(0, ROWS), tl.arange(0, SPEC.half), tl.arange(0, D)
    keys_ptr += program.to(tl.int64) * places * D
    values_ptr += program.to(tl.int64) * places * D
    # This CTA's part of the keys before the new one.
    first = tl.maximum(at + 1 - window, 0) if window > 0 else 0
    each = tl.cdiv(tl.cdiv(at - first, SPEC.parts), SPEC.block) * SPEC.block
    low = first + part * each
    high = tl.minimum(low + each, at)
    if SPEC.prefetched:  # `at` and the keys before it are older than the kernel before this one
        keys = low + tl.arange(0, SPEC.prefetched)
        prefetch_rows(keys_ptr + keys * D, keys < high, 0, D, D)
        prefetch_rows(values_ptr + keys * D, keys < high, 0, D, D)
    cos = tl.load(cos_ptr + at * SPEC.half + pair)[None]
    sin = tl.load(sin_ptr + at * SPEC.half + pair)[None]
    wait_for_previous(SPEC.prefetched > 0)
    qkv_ptr += batch.to(tl.int64) * (SPEC.group + 2) * SPEC.kv_heads * D
    real = (head < SPEC.group)[:, None]
    q1, q2 = _load_rotated(qkv_ptr, (kv * SPEC.group + head)[:, None] * D, real, q_norm_ptr, eps, cos, sin, SPEC)

    # The new key and value: loaded now, because a load after the loop would be waited for.
    heads: tl.constexpr = SPEC.group * SPEC.kv_heads
    has_new = part == 0
    new_k1, new_k2 = _load_rotated(
        qkv_ptr, (heads + kv + tl.arange(0, 1)[:, None]) * D, has_new, k_norm_ptr, eps, cos, sin, SPEC
    )
    new_v = tl.load(qkv_ptr + (heads + SPEC.kv_heads + kv) * D + dim, has_new, 0.0)

    # ---- keys before the new one -------------------------------------------------------------------------------------
    highest = tl.full((ROWS,), -1e30, tl.float32)
    weight_sum = tl.zeros((ROWS,), tl.float32)
    total = tl.zeros((ROWS, D), tl.float32)
    for start in range(low, high, SPEC.block):
        place = start + tl.arange(0, SPEC.block)
        inside = place < high
        k1 = tl.load(keys_ptr + place[:, None] * D + pair[None], inside[:, None], 0.0)
        k2 = tl.load(keys_ptr + place[:, None] * D + SPEC.half + pair[None], inside[:, None], 0.0)
        v = tl.load(values_ptr + place[:, None] * D + dim[None], inside[:, None], 0.0)
        scores = tl.dot(q1, k1.T, input_precision=PRECISION)
        scores = tl.dot(q2, k2.T, scores, input_precision=PRECISION) * scale
        scores = tl.where(inside[None], scores, -float("inf"))
        new = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new[:, None])
        keep = tl.exp(highest - new)
        weight_sum = weight_sum * keep + tl.sum(weights, 1)
        total = tl.dot(weights.to(v.dtype), v, total * keep[:, None], input_precision=PRECISION)
        highest = new

    start_next(SPEC.prefetched > 0)

    # ---- the new key and value ---------------------------------------------------------------------------------------
    if has_new:
        tl.store(keys_ptr + at * D + pair[None], new_k1)
        tl.store(keys_ptr + at * D + SPEC.half + pair[None], new_k2)
        tl.store(values_ptr + at * D + dim, new_v)
        score = tl.sum(q1.to(tl.float32) * new_k1.to(tl.float32), 1)
        score += tl.sum(q2.to(tl.float32) * new_k2.to(tl.float32), 1)
        score *= scale
        new = tl.maximum(highest, score)
        weight, keep = tl.exp(score - new), tl.exp(highest - new)
        weight_sum = weight_sum * keep + weight
        total = total * keep[:, None] + weight[:, None] * new_v.to(tl.float32)[None]
        highest = new

    # ---- merge -------------------------------------------------------------------------------------------------------
    mine = program * SPEC.parts + part
    place = head[:, None] * D + dim[None]
    last = True
    if SPEC.parts > 1:
        stats = tl.num_programs(0) * SPEC.parts * ROWS
        tl.store(part_ptr + mine * ROWS * D + place, total)
        tl.store(stats_ptr + mine * ROWS + head, highest)
        tl.store(stats_ptr + stats + mine * ROWS + head, weight_sum)
        last = arrives_last(arrived_ptr + program, PARTS)
        if last:
            at_parts = (program * SPEC.parts + tl.arange(0, SPEC.parts))[:, None] * ROWS + head[None]
            all_highest = tl.load(stats_ptr + at_parts, cache_modifier=".cg")  # [parts, rows]
            all_sums = tl.load(stats_ptr + stats + at_parts, cache_modifier=".cg")
            highest = tl.max(all_highest, 0)
            weight_sum = tl.sum(all_sums * tl.exp(all_highest - highest[None]), 0)
            total = tl.zeros((ROWS, D), tl.float32)
            for other in tl.static_range(PARTS):
                theirs = program * SPEC.parts + other
                factor = tl.exp(tl.load(stats_ptr + theirs * ROWS + head, cache_modifier=".cg") - highest)
                total += tl.load(part_ptr + theirs * ROWS * D + place, cache_modifier=".cg") * factor[:, None]
    if last:
        out = total / weight_sum[:, None]
        offset = (program.to(tl.int64) * SPEC.group + head)[:, None] * D + dim[None]
        tl.store(out_ptr + offset, out.to(out_ptr.dtype.element_ty), real)


def launch_cached_attention(
    qkv: Tensor, keys: Tensor, values: Tensor, at: Tensor, cos: Tensor, sin: Tensor, heads: Heads
) -> Tensor:
    """`cached_attention` by the kernel."""
    batch, kv_heads, places, d = keys.shape
    group = qkv.shape[1] // d // kv_heads - 2
    programs = batch * kv_heads
    # About a CTA an SM, of at least 128 keys each.
    parts = max(1, min(sm_count(qkv.device) // programs, places // 128, MOST_PARTS))
    parts = 2 ** (parts.bit_length() - 1)
    block, warps, stages = _block(places // parts, d * qkv.element_size(), qkv.device)
    spec = _Spec(
        kv_heads, group, max(16, triton.next_power_of_2(group)), d // 2, parts, heads.q_norm is not None, block,
        PREFETCHED if has_dependent_launch(qkv.device) else 0,
    )  # fmt: skip
    out, many = qkv.new_empty(batch, group * kv_heads * d), programs * parts * spec.rows
    part, stats = (qkv.new_empty(size, dtype=torch.float32) for size in (many * d, 2 * many))
    norms = (qkv if norm is None else norm for norm in (heads.q_norm, heads.k_norm))
    _cached_attention_kernel[(programs, parts)](
        qkv, keys, values, at, cos, sin, *norms, out, part, stats, arrival_counters(qkv.device),
        places, heads.scale, heads.window, heads.eps, SPEC=spec, num_warps=warps, num_stages=stages,
        launch_pdl=spec.prefetched > 0,
    )  # fmt: skip
    return out


def _block(keys: int, bytes_of_key: int, device: torch.device) -> tuple[int, int, int]:
    """Of `BLOCKS`: what shared memory can hold, and two blocks of a part of so many keys."""
    for block, warps, stages in BLOCKS:
        if 2 * block <= keys and stages * 2 * block * bytes_of_key <= shared_memory(device) - SPARE_BYTES:
            return block, warps, stages
    return BLOCKS[-1]
