"""The roofline of linears: the sums of torchao's model by hand, limits, and the command without a GPU."""

import csv
import json

import pytest

import benchmark_mm
from qtrain.bench.roofline import BANDWIDTH_REACHED, GEMM_REACHED, linear_roofline
from qtrain.core.hardware.device import datasheet_hardware
from qtrain.quant import SCHEMES
from tests.system import call

H100 = datasheet_hardware("h100")
M, N, K = 16384, 8192, 4096


def of(scheme: str, m: int = M, n: int = N, k: int = K, **kwargs):
    return linear_roofline(m, n, k, SCHEMES.make(scheme, kwargs, "--schemes"), H100)


def test_large_products_take_their_flops():
    compute = 3 * 2 * M * N * K / (989.4e12 * GEMM_REACHED)
    assert of("bf16").gemms == pytest.approx(compute) and of("bf16").quantize == 0
    assert of("fp8_rowwise").gemms == pytest.approx(compute / 2, rel=1e-3)
    assert of("fp8_rowwise_gw_hp").gemms == pytest.approx(compute * 2 / 3, rel=1e-3)


def test_quantization_takes_the_passes_of_each_granularity():
    bandwidth, x, w, dy = 3.35e12 * BANDWIDTH_REACHED, M * K, N * K, M * N
    # Read and two codes; an absmax before, which weights and delayed scaling have already.
    assert of("fp8_tensorwise").quantize == pytest.approx((6 * (x + dy) + 4 * w) / bandwidth)
    assert of("fp8_tensorwise", scaling="delayed").quantize == pytest.approx(4 * (x + w + dy) / bandwidth)
    # By rows in one pass, by columns in two.
    assert of("fp8_rowwise").quantize == pytest.approx(6 * (x + w + dy) / bandwidth)
    without = of("int8", grad_weight="bf16").quantize
    assert without == pytest.approx((3 * (x + dy) + 6 * w) / bandwidth)


def test_small_products_take_launches_and_memory():
    assert of("bf16", 16, 16, 16).total == pytest.approx(3 * 2e-6)
    assert of("fp8_rowwise", 16, 16, 16).total > of("bf16", 16, 16, 16).total
    bytes_moved = 2 * (N * K + 16 * (N + K))
    assert of("bf16", 16).gemms == pytest.approx(3 * bytes_moved / (3.35e12 * BANDWIDTH_REACHED))


def test_the_command_needs_no_gpu(tmp_path):
    path = tmp_path / "figures.json"
    argv = ["--tables", "roofline", "--gpu", "h100", "--roofline_shapes", f"{M}x{N}x{K},64x24x32", "--json", str(path)]
    done = call(benchmark_mm.main, [*argv, "--schemes", "bf16,fp8_rowwise,mxfp8"])
    assert done.code == 0, done.err
    (table,) = json.loads(path.read_text())["tables"]
    first, second = (row["cells"] for row in table["rows"])
    assert first["fp8_rowwise"]["value"] == pytest.approx(of("bf16").total / of("fp8_rowwise").total)
    assert first["mxfp8"]["reason"] == "H100 has no mxfp8" and "multiples of 16" in second["fp8_rowwise"]["reason"]
    rows = list(csv.DictReader(path.with_suffix(".csv").open()))
    assert len(rows) == 6 and float(rows[1]["total_us"]) == pytest.approx(1e6 * of("fp8_rowwise").total, abs=0.01)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--tables", "roofline", "--device", "cpu"], "--gpu: there is no GPU here"),
        (["--tables", "roofline", "--gpu", "h10"], "--gpu: unknown GPU 'h10'"),
        (["--gpu", "h100"], "--gpu: it is of the roofline only"),
        (["--roofline_shapes", "1x2x3"], "--roofline_shapes: it is of the roofline only"),
        (["--tables", "roofline", "--gpu", "h100", "--roofline_shapes", "1x2"], "--roofline_shapes: '1x2' is not"),
        (["--json", "x.csv"], "--json: x.csv would be overwritten"),
    ],
)
def test_mistakes_are_one_message(argv, said):
    done = call(benchmark_mm.main, argv)
    assert done.code == 2 and done.err.startswith(f"error: {said}") and done.err.count("\n") == 1
