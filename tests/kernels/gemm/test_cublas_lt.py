"""cuBLASLt's products: every algorithm against fp64, with a bias, and added to what is in memory."""

import pytest
import torch

from qtrain.kernels.gemm.cublas_lt import MOST_ALGORITHMS, algorithm_names, cublas_lt, fp8_mm
from tests.kernels.gemm.test_add_scaled_mm import total_of
from tests.kernels.gemm.test_scaled_mm import DTYPES, operands, truth

FP8 = DTYPES[1:]


def test_there_is_none_without_cuda():
    assert torch.version.cuda is not None or (cublas_lt() is None and algorithm_names() == [])


@pytest.mark.gpu
@pytest.mark.parametrize("dtypes", FP8)
@pytest.mark.parametrize("fast_accum", [False, True])
@pytest.mark.parametrize("algorithm", range(MOST_ALGORITHMS))
def test_against_fp64(dtypes, fast_accum, algorithm):
    for m, n, k in [(1, 64, 64), (304, 272, 1040), (1152, 896, 8192), (3584, 2560, 4112)]:
        codes, total = operands(m, n, k, dtypes, tensorwise=True, device="cuda"), total_of(m, n, torch.bfloat16, "cuda")
        product, size = truth(*codes)
        bias = torch.randn(n, device="cuda", dtype=torch.bfloat16)
        for added, options in ((0, {}), (bias.double(), {"bias": bias}), (total.double(), {"add": True})):
            out = total.clone()
            fp8_mm(*codes, out, algorithm=algorithm, fast_accum=fast_accum, **options)
            expected = product + added
            allowed = 2**-8 * expected.abs() + 2**-9 * (size + torch.as_tensor(added, device="cuda").abs())
            assert ((out.double() - expected).abs() <= allowed).all(), (m, n, k, options.keys())


@pytest.mark.gpu
def test_parts_of_tensors():
    """At addresses that are multiples of 16 bytes alone; an algorithm that was chosen for whole tensors is no error."""
    a, b, *scales = operands(512, 256, 384, FP8[0], tensorwise=True, device="cuda")
    whole, out = torch.zeros(512 * 384 + 16, device="cuda", dtype=a.dtype), torch.zeros(513, 256, device="cuda")
    part = whole[16:].view(512, 384).copy_(a)
    product, size = truth(a, b, *scales)
    for algorithm in (0, MOST_ALGORITHMS - 1):
        found = fp8_mm(part, b, *scales, out.bfloat16()[1:], algorithm=algorithm)
        assert ((found.double() - product).abs() <= 2**-8 * product.abs() + 2**-9 * size).all()


@pytest.mark.gpu
def test_a_recorded_product_reads_new_values():
    codes = operands(256, 512, 384, FP8[0], tensorwise=True, device="cuda")
    out = torch.zeros(256, 512, device="cuda", dtype=torch.bfloat16)
    fp8_mm(*codes, out, algorithm=0)
    once, graph = out.clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        fp8_mm(*codes, out, algorithm=0, add=True)
    codes[2].mul_(2)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.allclose(out.float(), 3 * once.float(), rtol=2**-6, atol=2**-6 * once.float().abs().max().item())


@pytest.mark.gpu
def test_a_bias_of_another_dtype_is_refused():
    codes = operands(64, 64, 64, FP8[0], tensorwise=True, device="cuda")
    out = torch.zeros(64, 64, device="cuda", dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match="bias"):
        fp8_mm(*codes, out, algorithm=0, bias=torch.zeros(64, device="cuda"))
