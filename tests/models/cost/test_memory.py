"""The memory estimate against real modules: kept tensors are counted, and the peak follows what decides it."""

import dataclasses
import itertools

import pytest
import torch
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from qtrain.models import (
    RECOMPUTE_SETS,
    Decoder,
    Lora,
    add_lora,
    apply_recompute,
    build_model,
    compile_layers,
    read_model_source,
)
from qtrain.models.cost.linear_bytes import LinearBytes, LowBitBytes, rows_per_token
from qtrain.models.cost.loss_memory import loss_bytes
from qtrain.models.cost.memory import estimate_memory
from qtrain.models.cost.parameters import LAYER_LINEARS, count_parameters
from qtrain.models.cost.saved_activations import saved_per_token
from qtrain.models.cost.step_shape import StepShape
from qtrain.models.cost.trained import all_of, only_adapters
from qtrain.models.native.attention import SequenceInfo
from qtrain.models.native.recompute import ATTENTION_KINDS
from qtrain.models.native.rope import rope_tables
from qtrain.parallel.layers.context_parallel import ContextParallel
from qtrain.parallel.mesh import make_mesh
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.tensors.stored_weight import StoredWeight
from tests.cases import sampled
from tests.models.families import drawn, source_of
from tests.peak_bytes import PeakBytes
from tests.worlds import run_ranks


