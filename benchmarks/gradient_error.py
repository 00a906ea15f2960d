"""Error of the gradient under a scheme: of one step, its noise, and its bias.

python -m benchmarks.gradient_error --model runs/llm_pretrain/.../hf --data '{"type":"token","dataset_dir":"DIR"}'

All use one batch and the same weights. g0 is the gradient of the layers' matrices in fp32, g that under a scheme. The
figures are relative to |g0|:

    error   |g - g0| of one step
    noise   standard deviation of g over draws of stochastic rounding
    bias    |mean of g over the draws - g0|, corrected for the noise that remains in that mean

Where a scheme's GEMMs can be chosen, quantizing one alone gives its share: int8:{"output":"bf16","grad_input":"bf16"}.
The bias of one batch is not that of a training: rounding to nearest errs differently in every batch.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from qtrain.bench.arguments import compared_schemes, split_list
from qtrain.bench.tables import Cell, Table, write_asked
from qtrain.bench.training_cell import random_batch
from qtrain.core.config import JsonDict, parse
from qtrain.core.errors import UserError
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.process import run_script
from qtrain.data.batch import Batch
from qtrain.data.eval_windows import eval_batches
from qtrain.data.stream import StreamContext
from qtrain.models import ModelSource, build_model, read_model_source
from qtrain.quant import SCHEMES, Scheme, quantize_linears
from qtrain.quant.choices import find_linears
from qtrain.train.settings.listing import listing
from qtrain.train.settings.machine import choose_device, choose_dtype
from qtrain.train.settings.settings import Count
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import compute_gradients


@dataclass(frozen=True)
class GradientErrorSettings:
    """Compare the gradients of schemes with the gradient in fp32, on one batch."""

    model: str = "llama-100m"
    """Folder or hub id of a trained model; or a shape, whose random weights are less representative."""
    data: JsonDict = None
    """Data as --eval_ds of llm_pretrain.py takes it; none: random tokens."""
    schemes: str = (
        'bf16,int8,int8:{"stochastic_rounding":false},int8:{"stochastic_rounding":true},fp8_rowwise,fp8_tensorwise'
    )
    """Schemes separated by commas; NAME:{JSON} sets a scheme's options."""
    sequences: Count = 16
    """Sequences in the batch."""
    seq_len: Count = 256
    """Tokens per sequence."""
    draws: Count = 8
    """Repetitions with new random bits, for schemes that round stochastically."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto is the GPU if there is one."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of weights and activations under the schemes; auto is bf16 on a GPU, fp32 on a CPU."""
    seed: int = 0
    """Seed of random weights, random tokens and stochastic rounding."""
    json: str | None = None
    """File for the figures."""


@dataclass(frozen=True)
class GradientError:
    """Figures relative to |g0|, as above."""

    error: float
    noise: float
    bias: float


def gradient_error(gradients: Iterator[list[Tensor]], true: list[Tensor]) -> GradientError:
    """From the gradients of one or several draws; each, like `true`, is a list of fp64 tensors."""
    size = _norm(true)
    first, mean, squares, draws = 0.0, [torch.zeros_like(t) for t in true], 0.0, 0
    for found in gradients:
        draws += 1
        squares += _norm(found) ** 2
        for m, g in zip(mean, found, strict=True):
            m += (g - m) / draws
        if draws == 1:
            first = _distance(found, true)
    noise = math.sqrt(max(squares - draws * _norm(mean) ** 2, 0.0) / max(draws - 1, 1))
    bias = math.sqrt(max(_distance(mean, true) ** 2 - noise**2 / draws, 0.0))
    return GradientError(first / size, noise / size, bias / size)


def _norm(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(float(t.square().sum()) for t in tensors))


def _distance(a: list[Tensor], b: list[Tensor]) -> float:
    return _norm([x - y for x, y in zip(a, b, strict=True)])


def gradients_of(
    source: ModelSource,
    scheme: Scheme,
    batch: Batch,
    dtype: torch.dtype,
    device: torch.device,
    settings: GradientErrorSettings,
) -> Iterator[list[Tensor]]:
    """Gradients of the layers' matrices, fp64, one per draw; a single one for a deterministic scheme."""
    model = build_model(source, device=device, dtype=dtype, pretrained=source.has_weights, seed=settings.seed)
    model.loss_chunks, model.z_loss = 0, 0.0
    names = [f"{names[0]}.weight" for linear, names in find_linears(model).items() if linear is not model.lm_head]
    quantized = quantize_linears(model, scheme, seed=settings.seed, head=model.lm_head)
    forward, parameters = language_forward(model, None), dict(model.named_parameters())
    drawn = any(linear.scheme.stochastic_rounding for linear in quantized.linears)
    for step in range(settings.draws if drawn else 1):
        model.zero_grad()
        compute_gradients(model, forward, quantized, [batch.to(device)], step)
        gradients = [parameters[name].grad for name in names]
        yield [gradient.double() for gradient in gradients if gradient is not None]


def main(argv: list[str]) -> None:
    settings = parse(GradientErrorSettings, argv, "-m benchmarks.gradient_error", listing)
    device = choose_device(settings.device)
    schemes = compared_schemes(split_list(settings.schemes))
    if not schemes:
        raise UserError("--schemes: nothing to compare; name at least one scheme.")
    source = read_model_source(settings.model)
    batch = read_batch(settings, source.model_config().vocab_size)
    (true,) = gradients_of(source, SCHEMES.make("bf16", {}, "--schemes"), batch, torch.float32, device, settings)
    columns = ["error", "noise", "bias"]
    what = f"{source.name}{'' if source.has_weights else ', random weights'}"
    title = (
        f"Gradients of {what}, {settings.sequences} x {settings.seq_len} tokens, on {describe_hardware(device).name}"
    )
    table = Table(title, "% of the gradient without quantization, in fp32", columns)
    for word, scheme in schemes.items():
        dtype = choose_dtype(settings.dtype, device)
        found = gradient_error(gradients_of(source, scheme, batch, dtype, device, settings), true)
        for column in columns:
            table.put(word, column, Cell(100 * getattr(found, column)))
    print(table.markdown())
    write_asked([table], settings, device)


def read_batch(settings: GradientErrorSettings, vocab_size: int) -> Batch:
    """The batch of all gradients, on the CPU. UserError for data that has fewer windows."""
    rows, length = settings.sequences, settings.seq_len
    if settings.data is None:
        return random_batch(vocab_size, rows, length, torch.Generator().manual_seed(settings.seed))
    context = StreamContext(length, settings.seed, vocab_size=vocab_size)
    windows = eval_batches(settings.data, context, rows, rows, "--data")
    if windows.n_sequences < rows:
        raise UserError(
            f"--data: it holds {windows.n_sequences} windows of {length + 1} tokens, not {rows}; give more data, or "
            f"--sequences {windows.n_sequences}."
        )
    return windows.batches[0]


if __name__ == "__main__":
    run_script(main)
