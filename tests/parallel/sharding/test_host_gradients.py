"""Weights and gradients of layers, embedding and head in host memory, on one process: losses, norms and weights are
those of a run without, bit for bit; and the device holds as little as is said."""

from dataclasses import dataclass
from itertools import chain

import pytest
import torch

from qtrain.data.batch import Batch
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, offload, parameter_groups
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding import host_gradients
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.full_shard import decoder_units
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.weight_codes import WeightCodes
from qtrain.tensors.lazy import plain_tensors
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients, share_amax
from tests.cases import sampled
from tests.system import TINY

SHAPE = {**TINY, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "tie_word_embeddings": False}


@dataclass
class Trained:
    """What a run of a few steps leaves. seen: (loss, norm) of each step."""

    seen: list[tuple[float, float]]
    weights: dict[str, torch.Tensor]
    model: torch.nn.Module
    parallel: DataParallel


def batches(step: int, count: int) -> list[Batch]:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(0, SHAPE["vocab_size"], (count, 2, 33), generator=generator)
    tokens[:, 0, 5:20] = -100  # a count of trained tokens that differs from that of all
    return [Batch(t[:, :-1].clamp(min=0), t[:, 1:]) for t in tokens]


def train(
    moved: bool,
    scheme: str = "bf16",
    options: dict | None = None,
    *,
    accumulation: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    tied: bool = False,
    quantize_head: bool = False,
    optim: str = "adamw",
    states: tuple[str, ...] = (),
    config: dict | None = None,
    frozen_embedding: bool = False,
    steps: int = 3,
) -> Trained:
    """moved: weights and gradients are in host memory; states: what else is."""
    source = ModelSource("tiny", {**SHAPE, "tie_word_embeddings": tied, **(config or {})}, "--model")
    model = build_model(source, seed=1, dtype=dtype, lazy=True)
    model.embed_tokens.weight.requires_grad_(not frozen_embedding)
    made = SCHEMES.make(scheme, options or {}, "--quantize")
    head = {"head": model.lm_head, "quantize_head": quantize_head}
    quantized = quantize_linears(model, made, seed=0, realize=not moved, **head)
    groups = parameter_groups(model, 0.1)
    units = decoder_units(model) if moved else ()
    parallel = DataParallel(model, quantized, Mesh(), units=units, host_gradients=moved)
    for group in groups:
        group["params"] = [parallel.master(p) for p in group["params"]]
    optimizer = OPTIMIZERS.make(optim, {}, "--optim").with_offload(states).build(groups, 1e-2)
    if states:
        optimizer.__class__ = type("Moving", (type(optimizer),), {"states_on_host": True})
    optimizer.place(parallel.placements)
    quantized.track_versions(optimizer)
    share_amax(optimizer, quantized, parallel)
    forward, seen = language_forward(model, None), []
    for step in range(steps):
        found = compute_gradients(model, forward, quantized, batches(step, accumulation), step, parallel=parallel)
        seen.append((found.loss, found.norm))
        apply_gradients(optimizer, quantized, found, lr=1e-2, clip_grad_norm=0.5, parallel=parallel)
    weights = {name: parallel.master(p).detach().clone() for name, p in model.named_parameters()}
    return Trained(seen, weights, model, parallel)


def assert_same(one: Trained, other: Trained) -> None:
    assert one.seen == other.seen
    assert all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)
    assert max(norm for _, norm in one.seen) > 0.5  # gradients were clipped


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that matrices pass in several."""
    monkeypatch.setattr(host_gradients, "PIECE_BYTES", 20_000)
    monkeypatch.setattr(offload, "BUCKET_BYTES", 200_000)


SCHEMES_COMPARED = {
    "bf16": {},
    "int8": {},
    "int8 sr": {"stochastic_rounding": True},
    "fp8_tensorwise": {},
    "fp8_tensorwise delayed": {"scaling": "delayed"},
    "fp8_blockwise": {},
    "fp8_rowwise": {"grad_input": "bf16"},
    "bitnet": {},
}
CASES = [(scheme, dtype, count) for scheme in SCHEMES_COMPARED for dtype in ("bf16", "fp32") for count in (1, 3)]
SAMPLE = [
    ("bf16", "fp32", 3),
    ("int8 sr", "bf16", 3),
    ("fp8_tensorwise delayed", "bf16", 3),
    ("fp8_blockwise", "fp32", 1),
]


@pytest.mark.parametrize(("scheme", "dtype", "accumulation"), sampled(CASES, lambda *case: case not in SAMPLE), ids=str)
def test_training_is_that_with_all_on_the_device(scheme, dtype, accumulation):
    kind = {"dtype": torch.bfloat16 if dtype == "bf16" else torch.float32, "accumulation": accumulation}
    name, options = scheme.split()[0], SCHEMES_COMPARED[scheme]
    assert_same(*(train(moved, name, options, **kind) for moved in (False, True)))


@pytest.mark.parametrize(
    "kind",
    [
        {"tied": True},
        {"tied": True, "quantize_head": True, "scheme": "int8"},
        {"quantize_head": True, "scheme": "fp8_tensorwise"},
        {"optim": "adamw_8bit", "states": ("m", "v")},
        {"optim": "adamw_4bit", "states": ("v",)},
        {"frozen_embedding": True},
        {"frozen_embedding": True, "tied": True},
        {"optim": "lion"},
        {"optim": "sgd", "states": ("m",)},
    ],
    ids=str,
)
def test_so_it_is_with_other_heads_and_optimizers(kind):
    assert_same(*(train(moved, accumulation=2, **{"states": (), **kind}) for moved in (False, True)))


def test_mixtures_too():
    config = {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config |= {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "head_dim": 32}
    assert_same(*(train(moved, "int8", accumulation=2, config=config, steps=2) for moved in (False, True)))


def test_the_device_keeps_vectors_and_scales_alone():
    """Between steps: no matrix, no codes, no gradient."""
    found = train(True, "fp8_tensorwise", accumulation=2)
    matrices = [p for p in found.model.parameters() if p.ndim > 1]
    assert len(matrices) == 2 + 3 * 4
    kept = [t for p in matrices for t in plain_tensors(p)]
    kept += chain.from_iterable(m.buffers() for m in found.model.modules() if isinstance(m, WeightCodes))
    assert sum(t.untyped_storage().nbytes() for t in kept) < 1000
    assert all(found.parallel.master(p).grad is None and p.grad is None for p in found.model.parameters())
    sums = found.parallel._host.tensors
    assert [t.shape for t in sums] == [p.shape for p in matrices]