def layer_input(model: Decoder, batch: int, seq_len: int, parts: int = 1) -> tuple[torch.Tensor, SequenceInfo]:
    """Of the first of so many parts of the sequences."""
    config = model.config
    x = torch.randn(batch, seq_len // parts, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    cos, sin = (t.unsqueeze(-2) for t in rope_tables(config.rope, config.rope_dim, seq_len // parts, x.device))
    return x, SequenceInfo(batch, seq_len, cos, sin, sharded=parts > 1)


def kept_bytes(model: Decoder, batch: int, seq_len: int, parts: int = 1) -> float:
    """Bytes a token that the first layer keeps for backward, its input and parameters aside."""
    x, info = layer_input(model, batch, seq_len, parts)
    parameters = [p.inner.values() if isinstance(p, StoredWeight) else [p] for p in model.parameters()]
    known = (*itertools.chain(*parameters), *model.buffers(), x, info.cos, info.sin)
    own = {t.untyped_storage().data_ptr() for t in known}
    kept: dict[int, torch.Tensor] = {}

    def pack(tensor):
        nonlocal kept
        # A stored weight's tensors are known; uint8: random state
        if not isinstance(tensor, StoredWeight) and tensor.dtype != torch.uint8:
            place = tensor.untyped_storage().data_ptr()
            kept |= {} if place in own else {place: tensor}
        return tensor

    model.layers[0](x, info).sum().backward()  # compiles backward too, which may decide what is kept
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model.layers[0](x, info)
    assert out.shape == x.shape
    return sum(t.untyped_storage().nbytes() for t in kept.values()) / (batch * seq_len // parts)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("name", "mode"),
    sampled([("qwen2", "none"), ("qwen3", "selective"), ("bitnet", "none")], lambda name, _: name != "qwen3"),
)
def test_compiled_layers_keep_what_the_table_says(name, mode):
    torch._dynamo.reset()
    shape = {"hidden_size": 128, "intermediate_size": 640, "num_attention_heads": 8, "num_hidden_layers": 1}
    model = drawn(source_of(name, **shape), dtype=torch.bfloat16)
    apply_recompute(model, RECOMPUTE_SETS[mode])
    compile_layers(model)
    expected = saved_per_token(model.config, RECOMPUTE_SETS[mode], True, 2)
    if mode == "none":  # recomputed on a CPU, where no kernel makes it
        expected.pop("down norm input")
    assert kept_bytes(model, 2, 64) == pytest.approx(sum(expected.values()) - expected["layer input"], rel=0.02)


KINDS = (
    [], ["norm"], ["swiglu"], ["qkv"], ["attention"], ["ffn"], ["norm", "swiglu"], ["norm", "qkv"],
    ["norm", "attention"], ["qkv", "attention"], ["swiglu", "qkv"], ["norm", "swiglu", "qkv", "attention", "ffn"],
    ["block"],
)  # fmt: skip
IN_SHORT = (
    *(("qwen2", "int8", [kind]) for kind in ("norm", "qkv", "attention", "block")),
    *(("qwen2", "fp8_blockwise", kinds) for kinds in (["ffn"], ["norm", "attention"])),
    ("qwen3", "bf16", ["swiglu", "qkv"]),
)
CODES = LowBitBytes(dict.fromkeys(LAYER_LINEARS, LinearBytes(2, kept_input=1.0)), swiglu_codes=True)
BYTES_OF_SCHEMES = {
    "bf16": None,
    "int8": dataclasses.replace(CODES, down_input_recomputed=True),
    "fp8_blockwise": CODES,
}


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """An MLP's kernels in place of PyTorch's operations, by their references."""
    monkeypatch.setattr("qtrain.models.native.mlp.runs_kernels", lambda x: True)


def recomputing(name: str, scheme: str, kinds: list[str]) -> Decoder:
    """A model of one wide layer that recomputes `kinds`."""
    wide = {"hidden_size": 128, "intermediate_size": 640, "num_attention_heads": 8, "num_hidden_layers": 1}
    model = drawn(source_of(name, **wide), dtype=torch.bfloat16)
    if scheme != "bf16":
        quantize_linears(model, SCHEMES.get(scheme, "--quantize")(), seed=0, head=model.lm_head)
    apply_recompute(model, kinds)
    return model


@pytest.mark.usefixtures("compiler", "as_on_a_gpu")
@pytest.mark.parametrize(
    ("name", "scheme", "kinds"),
    sampled(
        list(itertools.product(("qwen2", "qwen3"), BYTES_OF_SCHEMES, KINDS)),
        lambda *case: case not in IN_SHORT,
    ),
    ids=str,
)
def test_compiled_layers_keep_what_the_table_says_of_each_kind(name, scheme, kinds):
    torch._dynamo.reset()
    model = recomputing(name, scheme, kinds)
    # The default backend's partition of forward and backward, without its code: a tenth of the time.
    model.layers[0].compile(fullgraph=True, backend="aot_eager_decomp_partition")
    expected = saved_per_token(model.config, frozenset(kinds), True, 2, BYTES_OF_SCHEMES[scheme])
    if name == "qwen3" and not (ATTENTION_KINDS | {"block"}) & set(
        kinds
    ):  # unlike the GPU's kernel, norms of heads keep 1/rms
        expected["of heads"] = 4 * (model.config.num_attention_heads + model.config.num_key_value_heads)
    assert kept_bytes(model, 2, 64) == pytest.approx(sum(expected.values()) - expected["layer input"], rel=0.02)


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kinds", KINDS, ids=str)
@pytest.mark.parametrize("scheme", BYTES_OF_SCHEMES)
def test_eager_layers_keep_what_the_table_says_of_each_kind(scheme, kinds):
    """What a region's policy keeps is no saved tensor: all memory is counted."""
    model = recomputing("qwen2", scheme, kinds)
    x, info = layer_input(model, 2, 64)
    with PeakBytes((x, *model.parameters(), *model.buffers(), *info[2:4])) as counted:
        out = model.layers[0](x, info)
        found = (counted.live - out.nbytes) / 128
    expected = saved_per_token(model.config, frozenset(kinds), False, 2, BYTES_OF_SCHEMES[scheme])
    assert found == pytest.approx(sum(expected.values()) - expected["layer input"], rel=0.02)


PRODUCTS = {"aten.mm.default", "aten.addmm.default", "qtrain.scaled_mm.default", "qtrain.int8_mm.default",
            "qtrain.blockwise_mm.default", "aten._int_mm.default"}  # fmt: skip
KINDS_WITH_8BIT = ([], ["swiglu"], ["norm"], ["norm", "swiglu"], ["qkv"], ["norm", "swiglu", "qkv", "attention"])


def in_8_bits(scheme: str) -> LowBitBytes:
    return dataclasses.replace(BYTES_OF_SCHEMES[scheme] or LowBitBytes.plain(2), gate_up_8bit=True)


@pytest.mark.usefixtures("compiler", "as_on_a_gpu")
@pytest.mark.parametrize(
    ("scheme", "kinds"),
    sampled(
        list(itertools.product(BYTES_OF_SCHEMES, KINDS_WITH_8BIT)),
        lambda *case: case not in (("bf16", ["swiglu"]), ("int8", []), ("fp8_blockwise", ["norm"])),
    ),
    ids=str,
)
def test_compiled_layers_keep_gate_up_in_8_bits(scheme, kinds):
    torch._dynamo.reset()
    model = recomputing("qwen2", scheme, [])
    apply_recompute(model, kinds, ["gate_up"])
    products = []

    def count(graph: torch.fx.GraphModule, inputs: object):
        products.append(sum(str(node.target) in PRODUCTS for node in graph.graph.nodes))
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=count, bw_compiler=count, partition_fn=min_cut_rematerialization_partition)
    model.layers[0].compile(fullgraph=True, backend=backend)
    expected = saved_per_token(model.config, frozenset(kinds), True, 2, in_8_bits(scheme))
    assert kept_bytes(model, 2, 64) == pytest.approx(sum(expected.values()) - expected["layer input"], rel=0.02)
    # Two of each linear: what is not kept of gate_up and down is not computed again.
    assert products[:2] == [4, 8 + ("qkv" in kinds)]


