"""Every registered scheme: its fp64 emulation, outliers, rounding, what is quantized and kept, a little training."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from qtrain.core.errors import UserError
from qtrain.models import Decoder, ModelConfig, apply_recompute
from qtrain.models.native.attention import SequenceInfo
from qtrain.models.native.rope import rope_tables
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.quant import SCHEMES, LowBitLinear, LowBitScheme, quantize_linears
from qtrain.train.plan.scheme_bytes import code_bytes, kept_input_bytes
from tests.cases import matrix
from tests.models.families import drawn, source_of
from tests.quant.emulation import POWER_OF_TWO, TABLE, EmulatedLinear, cosine, draw_alike, emulate, same

ELSEWHERE = {"bf16", "auto", "binary", "bitnet", "qat", "int8_weight", "int4_weight"}
"""Schemes that multiply nothing of their own, or whose weights are something else; they have their own test files."""

LOW_BIT = sorted(set(SCHEMES.names()) - {"bf16", "auto"})

E5M2_GRADIENTS = {
    "grad_input": (("e5m2", "rowwise"), ("e4m3", "rowwise")),
    "grad_weight": (("e5m2", "rowwise"), ("e4m3", "rowwise")),
}
BLOCKS_1X128 = same(("int8", "1x128"))
X_IN_128X128 = {"grad_weight": (("e4m3", "1x128"), ("e4m3", "128x128"))}
INT4_GRADIENTS = same(("int4", "rowwise")) | {"grad_weight": None}

# Scheme, its options, what they change in the table, whether scales are powers of two.
CASES = [
    *((name, {}, {}, name in POWER_OF_TWO) for name in TABLE),
    ("int8", {"stochastic_rounding": False}, {}, False),
    ("int8", {"stochastic_rounding": True}, {}, False),
    ("int8", {"granularity": "tensorwise"}, same(("int8", "tensorwise")), False),
    ("switchback", {"weight_granularity": "rowwise"}, same(("int8", "rowwise")) | {"grad_weight": None}, False),
    ("switchback", {"grad_weight": "int8"}, {"grad_weight": (("int8", "rowwise"), ("int8", "rowwise"))}, False),
    ("int8_blockwise", {"block": "128x128"}, same(("int8", "128x128")), False),
    ("int8_blockwise", {"block": "1x128"}, BLOCKS_1X128, False),
    ("fp8_rowwise", {"power_of_two": False, "grad_format": "e5m2"}, E5M2_GRADIENTS, False),
    ("fp8_rowwise", {"stochastic_rounding": True, "power_of_two": False}, {}, False),
    ("fp8_blockwise", {"power_of_two": True}, {}, True),
    ("fp8_blockwise", {"grad_weight_x": "128x128"}, X_IN_128X128, False),
    ("fp8_blockwise", {"grad_weight_x": "128x128", "stochastic_rounding": ["grad_weight"]}, X_IN_128X128, False),
    ("fp8_tensorwise", {"scaling": "delayed"}, {}, False),
    ("fp8_tensorwise", {"output": "bf16", "power_of_two": True}, {"output": None}, True),
    ("int4", {"grad_input": "int4", "grad_weight": "bf16"}, INT4_GRADIENTS, False),
    ("mxfp8", {"grad_input": "bf16"}, {"grad_input": None}, False),
    ("nvfp4", {"hadamard": False}, same(("nvfp4", "1x16")), False),
    ("nvfp4", {"stochastic_rounding": False, "grad_weight": "bf16"}, {"grad_weight": None}, False),
]
NAMES = [name + "".join(f"-{value}" for value in options.values()) for name, options, _, _ in CASES]


def scheme(name: str, **options):
    return SCHEMES.make(name, options, "--quantize")


def swap(model: nn.Module, name: str, **options):
    return quantize_linears(model, scheme(name, **options), seed=3)


def run(model: nn.Module, x: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y and every gradient of one pass."""
    leaf = x.clone().requires_grad_()
    y = model(leaf)
    y.backward(dy)
    return {"y": y.detach(), "x": leaf.grad} | {name: p.grad for name, p in model.named_parameters()}


def test_no_scheme_is_without_its_emulation():
    assert set(TABLE) | ELSEWHERE >= set(SCHEMES.names())


