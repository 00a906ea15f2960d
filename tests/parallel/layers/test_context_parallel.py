"""Ranks that share sequences compute the heads and read the codes of one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qtrain.comm.rank_group import RankGroup
from qtrain.core.errors import UserError
from qtrain.models import RECOMPUTE_SETS, Decoder, ModelConfig, ModelSource, apply_recompute, compile_layers
from qtrain.models.cost.memory import estimate_memory
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.native.attention import Attention, SequenceInfo, attention_mask
from qtrain.parallel.layers.context_in_order import ContextInOrder
from qtrain.parallel.layers.context_parallel import ContextParallel, check_context, exchanged_width
from qtrain.parallel.layers.exchange import ContextExchange
from qtrain.parallel.mesh import check_readers, make_mesh, planned_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import SCHEMES, quantize_linears, reassign
from qtrain.quant.execute import OperandRequest, quantize_operands
from qtrain.quant.linear import LowBitLinear
from qtrain.quant.scheme import LowBitScheme
from qtrain.quant.tensor_roles import BOTH, DelayedScale
from qtrain.tensors.quantized_tensor import QuantizedTensor
from tests.cases import matrix, sampled
from tests.models.families import DOC_IDS, FAMILIES, MIXTURES, batch, drawn, source_of
from tests.worlds import run_ranks

# ---- attention -------------------------------------------------------------------------------------------------------


def _config(**changes: Any) -> ModelConfig:
    return ModelSource("s", {**FAMILIES["llama3"], **changes}, "--model").model_config()


def _heads_of_ranks(kv_heads: int, dtype: torch.dtype, masked: bool, deterministic: bool) -> list[float]:
    """Relative errors of y and of the gradients of q, k and v, of this rank's tokens; 0: the same bits."""
    torch.use_deterministic_algorithms(deterministic)
    group = make_mesh(0, 0, "cpu", cp=torch.distributed.get_world_size()).cp_group
    config, batch, length, dim = _config(num_key_value_heads=kv_heads), 2, 24, 8
    with torch.device("meta"):
        plain = Attention(config)
        shared = ContextParallel(group)._parallel_kind(plain)
    generator = torch.Generator().manual_seed(0)
    shapes = [(batch, heads, length, dim) for heads in (4, kv_heads, kv_heads, 4)]
    *inputs, dy = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    doc_ids = torch.arange(length).expand(batch, -1) // 7 if masked else None
    mask = attention_mask(doc_ids, batch, length, None, torch.device("cpu"))
    info = SequenceInfo(batch, length, dy, dy, mask)

    def run(attention: Attention, tensors: list[Tensor], dy: Tensor, info: SequenceInfo) -> list[Tensor]:
        leaves = [t.clone().requires_grad_() for t in tensors]
        y = attention.over_keys(*leaves, info)
        return [y.detach(), *torch.autograd.grad(y, leaves, dy)]

    def own(t: Tensor) -> Tensor:
        return t.chunk(group.ranks, 2)[group.rank]

    expected = [own(t) for t in run(plain, inputs, dy, info)]
    found = run(shared, [own(t) for t in inputs], own(dy), info._replace(sharded=True))
    return [float((a - b).float().norm() / a.float().norm()) for a, b in zip(expected, found, strict=True)]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_every_head_has_the_bits_of_one_process(masked, deterministic):
    """With as many key-value heads as ranks, or more. Fewer are sent to several ranks, whose gradients are added."""
    for ranks, kv_heads, dtype in ((2, 2, torch.bfloat16), (2, 4, torch.float32), (4, 4, torch.float32)):
        for errors in run_ranks(ranks, _heads_of_ranks, kv_heads, dtype, masked, deterministic):
            assert errors == [0.0] * 4, (ranks, kv_heads, errors)
    for y, dq, dk, dv in run_ranks(4, _heads_of_ranks, 1, torch.float32, masked, deterministic):
        assert y == dq == 0 and dk <= 1e-6 and dv <= 1e-6


# ---- a model ---------------------------------------------------------------------------------------------------------