@pytest.mark.usefixtures("as_on_a_gpu")
@pytest.mark.parametrize("kinds", [kinds for kinds in KINDS_WITH_8BIT if "norm" not in kinds], ids=str)
@pytest.mark.parametrize("scheme", BYTES_OF_SCHEMES)
def test_eager_layers_keep_gate_up_in_8_bits(scheme, kinds):
    model = recomputing("qwen2", scheme, [])
    apply_recompute(model, kinds, ["gate_up"])
    x, info = layer_input(model, 2, 64)
    with PeakBytes((x, *model.parameters(), *model.buffers(), *info[2:4])) as counted:
        out = model.layers[0](x, info)
        found = (counted.live - out.nbytes) / 128
    expected = saved_per_token(model.config, frozenset(kinds), False, 2, in_8_bits(scheme))
    assert found == pytest.approx(sum(expected.values()) - expected["layer input"], rel=0.02)


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize(
    ("lora", "mode", "keep_8bit"),
    sampled(
        [
            (Lora(r=4, base="nf4"), "none", ()),
            (Lora(r=4, base="int8"), "none", ()),
            (Lora(r=4, base="fp8", dora=True), "none", ()),
            (Lora(r=4, base="nf4"), "selective", ()),
            (Lora(r=4, targets=("q_proj", "v_proj")), "none", ()),
            (Lora(r=4, base="nf4", dora=True), "none", ()),
            (Lora(r=4, base="nf4"), "none", ("gate_up",)),
            (Lora(r=4, targets=("q_proj", "v_proj")), "none", ("gate_up",)),
        ],
        lambda lora, mode, keep_8bit: (lora.base, mode) != ("int8", "none"),
    ),
)
def test_compiled_layers_with_adapters_keep_no_weight_and_each_input_once(lora, mode, keep_8bit):
    """What a token takes, and beside it the adapters' copies in bf16 (and DoRA's gains: a few bytes a row)."""
    torch._dynamo.reset()
    shape = {"hidden_size": 128, "intermediate_size": 640, "num_attention_heads": 8, "num_hidden_layers": 1}
    model = drawn(source_of("qwen2", **shape), dtype=torch.bfloat16)
    if lora.base != "none":
        quantize_linears(model, base_scheme(lora.base, "bf16"), seed=0, head=model.lm_head)
    add_lora(model, lora, seed=0)
    apply_recompute(model, RECOMPUTE_SETS[mode], keep_8bit)
    compile_layers(model)
    part, low_bit = only_adapters(model.config, lora), in_8_bits("bf16") if keep_8bit else None
    if lora.base in ("int8", "fp8"):  # of products in 8 bits adapters read the codes
        low_bit = dataclasses.replace(CODES, swiglu_codes=False)
    kinds = RECOMPUTE_SETS[mode]
    expected = part.kept(saved_per_token(model.config, kinds, True, 2, low_bit), 2, kinds=kinds)
    copies = part.copies(2, kinds) + (part.added_bytes - part.bytes) * (mode == "none")
    found = kept_bytes(model, 2, 64) * 128
    assert found == pytest.approx(128 * (sum(expected.values()) - expected["layer input"]) + copies, rel=0.01)


