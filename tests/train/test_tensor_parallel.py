"""A model divided over tensor ranks computes what one process does, in every scheme; what cannot be divided is refused.

Sums over ranks are in another order than one process's: 1e-5 relative in fp32. In low bits a value near the border of a
code falls to the other side, and ranks' own scales are finer: LOSS_BOUNDS.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.mesh_equality import CONFIG as SMALL
from qtrain.comm.wire import sent
from qtrain.core.errors import UserError
from qtrain.data.batch import Batch
from qtrain.models import (
    RECOMPUTE_SETS,
    Decoding,
    ModelConfig,
    ModelSource,
    Sampling,
    apply_recompute,
    build_model,
    compile_layers,
    continuations,
    export_hf,
    read_model_source,
)
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.layers.exchange import TokenExchange
from qtrain.parallel.layers.local_config import check_divisible
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import Mesh, make_mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.quant import SCHEMES, quantize_linears, swiglu_mlp
from qtrain.quant.scheme_map import with_overrides
from qtrain.train.assembly.assemble import freeze_embedding
from qtrain.train.settings.exclusions import check_exclusions
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import LanguageSettings, VisionSettings
from qtrain.train.state.fingerprints import fingerprint
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import sampled, without_norms
from tests.worlds import run_ranks

CONFIG = {
    **SMALL,  # 263 tokens: ranks have 131 or 132
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ONE_LAYER = {**CONFIG, "num_hidden_layers": 1}
QWEN3 = {**CONFIG, "model_type": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": False}

MIXTURE = {
    **CONFIG,
    "model_type": "qwen2_moe",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 96,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [0],
    "norm_topk_prob": True,
}
"""A dense layer, and one of experts with a shared one."""
OLMOE = {**CONFIG, "model_type": "olmoe", "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 2}
"""Norms of queries and keys over all heads."""

SCHEME_NAMES = [name for name in SCHEMES.names() if name != "auto"]
LOSS_BOUNDS = dict.fromkeys(SCHEME_NAMES, 2e-3) | {
    "bf16": 1e-5,
    "int4": 1e-2,
    "int4_weight": 1e-2,
    "nvfp4": 1e-2,
    "qat": 1e-2,
}
STEPS = 2


def parts_of(source: ModelSource, mesh: Mesh, sequence: bool = True) -> ModelParallel | None:
    return ModelParallel.on(source.model_config(), mesh, sequence=sequence)


def model_of(config: dict[str, Any], mesh: Mesh, sequence: bool = True) -> torch.nn.Module:
    """Biases are random too, the same for any mesh."""
    source = ModelSource("s", config, "--model")
    parts = parts_of(source, mesh, sequence)
    model = build_model(source, seed=1, place=parts and parts.place)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            split = model.partition(name)
            shape = split.full_shape(p.shape) if split else p.shape
            whole = torch.randn(shape, generator=torch.Generator().manual_seed(len(name)))
            p.data.copy_(split.take(whole) if split else whole)
    return model


def shared_weights_of(model: torch.nn.Module) -> dict[str, Any]:
    return {} if model.parts is None else {"shared": model.parts.shared_linear}


def tokens(rows: int, length: int, seed: int = 0) -> Tensor:
    return torch.randint(263, (rows, length), generator=torch.Generator().manual_seed(seed))


def whole(model: torch.nn.Module, tensors: dict[str, Tensor]) -> dict[str, list]:
    """This rank's term of every whole tensor; those that several ranks have count once."""
    found = {}
    for name, own in tensors.items():
        split = model.partition(name)
        target = torch.zeros(split.full_shape(own.shape) if split else own.shape)
        holders = model.parts.group_of(name).ranks if split else 1  # from the first rank on
        if model.parts is None or model.parts.expert_group.rank < holders:
            split.put(target, own) if split else target.copy_(own)
        found[name] = target.tolist()
    return found


def added(terms: list[dict[str, list]]) -> dict[str, Tensor]:
    return {name: sum(torch.tensor(term[name]) for term in terms) for name in terms[0]}


# ---- one step of a model in fp32 -------------------------------------------------------------------------------------

