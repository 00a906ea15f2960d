"""What the ranks of a language model's run send each other, on any mesh."""

import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from qtrain.models.cost.parameters import ParameterGroup, embedding_elements, linear_key
from qtrain.models.cost.trained import all_of
from qtrain.parallel.layers.context_parallel import exchanged_width
from qtrain.parallel.layers.exchange import spanning_scales
from qtrain.parallel.layers.local_config import local_config
from qtrain.quant import LinearChoice
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.plan.traffic import (
    EXCHANGES_A_HALF,
    EXCHANGES_A_LAYER,
    ExpertTraffic,
    GroupTraffic,
    Traffic,
    half_layer_bytes,
    routed_bytes_per_token,
    weights_on_wire,
)
from qtrain.train.settings.recompute import recompute_kinds


def language_traffic(run: LanguageRun) -> Traffic:
    """What the ranks of any mesh send each other."""
    checked, model_config, adapted = run.checked, run.config, bool(run.adapters)
    # With --tp a rank's part, which its data-parallel peers have too; with --ep experts are told apart below.
    trained = run.trained or all_of(local_config(model_config, checked.settings.tp, 1), checked.dtype.itemsize)
    own_head = trained.head and not model_config.tie_word_embeddings
    # A tied head is the embedding: its weight is not the linear's alone. Under adapters all linears are frozen.
    alone = [] if adapted else [linear for linear in run.linears if own_head or not linear.is_head]
    matrix = embedding_elements(model_config)
    ends = 2 * matrix * (not model_config.tie_word_embeddings)
    trained_end = sum(trained.ends(model_config))
    element = checked.dtype.itemsize

    def of(shapes: Sequence[ParameterGroup], alone: Sequence[LinearChoice], linears: Sequence[LinearChoice]) -> Traffic:
        """linears: those of the parameters `shapes`; alone: which of them train, and hold their weights alone."""
        parameters = sum(math.prod(group.shape) * group.count for group in shapes)
        matrices = [group for group in shapes if len(group.shape) > 1]
        in_layers, at_end = ([n for n in linears if n.is_head == is_head] for is_head in (False, True))
        layer_bytes = weights_on_wire(sum(n.weights for n in in_layers), in_layers, element)
        adapter_bytes = adapted * trained.element * sum(math.prod(group.shape) * group.count for group in matrices)
        weights = weights_on_wire(parameters, alone, trained.element)
        # With full sharding: updated weights of layers, embedding and head are gathered when they are read.
        sharded = weights_on_wire(trained_end * matrix, at_end if own_head else (), element) if at_end else 0.0
        sharded += adapter_bytes if adapted else layer_bytes
        return Traffic(
            parameters=parameters,
            matrices=sum(group.count for group in matrices),
            element=trained.element,
            weights=weights,
            outside=weights - sharded,
            in_layers=layer_bytes + adapter_bytes,
            at_ends=weights_on_wire(ends, at_end, element) if ends and at_end else 0.0,
            micro_batches=checked.geometry.gradient_accumulation,
            gradient_wire=checked.settings.gradient_wire,
            deterministic=checked.settings.deterministic,
        )

    settings, group = checked.language, None
    # Activations come on top: every layer's inputs and outputs.
    if settings.tp > 1 or settings.cp > 1:
        group = _tensor_traffic(run) if settings.tp > 1 else _context_traffic(run)
    if settings.ep == 1:
        return replace(of(trained.shapes, alone, run.linears), group=group)

    def part(*, experts: bool) -> Traffic:
        shapes = [group for group in trained.shapes if group.experts == experts]
        return of(shapes, *([n for n in found if _is_experts(n) == experts] for found in (alone, run.linears)))

    experts = ExpertTraffic(
        part(experts=True),
        layers=len(model_config.moe_layers),
        tokens=checked.geometry.micro_batch_size * settings.seq_len // settings.tp,
        bytes_per_token=_routed_bytes(run),
    )
    return replace(part(experts=False), experts=experts, group=group)


def _is_experts(linear: LinearChoice) -> bool:
    return not linear.is_head and linear_key(linear.name).startswith("experts.")


def _tensor_traffic(run: LanguageRun) -> GroupTraffic:
    """What the ranks of --tp exchange in a micro-batch; with --ep without the tokens of experts."""
    settings, element, width = run.settings, run.checked.dtype.itemsize, run.config.hidden_size
    layers, mixtures = run.config.num_hidden_layers, len(run.config.moe_layers)
    kinds = recompute_kinds(settings)

    def halves(kind: str, again: str, *, last: bool) -> float:
        """Of all layers that have one. again: the kind of recomputation that runs it again, as `block` does."""
        recomputed, sequence = bool({"block", again} & kinds), settings.sequence_parallel
        return sum(
            half_layer_bytes(width, element, n.scheme, sequence=sequence, recomputed=recomputed, last=last)
            for n in run.linears
            if not n.is_head and linear_key(n.name) == kind
        )

    token_bytes, calls = halves("qkv", "qkv", last="block" not in kinds), layers * EXCHANGES_A_HALF
    if layers > mixtures:
        token_bytes += halves("gate_up", "ffn", last=True)
        calls += (layers - mixtures) * EXCHANGES_A_HALF
    if mixtures and settings.ep == 1:
        token_bytes += mixtures * _routed_bytes(run)
        calls += mixtures * EXCHANGES_A_LAYER
    return GroupTraffic(
        "activations",
        tokens=run.checked.geometry.micro_batch_size * settings.seq_len,
        bytes_per_token=token_bytes + EXCHANGES_A_HALF * width * element,  # of embedding and head
        calls=calls + EXCHANGES_A_HALF,
    )


def _context_traffic(run: LanguageRun) -> GroupTraffic:
    """What the ranks of --cp exchange in a micro-batch."""
    settings, layers = run.settings, run.config.num_hidden_layers
    element, tokens = run.checked.dtype.itemsize, run.checked.geometry.micro_batch_size * settings.seq_len
    if settings.sequence_parts == 1:
        per_token = layers * run.config.hidden_size * element
        return GroupTraffic("layers' inputs", tokens=tokens, bytes_per_token=per_token, calls=layers)
    passes = 2 + bool({"block", "norm", "qkv", "attention"} & recompute_kinds(settings))
    width = exchanged_width(run.config, settings.cp) * element
    # Scales are a few bytes: what counts is that they wait for each other.
    schemes = [n.scheme for n in run.linears if n.scheme is not None and not n.is_head and n.groups == 1]
    scales = sum((passes - 1) * spanning_scales(s, "x") + spanning_scales(s, "dy") for s in schemes)
    return GroupTraffic(
        "heads of attention",
        tokens=tokens // settings.cp,
        bytes_per_token=passes * layers * width,
        calls=2 * passes * layers + scales,
    )


def _routed_bytes(run: LanguageRun) -> float:
    """Of a layer, on average."""
    recomputed = bool({"block", "ffn"} & recompute_kinds(run.settings))
    shape = run.config.hidden_size, run.config.mixture.per_token, run.checked.dtype.itemsize
    routed = [n.scheme for n in run.linears if not n.is_head and linear_key(n.name) == "experts.gate_up"]
    adapted = {a.name for a in run.adapters if a.active is not None}
    if adapted:  # by adapters, which read the tokens themselves
        routed = [None]
    bytes_of = functools.partial(
        routed_bytes_per_token, *shape, recomputed=recomputed, again="experts.gate_up" in adapted
    )
    return sum(map(bytes_of, routed)) / len(routed)
