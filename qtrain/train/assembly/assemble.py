"""From a prepared run to one that can train: model > quantize > (the script's changes) > optimizer > resume."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from qtrain.core.hardware.memory import limit_allocator
from qtrain.kernels import compile_ahead
from qtrain.models import Lora, ModelConfig
from qtrain.models.cost.parameters import parameter_shapes
from qtrain.models.cost.trained import TrainedPart, all_but_embedding, only_adapters
from qtrain.optim import parameter_groups
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.parallel.sharding.gradient_wire import GRADIENT_WIRES
from qtrain.quant import QuantizedModel, quantize_linears
from qtrain.quant.gradient_sums import GradientSums
from qtrain.train.assembly.deterministic import use_deterministic_kernels
from qtrain.train.assembly.prepare import Prepared
from qtrain.train.log.status import short_number
from qtrain.train.state.ema import Ema
from qtrain.train.state.restore import restore
from qtrain.train.state.run import Run
from qtrain.train.state.state_dict import TrainState, seed_rng
from qtrain.train.step.in_backward import model_partitions
from qtrain.train.step.step import share_amax


def build_quantized(prepared: Prepared) -> tuple[nn.Module, QuantizedModel]:
    """The model on the device, with weights, its linears swapped as planned. Seeds all random generators."""
    settings, architecture = prepared.settings, prepared.architecture
    if settings.deterministic:
        use_deterministic_kernels()
    if settings.memory_limit is not None and (limit := prepared.plan.hardware.memory_bytes) is not None:
        limit_allocator(prepared.device, limit)
    if settings.compile and prepared.device.type == "cuda":
        compile_ahead.start()
    seed_rng(settings.seed)
    model = architecture.build(prepared)
    quantized = quantize_linears(
        model,
        prepared.scheme,
        seed=settings.seed,
        head=architecture.head(model),
        quantize_head=settings.quantize_lm_head,
        min_size=settings.quantize_min_size,
        left=architecture.left_linears(prepared.scheme),
        # False where shards are cut: sharding then makes one value after the other (`tensors/lazy.py`).
        realize=prepared.mesh.shard == 1 and not prepared.reshards,
        shared=architecture.shared_linear,
        one_weight_layout=settings.weight_codes == "one",
    )
    assert quantized.choices == list(prepared.linears), "the swap is not the planned one"
    return model, quantized


def assemble(
    prepared: Prepared,
    model: nn.Module,
    quantized: QuantizedModel,
    *,
    ema_decay: float = 0.0,
    files: Sequence[Path] = (),
) -> Run:
    """The run of a built model: activation checkpointing, compilation, the optimizer, and the state of the checkpoint
    that it resumes from. Writes nothing. ema_decay: of a moving average of the weights; 0: none. files: those of the
    training data, which are to be the same when the run is resumed."""
    settings, architecture = prepared.settings, prepared.architecture
    # First: it decides which functions are compiled.
    architecture.recompute(model, settings)
    if settings.compile:
        architecture.compile(model, prepared)
    groups = parameter_groups(model, settings.weight_decay)
    hidden = {id(p) for group in groups if group["hidden"] for p in group["params"]}
    parallel = DataParallel(
        model,
        quantized,
        prepared.mesh,
        lambda p: prepared.optimizer.needs_whole(id(p) in hidden),
        deterministic=settings.deterministic,
        keep_full_weights=not architecture.is_native,
        wire=GRADIENT_WIRES[settings.gradient_wire],
        seed=settings.seed,
        units=architecture.units(model) if prepared.reshards else (),
        host_gradients="gradients" in prepared.offload,
        partitions=model_partitions(model) if settings.optimizer_in_backward else None,
        gradient_sums=_gradient_sums(model, quantized, prepared),
    )
    # The optimizer updates masters, which may be shards; the model's parameters are gathered from them.
    for group in groups:
        group["params"] = [parallel.master(p) for p in group["params"]]
    optimizer = prepared.optimizer.build(groups, settings.lr, seed=settings.seed)
    optimizer.place(parallel.placements)
    quantized.track_versions(optimizer)
    if not settings.optimizer_in_backward:
        share_amax(optimizer, quantized, parallel)
    ema = Ema(model, ema_decay, parallel) if ema_decay else None
    if prepared.mesh.dp_rank:
        seed_rng(settings.seed + prepared.mesh.dp_rank)  # else all ranks drop out the same activations
    run = Run(
        settings,
        prepared.script,
        prepared.folder,
        prepared.device,
        model,
        quantized,
        optimizer,
        TrainState(),
        ema,
        parallel,
        data_files=files,
    )
    # Last, when everything exists that a checkpoint fills.
    restore(run)
    return run


def _gradient_sums(model: nn.Module, quantized: QuantizedModel, prepared: Prepared) -> GradientSums | None:
    """Where autograd would add up the micro-batches' gradients, in one process."""
    settings = prepared.settings
    apart = settings.deterministic or settings.optimizer_in_backward or "gradients" in prepared.offload
    # Chunks' gradients of an MLP are added up in fp32.
    if prepared.mesh.world > 1 or prepared.reshards or apart or getattr(settings, "mlp_chunks", 0):
        return None
    # The loss of a language model takes the gradient of the head itself.
    return GradientSums(quantized, left_out=getattr(model, "lm_head", None))


def freeze_embedding(model: nn.Module) -> list[str]:
    """Freeze the embedding. Returns the line to print; none for a model without an embedding."""
    # A tied head is frozen with it: they are one matrix.
    embeddings = [m for m in model.modules() if isinstance(m, nn.Embedding)]
    for embedding in embeddings:
        embedding.weight.requires_grad_(False)
    frozen = {id(e.weight) for e in embeddings}
    head = getattr(model, "lm_head", None)
    tied = head is not None and id(getattr(head, "weight", None)) in frozen
    return [f"frozen: the embedding{', which is the output head too' if tied else ''}"] if embeddings else []


def describe_trained(model: nn.Module) -> str:
    """How many of the model's parameters train."""
    total = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return f"trained: {short_number(trained)} of {short_number(total)} parameters ({100 * trained / total:.3g}%)"


def trained_part(
    config: ModelConfig | None, lora: Lora | None, freeze_embedding: bool, dtype: torch.dtype
) -> TrainedPart | None:
    """What trains, for the plan; None: everything, or a model whose plan has no figures."""
    if config is None or (lora is None and not freeze_embedding):
        return None
    if lora is not None:
        return only_adapters(config, lora)
    return all_but_embedding(config, parameter_shapes(config), dtype.itemsize)