@pytest.mark.parametrize(("name", "options", "changes", "power_of_two"), CASES, ids=NAMES)
@pytest.mark.parametrize("kind", ["normal", "outlier"])
def test_a_linear_is_its_emulation(name, options, changes, power_of_two, kind):
    """y, dx, dw and the bias's gradient of one linear, M = 1 and sizes of no block included."""
    for seed, (m, k, n) in enumerate([(1, 64, 48), (37, 130, 65), (144, 33, 8)]):
        linear = nn.Linear(k, n)
        with torch.no_grad():
            linear.weight.copy_(matrix(n, k, seed + 50, "normal"))
        low, high = nn.Sequential(linear), nn.Sequential(copy.deepcopy(linear))
        swap(low, name, **options)
        draw_alike(emulate(high, TABLE[name] | changes, power_of_two), low)
        assert isinstance(low[0], LowBitLinear) and isinstance(high[0], EmulatedLinear)
        x, dy = matrix(m, k, seed, kind), matrix(m, n, seed + 100, kind)
        found, true = run(low, x, dy), run(high, x.double(), dy.double())
        for key in true:
            error = (found[key].double() - true[key]).norm() / true[key].norm()
            assert error < 2e-4, f"{key} of {m}x{k}x{n}: {error}"  # a code or two that falls on the other side of a tie


CONFIG = {
    "model_type": "llama",
    "vocab_size": 32,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@pytest.mark.parametrize("name", TABLE)
def test_a_decoder_layer_is_its_emulation(name):
    """Every gradient of a real layer, against the same layer in fp64 over emulated linears: cosine at least 0.999."""
    torch.manual_seed(0)
    layer = Decoder(ModelConfig.from_hf(CONFIG)).layers[0]
    high = emulate(copy.deepcopy(layer), TABLE[name], name in POWER_OF_TWO)
    swap(layer, name)
    draw_alike(high, layer)
    x, dy = matrix(48, 128, 0).view(2, 24, 128), matrix(48, 128, 1).view(2, 24, 128)
    cos, sin = (table.unsqueeze(-2) for table in rope_tables(ModelConfig.from_hf(CONFIG).rope, 32, 24, x.device))
    found = run(_with(layer, SequenceInfo(2, 24, cos, sin)), x, dy)
    true = run(_with(high, SequenceInfo(2, 24, cos.double(), sin.double())), x.double(), dy.double())
    assert {key: value for key in true if (value := cosine(found[key], true[key])) < 0.999} == {}


class _with(nn.Module):
    """A layer whose other arguments are given."""

    def __init__(self, layer: nn.Module, *arguments):
        super().__init__()
        self.layer, self.arguments = layer, arguments

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x, *self.arguments)


