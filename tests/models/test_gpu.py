"""What only a GPU shows: flex attention's documents, cuDNN and flash, fused kernels, fp32 sums, the memory estimate."""

import dataclasses
import gc

import pytest
import torch
from torch import nn

from qtrain import quant
from qtrain.models import (
    RECOMPUTE_SETS,
    apply_recompute,
    build_model,
    compile_layers,
    linear_cross_entropy,
    read_model_source,
)
from qtrain.models.cost.linear_bytes import LowBitBytes
from qtrain.models.cost.memory import estimate_memory
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.native import decoder, mlp
from qtrain.models.native.attention import attention_mask
from qtrain.quant import SCHEMES, LowBitScheme
from qtrain.quant.linear import LowBitLinear
from tests.models.families import ModelSource, source_of

pytestmark = pytest.mark.gpu

SHAPE = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "initializer_range": 0.05,
}


def model_of(name: str, dtype: torch.dtype, **changes):
    return build_model(source_of(name, **{**SHAPE, **changes}), device="cuda", dtype=dtype)


def batch(rows: int = 3, length: int = 320):
    """input_ids, labels, doc_ids; the length is no multiple of flex attention's blocks, documents end anywhere."""
    generator = torch.Generator().manual_seed(0)
    ids, labels = torch.randint(0, 1000, (2, rows, length), generator=generator)
    labels[:, ::7] = -100
    docs = (torch.rand(rows, length, generator=generator) < 0.02).cumsum(1)
    return ids.cuda(), labels.cuda(), docs.cuda()


def results(model, doc_ids) -> dict[str, torch.Tensor]:
    ids, labels, _ = batch()
    model.zero_grad()
    sums = model(ids, labels, doc_ids)
    (sums.loss / 500).backward()
    return {"loss": sums.loss.detach() / 500, **{n: p.grad.clone() for n, p in model.named_parameters()}}


def assert_close(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float) -> None:
    for name, value in expected.items():
        error = (found[name].double() - value.double()).norm() / value.double().norm()
        assert error <= tolerance, f"{name}: {error:.2e}"


def exact_results(model, doc_ids) -> dict[str, torch.Tensor]:
    """The same weights in fp64 on the CPU, where masks are explicit."""
    reference = model.__class__(model.config).double()
    reference.load_state_dict({k: v.double().cpu() for k, v in model.state_dict().items()})
    ids, labels, _ = (t.cpu() for t in batch())
    sums = reference(ids, labels, None if doc_ids is None else doc_ids.cpu())
    (sums.loss / 500).backward()
    return {"loss": sums.loss.detach() / 500, **{n: p.grad for n, p in reference.named_parameters()}}


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("kind", ["causal", "documents", "window", "window and documents"])
def test_bf16_attention_paths_equal_an_explicit_mask(kind, compiled, monkeypatch):
    """flex attention (forward and backward) against a boolean mask through PyTorch's attention, on the same GPU."""
    torch._dynamo.reset()
    name = "mistral-window" if "window" in kind else "qwen2"
    model = model_of(name, torch.bfloat16, **({"sliding_window": 50} if "window" in kind else {}))
    doc_ids = batch()[2] if "documents" in kind else None
    with monkeypatch.context() as patch:
        patch.setattr(
            decoder,
            "attention_mask",
            lambda docs, b, s, window, device, own: (
                None
                if kind == "causal"
                else attention_mask(None if docs is None else docs.cpu(), b, s, window, torch.device("cpu")).to(device)
            ),
        )
        expected = results(model, doc_ids)
    if compiled:
        compile_layers(model)
    assert_close(results(model, doc_ids), expected, 0.02)


@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
def test_bf16_gradients_are_near_fp64(documents):
    """Every gradient of the GPU's kernels, compiled, against fp64 on the CPU: bf16's rounding and nothing else."""
    torch._dynamo.reset()
    model = model_of("qwen3", torch.bfloat16)
    doc_ids = batch()[2] if documents else None
    expected = exact_results(model, doc_ids)
    compile_layers(model)
    found = {name: value.cpu() for name, value in results(model, doc_ids).items()}
    assert_close(found, expected, 0.05)