def _losses_and_gradients(model: Decoder) -> tuple[list[float], dict[str, Tensor]]:
    """Of a step, and of evaluations of sequences that have parts, and of some that have none."""
    model.z_loss, model.router_losses.balance, model.router_losses.z = 1e-3, 0.1, 0.01
    ids, labels = batch()
    sums = model(ids, labels, DOC_IDS)
    sums.loss.backward()
    with torch.no_grad():
        evaluated = [float(model(ids[:, :n], labels[:, :n], DOC_IDS[:, :n]).nll) for n in (24, 23)]
    return [float(sums.nll), float(sums.loss), *evaluated], {
        n: p.grad for n, p in model.named_parameters() if p.grad is not None
    }


def _models_of_ranks(names: list[str]) -> dict[str, tuple[list[float], dict[str, float]]]:
    """Of each model: errors of nll and loss over all ranks, and of evaluated ones; those of the sums of gradients."""
    mesh, found = make_mesh(0, 0, "cpu", cp=torch.distributed.get_world_size()), {}
    for name in names:
        one = drawn(source_of(name), seed=1)
        expected, gradients = _losses_and_gradients(one)
        model = drawn(source_of(name), seed=1, place=ContextParallel(mesh.cp_group).place)
        (*own, full, odd), terms = _losses_and_gradients(model)
        total, errors = torch.tensor(own, dtype=torch.float64), {}
        torch.distributed.all_reduce(total)
        assert terms.keys() == gradients.keys()
        for parameter, gradient in gradients.items():
            torch.distributed.all_reduce(terms[parameter])
            errors[parameter] = float((terms[parameter] - gradient).norm() / gradient.norm())
        if one.expert_load is not None:
            load = model.expert_load.step
            torch.distributed.all_reduce(load)  # as `ExpertBalance` does
            errors["load"] = float((load != one.expert_load.step).sum())
        found[name] = [a / b - 1 for a, b in zip((*total.tolist(), full, odd), expected, strict=True)], errors
    return found


@pytest.mark.parametrize("ranks", [2, 4])
def test_every_model_has_the_loss_and_gradients_of_one_process(ranks):
    """In fp32, where the order of sums differs; with documents, padding and the losses of routers."""
    names = [*FAMILIES, *MIXTURES] if ranks == 2 else ["llama3", "deepseek_v2", "qwen3_moe"]
    for found in run_ranks(ranks, _models_of_ranks, names):
        assert found.keys() == set(names)
        for name, (losses, errors) in found.items():
            assert max(map(abs, losses)) <= 1e-6, (name, losses)
            worst = max(errors, key=errors.__getitem__)
            assert errors[worst] <= 1e-5, (name, worst, errors[worst])


def _in_order(names: list[str], kinds: str) -> dict[str, list[str]]:
    """Of each model what has not the bits of one process: losses, gradients of parameters, loads."""
    torch.use_deterministic_algorithms(True)
    mesh, found = make_mesh(0, 0, "cpu", cp=torch.distributed.get_world_size()), {}
    for name in names:
        one = drawn(source_of(name), seed=1)
        model = drawn(source_of(name), seed=1, place=ContextInOrder(mesh.cp_group).place)
        results = []
        for each in (one, model):
            apply_recompute(each, RECOMPUTE_SETS[kinds])
            results.append(_losses_and_gradients(each))
        (expected, gradients), (losses, terms) = results
        found[name] = [n for n in gradients if not torch.equal(gradients[n], terms[n])]
        found[name] += ["losses"] * (losses != expected)
        if one.expert_load is not None:
            load = model.expert_load.step
            torch.distributed.all_reduce(load)
            found[name] += ["load"] * (not torch.equal(load, one.expert_load.step))
    return found


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("kinds", ["none", "full"])
def test_in_order_every_model_has_the_bits_of_one_process(ranks, kinds):
    names = [*FAMILIES, *MIXTURES] if ranks == 2 else ["llama3", "deepseek_v2", "qwen3_moe"]
    assert run_ranks(ranks, _in_order, names, kinds) == [{name: [] for name in names}] * ranks