@pytest.mark.parametrize("name", LOW_BIT)
def test_an_outlier_channel_gives_no_nan(name):
    """x, w and dy each with a column a thousand times the rest."""
    model = nn.Sequential(nn.Linear(64, 48, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(matrix(48, 64, 0, "outlier"))
    swap(model, name)
    results = run(model, matrix(40, 64, 1, "outlier"), matrix(40, 48, 2, "outlier"))
    assert {key for key, value in results.items() if not value.isfinite().all()} == set()


@pytest.mark.parametrize("name", LOW_BIT)
def test_a_bad_value_is_not_hidden(name):
    for bad in (float("nan"), float("inf")):
        model = nn.Sequential(nn.Linear(64, 48, bias=False))
        swap(model, name)
        x = matrix(40, 64, 1)
        x[3, 5] = bad
        assert not model(x)[3].isfinite().any()


STOCHASTIC = [name for name in TABLE if hasattr(scheme(name), "__dataclass_fields__")
              and "stochastic_rounding" in scheme(name).__dataclass_fields__]  # fmt: skip


@pytest.mark.parametrize("name", [*STOCHASTIC, "fp8_tensorwise-delayed"])
def test_stochastic_rounding_is_a_function_of_the_step(name):
    """The same step draws the same, in forward and backward; another step, or another linear, other bits."""
    name, _, scaling = name.partition("-")
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    with torch.no_grad():
        model[1].weight.copy_(model[0].weight)
    quantized = swap(model, name, stochastic_rounding=True, **({"scaling": scaling} if scaling else {}))
    x, dy = matrix(32, 64, 0), matrix(32, 64, 1)

    def of(number: int) -> list[Tensor]:
        model.zero_grad()
        return [t.clone() for t in run(model[number : number + 1], x, dy).values()]

    first, again, other = of(0), of(0), of(1)
    a, b = (1, 2) if name == "nvfp4" else (0, 1)  # y, dx, dw: NVFP4 rounds gradients only
    assert all(map(torch.equal, first, again))
    assert not torch.equal(first[a], other[a]) and not torch.equal(first[b], other[b])
    quantized.set_step(1)
    later = of(0)
    assert not torch.equal(first[a], later[a]) and not torch.equal(first[b], later[b])
    quantized.set_step(0)
    assert all(map(torch.equal, first, of(0)))
    model.eval()
    quantized.set_step(1)
    still = model[0](x)
    quantized.set_step(0)
    assert torch.equal(still, model[0](x))  # an evaluation draws nothing


def test_stochastic_rounding_of_single_gemms():
    """Only what the named GEMMs read is drawn: the others' results are those of rounding to nearest."""
    results = {}
    for chosen in (False, ["output"], ["grad_input"], ["grad_weight"], ["grad_input", "grad_weight"]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64, bias=False))
        swap(model, "int8", stochastic_rounding=chosen)
        results[str(chosen)] = list(run(model, matrix(32, 64, 0), matrix(32, 64, 1)).values())
    nearest = results.pop("False")
    for chosen, found in results.items():
        kept = [torch.equal(a, b) for a, b in zip(nearest, found, strict=True)]
        assert kept == [gemm not in chosen for gemm in ("output", "grad_input", "grad_weight")], chosen


def test_int8_rounds_a_weights_gradient_stochastically_unless_told_otherwise():
    assert scheme("int8").stochastic_rounding == ("grad_weight",)
    assert scheme("int8", stochastic_rounding=False).stochastic_rounding is False
    assert scheme("int8", grad_weight="bf16").stochastic_rounding is False, "nothing of it is rounded"


def test_stochastic_rounding_for_one_reader_takes_no_second_pass():
    """A tensor that one GEMM reads rounded to nearest and the other stochastically is quantized for both at once."""
    model, ops = nn.Sequential(nn.Linear(64, 64, bias=False)), []
    swap(model, "int8")

    class Record(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            ops.append(str(op))
            return op(*args, **(kwargs or {}))

    x, dy = matrix(32, 64, 0).requires_grad_(), matrix(32, 64, 1)
    with Record():
        model(x).backward(dy)
    assert [op for op in ops if "quantize" in op] == ["qtrain.quantize_dual.default"] * 2


@pytest.mark.parametrize("name", TABLE)
def test_nothing_is_quantized_twice_or_for_nobody(name):
    """Codes that are made: of x and dy once a micro-batch and reader, of w once a step; in evaluation of x for one."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    quantized = swap(model, name)
    made = 0

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal made
            out = op(*args, **(kwargs or {}))
            if op.namespace == "qtrain" and "quantize_nvfp4" in op.__name__:
                made += 1
            elif op.namespace == "qtrain" and "quantize" in op.__name__:
                made += sum(t.element_size() == 1 and t.dtype != torch.float8_e8m0fnu for t in out)
            return out

    def count(work) -> int:
        nonlocal made
        made = 0
        with Count():
            work()
        return made

    x = matrix(32, 64, 0).requires_grad_()
    output, grad_input, grad_weight = (arithmetic != "bf16" for arithmetic in scheme(name).gemm_dtypes().values())
    assert count(lambda: model(x)) == output + grad_weight
    y = model(x)
    assert count(lambda: y.sum().backward()) == grad_input + grad_weight
    assert count(quantized.refresh) == output + grad_input
    with torch.no_grad():
        assert count(lambda: model(x)) == 1
    model[0].weight.requires_grad_(False)
    assert count(lambda: model(x)) == 1
    y = model(x)
    assert count(lambda: y.sum().backward()) == 1


@pytest.mark.parametrize(
    ("name", "options"), [*((name, {}) for name in TABLE), ("fp8_blockwise", {"grad_weight_x": "128x128"})]
)
def test_memory_is_what_the_plan_counts(name, options):
    """Bytes beside the weight and kept of the input, an element; large enough that a row's scale is no share of it."""
    m, k, n = 1024, 512, 256
    model = nn.Sequential(nn.Linear(k, n, bias=False))
    swap(model, name, **options)
    operands = {t.data_ptr(): t for t in model[0].weight_codes.buffers()}.values()
    beside = sum(t.numel() * t.element_size() for t in operands) / (n * k)
    assert beside == pytest.approx(code_bytes(scheme(name, **options)), rel=0.02)
    own = {t.data_ptr() for t in (*model[0].buffers(), *model[0].parameters())}
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        model(matrix(m, k, 0).requires_grad_())
    of_input = sum(t.numel() * t.element_size() for at, t in kept.items() if at not in own) / (m * k)
    assert of_input == pytest.approx(kept_input_bytes(scheme(name, **options), 4), rel=0.02)


@pytest.mark.parametrize("name", LOW_BIT)
def test_micro_batches_add_up(name):
    """Where scales do not cross rows, halves of a batch give the rows of the whole; always, close to its gradient."""
    model = nn.Sequential(nn.Linear(64, 64, bias=False))
    swap(model, name, **({"stochastic_rounding": False} if name == "nvfp4" else {}))
    x, dy = matrix(256, 64, 0), matrix(256, 64, 1)
    whole = run(model, x, dy)
    gradient = whole.pop("0.weight").clone() if "0.weight" in whole else None
    model.zero_grad()
    halves = [run(model, x[half], dy[half]) for half in (slice(0, 128), slice(128, 256))]
    for key in ("y", "x"):
        parts = torch.cat([half[key] for half in halves])
        assert cosine(parts, whole[key]) > (0.98 if name == "nvfp4" else 0.995)
        if name not in ("fp8_tensorwise", "nvfp4"):
            assert torch.allclose(parts, whole[key], rtol=1e-5, atol=1e-5)
    if gradient is not None:
        assert cosine(model[0].weight.grad, gradient) > (0.98 if name in ("int4", "nvfp4") else 0.995)


def small_model() -> Decoder:
    return drawn(source_of("llama2"))


@pytest.mark.parametrize("name", [*LOW_BIT, "fp8_tensorwise-delayed"])
def test_recomputation_gives_the_same_gradients(name):
    """Bit for bit, over two steps, so that a delayed scale is in force in the second."""
    name, _, scaling = name.partition("-")
    options = {"scaling": scaling} if scaling else {}
    results = {}
    every = ((), ("norm", "swiglu"), ("norm", "qkv", "attention", "ffn"), ("block",))
    for kinds in every:
        model = small_model()
        quantized = swap(model, name, **options)
        apply_recompute(model, kinds)
        ids = torch.randint(0, 60, (2, 17), generator=torch.Generator().manual_seed(0))
        for step in range(2):
            quantized.set_step(step)
            model.zero_grad()
            model(ids[:, :-1], ids[:, 1:]).loss.backward()
            quantized.refresh()
        results[kinds] = [p.grad for p in model.parameters()] + list(quantized.tensors().values())
    for kinds in every[1:]:
        assert all(map(torch.equal, results[()], results[kinds])), kinds


def losses_of_learning(name: str) -> list[float]:
    """Of eight steps of a small model in a scheme, on a text that repeats itself."""
    torch.manual_seed(0)
    model = small_model()
    quantized = quantize_linears(model, scheme(name), seed=0, head=model.lm_head)
    optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(parameter_groups(model, 0.0), 1e-2, seed=0)
    quantized.track_versions(optimizer)
    ids = torch.arange(4 * 33).remainder(11).view(4, 33)
    losses = []
    for step in range(8):
        quantized.assert_fresh()
        quantized.set_step(step)
        loss = model(ids[:, :-1], ids[:, 1:]).loss / 128
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        quantized.refresh()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", [*TABLE, "bitnet", "binary"])
def test_a_small_model_learns(name):
    """The loss falls to well under its start."""
    losses = losses_of_learning(name)
    assert losses[-1] < 0.25 * losses[0], losses


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("int8_blockwise", {"block": "64x64"}, "one of '32x32', '128x128', '1x128'"),
        ("fp8_tensorwise", {"scaling": "static"}, "one of 'dynamic', 'delayed'"),
        ("fp8_tensorwise", {"history": 32}, '"scaling" to "delayed"'),
        ("fp8_tensorwise", {"scaling": "delayed", "history": 0}, "from 1 to 1024"),
        ("fp8_rowwise", {"grad_input": "bf16", "grad_weight": "bf16", "grad_format": "e5m2"}, "leave it out"),
        ("fp8_rowwise_gw_hp", {"stochastic_rounding": ["grad_weight"]}, "rounds nothing"),
        ("fp8_blockwise", {"grad_weight": "bf16", "grad_weight_x": "128x128"}, "leave it out"),
        ("fp8_blockwise", {"grad_weight_x": "32x32"}, "one of '1x128', '128x128'"),
        ("int8", {"stochastic_rounding": ["dx"]}, "'output', 'grad_input', 'grad_weight'"),
        ("int4", {"output": "fp8"}, "one of 'int4', 'int8', 'bf16'"),
        ("mxfp8", {"stochastic_rounding": True}, "unknown key"),
        ("nvfp4", {"grad_weight": "bf16", "hadamard": True}, "leave it out"),
    ],
)
def test_impossible_options_are_refused(name, options, message):
    with pytest.raises(UserError, match="--quantize") as error:
        scheme(name, **options)
    assert message in str(error.value)