BIASED = {**CONFIG, "mlp_bias": True, "attention_bias": True}
CASES = [
    (QWEN3, True, (2, 12)),
    (QWEN3, False, (2, 12)),
    (BIASED, True, (1, 13)),
    (MIXTURE, True, (2, 12)),
    (MIXTURE, True, (1, 13)),
]
"""Model, whether tokens are divided, and sequences x tokens: 24, and 13, which two ranks do not divide."""


def _step(
    tp: int, ep: int = 1, micro_batches: int = 1, cases: Sequence[tuple[dict, bool, tuple[int, int]]] = CASES
) -> list[dict[str, Any]]:
    mesh, found = make_mesh(ep, 1, "cpu", tp, ep), []
    for config, sequence, shape in cases:
        model = model_of(config, mesh, sequence)
        model.z_loss, model.loss_chunks = 1e-3, 3
        model.router_losses.balance, model.router_losses.z = 0.1, 0.01
        quantized = quantize_linears(model, SCHEMES.make("bf16", {}, "-"), seed=0)
        every = [tokens(shape[0], shape[1] + 1, seed) for seed in range(micro_batches)]
        ids = every[0]
        batches = [
            Batch(own[:, :-1].contiguous(), own[:, 1:].masked_fill(own[:, 1:] % 3 == 0, -100))
            for own in every[mesh.dp_rank :: mesh.dp_size]
        ]
        parallel, forward = DataParallel(model, quantized, mesh), language_forward(model, None)
        gradients = compute_gradients(model, forward, quantized, batches, 0, parallel=parallel)
        # The update reads them on the device.
        assert gradients.on_device.norm.item() == gradients.norm
        assert gradients.on_device.loss.item() == pytest.approx(gradients.loss, rel=1e-6)
        for s in parallel.parameters if ep > 1 else ():
            if ".experts." in s.name:  # an expert draws random bits of its own
                first = model.partition(s.name).ranges[0][0] * s.parameter.shape[1]
                assert parallel.placements[s.master].first_element == first
        with torch.no_grad():
            logits = model(ids)
        named = dict(model.named_parameters())
        found.append(
            {
                "loss": gradients.loss,
                "load": model.expert_load.step.tolist() if model.expert_load is not None else None,
                "norm": gradients.norm,
                "weights": whole(model, {n: p.data for n, p in named.items()}),
                "gradients": whole(model, {n: p.grad for n, p in named.items()}),
                "logits": logits.tolist(),
                "written": continuations(model, ids[:, :5].tolist(), Decoding(4, Sampling(0.7, seed=2))),
                "answers": continuations(model, [[1, 2, 3], [4]], Decoding(5, vocab_size=263)),
            }
        )
    return found


def test_loss_gradients_logits_and_text_are_those_of_one_process():
    """With tied and untied embeddings, biases, QK-norm, z-loss, tokens that do not divide, and a mixture of experts,
    whose routers' losses are of all tokens."""
    _compare_steps(_step(1), run_ranks(2, _step, 2))


@pytest.mark.parametrize("shape", sampled([((2, 12),), ((1, 13),)], lambda shape: shape == (2, 12)))
def test_so_they_are_where_tensor_groups_share_experts(shape):
    """Two groups of two: each rank has one of four experts, half of all else, and half of a micro-batch's tokens."""
    cases = [(MIXTURE, True, shape)]
    _compare_steps(_step(1, 1, 2, cases), run_ranks(4, _step, 2, 2, 2, cases), data_ranks=2)