@pytest.mark.parametrize("name", ["qwen2", "qwen3"])
def test_eager_layers_keep_what_the_table_says(name):
    """But for two things that differ on a CPU: the gate is PyTorch's, which keeps silu(gate), and norms of heads keep
    fp32 copies of input and result."""
    model = drawn(source_of(name), dtype=torch.bfloat16)
    config = model.config
    expected = saved_per_token(config, frozenset(), False, 2)
    known = 2 * config.intermediate_size
    if config.qk_norm:  # and 1/rms, which the GPU's kernel does not keep
        known += (8 * config.head_dim + 4) * (config.num_attention_heads + config.num_key_value_heads)
    found = kept_bytes(model, 2, 24)
    assert found == pytest.approx(sum(expected.values()) - expected["layer input"] + known, rel=0.001)


def _kept_of_parts(name: str, scheme: str) -> float:
    """Of a rank that has a part of each sequence."""
    mesh = make_mesh(0, 0, "cpu", cp=torch.distributed.get_world_size())
    context = ContextParallel(mesh.cp_group)
    model = drawn(source_of(name), dtype=torch.bfloat16, place=context.place)
    quantize_linears(model, SCHEMES.make(scheme, {}, "-"), seed=0, head=model.lm_head, shared=context.shared_linear)
    return kept_bytes(model, 2, 48, mesh.cp)


@pytest.mark.parametrize(
    ("name", "scheme", "ranks"),
    [("qwen2", "bf16", 2), ("qwen2", "fp8_blockwise", 2), ("qwen2", "bf16", 4)],
)
def test_a_part_of_a_sequence_keeps_heads_besides_tokens(name, scheme, ranks):
    """What attention keeps more than that of one process, for each token of a rank. (With QK-norm a CPU keeps qkv's
    output for v alone, a GPU's kernel for the norms' gradients too.)"""
    model = drawn(source_of(name), dtype=torch.bfloat16)
    quantize_linears(model, SCHEMES.make(scheme, {}, "-"), seed=0, head=model.lm_head)
    how = model.config, frozenset(), False, 2, BYTES_OF_SCHEMES[scheme]
    planned = [sum(saved_per_token(*how, sequence_parts=parts).values()) for parts in (1, ranks)]
    one = kept_bytes(model, 2, 24)
    for many in run_ranks(ranks, _kept_of_parts, name, scheme):
        assert many - one == pytest.approx(planned[1] - planned[0], abs=0.01 * one), (one, many, planned)
    assert planned[1] > planned[0] or scheme != "bf16"


EXPERT_ADAPTERS = ("experts.gate_up_proj", "experts.down_proj")