def _kept_parts() -> tuple[int, int, int]:
    """Bytes of layers' inputs between the passes: freed of their own memory, and kept in parts; and what is freed by
    the plan."""
    mesh = make_mesh(0, 0, "cpu", cp=2)
    model = drawn(source_of("llama3"), seed=1, place=ContextInOrder(mesh.cp_group).place)
    apply_recompute(model, RECOMPUTE_SETS["full"])
    ids, labels = batch()
    sums = model(ids, labels)
    residuals = model.residual_offload
    freed = sum(residual.size for residual in residuals._kept.values() if not residual.on_device)
    kept = sum(part.nbytes for part in residuals._parts.values())
    steps = [StepShape(*ids.shape, 4, RECOMPUTE_SETS["full"], compiled=False, residual_parts=parts) for parts in (1, 2)]
    one, shared = (estimate_memory(model.config, step).activations for step in steps)
    sums.loss.backward()
    assert not residuals._parts
    return freed, kept, one - shared


def test_in_order_a_rank_keeps_its_part_of_layers_inputs():
    layers = source_of("llama3").model_config().num_hidden_layers
    size = batch()[0].numel() * source_of("llama3").model_config().hidden_size * 4 * (layers - 1)
    # The last layer's stays, for its backward comes first; the one before is freed when that has run.
    assert run_ranks(2, _kept_parts) == [(size, size // 2, size // 2)] * 2


def _compiled_ranks(scheme: str, kinds: str) -> tuple[list[float], float]:
    """Losses of an eager and of a compiled step of this rank, and the error of the compiled gradients."""
    mesh, losses, gradients = make_mesh(0, 0, "cpu", cp=2), [], []
    context = ContextParallel(mesh.cp_group)
    for compiled in (False, True):
        model = drawn(source_of("qwen3", num_hidden_layers=1), seed=1, place=context.place)
        made = SCHEMES.make(scheme, {}, "--quantize")
        quantize_linears(model, made, seed=0, head=model.lm_head, shared=context.shared_linear)
        apply_recompute(model, RECOMPUTE_SETS[kinds])
        if compiled:
            compile_layers(model)
        found, terms = _losses_and_gradients(model)
        losses.append(found[0])
        gradients.append(torch.cat([t.flatten() for t in terms.values()]))
    return losses, float((gradients[1] - gradients[0]).norm() / gradients[0].norm())


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(("scheme", "kinds"), sampled([("fp8_tensorwise", "selective")], lambda *_: True))
def test_compiled_layers_exchange_as_eager_ones_do(scheme, kinds):
    for (eager, compiled), error in run_ranks(2, _compiled_ranks, scheme, kinds):
        assert compiled == pytest.approx(eager, rel=1e-4) and error <= 1e-2


# ---- codes of one process --------------------------------------------------------------------------------------------

SPANNING = {
    "fp8_tensorwise": {},
    "fp8_tensorwise delayed": {"scaling": "delayed"},
    "fp8_rowwise": {},
    "fp8_rowwise_gw_hp": {},
    "int8": {"stochastic_rounding": False},
    "int8 tensorwise": {"granularity": "tensorwise", "stochastic_rounding": False},
    "switchback": {},
    "bitnet": {},
    "fp8_blockwise": {},
    "int8_blockwise": {},
    "mxfp8": {},
}
ROWS = 512
"""Each rank has whole blocks of tokens."""


def _codes_of_ranks() -> dict[str, list[str]]:
    """Of each scheme the operands whose codes, scales or recorded absmax are not those of one process."""
    group = make_mesh(0, 0, "cpu", cp=torch.distributed.get_world_size()).cp_group
    return {name: _odd_operands(name, options, group) for name, options in SPANNING.items()}


def _odd_operands(name: str, options: dict[str, Any], group: RankGroup) -> list[str]:
    scheme, odd = SCHEMES.make(name.split()[0], options, "--quantize"), []
    for tensor, history in (("x", 0.0), ("dy", 0.25)):  # without a delayed scale, and with one
        t = _outliers(tensor)
        one, own = (
            DelayedScale(torch.full((1,), history), torch.zeros(1)) if scheme.amax_history else None for _ in range(2)
        )
        request = OperandRequest(scheme, tensor, delayed=one)
        expected = quantize_operands(t, request)
        request = request._replace(delayed=own, exchange=ContextExchange(group))
        found = quantize_operands(t.chunk(group.ranks)[group.rank], request)
        for layout, a, b in zip(("rows", "columns"), expected, found, strict=True):
            low_bit = isinstance(a, QuantizedTensor)
            # Transposed codes have the tokens along dimension 1; those that both products read have not.
            dim = int(layout == "columns" and low_bit and a.format.sum_dim != 0)
            codes, scales = ((a.codes, b.codes), (a.scale, b.scale)) if low_bit else ((a, b), (t, t))
            part = codes[0].chunk(group.ranks, dim)[group.rank].contiguous()
            if not torch.equal(part.view(torch.uint8), codes[1].contiguous().view(torch.uint8)):
                odd.append(f"{tensor} {layout}")
            if scales[0].shape == scales[1].shape and not torch.equal(*scales):
                odd.append(f"{tensor} {layout}, the scale")
        if own is not None and not torch.equal(one.amax, own.amax):
            odd.append(f"{tensor}, the absmax")
    return odd


def _outliers(tensor: str) -> Tensor:
    """Of x [512, 96], or dy [512, 64]; the largest value of every column is on the first rank."""
    t = matrix(ROWS, 96 if tensor == "x" else 64, len(tensor), "outlier")
    t[3] = 50 * t.abs().amax(dim=0)
    return t


def test_codes_are_those_of_one_process():
    for found in run_ranks(2, _codes_of_ranks):
        assert found == {name: [] for name in SPANNING}


def test_linears_of_layers_exchange_scales():
    """In whatever scheme they run; experts and the head scale what they have."""
    context = ContextParallel(RankGroup("planned", 2, 0))
    model = drawn(source_of("qwen2_moe"), place=context.place)
    made = SCHEMES.make("fp8_tensorwise", {}, "--quantize")
    how = {"seed": 0, "head": model.lm_head, "quantize_head": True, "shared": context.shared_linear}
    quantized = quantize_linears(model, made, **how)
    reassign(model, quantized, {"layers.0.attn.qkv": SCHEMES.make("int8", {}, "--quantize")})
    for name, linear in quantized.by_name().items():
        assert (linear.exchange is None) == (name == "lm_head" or ".experts." in name), name
        arguments = linear.arguments()
        assert arguments.exchange is linear.exchange and arguments.request("dy", BOTH).exchanges == bool(
            linear.exchange
        )


def _gradients_of_ranks() -> dict[str, tuple[float, float]]:
    """Of each scheme, errors of the weight's gradient relative to the product of the codes in fp64: of one process, and
    of the sum over the ranks."""
    group, found = make_mesh(0, 0, "cpu", cp=torch.distributed.get_world_size()).cp_group, {}
    x, dy = _outliers("x"), _outliers("dy")
    for name, options in SPANNING.items():
        scheme = SCHEMES.make(name.split()[0], options, "--quantize")
        operands = [quantize_operands(t, OperandRequest(scheme, n)).columns for n, t in (("dy", dy), ("x", x))]
        if not all(isinstance(operand, QuantizedTensor) for operand in operands):
            continue  # grad_weight in high precision reads no codes

        def gradient(x: Tensor, dy: Tensor, exchange: ContextExchange | None, scheme: LowBitScheme = scheme) -> Tensor:
            torch.manual_seed(0)
            linear = LowBitLinear(nn.Linear(96, 64, bias=False), scheme, torch.zeros(3, dtype=torch.int64))
            linear.exchange = exchange
            linear(x).backward(dy)
            return linear.weight.grad

        dy_64, x_64 = (o.dequantize(torch.float32).double() for o in operands)
        exact = dy_64 @ x_64.t() if dy_64.shape[1] == ROWS else dy_64.t() @ x_64
        one = gradient(x, dy, None)
        many = gradient(*(t.chunk(group.ranks)[group.rank] for t in (x, dy)), ContextExchange(group))
        torch.distributed.all_reduce(many)
        found[name] = tuple(float((g.double() - exact).norm() / exact.norm()) for g in (one, many))
    return found


def test_gradients_of_weights_are_as_exact_as_those_of_one_process():
    """The one result whose bits differ: each rank's product is rounded, and their sum is."""
    found, _ = run_ranks(2, _gradients_of_ranks)
    assert len(found) > 5
    for name, (one, many) in found.items():
        assert many <= max(2 * one, 2**-23), (name, one, many)


# ---- what cannot be shared -------------------------------------------------------------------------------------------


def test_sequences_and_heads_that_do_not_divide_are_refused():
    config = source_of("llama3").model_config()  # 4 heads, 2 key-value heads
    for ranks in (1, 2, 4):
        check_context(config, ranks, 24)
    check_context(source_of("deepseek_v2").model_config(), 4, 24)  # a key for every head
    for ranks, length, message in (
        (5, 24, "--cp: 5 does not divide the 24 tokens of a sequence; give --seq_len 20, or another --cp."),
        (3, 24, "--cp: 3 ranks cannot share the model's 4 attention heads, with 2 key-value heads, equally; allowed: "
        "1, 2, 4."),
        (8, 24, "--cp: 8 ranks cannot share"),
    ):  # fmt: skip
        with pytest.raises(UserError) as refused:
            check_context(config, ranks, length)
        assert str(refused.value).startswith(message)
    check_readers(2, 2, 4)
    with pytest.raises(UserError, match=r"--cp: 3 does not divide the 4 processes of the run; allowed: 1, 2, 4\."):
        check_readers(1, 4, 3)


def test_a_mesh_knows_who_reads_what():
    mesh = planned_mesh(2, 4, cp=2)
    assert (mesh.world, mesh.dp_size, mesh.readers, mesh.reader, mesh.cp_rank) == (8, 8, 4, 0, 0)
    assert mesh.describe(False) == "2 x 4 (replicate x shard, HSDP, ZeRO-2; sequences over groups of 2)"
    found = run_ranks(4, _place_of_rank)
    assert found == [(4, 2, 0, 0), (4, 2, 0, 1), (4, 2, 1, 0), (4, 2, 1, 1)]


def _place_of_rank() -> tuple[int, ...]:
    mesh = make_mesh(0, 2, "cpu", cp=2)
    return mesh.dp_size, mesh.readers, mesh.reader, mesh.cp_rank


def _micro_steps_of_rank(cp: int) -> tuple[list[int], int]:
    """Numbers that key the random bits of two micro-batches, and those of the weights after the step."""
    model, found = drawn(source_of("llama3")), []
    quantized = quantize_linears(model, SCHEMES.make("int8", {}, "--quantize"), seed=0, head=model.lm_head)
    parallel = DataParallel(model, quantized, make_mesh(0, 0, "cpu", cp=cp))
    parallel.begin_step(3, 2)
    for index in range(2):
        parallel.begin_micro_batch(index)
        found.append(int(quantized.keys[0, 1]))
    parallel.refresh()
    return found, int(quantized.keys[0, 1])


def test_each_part_draws_bits_of_its_own_and_weights_those_of_one_process():
    found = run_ranks(4, _micro_steps_of_rank, 2)
    numbers = sorted(number for own, _ in found for number in own)
    assert numbers == list(range(2 * 12, 2 * 16))  # of micro-batches 12 to 15, for each of two parts
    assert (
        {weights for _, weights in found} == {weights for _, weights in run_ranks(2, _micro_steps_of_rank, 1)} == {15}
    )


def test_elements_of_a_token_that_are_exchanged():
    assert exchanged_width(source_of("llama3").model_config(), 2) == 8 * (2 * 4 + 2 * 2)
    assert exchanged_width(source_of("llama3").model_config(), 4) == 8 * (2 * 4 + 2 * 4)  # key-value heads twice
    assert exchanged_width(source_of("deepseek_v2").model_config(), 2) == 4 * (2 * 18 + 2 * 12)
