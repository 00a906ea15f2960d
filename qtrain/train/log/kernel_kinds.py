"""What a device spends its time on, by kind of kernel: read off the kernels' names.

The names are those that the profiler gives: of cuBLAS (nvjet_..., cutlass_..., ..._xmma_gemm_...), attention libraries,
NCCL, PyTorch's own kernels, Inductor's (triton_KIND_fused_OPERATIONS), and of this package's Triton kernels. On a CPU
they are PyTorch's operators. The first rule that matches counts.
"""

import re

OTHER = "other"

_RULES = (
    ("communication", r"nccl|all_gather|reduce_scatter|all_reduce|all_to_all|c10d::|symm_mem"),
    ("sums", r"_add_in_order_kernel|_column_sums_kernel"),
    # Before GEMMs and copies: attention kernels of cutlass have gemm in their names, and convert what they summed.
    ("attention", r"flash|fmha|sdpa|scaled_dot_product|flex_attention|AttentionKernel|dot_do_o|convert_dq"),
    ("attention", r"_cached_attention_kernel|_attention_(forward|queries|keys)_kernel"),
    ("optimizer", r"(^|\W)update_kernel|(^|\W)factors_kernel|_sum_of_squares_kernel|multi_tensor_apply|FusedOptimizer"),
    ("optimizer", r"fused_adam|aten::_foreach|newton_schulz"),
    ("loss", r"cross_entropy|nll_loss|log_softmax|softmax_warp|softmax_(forward|backward)|logsumexp"),
    ("norm and RoPE", r"_qk_norm_rope|_qkv_rope|rms_?norm|residual_norm|layer_?norm|group_?norm|batch_?norm|rsqrt"),
    # Before GEMMs, whose patterns match its name too.
    ("expert routing", r"prepare_grouped_gemm_data"),
    # nvjet names the dtypes of A, B and the output: q is e4m3, r e5m2, t bf16, h fp16, s fp32.
    ("GEMM fp8", r"nvjet_(sm\d+_)?[qro]{2}|gemm.*e[45]m[23]|e[45]m[23].*gemm|GemmUniversal.*e[45]m[23]|_scaled_mm"),
    ("GEMM int8", r"gemm_s8|gemm.*i8i?\d*|i8i8|imma|_int_mm|int8_mm"),
    ("GEMM int4", r"int4_mm|_int4_cores_kernel|gemm_s4"),
    ("GEMM fp32", r"gemm_f32|sgemm|tf32|nvjet_(sm\d+_)?s{2}"),
    (
        "GEMM bf16",
        r"nvjet|cutlass.*gemm|xmma_gemm|[^a-z]gemm|grouped_gemm|bf16.*gemm|GemmUniversal|cublas|splitKreduce",
    ),
    # Which arithmetic, their names do not tell: FP8 and INT8 without a library's kernel, blocks, experts.
    (
        "GEMM Triton",
        r"_persistent_mm_kernel|_blockwise_mm_kernel|_(blockwise|scaled)_wgmma_kernel|_[mk]_grouped_\w*kernel",
    ),
    (
        "GEMM Triton",
        r"_slice_kernel|_sum_slices_kernel|_long_sums_kernel|_gemv_kernel|_tile_kernel|_codes_\w*mm_kernel|_conv_\w*kernel|triton_tem_fused_.*mm",
    ),
    ("GEMM", r"aten::(mm|addmm|bmm|baddbmm|_grouped_mm)$|qtrain::.*_mm"),
    ("quantize", r"quantize|absmax|amax|_dual_kernel|_encode_kernel|_group_scales_kernel|_groups_kernel|_mx_kernel"),
    ("quantize", r"_rowwise_bf16x2_kernel|_long_rows_kernel|_tiles_kernel|_scale_unless_known|_restore_8bit_kernel"),
    ("quantize", r"_transpose_8bit_kernel|_transpose_rowwise_kernel|_unpack_halves_kernel|_unpack_int4_kernel"),
    ("activation function", r"swiglu|silu|gelu|sigmoid"),
    ("expert routing", r"_combine_rows_kernel|_gather_(rows|dual)_kernel|_count_kernel|_offsets_kernel|_place_kernel"),
    (
        "expert routing",
        r"_starts_kernel|_longest_first_kernel|_route_weight_grad_kernel|_zero_(empty|tail)_kernel|topk",
    ),
    ("expert routing", r"prepare_grouped_gemm_data|radixSort|bitonicSort|moe_permutation"),
    ("copies", r"Memcpy|Memset|copy_kernel|CatArray|FillFunctor|aten::(copy_|zero_|fill_|cat|clone)$"),
    # Inductor casts nearly everywhere: a copy is what does nothing else.
    ("copies", r"^triton_\w+?_fused_((_to_copy|copy|clone|cat|stack|transpose|t|view|zeros|full|fill)_+)+\d+$"),
)
# dict.fromkeys keeps each kind once, in the order of its first rule.
KINDS = tuple(dict.fromkeys([kind for kind, _ in _RULES if kind.startswith("GEMM")] + [kind for kind, _ in _RULES]))
KINDS += (OTHER,)
"""GEMMs first."""

_PATTERNS = tuple((kind, re.compile(pattern)) for kind, pattern in _RULES)


def kernel_kind(name: str) -> str:
    """The kind of work of the kernel, or operator, of this name: one of KINDS."""
    return next((kind for kind, pattern in _PATTERNS if pattern.search(name)), OTHER)
