"""Training steps of one model under one scheme, timed: what `train_step.py` runs in a process of its own."""

import statistics
import time
from typing import Any

import torch

from qtrain.data import Batch
from qtrain.hardware import describe_hardware
from qtrain.models import apply_activation_checkpointing, build_model, compile_layers, empty_model, read_model_source
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.cuda_graphs import step_graphs
from qtrain.train.in_backward import OptimizerInBackward
from qtrain.train.language import language_forward
from qtrain.train.log.failures import GIB, is_out_of_memory
from qtrain.train.loop import peak_memory
from qtrain.train.plan.auto_scheme import resolve_auto_scheme
from qtrain.train.plan.plan import make_plan
from qtrain.train.settings import LanguageSettings, batch_geometry, choose_device, choose_dtype
from qtrain.train.state.state_dict import seed_rng
from qtrain.train.step import apply_gradients, compute_gradients


def time_training(settings: LanguageSettings, warmup_steps: int) -> dict[str, Any]:
    """Median speed over `settings.n_steps` steps after `warmup_steps`, on random tokens; or {"reason": ...}.

    Keys: tok_s, step_ms, sol, mfu, peak_gib, planned_gib, loss.
    """
    try:
        return _time_training(settings, warmup_steps)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        peak = peak_memory(choose_device(settings.device)) / GIB
        return {"reason": f"out of memory, with {peak:.1f} GiB in use"}


def _time_training(settings: LanguageSettings, warmup_steps: int) -> dict[str, Any]:
    # ---- plan --------------------------------------------------------------------------------------------------------
    device = choose_device(settings.device)
    dtype = choose_dtype(settings.dtype, device)
    geometry = batch_geometry(settings)
    scheme = SCHEMES.make(settings.quantize, settings.quantize_kwargs or {}, "--schemes")
    optimizer_spec = OPTIMIZERS.make(settings.optim, settings.optim_kwargs or {}, "--optim")
    source = read_model_source(settings.model, "--models")
    config = source.model_config()
    settings, scheme, _ = resolve_auto_scheme(
        settings,
        scheme,
        lambda: empty_model(source),
        tokens=geometry.micro_batch_size * settings.seq_len,
        geometry=geometry,
        dtype=dtype,
        device=device,
        resumed_from=None,
    )
    plan = make_plan(settings, config, scheme, optimizer_spec, geometry, describe_hardware(device), dtype, data=())

    # ---- model, quantize, optimizer ----------------------------------------------------------------------------------
    seed_rng(settings.seed)
    model = build_model(source, device=device, dtype=dtype, seed=settings.seed)
    model.loss_chunks, model.z_loss = settings.loss_chunks, settings.z_loss
    quantized = quantize_linears(
        model,
        scheme,
        seed=settings.seed,
        head=model.lm_head,
        quantize_head=settings.quantize_lm_head,
        min_size=settings.quantize_min_size,
    )
    apply_activation_checkpointing(model, settings.activation_checkpointing)
    if settings.compile:
        compile_layers(model)
    groups = parameter_groups(model, settings.weight_decay)
    optimizer = optimizer_spec.build(groups, settings.lr, seed=settings.seed)
    quantized.watch(optimizer)

    # ---- steps -------------------------------------------------------------------------------------------------------
    forward = language_forward(model, None)
    graphs = step_graphs(settings, model, forward, quantized)
    in_backward = OptimizerInBackward(model, optimizer) if settings.optimizer_in_backward else None
    generator = torch.Generator().manual_seed(settings.seed)
    times, loss = [], float("nan")
    for step in range(warmup_steps + settings.n_steps):
        batches = [random_batch(config.vocab_size, geometry.micro_batch_size, settings.seq_len, generator).to(device)]
        batches *= geometry.gradient_accumulation  # which tokens they are makes no difference
        start = _now(device)
        gradients = compute_gradients(model, forward, quantized, batches, step, graphs, in_backward)
        apply_gradients(
            model,
            optimizer,
            quantized,
            gradients,
            lr=settings.lr,
            clip_grad_norm=settings.clip_grad_norm,
            graphs=graphs,
            in_backward=in_backward,
        )
        times.append(_now(device) - start)
        loss = gradients.loss
    seconds = statistics.median(times[warmup_steps:])
    tok_s = plan.tokens_per_step / seconds
    return {
        "tok_s": tok_s,
        "step_ms": 1000 * seconds,
        **plan.efficiency(tok_s),
        "peak_gib": peak_memory(device) / GIB,
        "planned_gib": sum(plan.memory.values()) / GIB,
        "loss": loss,
    }


def random_batch(vocab_size: int, sequences: int, seq_len: int, generator: torch.Generator) -> Batch:
    """Random tokens, each but the first of a sequence to be predicted, where the generator is."""
    tokens = torch.randint(0, vocab_size, (sequences, seq_len + 1), generator=generator)
    return Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
