"""Generate text with a model: prompts > the model > text on stdout, all else on stderr.

python -m qtrain generate runs/llm_pretrain/RUN --prompt "Once upon a time"
python -m qtrain generate Qwen/Qwen3-0.6B --chat
python -m qtrain generate Qwen/Qwen3-0.6B --quantize int8 --prompts questions.jsonl --json answers.jsonl

Of a run the newest checkpoint generates, in the scheme that it was trained with; its export, a folder or a hub id in
--dtype, or with --quantize in a low-bit scheme, with codes of its weights alone in memory.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from qtrain.core.checks import Range, user_path
from qtrain.core.config import JsonDict, parse
from qtrain.core.errors import UserError
from qtrain.train.settings.listing import listing

if TYPE_CHECKING:
    from qtrain.models import Decoding
    from qtrain.train.generate.prompts import Given
    from qtrain.train.generate.source import TextModel

NAME = "-m qtrain generate"


@dataclass(frozen=True)
class GenerateSettings:
    """Generate text with a language model; the first word without dashes is --model."""

    HELP_GROUPS: ClassVar = {
        "model": "model quantize quantize_kwargs quantize_overrides quantize_lm_head device dtype deterministic",
        "prompts": "prompt prompts chat system",
        "sampling": "temperature top_k top_p min_p repetition_penalty seed samples max_new_tokens stop",
        "output": "batch_size json logprobs",
    }

    model: str | None = None
    """Run folder (its newest checkpoint, with --quantize its export), checkpoint of one, exported folder, or hub id."""
    quantize: str | None = None
    """Scheme that linear layers of an exported folder or hub id run in; --list shows all; None: --dtype, and of a
    checkpoint the scheme of its training."""
    quantize_kwargs: JsonDict = None
    """Options of --quantize as a JSON object, such as {"granularity":"tensorwise"}; --list shows them."""
    quantize_overrides: JsonDict = None
    """Other schemes for some linear layers, a JSON object of globs over their names, as in training:
    {"*.down_proj":"bf16"}."""
    quantize_lm_head: bool = False
    """Quantize the output head too, not only the linear layers below it."""
    device: Literal["auto", "cuda", "cpu"] = "auto"
    """Device; auto: the GPU if there is one, else the CPU."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Dtype of an exported folder's model; auto: bf16 on a GPU, fp32 on a CPU."""
    deterministic: bool = False
    """Compute logits by the forward pass of training, with the same bits in every batch, as under its --deterministic:
    slower, and refused for schemes and models whose rows depend on each other."""
    prompt: tuple[str, ...] = ()
    """Texts to continue."""
    prompts: str | None = None
    """File of prompts: .txt, a line each, or .jsonl, an object a line with "prompt", or "messages" for the chat
    template."""
    chat: bool = False
    """Talk to the model in the terminal, by its chat template."""
    system: str | None = None
    """System message of --chat, and of conversations of --prompts that have none."""
    temperature: Annotated[float, Range(0, 100)] = 0.8
    """Logits are divided by it before sampling; 0: always the likeliest token."""
    top_k: Annotated[int, Range(0)] = 0
    """Sample among the k likeliest tokens; 0: all."""
    top_p: Annotated[float, Range(0, 1)] = 1.0
    """Sample among the likeliest tokens whose probabilities together reach this; 1: all."""
    min_p: Annotated[float, Range(0, 1)] = 0.0
    """Leave out tokens whose probability is below this fraction of the likeliest one's; 0: none."""
    repetition_penalty: Annotated[float, Range(0.01, 100)] = 1.0
    """Make tokens that the text has already less likely: divides their positive logits, multiplies negative ones; 1:
    off."""
    seed: Annotated[int, Range(0)] = 0
    """Seed of sampling; with the number of the text and of its token it determines every draw, whatever the batch."""
    samples: Annotated[int, Range(1, 10**6)] = 1
    """Continuations of each prompt."""
    max_new_tokens: Annotated[int, Range(1, 10**6)] = 256
    """Longest continuation, in tokens."""
    stop: tuple[str, ...] = ()
    """Strings that end a text, which stops before them."""
    batch_size: Annotated[int, Range(0, 10**5)] = 0
    """Texts that are written together; 0: as many as have keys and values in 4 GiB, at most 256."""
    json: str | None = None
    """File for a JSON object a text, a line each: prompt, text, ids, finish, tokens, seconds, tok_s."""
    logprobs: bool = False
    """Add each token's log-probability under the model to --json."""


def main(argv: list[str]) -> None:
    from qtrain.commands.evaluate import as_flags

    generate(parse(GenerateSettings, as_flags(argv), NAME, listing))