@pytest.mark.parametrize(
    ("scheme", "lora", "keep_8bit"),
    [
        ("bf16", None, ()),
        ("int8", None, ()),
        ("bf16", Lora(r=5, targets=EXPERT_ADAPTERS), ()),
        ("bf16", Lora(r=4, targets=EXPERT_ADAPTERS, dropout=0.1), ()),
        ("bf16", Lora(r=4, targets=EXPERT_ADAPTERS[1]), ()),
        ("bf16", None, ("gate_up",)),
        ("int8", None, ("gate_up",)),
        ("bf16", Lora(r=5, targets=EXPERT_ADAPTERS), ("gate_up",)),
    ],
)
def test_a_mixture_keeps_what_the_table_says(scheme, lora, keep_8bit):
    """Its rows with their padding; norms and attention are as of any layer."""
    shape = {"hidden_size": 128, "moe_intermediate_size": 256, "num_hidden_layers": 1}
    model = drawn(source_of("qwen3_moe", **shape), dtype=torch.bfloat16)
    low_bit = None
    if scheme == "int8":
        quantize_linears(model, SCHEMES.get("int8", "--quantize")(), seed=0, head=model.lm_head)
        kept_input = dict.fromkeys(LAYER_LINEARS, LinearBytes(2, kept_input=1.0))
        low_bit = LowBitBytes(kept_input, down_input_recomputed=True)
    if keep_8bit:
        low_bit = dataclasses.replace(low_bit or LowBitBytes.plain(2), gate_up_8bit=True)
    rows, tokens = rows_per_token(model.config, 512), 512
    saved = saved_per_token(model.config, frozenset(), False, 2, low_bit, rows)
    if lora is not None:
        add_lora(model, lora, seed=0)
        saved = only_adapters(model.config, lora).kept(saved, 2, rows)
        assert (saved["mlp_norm output"] > 0) == (lora.targets == EXPERT_ADAPTERS)
    expected = {name: size for name, size in saved.items() if "experts" in name or name == "routing"}
    apply_recompute(model, [], keep_8bit)
    expected["routing"] -= 4 * rows + 4 * model.config.moe.per_token  # indices of rows are no saved tensors
    x = torch.randn(2, 256, 128, dtype=torch.bfloat16, requires_grad=True)
    own = {t.untyped_storage().data_ptr() for t in (x, *model.parameters(), *model.buffers())}
    found: dict[int, int] = {}

    def pack(tensor):
        place = tensor.untyped_storage()
        found.update({} if place.data_ptr() in own else {place.data_ptr(): place.nbytes()})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        kept = model.layers[0].mlp(x, SequenceInfo(*x.shape[:2], None, None))
    assert len(kept) == 3 and sum(found.values()) / tokens == pytest.approx(sum(expected.values()), rel=0.015)


@pytest.mark.parametrize("tied", [False, True])
def test_building_a_model_with_a_large_embedding_takes_it_in_fp32_before_its_layers(tied):
    source = source_of("llama2", vocab_size=4096, tie_word_embeddings=tied)
    with PeakBytes() as counted:
        quantize_linears(build_model(source, dtype=torch.bfloat16, lazy=True), SCHEMES.make("bf16", {}, "-"), seed=0)
    estimate = estimate_memory(source.model_config(), StepShape(micro_batch_size=1, seq_len=8))
    assert sum(estimate.moments["the model's build"].values()) == pytest.approx(counted.peak, rel=0.001)