def test_the_cpu_takes_every_shape():
    for name, (k, n) in itertools.product(TABLE, [(7, 5), (64, 33)]):
        assert isinstance(scheme(name), LowBitScheme)
        assert scheme(name).refusal(k, n, torch.device("cpu")) is None


def test_a_gpu_refuses_with_the_reason(monkeypatch):
    """What it would be slow at, and arithmetic that it has not."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA A100")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert scheme("int8").refusal(64, 64, gpu) is None
    assert "multiples of 16" in scheme("int8").refusal(64, 40, gpu)
    for name in ("fp8_tensorwise", "fp8_rowwise", "fp8_blockwise", "mxfp8"):
        assert "NVIDIA A100 has no FP8" in scheme(name).refusal(64, 64, gpu)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
    for name in TABLE:
        assert scheme(name).refusal(64, 64, gpu) is None


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "options", "changes", "power_of_two"), CASES, ids=NAMES)
def test_a_linear_is_its_emulation_on_the_gpu(name, options, changes, power_of_two):
    """bf16 through the kernels, an outlier column in x and dy; what is left is the rounding of the result to bf16."""
    for seed, (m, k, n) in enumerate([(16, 64, 48), (272, 1040, 656), (2048, 1024, 4096)]):
        # The same weights each time: one draw of 300 had a weight midway between two codes of INT4, 3% of the result.
        torch.manual_seed(seed)
        linear = nn.Linear(k, n, dtype=torch.bfloat16).cuda()
        low, high = nn.Sequential(linear), nn.Sequential(copy.deepcopy(linear))
        swap(low, name, **options)
        draw_alike(emulate(high, TABLE[name] | changes, power_of_two), low)
        x = matrix(m, k, seed, "outlier", torch.bfloat16).cuda()
        dy = matrix(m, n, seed + 100, "outlier", torch.bfloat16).cuda()
        found, true = run(low, x, dy), run(high, x.double(), dy.double())
        for key in true:
            error = (found[key].double() - true[key]).norm() / true[key].norm()
            limit = 0.04 if name == "nvfp4" else 0.01  # bf16 data lie midway between NVFP4's few codes more often
            assert error < limit and cosine(found[key], true[key]) > 0.999, f"{key} of {m}x{k}x{n}: {error}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", TABLE)
def test_a_decoder_layer_is_its_emulation_on_the_gpu(name):
    config = ModelConfig.from_hf({**CONFIG, "hidden_size": 512, "intermediate_size": 1536})
    torch.manual_seed(0)
    layer = Decoder(config).layers[0].cuda()
    high = emulate(copy.deepcopy(layer), TABLE[name], name in POWER_OF_TWO)
    layer.bfloat16()
    for low_module, high_module in zip(layer.modules(), high.modules(), strict=True):  # the same, rounded, weights
        if isinstance(high_module, EmulatedLinear):
            high_module.weight.data = low_module.weight.data.double()
    swap(layer, name)
    draw_alike(high, layer)
    x, dy = (matrix(1024, 512, seed, "normal", torch.bfloat16).view(4, 256, 512).cuda() for seed in (0, 1))
    cos, sin = (table.unsqueeze(-2) for table in rope_tables(config.rope, 128, 256, x.device))
    found = run(_with(layer, SequenceInfo(4, 256, cos, sin)), x, dy)
    true = run(_with(high, SequenceInfo(4, 256, cos.double(), sin.double())), x.double(), dy.double())
    least = {"int4": 0.99, "nvfp4": 0.98}.get(
        name, 0.999
    )  # where activations are rounded to bf16 in between, 4-bit codes flip
    assert {key: value for key in true if (value := cosine(found[key], true[key])) < least} == {}
