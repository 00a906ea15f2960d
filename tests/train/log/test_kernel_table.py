"""Kernels by kind: names as the profiler gives them on an H100, and all of this package's; times per step."""

import ast
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.autograd import DeviceType

from qtrain.train.log.kernel_kinds import KINDS, OTHER, kernel_kind
from qtrain.train.log.kernel_table import Kernel, kernel_table, kernels_of
from tests.system import ROOT

# Read from traces of torch 2.11 on an H100, and of NCCL 2.27.
NATIVE, ELEMENTWISE = "void at::native::", "void at::native::vectorized_elementwise_kernel<8, at::native::"
NAMES = {
    "nvjet_sm90_qqtst_128x256_128x4_2x1_v_bz_coopA_TNN": "GEMM fp8",
    "nvjet_sm90_qrtst_48x64_128x15_4x2_h_bz_algo2_TNN": "GEMM fp8",
    "nvjet_sm90_qqtst_128x128_128x6_1x2_h_bz_ovscale_TNT": "GEMM fp8",
    "void cutlass::Kernel2<cutlass_80_tensorop_i16832gemm_s8_128x256_128x3_tn_align16>(cutlass_80": "GEMM int8",
    "sm90_xmma_gemm_i8i32_i8i32_i32_tn_n_tilesize128x128x128_warpgroupsize1x1x1_execute_kernel": "GEMM int8",
    "nvjet_sm90_tst_256x128_64x4_1x2_h_bz_coopA_NNT": "GEMM bf16",
    "nvjet_tst_128x256_64x4_2x1_v_bz_coopB_TNT": "GEMM bf16",
    "nvjet_sm90_hsh_48x64_64x15_4x2_h_bz_TNN": "GEMM bf16",
    "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16_s161616gemm_bf16_32x32_32x1_tn_align8>": "GEMM bf16",
    "_ZN7cutlass13device_kernelIN2at4cuda6enable_3x_kernel_for_sm9xINS_4gemm6kernel13GemmUniversal": "GEMM bf16",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize64x64x8_stage3_warpsize1x4x1_ffma_execute_kernel": "GEMM fp32",
    "_persistent_mm_kernel": "GEMM Triton",
    "_m_grouped_blockwise_kernel": "GEMM Triton",
    "_blockwise_wgmma_kernel": "GEMM Triton",
    "_int4_mm_kernel": "GEMM int4",
    "_dual_kernel": "quantize",
    "_rowwise_bf16x2_kernel": "quantize",
    "_quantize_swiglu_backward_kernel": "quantize",
    "_transpose_8bit_kernel": "quantize",
    "_swiglu_kernel": "activation function",
    "triton_poi_fused__to_copy_mul_silu_2": "activation function",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4, false, false, cutlass": "attention",
    "void pytorch_flash::flash_bwd_convert_dq_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8>": "attention",
    "cudnn_generated_fort_native_sdpa_sm90_flash_bprop_wgmma_f16_knob_26_64x64x64_4x1x1_kernel0_0": "attention",
    "void cudnn::fusion::compute_dot_do_o_specialized<true, 64>(void const*, void const*)": "attention",
    "fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass": "attention",
    "triton_tem_fused_flex_attention_0": "attention",
    "_qk_norm_rope_backward_kernel": "norm and RoPE",
    "_qkv_rope_kernel": "norm and RoPE",
    "triton_per_fused__fused_rms_norm__fused_rms_norm_backward_0": "norm and RoPE",
    "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_1": "norm and RoPE",
    NATIVE + "(anonymous namespace)::vectorized_layer_norm_kernel<c10::BFloat16, float, true>": "norm and RoPE",
    "_cross_entropy_kernel": "loss",
    NATIVE + "(anonymous namespace)::nll_loss_forward_reduce_cuda_kernel_2d<c10::BFloat16>": "loss",
    "void (anonymous namespace)::softmax_warp_backward<c10::BFloat16, c10::BFloat16, float, 10>": "loss",
    "update_kernel": "optimizer",
    "_sum_of_squares_kernel": "optimizer",
    NATIVE + "(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::Fused": "optimizer",
    "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)": "communication",
    "Memcpy DtoD (Device -> Device)": "copies",
    "Memset (Device)": "copies",
    ELEMENTWISE + "FillFunctor<c10::BFloat16>, std::array<char*, 1ul> >(int, ": "copies",
    NATIVE + "unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)": "copies",
    "triton_poi_fused__to_copy_clone_3": "copies",
    "_place_kernel": "expert routing",
    "void at::cuda::detail::prepare_grouped_gemm_data<cutlass::bfloat16_t, cutlass::bfloat16_t>": "expert routing",
    ELEMENTWISE + "CUDAFunctor_add<c10::BFloat16>, std::array<char*, 3ul> >": OTHER,
    "triton_poi_fused__to_copy_add_mul_3": OTHER,
    "aten::_int_mm": "GEMM int8",
    "aten::_scaled_mm": "GEMM fp8",
    "aten::addmm": "GEMM",
    "aten::_scaled_dot_product_flash_attention_for_cpu": "attention",
    "aten::copy_": "copies",
}