def test_memory_grows_and_shrinks_with_what_decides_it():
    config = read_model_source("qwen2.5-0.5b").model_config()

    def peak(optimizer_bytes=4.0, low_bit=None, **changes) -> int:
        step = StepShape(**{"micro_batch_size": 8, "seq_len": 1024, **changes})
        return estimate_memory(config, step, optimizer_bytes=optimizer_bytes, low_bit=low_bit).peak

    base = peak()
    assert peak(micro_batch_size=16) > 1.5 * base
    assert peak(recompute=RECOMPUTE_SETS["full"]) < peak(recompute=RECOMPUTE_SETS["selective"]) < base
    assert peak(optimizer_bytes=8.0) - base == 4 * count_parameters(config).total
    assert peak(accumulates=True) - base == 2 * count_parameters(config).total
    assert peak(loss_chunks=8) < base < peak(loss_chunks=1, micro_batch_size=9)
    assert peak(compiled=False) >= base
    low_bit = LowBitBytes(dict.fromkeys(LAYER_LINEARS, LinearBytes(2, kept_input=1.0)))
    recomputed = dataclasses.replace(low_bit, down_input_recomputed=True)
    assert peak(low_bit=recomputed) < peak(low_bit=low_bit) < base
    one = LowBitBytes({**LowBitBytes.plain(2).layer, "gate_up": LinearBytes(2, kept_input=1.0)})
    assert peak(low_bit=low_bit) < peak(low_bit=one) < base
    estimate = estimate_memory(config, StepShape(micro_batch_size=8, seq_len=1024))
    assert (
        estimate.peak == max(sum(kinds.values()) for kinds in estimate.moments.values())
        and estimate.weights == 2 * count_parameters(config).total
    )


WEIGHTY = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "vocab_size": 2048}
"""A shape of which few tokens take little beside weights."""


@pytest.mark.parametrize("kinds", [(), ("block",)], ids=str)
@pytest.mark.parametrize("tied", [False, True])
def test_each_gradient_is_planned_once_at_the_end_of_backward(tied, kinds):
    model = drawn(source_of("llama2", **WEIGHTY, tie_word_embeddings=tied), dtype=torch.bfloat16)
    apply_recompute(model, kinds)
    ids = torch.randint(0, 2048, (1, 64))
    with PeakBytes([*model.parameters(), *model.buffers(), ids]) as counted:
        model(ids, ids).loss.backward()
    step = StepShape(1, 64, recompute=frozenset(kinds), compiled=False)
    estimate = estimate_memory(model.config, step, optimizer_bytes=0)
    assert estimate.at_peak.moment == "the end of backward"
    planned = estimate.peak - estimate.weights - estimate.workspace
    assert planned == pytest.approx(counted.peak, rel=0.01)