@pytest.mark.parametrize("mode", ["none", "selective"])
@pytest.mark.parametrize(("name", "operator"), [("qwen3", "qk_norm_rope"), ("qwen2", "qkv_rope")])
def test_norms_and_rotation_run_their_kernels(name, operator, mode):
    """Compiled as in eager code, and the gradients are near fp64."""
    torch._dynamo.reset()
    model = model_of(name, torch.bfloat16, num_attention_heads=6)
    expected = exact_results(model, None)
    apply_recompute(model, RECOMPUTE_SETS[mode])
    for compiled in (False, True):
        if compiled:
            compile_layers(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            found = results(model, None)
        run = {e.key for e in profile.key_averages()}
        assert {f"qtrain::{operator}", f"qtrain::{operator}_backward", "qtrain::residual_norm_backward"} <= run
        assert_close({name: value.cpu() for name, value in found.items()}, expected, 0.05)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("documents", [False, True], ids=["causal", "documents"])
def test_compiled_layers_in_every_mode_equal_eager(mode, documents):
    """One compilation for all layers, no new one for the next batch's documents."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = model_of("qwen2", torch.bfloat16)
    doc_ids = batch()[2] if documents else None
    expected = results(model, doc_ids)
    apply_recompute(model, RECOMPUTE_SETS[mode])
    assert_close(results(model, doc_ids), expected, 0.02)  # eager, recomputed
    compile_layers(model)
    assert_close(results(model, doc_ids), expected, 0.02)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    results(model, None if doc_ids is None else doc_ids.flip(0))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs


def test_plain_causal_attention_runs_in_a_fused_kernel():
    """Grouped queries in bf16 go to cuDNN or flash, not to the unfused fallback."""
    model = model_of("qwen2", torch.bfloat16)
    with torch.profiler.profile() as profile:
        results(model, None)
    names = {event.key for event in profile.key_averages()}
    fused = {"aten::_scaled_dot_product_cudnn_attention", "aten::_scaled_dot_product_flash_attention"}
    assert names & fused, sorted(n for n in names if "attention" in n)
    assert "aten::_scaled_dot_product_attention_math" not in names


@pytest.mark.parametrize("chunks", [1, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_loss_and_gradients_near_fp64_and_free_of_the_chunk_count(dtype, chunks):
    """bf16: the head's gradient is summed in fp32, so seven chunks are no worse than one GEMM."""
    torch.manual_seed(0)
    hidden = torch.randn(700, 256, device="cuda").to(dtype).requires_grad_()
    head = nn.Linear(256, 3000, bias=False, device="cuda", dtype=dtype)
    labels = torch.randint(0, 3000, (700,), device="cuda")
    labels[::9] = -100
    x, w = hidden.detach().double().requires_grad_(), head.weight.detach().double().requires_grad_()
    expected = nn.functional.cross_entropy(x @ w.t(), labels, reduction="sum")
    (expected / 600).backward()
    sums = linear_cross_entropy(hidden, head, labels, chunks)
    (sums.loss / 600).backward()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-4 if dtype == torch.bfloat16 else 1e-6)
    tolerance = 0.006 if dtype == torch.bfloat16 else 2e-3  # fp32 products may run in TF32
    for found, exact in ((hidden.grad, x.grad), (head.weight.grad, w.grad)):
        assert found.dtype == dtype
        assert (found.double() - exact).norm() / exact.norm() <= tolerance


def head_of(plain: nn.Linear, scheme: LowBitScheme, logits: list, in_memory: bool) -> LowBitLinear:
    """`logits` receives its outputs, and their values before anything overwrites them. in_memory: it reads the gradient
    of its outputs from there."""
    head = LowBitLinear(plain, scheme, torch.zeros(3, dtype=torch.int64, device=plain.weight.device))
    head.register_forward_hook(lambda module, args, y: logits.append((y.detach(), y.detach().clone())))
    if in_memory:
        head.reads_softmax_gradient = lambda *_: False
    return head


