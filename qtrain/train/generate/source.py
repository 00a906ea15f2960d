"""The model that generates: which of a run's, in which scheme, with which tokenizer and which end tokens."""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from qtrain.core.errors import UserError
from qtrain.data.examples.chat_dataset import ChatRenderer
from qtrain.data.examples.examples import ExampleDataset
from qtrain.data.stream import DATASETS, dataset_tokenizer, with_chat_template
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from qtrain.models import generation_config
from qtrain.quant import SCHEMES, LowBitScheme, Scheme, choose_linears
from qtrain.quant.scheme_map import spec_of, spec_text, with_overrides
from qtrain.train.assembly.measured import MeasuredModel
from qtrain.train.plan.linears import check_overrides, refuse_no_swap

MODEL, RUN_DATA = "--model", "--train_ds of the run"


@dataclass(frozen=True)
class Quantization:
    """--quantize with its flags."""

    name: str
    kwargs: Mapping[str, Any] | None
    overrides: Mapping[str, Any] | None
    head: bool

    @property
    def scheme(self) -> Scheme:
        """Raises UserError, also for schemes that need a training run."""
        made = SCHEMES.make(self.name, self.kwargs or {}, "--quantize", "--quantize_kwargs")
        scheme = with_overrides(self.overrides, made)
        root = scheme.root
        if not isinstance(root, LowBitScheme) and not root.leaves_all:
            raise UserError(f"--quantize: {self.name!r} times schemes as they train; name the scheme to generate in.")
        if any(isinstance(part, LowBitScheme) and part.amax_history for part in scheme.parts()):
            raise UserError(
                "--quantize_kwargs.scaling: delayed scales are of earlier training steps, which an exported model does "
                'not have; give "dynamic", or generate from a checkpoint.'
            )
        if any(isinstance(part, LowBitScheme) and part.packed_weight is not None for part in scheme.parts()):
            raise UserError(
                f"--quantize: {self.name!r} rounds latent weights, which checkpoints alone have; give one of its run, "
                "without --quantize, or another scheme."
            )
        return scheme


@dataclass(frozen=True)
class TextModel:
    """A model that can generate text, not loaded yet."""

    measured: MeasuredModel
    tokenizer: Tokenizer
    quantization: Quantization | None
    notes: tuple[str, ...]
    """Lines that say what is used."""

    @classmethod
    def find(cls, name: str, quantization: Quantization | None, device: torch.device) -> "TextModel":
        """What `name` refers to. Raises UserError. Of a run with both the newest checkpoint, in its scheme; with
        --quantize the export."""
        measured = MeasuredModel.find(name, MODEL, prefer_checkpoint=quantization is None)
        if quantization is None:
            notes = [f"model     {measured.checkpoint or measured.exported}"]
            if measured.exported is None:
                notes.append(f"scheme    {measured.scheme_text}, that of its training")
        else:
            if measured.exported is None:
                raise UserError(
                    f"--quantize: {measured.checkpoint} runs in the scheme of its training, "
                    f"{measured.scheme_text}. Leave it out, or write dense weights first: "
                    f"python -m qtrain export {name} --format hf"
                )
            notes = [f"model     {measured.exported}", *_planned(measured, quantization, device)]
        return cls(measured, _tokenizer(measured, name), quantization, tuple(notes))

    @property
    def _own_files(self) -> bool:
        """Whether the source's config and generation settings are those of this tokenizer: not of a mere shape."""
        source = self.measured.source
        trained = self.measured.settings
        return source.has_weights and (
            self.measured.exported is not None or (trained is not None and trained.pretrained)
        )

    @property
    def vocab_size(self) -> int | None:
        """Of the model; None: its config does not say."""
        size = self.measured.source.config.get("vocab_size")
        return size if isinstance(size, int) else None

    @property
    def positions(self) -> int | None:
        """The longest text that the model's config names; None: it names none."""
        config = self.measured.source.config
        named = (config.get(key) for key in ("max_position_embeddings", "n_positions", "max_seq_len"))
        return next((value for value in named if isinstance(value, int) and value > 0), None)

    @property
    def begin_ids(self) -> list[int]:
        """What a plain text begins with: of a run what its training texts begin with, else what the tokenizer adds."""
        trained = self.measured.settings
        if trained is None:
            return self.tokenizer.begin_ids()
        data = DATASETS.make_typed(trained.train_ds, RUN_DATA) if trained.train_ds else None
        begins, bos_id = isinstance(data, ExampleDataset) and data.begin_token, self.tokenizer.bos_id
        return [bos_id] if begins and bos_id is not None else []

    def ends(self, renderer: ChatRenderer | None) -> tuple[tuple[int, ...], tuple[str, ...]]:
        """End tokens, and stop strings; renderer: of conversations, whose turns end an answer too."""
        source, ids, stops = self.measured.source, {self.tokenizer.eos_id}, []
        if self._own_files:
            named = generation_config(source, source.config).get("eos_token_id")
            ids |= set(named if isinstance(named, list) else [named])
        if renderer is not None and (end := renderer.end_of_turn()):
            encoded = self.tokenizer.encode(end)
            # A single token where the tokenizer has one for it, else the text.
            ids |= set(encoded) if len(encoded) == 1 else set()
            stops += [end] if len(encoded) != 1 else []
        return tuple(sorted(i for i in ids if isinstance(i, int))), tuple(stops)

    @contextlib.contextmanager
    def loaded(self, device: torch.device, dtype: str) -> Iterator[nn.Module]:
        """The model; what loading prints goes to stderr."""
        with contextlib.ExitStack() as stack:
            with contextlib.redirect_stdout(sys.stderr):
                if self.quantization is None:
                    model, _ = stack.enter_context(self.measured.loaded(device, dtype))
                else:
                    scheme, head = self.quantization.scheme, self.quantization.head
                    model = self.measured.in_codes(device, dtype, scheme, quantize_head=head)
            yield model


def _planned(measured: MeasuredModel, quantization: Quantization, device: torch.device) -> list[str]:
    """A line on what --quantize does to an exported model, none for bf16. UserError where it quantizes no linear."""
    scheme = quantization.scheme
    empty, _ = measured.outline(device, native=False)
    head: Any = empty.lm_head
    linears = choose_linears(empty, scheme, device=device, head=head, quantize_head=quantization.head)
    check_overrides(linears, scheme)
    refuse_no_swap(linears, scheme, quantization.name)
    if not (swapped := sum(linear.scheme is not None for linear in linears)):
        return []
    described = spec_text(spec_of(scheme.root if isinstance(scheme.root, LowBitScheme) else None))
    return [f"scheme    {described} in {swapped:,} of {len(linears):,} linears, codes alone are kept"]


def _tokenizer(measured: MeasuredModel, name: str) -> Tokenizer:
    """The model's own, or that of the data that its run trained on, with their chat template."""
    found, trained = measured.tokenizer(), measured.settings
    if found is None and trained is not None and trained.train_ds:
        found = dataset_tokenizer(trained.train_ds, RUN_DATA)
        source = measured.source
        if found is None and trained.pretrained and source.has_weights:
            found = load_tokenizer(str(source.folder or source.hub_id), MODEL)
        found = found and with_chat_template(found, trained.train_ds, RUN_DATA)
    if found is None:
        raise UserError(f"{MODEL}: {name} has no tokenizer; put tokenizer.json beside its config.json.")
    return found