@pytest.mark.parametrize("documents", [False, True])
def test_rotary_tables_of_long_sequences_are_planned(documents):
    """Of a narrow model; what else forward keeps is planned as before."""
    config = source_of("llama2").model_config()
    short, long = (estimate_memory(config, StepShape(1, seq_len, documents=documents)) for seq_len in (1, 1 + 2**20))
    cos, sin = rope_tables(config.rope, config.rope_dim, 1024, torch.device("cpu"))
    tables = (cos.nbytes + sin.nbytes) * 1024
    assert long.workspace - short.workspace == tables
    plain = estimate_memory(config, StepShape(1, 1 + 2**20))
    assert long.activations - plain.activations == documents * (tables + cos.nbytes // 512)


@pytest.mark.parametrize("tied", [False, True])
def test_when_gradients_of_weights_exist(tied):
    """As the plan has it: in a layer's MLP none of its own; that of the head from its backward on, unless it is tied;
    that of the embedding last."""
    model, found = drawn(source_of("llama2", tie_word_embeddings=tied)), {}

    def note(index: int):
        names = [name for name, p in model.named_parameters() if p.grad is not None]
        found[index] = names

    for index, layer in enumerate(model.layers):
        layer.mlp.down_proj.register_full_backward_pre_hook(lambda *_, i=index: note(i))
    ids = torch.randint(0, 97, (1, 16))
    model(ids, ids).loss.backward()
    last = len(model.layers) - 1
    assert found[last] == ["norm.weight"] + ["lm_head.weight"] * (not tied)
    every = {name for name, _ in model.named_parameters()}
    assert every - set(found[0]) == {n for n in every if n.startswith(("layers.0.", "embed_tokens."))}


@pytest.mark.usefixtures("compiler", "as_on_a_gpu")
@pytest.mark.parametrize("kinds", [["norm", "qkv", "attention", "ffn"], ["block"]], ids=str)
def test_compiled_attention_is_computed_again_when_it_is_needed(kinds):
    """After the MLP's backward, if the layer keeps the stream between its halves."""
    torch._dynamo.reset()
    model, graphs = recomputing("qwen2", "bf16", kinds), []

    def note(graph: torch.fx.GraphModule, inputs: object):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return make_boxed_func(graph.forward)

    backend = aot_autograd(fw_compiler=note, bw_compiler=note, partition_fn=min_cut_rematerialization_partition)
    model.layers[0].compile(fullgraph=True, backend=backend)
    x, info = layer_input(model, 2, 64)
    model.layers[0](x, info).sum().backward()
    qkv, mlp = (graphs[1].index(name) for name in ("aten.addmm.default", "qtrain.swiglu_backward.default"))
    assert (qkv < mlp) == (kinds == ["block"])


def test_a_gradient_that_is_quantized_apart_is_planned_with_its_codes():
    """Of gate_up, where no kernel quantizes it as it is computed: 2·I elements of 2 bytes, and 1 + 1 of codes."""
    config = read_model_source("qwen2.5-7b").model_config()
    step = StepShape(64, 1024, recompute=frozenset({"block"}))
    linear = LinearBytes(2, kept_input=1.0, dy_codes=2.0)
    apart = LowBitBytes(dict.fromkeys(LAYER_LINEARS, linear))
    fused = dataclasses.replace(apart, swiglu_codes=True)
    found = [estimate_memory(config, step, low_bit=low_bit).backward for low_bit in (apart, fused)]
    # Fused there are the activation's gradient (2) and the codes of gate_up's (4), less down's input (1), per I.
    assert found[0] - found[1] == 64 * 1024 * config.intermediate_size * (8 - 5)
    # A gate_up that is kept is freed before: gradients of SwiGLU's output (2) and of gate_up (4), less down's input.
    step = dataclasses.replace(step, recompute=frozenset())
    found = [estimate_memory(config, step, low_bit=low_bit).backward for low_bit in (apart, fused)]
    assert found[0] == found[1]


@pytest.mark.parametrize("frozen", [True, False])
def test_codes_of_the_gradient_of_logits_are_in_the_layouts_that_are_read(frozen):
    """Of a head that is frozen those along rows alone; 1 byte a logit of the chunk each."""
    config, step = read_model_source("qwen2.5-7b").model_config(), StepShape(4, 4096, loss_chunks=1)
    trained = only_adapters(config, Lora()) if frozen else all_of(config, 2)
    plain = LowBitBytes.plain(2)
    quantized = dataclasses.replace(plain, head=plain.layer["qkv"])
    codes = loss_bytes(config, step, quantized, trained) - loss_bytes(config, step, plain, trained)
    if not frozen:
        codes += 2 * config.vocab_size * config.hidden_size  # one chunk's gradient is in bf16, not fp32
    assert codes == 4 * 4096 * config.vocab_size * (1 if frozen else 2)


@pytest.mark.parametrize("sequences", [1, 64])
def test_what_cannot_use_the_memory_of_recorded_steps_is_planned_beside_it(sequences):
    """The optimizer's temporaries, whether its step has more tensors than the micro-batch or not."""
    config = read_model_source("qwen2.5-0.5b").model_config()

    def estimate(**options: bool):
        return estimate_memory(config, StepShape(sequences, 1024, **options), step_bytes=2.0**31)

    ordinary, recorded = estimate().at_peak, estimate(recorded=True)
    assert ordinary.apart == 0 and recorded.at_peak.kinds == ordinary.kinds
    assert (recorded.at_peak.moment == "the optimizer's step") == (sequences == 1)
    micro_batch = max(sum(recorded.moments[name].values()) for name in ("the loss", "the start of backward"))
    assert recorded.at_peak.reserved == micro_batch + 2**31
    streamed = estimate(recorded=True, weights_on_host=True).at_peak
    assert streamed.reserved > recorded.at_peak.reserved and streamed.kinds == recorded.at_peak.kinds