def generate(settings: GenerateSettings) -> None:
    # ---- what to continue: whatever can be refused is refused before the model is loaded -----------------------------
    if settings.model is None:
        raise UserError("--model: no model is named; give a run folder, a checkpoint, a folder or a hub id.")
    given = _given(settings)

    # Imported here: torch and what needs it take seconds, which a mistyped flag should not have to wait for.
    from qtrain.models import Decoder, why_other_bits
    from qtrain.train.assembly.deterministic import use_deterministic_kernels
    from qtrain.train.generate.chat import Chat
    from qtrain.train.generate.prompts import PromptReader, chat_renderer
    from qtrain.train.generate.source import Quantization, TextModel
    from qtrain.train.generate.writing import Output, Totals, write_texts
    from qtrain.train.settings.machine import choose_device

    # ---- the model, and every prompt as it reads it ------------------------------------------------------------------
    device, quantization = choose_device(settings.device), None
    if settings.quantize is not None:
        own = settings.quantize_kwargs, settings.quantize_overrides, settings.quantize_lm_head
        quantization = Quantization(settings.quantize, *own)
    found = TextModel.find(settings.model, quantization, device)
    if settings.dtype != "auto" and found.measured.exported is None:
        raise UserError(f"--dtype: {found.measured.checkpoint} is in the dtype of its training; leave it out.")
    tokenizer, positions = found.tokenizer, found.positions
    reader = PromptReader(tokenizer, settings.model, found.begin_ids, found.vocab_size, positions, settings.system)
    prompts = [reader.read(one) for one in given]
    renderer = None
    if settings.chat or any(not isinstance(one.content, str) for one in given):
        renderer = chat_renderer(tokenizer, settings.model, "--chat" if settings.chat else "--prompts")
    found.ends(renderer)
    for note in found.notes:
        print(note, file=sys.stderr, flush=True)

    if settings.deterministic:
        use_deterministic_kernels()

    # ---- text --------------------------------------------------------------------------------------------------------
    totals = Totals()
    with found.loaded(device, settings.dtype) as model:
        if settings.deterministic and (reason := why_other_bits(model, positions or 0)):
            raise UserError(f"--deterministic: logits of {settings.model} depend on the batch: {reason}.")
        eos_ids, stops = found.ends(renderer)  # again: the hub's generation settings come with the weights
        decoding = _decoding(settings, found, eos_ids)
        stops = (*stops, *settings.stop)
        if not isinstance(model, Decoder):
            print("cache     none for models of transformers: every token reads the whole text again", file=sys.stderr)
        if settings.chat:
            Chat(model, reader, decoding, stops).run(totals)
        else:
            records = None if settings.json is None else user_path(settings.json, "--json")
            output = Output(_names(given, settings.samples), records)
            how = {"stops": stops, "samples": settings.samples, "batch_size": settings.batch_size}
            write_texts(model, tokenizer, prompts, output, totals, decoding=decoding, **how)
    print(totals.line(), file=sys.stderr)


def _decoding(settings: GenerateSettings, found: "TextModel", eos_ids: tuple[int, ...]) -> "Decoding":
    from qtrain.models import Decoding, Sampling

    own = found.tokenizer.vocab_size
    return Decoding(
        settings.max_new_tokens,
        Sampling(**{f.name: getattr(settings, f.name) for f in fields(Sampling)}),
        eos_ids=eos_ids,
        vocab_size=min(own, found.vocab_size or own),
        context=found.positions,
        logprobs=settings.logprobs,
        fast=not settings.deterministic,
    )


def _given(settings: GenerateSettings) -> "list[Given]":
    """The prompts, none with --chat. UserError for flags that do not go together, and files that cannot be read."""
    named = [f"--{name}" for name in ("prompt", "prompts", "chat") if getattr(settings, name)]
    if not named:
        raise UserError('--prompt: nothing to continue is given; give --prompt "TEXT", --prompts FILE or --chat.')
    if len(named) > 1:
        raise UserError(f"{named[0]}: it does not go with {named[1]}; give one of them.")
    for name in ("quantize_kwargs", "quantize_overrides", "quantize_lm_head"):
        if settings.quantize is None and getattr(settings, name):
            raise UserError(f"--{name}: it needs --quantize, the scheme of an exported model; add it.")
    if settings.logprobs and settings.json is None:
        raise UserError("--logprobs: they are written to the file of --json; name one.")
    for name in ("json", "samples", "batch_size"):
        if settings.chat and getattr(settings, name) != getattr(GenerateSettings, name):
            raise UserError(f"--{name}: --chat has one text at a time, on the screen; leave one of the two out.")
    if settings.chat and not _is_terminal():
        raise UserError("--chat: stdin is no terminal; give --prompts FILE with conversations instead.")
    from qtrain.bench.tables import check_place
    from qtrain.train.generate.prompts import Given, read_prompts

    if settings.json is not None:
        check_place(user_path(settings.json, "--json"))
    if settings.prompts is not None:
        given = read_prompts(settings.prompts, "--prompts")
    else:
        given = [Given(text, "--prompt") for text in settings.prompt]
    if settings.system is not None and not settings.chat and all(isinstance(one.content, str) for one in given):
        raise UserError('--system: no conversation has it; give --chat, or --prompts FILE.jsonl with "messages".')
    return given


def _is_terminal() -> bool:
    return sys.stdin.isatty()


def _names(given: "Sequence[Given]", samples: int) -> list[str]:
    """Of each text: the number and the beginning of its prompt."""
    names = []
    for number, one in enumerate(given, 1):
        last = {"content": one.content} if isinstance(one.content, str) else one.content[-1]
        line = " ".join(str(last.get("content") or last.get("value")).split())
        line = line if len(line) <= 60 else f"{line[:57]}..."
        sample_notes = (f" ({sample} of {samples})" if samples > 1 else "" for sample in range(1, samples + 1))
        names += [f"{number}{which}: {line}" for which in sample_notes]
    return names