def _compare_steps(one: list[dict[str, Any]], ranks: list[list[dict[str, Any]]], data_ranks: int = 1) -> None:
    for expected, *parts in zip(one, *ranks, strict=True):
        for part in parts:
            assert part["loss"] == pytest.approx(expected["loss"], rel=1e-5)
            assert part["norm"] == pytest.approx(expected["norm"], rel=1e-5) and part["norm"] == parts[0]["norm"]
            assert torch.allclose(torch.tensor(part["logits"]), torch.tensor(expected["logits"]), atol=1e-5)
            assert part["logits"] == parts[0]["logits"], "ranks would sample different tokens"
            assert part["written"] == expected["written"] and part["answers"] == expected["answers"]
        if expected["load"] is not None:  # data ranks have those of their micro-batches
            of_data_ranks = torch.tensor([part["load"] for part in parts[:: len(parts) // data_ranks]])
            assert of_data_ranks.sum(0).tolist() == expected["load"]
        weights = added([part["weights"] for part in parts])
        assert not [n for n, w in expected["weights"].items() if not torch.equal(torch.tensor(w), weights[n])]
        for name, gradient in added([part["gradients"] for part in parts]).items():
            right = torch.tensor(expected["gradients"][name])  # those of QK-norms are differences of larger terms
            assert (gradient - right).norm() <= 1e-5 * right.norm() + 1e-7 * expected["norm"], name


def _freeze(model: torch.nn.Module) -> None:
    """The embedding, and experts."""
    assert freeze_embedding(model)
    for name, p in model.named_parameters():
        p.requires_grad_(p.requires_grad and ".experts." not in name)


def _loaded(folder: str, ep: int) -> dict[str, list]:
    source = read_model_source(folder)
    model = build_model(source, pretrained=True, place=parts_of(source, make_mesh(0, 0, "cpu", 2, ep)).place)
    _freeze(model)
    prints = fingerprint(model)
    return {"weights": whole(model, {n: p.data for n, p in model.named_parameters()}), "frozen": prints}


@pytest.mark.parametrize(
    ("config", "ep"),
    [(QWEN3, 1), (CONFIG, 1), pytest.param(MIXTURE, 2, marks=pytest.mark.sweep)],
    ids=["untied", "tied", "experts of two groups"],
)
def test_published_weights_and_their_fingerprints(config, ep, tmp_path):
    """Each rank loads its part; fingerprints of what is frozen are those of the whole."""
    one = model_of(config, Mesh())
    export_hf(one, ModelSource("s", config, "--model"), tmp_path / "hf")
    _freeze(one)
    parts = run_ranks(2 * ep, _loaded, str(tmp_path / "hf"), ep)
    loaded = added([part["weights"] for part in parts])
    assert not [name for name, p in one.named_parameters() if not torch.equal(p.data, loaded[name])]
    assert [part["frozen"] for part in parts] == [fingerprint(one)] * (2 * ep)


# ---- steps of training in every scheme -------------------------------------------------------------------------------


def _train(
    schemes: list[str],
    shape: tuple[int, int],
    tp: int,
    options: dict[str, Any] | None = None,
    how: str = "",
    config: dict[str, Any] = ONE_LAYER,
    full_shard: bool = False,
    overrides: dict[str, Any] | None = None,
) -> dict[str, dict[str, Any]]:
    """Losses of steps of two micro-batches, norms, codes and bytes sent, of each scheme. how: "compiled full"."""
    mesh, found = make_mesh(*shape, "cpu", tp), {}
    for name in schemes:
        sent.clear()
        model = model_of(config, mesh)
        scheme = with_overrides(overrides, SCHEMES.make(name, options or {}, "--quantize"))
        quantized = quantize_linears(model, scheme, seed=0, head=model.lm_head, **shared_weights_of(model))
        codes = {
            f"{i} {n}": t.float().tolist()
            for i, x in enumerate(quantized.linears)
            for n, t in x.weight_codes.named_buffers()
        }
        if how:
            compiled, mode = how.split()
            apply_recompute(model, RECOMPUTE_SETS[mode])
            if compiled == "compiled":
                compile_layers(model)
        spec, groups = OPTIMIZERS.make("adamw", {}, "--optim"), parameter_groups(model, 0.1)
        units = decoder_units(model) if full_shard else ()
        parallel = DataParallel(model, quantized, mesh, lambda p: False, deterministic=True, units=units)
        for group in groups:
            group["params"] = [parallel.master(p) for p in group["params"]]
        optimizer = spec.build(groups, 1e-3, seed=3)
        optimizer.place(parallel.placements)
        quantized.track_versions(optimizer)
        forward, steps = language_forward(model, None), []
        for step in range(STEPS):
            numbers = range(mesh.dp_rank, 2, mesh.dp_size)
            batches = [
                Batch(*map(Tensor.contiguous, (t[:, :-1], t[:, 1:])))
                for t in (tokens(2, 13, 2 * step + n) for n in numbers)
            ]
            gradients = compute_gradients(model, forward, quantized, batches, step, parallel=parallel)
            apply_gradients(optimizer, quantized, gradients, lr=1e-3, clip_grad_norm=0.5, parallel=parallel)
            steps.append((gradients.loss, gradients.norm))
        found[name] = {"steps": steps, "codes": codes, "sent": dict(sent), "key": quantized.keys.tolist()[:1]}
    return found


def test_linears_of_several_schemes_train_as_on_one_process():
    """Some gather codes, some in the model's dtype; delayed scales are of all tokens."""
    delayed = {"scheme": "fp8_tensorwise", "scaling": "delayed"}
    overrides = {"*.down_proj": "fp8_rowwise", "*.o_proj": "bf16", "*.qkv": delayed}
    one = _train(["int8"], (1, 1), 1, overrides=overrides)["int8"]["steps"]
    for found in run_ranks(2, _train, ["int8"], (1, 1), 2, None, "", ONE_LAYER, False, overrides):
        assert torch.tensor(found["int8"]["steps"]).allclose(torch.tensor(one), rtol=5e-4)


@functools.cache
def of_one(scheme: str) -> dict[str, Any]:
    return _train([scheme], (1, 1), 1)[scheme]


@functools.cache
def of_two(scheme: str) -> list[dict[str, Any]]:
    return [of_rank[scheme] for of_rank in run_ranks(2, _train, [scheme], (1, 1), 2)]


def losses_differ(scheme: str, steps: list[tuple[float, float]], one: list[tuple[float, float]] | None = None) -> float:
    """Relative to one process."""
    return max(abs(a[0] - b[0]) / a[0] for a, b in zip(one or of_one(scheme)["steps"], steps, strict=True))


SAMPLE = ("int8", "fp8_tensorwise", "bitnet", "int4_weight", "fp8_blockwise")


@pytest.mark.parametrize("scheme", sampled(SCHEME_NAMES, lambda scheme: scheme not in SAMPLE))
def test_every_scheme_trains_as_on_one_process(scheme):
    first, second = of_two(scheme)
    assert first["steps"] == second["steps"]
    assert losses_differ(scheme, first["steps"]) <= LOSS_BOUNDS[scheme]
    assert first["key"] != second["key"] or scheme == "bf16", "both would round with the same bits"


def test_norms_over_all_heads_are_those_of_one_process():
    one = _train(["bf16"], (1, 1), 1, config=OLMOE)["bf16"]["steps"]
    two = run_ranks(2, _train, ["bf16"], (1, 1), 2, None, "", OLMOE)[0]["bf16"]["steps"]
    assert losses_differ("bf16", two, one) <= 1e-6
    assert two == [(pytest.approx(loss, rel=1e-6), pytest.approx(norm, rel=1e-5)) for loss, norm in one]


@pytest.mark.parametrize("scheme", sampled(SCHEME_NAMES, lambda scheme: scheme != "fp8_tensorwise"))
def test_tensor_ranks_that_shard_train_as_those_that_do_not(scheme):
    """2 x 2: half of the micro-batches each, and half of the masters of half of each matrix."""
    four = run_ranks(4, _train, [scheme], (1, 2), 2)
    assert all(of_rank[scheme]["steps"] == four[0][scheme]["steps"] for of_rank in four)
    assert losses_differ(scheme, four[0][scheme]["steps"]) <= LOSS_BOUNDS[scheme]


@pytest.mark.parametrize(
    "config", [ONE_LAYER, {**MIXTURE, "tie_word_embeddings": False}], ids=["dense, tied", "mixture, untied"]
)
@pytest.mark.parametrize("scheme", sampled(SCHEME_NAMES, lambda scheme: scheme not in ("int8", "fp8_tensorwise")))
def test_tensor_ranks_that_shard_fully_train_as_those_that_do_not(scheme, config):
    """2 x 2, bit for bit: parts of layers are gathered over their data ranks when they run; the gradients of norms and
    routers are completed over the tensor ranks before those of their layer are reduced."""
    options = without_norms(scheme)
    plain, full = (run_ranks(4, _train, [scheme], (1, 2), 2, options, "", config, full) for full in (False, True))
    assert [of_rank[scheme]["steps"] for of_rank in full] == [of_rank[scheme]["steps"] for of_rank in plain]
    assert full[0][scheme]["sent"]["gradients"] == plain[0][scheme]["sent"]["gradients"]


@pytest.mark.parametrize("scheme", sampled(["fp8_tensorwise", "bitnet", "switchback"], lambda s: s == "switchback"))
def test_codes_of_tensorwise_weights_are_those_of_the_whole(scheme):
    """qkv and o_proj of the first layer: its rows and its columns of the whole weight's codes, and the same scale."""
    one, config = of_one(scheme)["codes"], ModelConfig.from_hf(CONFIG)
    for number, name in enumerate(("layers.0.attn.qkv.weight", "layers.0.attn.o_proj.weight")):
        for rank, of_rank in enumerate(of_two(scheme)):
            group = dataclasses.replace(_Group, rank=rank)
            split = ModelParallel(config, group, group).partition(name)
            codes = torch.tensor(one[f"{number} output_codes"])
            assert torch.equal(split.take(codes), torch.tensor(of_rank["codes"][f"{number} output_codes"]))
            key = f"{number} output_scale"
            assert one[key] == of_rank["codes"][key]


@dataclasses.dataclass(frozen=True)
class _Ranks:
    ranks: int = 2
    rank: int = 0


_Group = _Ranks()


def test_bytes_of_activations_by_kind():
    """Each exchange sends 12 of 24 tokens of 64 elements: in the model's fp32, or codes where the scheme allows."""
    exchange, layers, micro_batches = 12 * 64, 1, 2 * STEPS
    plain, low_bit = (of_two(scheme)[0]["sent"] for scheme in ("bf16", "fp8_tensorwise"))
    # Two entries and two exits a layer, embedding and head, forward and backward.
    assert plain["activations"] == micro_batches * 4 * exchange * 2 * (4 * layers + 2)
    assert low_bit["activation codes"] == micro_batches * exchange * 2 * layers
    assert low_bit["activations"] == plain["activations"] - 4 * low_bit["activation codes"]
    assert of_two("fp8_blockwise")[0]["sent"]["activations"] == plain["activations"], "blocks of tokens"


OF_EXPERTS = ["fp8_tensorwise", "int8", "fp8_blockwise", "bf16", "mxfp8", "int4", "fp8_rowwise", "int8_weight"]


@pytest.mark.parametrize("scheme", sampled(OF_EXPERTS, lambda scheme: scheme not in ("fp8_tensorwise", "bf16")))
@pytest.mark.parametrize("world", [2, 4])
def test_every_scheme_trains_experts_as_on_one_process(scheme, world):
    """Of 2 ranks each has two of four experts; on 2 x 2, half of the micro-batches and of the masters."""
    one = _train([scheme], (1, 1), 1, None, "", MIXTURE)[scheme]["steps"]
    ranks = run_ranks(world, _train, [scheme], (1, world // 2), 2, None, "", MIXTURE)
    assert all(of_rank[scheme]["steps"] == ranks[0][scheme]["steps"] for of_rank in ranks)
    assert losses_differ(scheme, ranks[0][scheme]["steps"], one) <= LOSS_BOUNDS[scheme]


HOW = [
    ("eager selective", ONE_LAYER),
    ("compiled none", ONE_LAYER),
    ("compiled selective", ONE_LAYER),
    ("compiled full", ONE_LAYER),
    ("compiled full", MIXTURE),
]


@pytest.mark.parametrize(("how", "config"), sampled(HOW, lambda how, _: how != "eager selective"))
def test_compiled_and_recomputed_layers(how, config):
    one = _train(["fp8_tensorwise"], (1, 1), 1, None, "", config)["fp8_tensorwise"]["steps"]
    (first, _) = run_ranks(2, _train, ["fp8_tensorwise"], (1, 1), 2, None, how, config)
    assert losses_differ("fp8_tensorwise", first["fp8_tensorwise"]["steps"], one) <= LOSS_BOUNDS["fp8_tensorwise"]


def test_delayed_scales_are_those_of_all_ranks():
    """The history is common to all: the ranks' scales, and so their losses, stay equal and close to one process's."""
    options = {"scaling": "delayed"}
    one = _train(["fp8_tensorwise"], (1, 1), 1, options)["fp8_tensorwise"]["steps"]
    first, second = run_ranks(2, _train, ["fp8_tensorwise"], (1, 1), 2, options)
    assert first["fp8_tensorwise"]["steps"] == second["fp8_tensorwise"]["steps"]
    for (a, _), (b, _) in zip(one, first["fp8_tensorwise"]["steps"], strict=True):
        assert b == pytest.approx(a, rel=LOSS_BOUNDS["fp8_tensorwise"])


def _gathered_mlp(scheme: str) -> list[Any]:
    """The fused MLP of half of the tokens that gathers codes, and of all tokens."""
    group = make_mesh(0, 0, "cpu", 2).tp_group
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(0))
    results = []
    for own in (x.chunk(2)[group.rank], x):
        torch.manual_seed(1)
        up, down = torch.nn.Linear(64, 128, bias=False), torch.nn.Linear(64, 64, bias=False)
        model = torch.nn.Sequential(up, down)
        quantize_linears(model, SCHEMES.make(scheme, {"stochastic_rounding": False}, "-"), seed=0)
        leaf = own.clone().requires_grad_()
        y = swiglu_mlp(model[0], model[1], leaf, TokenExchange(group) if len(own) < len(x) else None)
        y.backward(torch.ones_like(y) * x)
        dx = leaf.grad if len(own) < len(x) else (2 * leaf.grad).chunk(2)[group.rank]  # both ranks have the same term
        results.append([t.tolist() for t in (y, dx, model[0].weight.grad, model[1].weight.grad)])
    return results


@pytest.mark.parametrize("scheme", ["int8", "fp8_tensorwise", "int4"])
def test_gathered_codes_are_those_of_the_gathered_input(scheme):
    for gathered, wide in run_ranks(2, _gathered_mlp, scheme):
        assert gathered == wide


# ---- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (VisionSettings(tp=2), "--tp: 2, but models of timm have no tensor parallelism"),
        (LanguageSettings(tp=2, model_impl="hf"), "--tp: 2, but only qtrain's own decoder has tensor parallelism"),
        (LanguageSettings(tp=2, optim="muon"), "--tp: 2, but --optim muon works on whole matrices.*allowed: adamw"),
        (LanguageSettings(tp=2, quantize="auto", quantize_lm_head=True), "--tp: 2, but --quantize auto times one"),
        (LanguageSettings(tp=2, optimizer_in_backward=True), "--tp: 2, but --optimizer_in_backward updates a layer"),
    ],
)
def test_what_is_not_divided_is_refused(settings, says):
    with pytest.raises(UserError, match=f"^{says}"):
        check_exclusions(Options(settings), option="--tp")


def test_adapters_are_refused():
    from llm_finetune import FinetuneSettings

    with pytest.raises(UserError, match=r"^--tp: 2, but adapters \(--lora\) have no tensor parallelism"):
        check_exclusions(Options(FinetuneSettings(tp=2, lora={})), option="--tp")


@pytest.mark.parametrize(
    ("ranks", "changes", "says"),
    [
        (3, {}, "3 does not divide the model's attention heads, 4; allowed: 1, 2."),
        (4, {}, "4 does not divide the model's key-value heads, 2; allowed: 1, 2."),
        (2, {"intermediate_size": 255}, "2 does not divide the model's intermediate size, 255; allowed: 1."),
        (2, {"vocab_size": 1}, "2 ranks are more than the vocabulary's 1 tokens."),
        (2, {**MIXTURE, "num_experts": 3}, "2 does not divide the model's experts, 3; allowed: 1."),
    ],
)
def test_sizes_that_do_not_divide_are_refused(ranks, changes, says):
    with pytest.raises(UserError) as refused:
        check_divisible(ModelConfig.from_hf({**CONFIG, **changes}), ranks)
    assert str(refused.value) == f"--tp: {says}"


def test_no_rank_of_a_large_vocabulary_begins_between_multiples_of_64():
    config = ModelConfig.from_hf({**CONFIG, "vocab_size": 151_936})
    rows = ModelParallel(config, dataclasses.replace(_Group, ranks=2), None).vocabulary
    assert rows == [(0, 75_968), (75_968, 151_936)] and 75_968 % 64 == 0
    rows = ModelParallel(ModelConfig.from_hf({**CONFIG, "vocab_size": 50_257}), _Group, None).vocabulary
    assert rows == [(0, 25_152), (25_152, 50_257)]
    assert ModelParallel(ModelConfig.from_hf(CONFIG), _Group, None).vocabulary == [(0, 132), (132, 263)]
