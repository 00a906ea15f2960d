"""How fast a model generates, beside the time in which its weights and cache can be read, and beside transformers.

python -m benchmarks.decode --model qwen2.5-7b --schemes bf16,int8,fp8_rowwise --batches 1,32 --transformers

A step is one more token for every text of a batch, sampled, by what `python -m qtrain generate` runs. The weights are
random. transformers generates in bf16 with a static cache, which compiles its decoding step. Each figure is the median
of the checks of one generation, eight steps each, after the first three, which tune, record and warm up.
"""

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from qtrain.bench.arguments import split_list
from qtrain.bench.tables import Cell, Table, about_run, check_json, write_json
from qtrain.core.checks import user_path
from qtrain.core.config import parse
from qtrain.core.hardware.device import describe_hardware
from qtrain.core.hardware.rates import synchronized_time
from qtrain.core.process import run_script
from qtrain.models import Decoder, Decoding, Generation, build_model, read_model_source
from qtrain.models.generation.fused_step import FusedStep, runs_fused
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.train.settings.listing import listing
from qtrain.train.settings.machine import choose_device, choose_dtype
from qtrain.train.settings.settings import Count

COLUMNS = ("ms a step", "tok/s", "floor, ms", "of the floor's speed", "prompts, ms")
SKIPPED = 3
"""Checks that are not counted."""


@dataclass(frozen=True)
class DecodeSettings:
    """Time generation."""

    model: str = "qwen2.5-0.5b"
    """Model: a name that --list shows, a hub id, a local folder, or a config.json; its weights are random."""
    schemes: str = "bf16,int8,fp8_rowwise"
    """Schemes of its linear layers, head included, separated by commas."""
    batches: str = "1,32"
    """Texts together, separated by commas."""
    context: Count = 512
    """Tokens of a prompt."""
    steps: Count = 80
    """Tokens that are generated."""
    transformers: bool = False
    """Time transformers too."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto: the GPU if there is one."""
    json: str | None = None
    """File for the results; a .csv is written beside it."""


def main(argv: list[str]) -> None:
    settings = parse(DecodeSettings, argv, "-m benchmarks.decode", listing)
    if settings.json:
        check_json(user_path(settings.json, "--json"))
    device = choose_device(settings.device)
    table = Table(f"Generation of {settings.model} on {describe_hardware(device).name}", "", list(COLUMNS))
    for row, cells in rows(settings, device):
        for column, cell in cells.items():
            table.put(row, column, cell)
        print(f"{row}: {', '.join(f'{column} {cell.shown()}' for column, cell in cells.items())}", flush=True)
    print(table.markdown())
    if settings.json:
        write_json([table], Path(settings.json), about_run(settings, device.type))


def rows(settings: DecodeSettings, device: torch.device) -> Iterator[tuple[str, dict[str, Cell]]]:
    batches = [int(size) for size in split_list(settings.batches)]
    for scheme in split_list(settings.schemes):
        model = built(settings.model, scheme, device)
        for batch in batches:
            seconds, prompt = time_of(model, batch, settings)
            floor = floor_seconds(model, batch, settings, device)
            yield f"{scheme}, {batch}", cells_of(seconds, prompt, batch, floor)
        del model
        free()
    if settings.transformers:
        for batch in batches:
            yield f"transformers bf16, {batch}", cells_of(time_of_transformers(batch, settings, device), None, batch)
            free()


def cells_of(seconds: float, prompt: float | None, batch: int, floor: float | None = None) -> dict[str, Cell]:
    cells = {"ms a step": Cell(1e3 * seconds), "tok/s": Cell(batch / seconds)}
    if floor is not None:
        share = floor / seconds
        cells |= {"floor, ms": Cell(1e3 * floor), "of the floor's speed": Cell(share, text=f"{share:.0%}")}
    return cells if prompt is None else cells | {"prompts, ms": Cell(1e3 * prompt)}


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def built(name: str, scheme: str, device: torch.device) -> Decoder:
    """With random weights, of which only codes are kept."""
    source = read_model_source(name, "--model")
    model: Any = build_model(source, pretrained=False, device=device, dtype=choose_dtype("auto", device), lazy=True)
    chosen = SCHEMES.make(scheme, {}, "--schemes")
    quantize_linears(model, chosen, seed=0, head=model.lm_head, quantize_head=scheme != "bf16", forward_only=True)
    return model.eval()


def prompts(batch: int, settings: DecodeSettings, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(0, vocabulary, (batch, settings.context), generator=generator).tolist()


def time_of(model: Decoder, batch: int, settings: DecodeSettings) -> tuple[float, float]:
    """Seconds a step, and of reading the prompts."""
    generation = Generation(
        model, prompts(batch, settings, model.config.vocab_size), Decoding(settings.steps, fast=True)
    )
    checks, before = [], time.perf_counter()
    for new in generation:
        checks.append((time.perf_counter() - before) / max(len(new[0]), 1))
        before = time.perf_counter()
    # The first is the prompts'; the last may have fewer steps.
    return statistics.median(checks[SKIPPED:-1] or checks[1:]), generation.prompt_seconds


def floor_seconds(model: Decoder, batch: int, settings: DecodeSettings, device: torch.device) -> float | None:
    """To read what the middle step reads, once, at the datasheet's bandwidth: weights, keys and values."""
    if not runs_fused(model):
        return None
    config, like = model.config, torch.zeros(1, device=device)
    places = settings.context + settings.steps // 2
    cache = 2 * config.num_hidden_layers * model.kv_heads * config.head_dim * batch * places * 2
    return (FusedStep(model, like, like).weight_bytes + cache) / describe_hardware(device).memory_bandwidth


def time_of_transformers(batch: int, settings: DecodeSettings, device: torch.device) -> float:
    """Seconds a step: the difference of two lengths, so that prompts and what is done once do not count."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = read_model_source(settings.model, "--model").config
    own = AutoConfig.for_model(**{key: value for key, value in config.items() if key != "transformers_version"})
    with torch.device(device):
        peer: Any = AutoModelForCausalLM.from_config(own, dtype=torch.bfloat16).eval()
    ids = torch.tensor(prompts(batch, settings, own.vocab_size), device=device)
    rule = {"do_sample": False, "cache_implementation": "static", "pad_token_id": 0, "eos_token_id": None}

    def seconds(steps: int) -> float:
        start = time.perf_counter()
        peer.generate(ids, max_new_tokens=steps, min_new_tokens=steps, **rule)
        return synchronized_time(device) - start

    few, many = settings.steps // 4, settings.steps
    for _ in range(2):  # the longer first: the shorter one then takes its cache, and nothing is compiled again
        seconds(many), seconds(few)
    return statistics.median((seconds(many) - seconds(few)) / (many - few) for _ in range(3))


if __name__ == "__main__":
    run_script(main)
