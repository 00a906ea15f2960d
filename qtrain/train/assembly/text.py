"""A language model's data: the training stream, opened once."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from qtrain.comm.ranks import first_difference, from_rank_0
from qtrain.core.checks import shown
from qtrain.core.errors import NotHere, UserError
from qtrain.data.batch import Sample
from qtrain.data.eval_windows import eval_sets
from qtrain.data.loader import Loader
from qtrain.data.stream import (
    DATASETS,
    Stream,
    StreamContext,
    check_kind,
    count_samples,
    open_stream,
    tokenizer_needed,
    with_chat_template,
)
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from qtrain.models import ModelSource
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.eval.language import EvaluationData, load_evaluation
from qtrain.train.log.status import epochs, short_number
from qtrain.train.plan.checked_settings import CheckedSettings, count_steps
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.run_folder import changed_settings, that_run_had

PLANNED_WITHOUT = "This is planned without data."


class AbsentStream(Stream):
    """The stream of a plan whose data are not here: it is never read."""

    def next_sample(self) -> Sample:
        raise StopIteration

    def position(self) -> dict[str, Any]:
        return {}

    def seek(self, position: Mapping[str, Any]) -> None:
        assert not position


@dataclass(frozen=True)
class TextData:
    """checked: with the steps of --n_epochs. tokenizer: None if neither the data nor the model names one. stream: open,
    at its start."""

    checked: CheckedSettings
    context: StreamContext
    tokenizer: Tokenizer | None
    stream: Stream
    absent: str = ""
    """With --dry_run, why there are no data: a plan is made without them."""

    @property
    def settings(self) -> LanguageSettings:
        return self.checked.language

    @property
    def document_end(self) -> int | None:
        """The token that ends documents, which --doc_mask keeps apart; None without it."""
        return self.tokenizer.eos_id if self.tokenizer is not None and self.settings.doc_mask else None

    @property
    def described(self) -> list[str]:
        """Lines for the plan that describe the data."""
        if self.absent:
            return [f"{self.absent} {PLANNED_WITHOUT}"]
        settings, per_epoch = self.settings, self.stream.samples_per_epoch
        named = eval_sets(settings.eval_ds, "--eval_ds")
        lines = [f"train: {json.dumps(settings.train_ds)}"] if settings.train_ds else []
        lines += [f"evaluation{f' {name}' if name else ''}: {json.dumps(spec)}" for name, spec in named.items()]
        read = settings.steps * settings.batch_size
        if per_epoch:
            lines.append(f"{epochs(read / per_epoch)} of the training data's {per_epoch:,} sequences")
        elif about := self.stream.estimated_samples():
            size = f"some {short_number(about)} sequences, estimated from a part of them"
            lines.append(f"about {epochs(read / about)} of the training data ({size})")
        return lines

    def evaluation(self) -> EvaluationData:
        """What evaluations ask. Raises UserError; with --dry_run data that are not here are left out."""
        settings = self.settings
        if self.absent:
            return EvaluationData(ctx=self.context)
        try:
            return load_evaluation(
                settings,
                self.context,
                settings.eval_ds,
                "--eval_ds",
                settings.eval_sequences,
                trained_on=self.stream.reads,
                needs_tokenizer=["--lm_eval"] if settings.lm_eval else [],
            )
        except NotHere as error:
            if not settings.dry_run:
                raise
            return EvaluationData(ctx=self.context, notes=(f"{error} {PLANNED_WITHOUT}",))

    @property
    def exported_tokenizer(self) -> Tokenizer | None:
        """The tokenizer with the chat template of the training data, which the exported model has learned."""
        if self.tokenizer is None or self.settings.train_ds is None:
            return self.tokenizer
        return with_chat_template(self.tokenizer, self.settings.train_ds, "--train_ds")

    def loader(self, position: Mapping[str, Any] | None) -> Loader:
        """This rank's micro-batches from `position` on; None: from the start. UserError for a position of other
        data."""
        if position is not None:
            check_kind(position, self.stream.position(), "--train_ds")
        mesh = self.checked.mesh
        try:
            return Loader(
                self.stream,
                self.checked.geometry.micro_batch_size,
                num_workers=self.settings.num_workers,
                position=position,
                rank=mesh.reader,
                ranks=mesh.readers,
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            if position is None:
                raise
            raise UserError(f"--train_ds: the checkpoint's data position cannot be read ({error!r}).") from None


def open_text(
    checked: CheckedSettings,
    architecture: LanguageArchitecture,
    *,
    model_tokenizer: bool = False,
    seq_len_multiple: int = 0,
) -> TextData:
    """Open --train_ds and read its first sample. Raises UserError; with --dry_run data that are not here are left out.

    model_tokenizer: use the model's tokenizer if the data name none. seq_len_multiple: see `StreamContext`.
    """
    try:
        return _open_text(checked, architecture, model_tokenizer, seq_len_multiple)
    except NotHere as error:
        settings = checked.language
        if not settings.dry_run:
            raise
        if settings.n_steps is None:
            raise UserError(f"{error} Without data --n_epochs is no number of steps; give --n_steps.") from None
        return TextData(checked, StreamContext(settings.seq_len), None, AbsentStream(), str(error))
    except UserError as error:
        if (checkpoint := checked.folder.resumed_from) is None:
            raise
        # Data may not fit a model that is another than that of the resumed run.
        changed = changed_settings(checkpoint, checked.settings)
        raise UserError(f"{error}{that_run_had(changed, ('model', 'model_kwargs'))}") from None


def _open_text(
    checked: CheckedSettings, architecture: LanguageArchitecture, model_tokenizer: bool, seq_len_multiple: int
) -> TextData:
    settings, micro_batch_size = checked.language, checked.geometry.micro_batch_size
    if settings.train_ds is None:
        raise NotHere('--train_ds: no training data is given; for example \'{"type":"token","dataset_dir":"DIR"}\'.')
    dataset = DATASETS.make_typed(settings.train_ds, "--train_ds")
    tokenizer = dataset.load_tokenizer("--train_ds")
    if tokenizer is None and (model_tokenizer or (settings.pretrained and dataset.tokenizes("--train_ds"))):
        tokenizer = _tokenizer_of_model(architecture.source)
    if settings.doc_mask:
        if tokenizer is None:
            raise tokenizer_needed("--train_ds", "--doc_mask")
        if tokenizer.eos_id is None:
            raise UserError(f"--doc_mask: the tokenizer {tokenizer.name!r} has no end token to tell documents apart.")
    context = StreamContext(
        settings.seq_len,
        settings.seed,
        tokenizer=tokenizer,
        vocab_size=architecture.vocab_size,
        seq_len_multiple=seq_len_multiple,
        micro_batch_size=micro_batch_size,
    )
    stream = open_stream(settings.train_ds, context, "--train_ds")
    start = stream.position()
    first = stream.next_sample()  # refuses what cannot be read before anything is allocated
    stream.seek(start)
    _check_alike({**start, "its first sample": zlib.crc32(first.tokens.tobytes())})
    checked = count_steps(checked, _steps_of_epochs(settings, stream, context))
    return TextData(checked, context, tokenizer, stream)


def _steps_of_epochs(settings: LanguageSettings, stream: Stream, context: StreamContext) -> int:
    """The optimizer steps of --n_epochs; 0 without. UserError where the size of the data is not known. The stream then
    knows its samples."""
    if not settings.n_epochs or settings.train_ds is None:
        return 0
    spec = settings.train_ds
    samples = from_rank_0(lambda: count_samples(spec, stream, context, "--n_epochs"))
    stream.samples_per_epoch = samples
    steps = settings.n_epochs * samples // settings.batch_size
    if not steps:
        raise UserError(
            f"--n_epochs: {settings.n_epochs} epochs of {samples:,} sequences are less than one batch of "
            f"{settings.batch_size:,}; give more epochs, or a smaller --batch_size."
        )
    return steps


def _check_alike(data: Mapping[str, Any]) -> None:
    """UserError naming a rank that reads other data than rank 0. data: their size and a part of them."""
    if found := first_difference(data):
        number, what, its, first = found
        raise UserError(
            f"--train_ds: rank {number} reads other data than rank 0: {what} is {shown(its)} there and {shown(first)} "
            "on rank 0. Give all processes the same files."
        )


def _tokenizer_of_model(source: ModelSource) -> Tokenizer:
    if not source.has_weights:
        raise UserError(
            f'--train_ds: {source.name} has no tokenizer of its own; add "tokenizer":"NAME" to the dataset.'
        )
    return load_tokenizer(str(source.folder or source.hub_id), "--model")