@pytest.mark.parametrize("name", ["int8", "fp8_rowwise", "fp8_blockwise"])
def test_heads_with_finer_scales_never_write_the_gradient_of_their_logits(name):
    """Gradients are those with the gradient in memory, but for roundings of an exponential, in two chunks, one of them
    no multiple of a tile."""
    torch.manual_seed(0)
    scheme = SCHEMES.make(name, {}, "--quantize").for_linear(256, 3008, head=True)
    hidden = torch.randn(1008, 256, device="cuda").bfloat16().requires_grad_()
    plain = nn.Linear(256, 3008, bias=False, device="cuda", dtype=torch.bfloat16)
    labels = torch.randint(0, 3008, (1008,), device="cuda")
    labels[::9] = -100
    found, logits = [], []
    for in_memory in (False, True):
        head = head_of(plain, scheme, logits, in_memory)
        logits.clear()
        loss = linear_cross_entropy(hidden, head, labels, 2, 1e-4).loss
        found.append([loss.detach(), *torch.autograd.grad(loss, [hidden, plain.weight])])
        assert [torch.equal(y, before) for y, before in logits] == [not in_memory] * 2
    for one, other in zip(*found, strict=True):
        assert (one.double() - other.double()).norm() <= 0.01 * other.double().norm()


@pytest.mark.parametrize(("tokens", "frozen"), [(1024, False), (1024, True), (1000, False)])  # 1000: no kernel takes it
def test_an_fp8_head_with_delayed_scales_never_writes_the_gradient_of_its_logits(tokens, frozen):
    """Loss and gradients in two chunks, ordinary and as a CUDA graph, as with the gradient in memory, and no further
    from fp64."""
    # Autograd runs a node on the stream on which it was made: of a graph that is the stream of the capture.
    with torch.cuda.stream(torch.cuda.Stream()):
        check_head_without_gradient_of_logits(tokens, frozen)


def check_head_without_gradient_of_logits(tokens: int, frozen: bool) -> None:
    scheme = SCHEMES.make("fp8_tensorwise", {"scaling": "delayed"}, "--quantize")
    torch.manual_seed(0)
    hidden = torch.randn(tokens, 256, device="cuda").bfloat16().requires_grad_()
    plain = nn.Linear(256, 3008, bias=False, device="cuda", dtype=torch.bfloat16).requires_grad_(not frozen)
    labels = torch.randint(0, 3008, (tokens,), device="cuda")
    labels[::9] = -100
    x, w = hidden.detach().double().requires_grad_(), plain.weight.detach().double().requires_grad_()
    nn.functional.cross_entropy(x @ w.t(), labels, reduction="sum").backward()
    errors, logits = [], []
    for in_memory in (False, True):
        head = head_of(plain, scheme, logits, in_memory)

        def step(head=head) -> list[torch.Tensor]:
            logits.clear()
            trained = [hidden] if frozen else [hidden, plain.weight]
            return list(torch.autograd.grad(linear_cross_entropy(hidden, head, labels, 2).loss, trained))

        step()  # without a history
        assert head.dy_amax.item() == pytest.approx(1.0, rel=0.01)
        head.x_scale.copy_(hidden.abs().amax().float() / 448)
        head.dy_scale.fill_(1 / 448)
        found = step()
        last = tokens - 512  # tokens of the second chunk
        kept = [torch.equal(y, before) for y, before in logits]
        assert kept == [not in_memory, not in_memory and last % 16 == 0]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
            replayed = step()
        graph.replay()
        assert all(map(torch.equal, replayed, found))
        exact = [x.grad] if frozen else [x.grad, w.grad]
        errors.append([((f.double() - e).norm() / e.norm()).item() for f, e in zip(found, exact, strict=True)])
    assert all(new <= old * 1.001 < 0.05 for new, old in zip(*errors, strict=True)), errors