@pytest.mark.parametrize("name", NAMES)
def test_names_of_real_kernels(name):
    assert kernel_kind(name) == NAMES[name] and NAMES[name] in KINDS


def own_kernels() -> list[str]:
    found = []
    for path in (ROOT / "qtrain/kernels").rglob("*.py"):
        functions = (n for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.FunctionDef))
        found += [f.name for f in functions if f.decorator_list and f.name.endswith("_kernel")]
    return sorted(found)


def test_every_kernel_of_this_package_has_a_kind():
    kernels = own_kernels()
    assert len(kernels) > 40 and [name for name in kernels if kernel_kind(name) == OTHER] == []


GEMM, NORM, NCCL = "nvjet_sm90_qqtst_128x256", "_qk_norm_rope_kernel", "ncclDevKernel_AllGather_RING_LL"


def launches(steps: int) -> list[Kernel]:
    """Of each step: a GEMM of 4 ms, a norm of 1 ms, a collective of 2 ms beside them, 3 ms without any."""
    found = []
    for start in range(0, 10_000 * steps, 10_000):
        for name, begin, end in ((GEMM, 0, 4000), (NCCL, 3000, 5000), (NORM, 6000, 7000)):
            found.append(Kernel(name, start + begin, start + end, end - begin))
        found.append(Kernel(NORM, start + 9000, start + 10_000, 1000))
    return found


def test_times_are_per_step_and_overlap_is_counted_once():
    table = kernel_table(launches(3), 3, {"blocks": 1.5, "head": 0.5, "attention": 0.25})
    assert table.ms == pytest.approx({"GEMM fp8": 4.0, "communication": 2.0, "norm and RoPE": 2.0})
    assert table.launches == {"GEMM fp8": 1, "communication": 1, "norm and RoPE": 2}
    assert (table.idle, table.overlap, table.busy, table.total) == pytest.approx((3.0, 1.0, 7.0, 10.0))
    assert table.floor == {"GEMM": 2.0, "attention": 0.25}
    assert table.short() == (
        "a step takes 10 ms of the device: GEMM fp8 40%, communication 20%, norm and RoPE 20%, idle 30%"
    )


def test_the_table_has_the_floor_beside_what_has_one():
    floor = {"blocks": 1.5, "head": 0.5, "attention": 0.25, "between products": 1.0, "optimizer": 0.75}
    lines = kernel_table(launches(3), 3, floor).text().splitlines()
    rows = {line[:22].strip(): line[22:].split() for line in lines if line[:22].strip()}
    assert rows["GEMM fp8"] == ["4.000", "40.0%", "1"]
    assert rows["all GEMMs"] == ["4.000", "40.0%", "1", "2.000", "2.00x"]
    assert rows["norm and RoPE"] == ["2.000", "20.0%", "2"] and rows["overlapping"] == ["-1.000", "-10.0%"]
    assert rows["all between products"] == ["2.000", "20.0%", "2", "1.000", "2.00x"]
    assert rows["step"] == ["10.000", "100.0%", "4", "4.000", "2.50x"]
    assert f"       2.000 ms        2 x  {NORM}" in lines


def test_nothing_recorded_is_an_empty_table():
    table = kernel_table([], 3, {})
    assert table.total == 0 and "idle" in table.text() and "0 ms" in table.short()


def event(name: str, device: DeviceType, start: float, end: float, annotation: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        name=name,
        device_type=device,
        time_range=SimpleNamespace(start=start, end=end),
        self_cpu_time_total=(end - start) / 2,
        is_user_annotation=annotation,
    )


def test_ranges_and_the_hosts_calls_are_no_kernels():
    cpu, cuda = DeviceType.CPU, DeviceType.CUDA
    events = [
        event("aten::mm", cpu, 0, 8),
        event("cudaLaunchKernel", cpu, 2, 3),
        event("ProfilerStep#4", cuda, 0, 100, True),
        event("nccl:all_gather", cuda, 5, 9, True),
        event(GEMM, cuda, 4, 9),
    ]
    assert kernels_of(events, on_gpu=True) == [Kernel(GEMM, 4, 9, 5)]
    assert kernels_of(events, on_gpu=False) == [Kernel("aten::mm", 0, 8, 4)]


def test_the_names_above_are_of_this_package_where_they_look_so():
    own = set(own_kernels())
    assert {name for name in NAMES if name.startswith("_") and not name.startswith("_Z")} <= own
    assert Path(ROOT / "qtrain/kernels").is_dir()