def test_initial_weights_on_the_gpu_are_reproducible():
    first, second = model_of("qwen2", torch.bfloat16), model_of("qwen2", torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert first.lm_head.weight is first.embed_tokens.weight and first.embed_tokens.weight.is_cuda


def peak_of_steps(mode: str, accumulates: bool = False, keep_8bit: tuple[str, ...] = ()) -> tuple[int, int]:
    """Planned and measured bytes of steps of a 100 M parameter model, compiled, fused AdamW in bf16."""
    torch._dynamo.reset()
    source: ModelSource = read_model_source("llama-100m")
    step = StepShape(micro_batch_size=16, seq_len=1024, recompute=RECOMPUTE_SETS[mode], accumulates=accumulates)
    low_bit = dataclasses.replace(LowBitBytes.plain(2), gate_up_8bit=bool(keep_8bit))
    estimate = estimate_memory(source.model_config(), step, low_bit=low_bit)
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = build_model(source, device="cuda", dtype=torch.bfloat16)
    apply_recompute(model, RECOMPUTE_SETS[mode], keep_8bit)
    compile_layers(model)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, 16384, (16, 1025), device="cuda")
    for step in range(3):
        if step == 2:
            torch.cuda.reset_peak_memory_stats()
        for _ in range(1 + accumulates):
            (model(ids[:, :-1], ids[:, 1:]).loss / ids.numel()).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return estimate.peak, torch.cuda.max_memory_allocated() - before


@pytest.mark.parametrize("mode", ["none", "full"])
@pytest.mark.parametrize("accumulates", [False, True])
def test_memory_estimate_is_within_a_tenth_of_the_peak(mode, accumulates):
    planned, peak = peak_of_steps(mode, accumulates)
    assert planned == pytest.approx(peak, rel=0.1), f"{planned / 2**20:.0f} and {peak / 2**20:.0f} MiB"


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_gate_up_in_8_bits_takes_what_is_planned(mode):
    """The peak falls, within a tenth as much as the plan's."""
    (planned, peak), (planned_8bit, peak_8bit) = (peak_of_steps(mode, keep_8bit=names) for names in ((), ("gate_up",)))
    assert planned_8bit == pytest.approx(peak_8bit, rel=0.1)
    assert peak - peak_8bit == pytest.approx(planned - planned_8bit, rel=0.1)


@pytest.mark.parametrize("scheme", ["bf16", "int8", "fp8_blockwise"])
@pytest.mark.parametrize("mode", ["none", "selective"])
def test_gate_up_in_8_bits_in_compiled_layers(scheme, mode):
    """The loss is that of compiled layers without, gradients are within 12%, with those of the scheme."""
    found = []
    for names in ((), ("gate_up",)):
        torch._dynamo.reset()
        model = model_of("qwen2", torch.bfloat16)
        quant.quantize_linears(model, quant.SCHEMES.make(scheme, {}, "--quantize"), seed=3, head=model.lm_head)
        apply_recompute(model, RECOMPUTE_SETS[mode], names)
        compile_layers(model)
        found.append(results(model, None))
    assert found[0]["loss"].item() == pytest.approx(found[1]["loss"].item(), rel=1e-4)
    assert_close(found[1], found[0], 0.12)


@pytest.mark.parametrize("name,kwargs", [("int8", {}), ("fp8_tensorwise", {"scaling": "delayed"})])
def test_a_low_bit_mlp_is_one_function(name, kwargs, monkeypatch):
    """Compiled by layers: the loss is that of separate linears, and so are the gradients."""
    ids = torch.randint(0, 1000, (2, 129), device="cuda", generator=torch.Generator("cuda").manual_seed(0))
    found = []
    for takes in (quant.supports_swiglu_mlp, lambda *linears: False):
        torch._dynamo.reset()
        monkeypatch.setattr(mlp, "supports_swiglu_mlp", takes)
        model = model_of("qwen2", torch.bfloat16)
        quant.quantize_linears(model, quant.SCHEMES.make(name, kwargs, "--quantize_kwargs"), seed=3)
        compile_layers(model)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            sums = model(ids[:, :-1], ids[:, 1:])
            sums.loss.backward()
        fused = any("quantize_swiglu" in event.key for event in profile.key_averages())
        assert fused == (takes is quant.supports_swiglu_mlp)
        found.append([sums.loss.detach(), *(p.grad for p in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
