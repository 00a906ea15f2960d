"""A language model to be measured and not trained on: an exported folder, a model of the hub, or a run's checkpoint as
it was trained."""

import contextlib
import dataclasses
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qtrain.core.checks import check_fields, user_path
from qtrain.core.config import read_recipe
from qtrain.core.errors import UserError
from qtrain.core.maybe_none import MaybeNone
from qtrain.data.tokenizers.tokenizer import Tokenizer, load_tokenizer
from qtrain.models import (
    Lora,
    ModelSource,
    add_lora,
    as_lora,
    build_model,
    empty_model,
    export_hf,
    merge_lora,
    models_within,
    read_model_source,
)
from qtrain.quant import LinearChoice, Scheme, quantize_linears
from qtrain.quant.scheme_map import spec_text
from qtrain.train.assembly.assemble import assemble, build_quantized, freeze_embedding
from qtrain.train.assembly.exports import whose_weights
from qtrain.train.assembly.frozen_base import frozen_base
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.model_card import ModelCard
from qtrain.train.assembly.prepare import Prepared, prepare
from qtrain.train.log.metrics import read_metrics
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.machine import choose_dtype
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.checkpoint import read_meta
from qtrain.train.state.checkpoint_files import newest_complete
from qtrain.train.state.run import Run
from qtrain.train.state.run_folder import RunFolder, resolve_resume
from qtrain.train.step.step import eval_weights, export_weights

LANGUAGE_SCRIPTS = ("llm_pretrain", "llm_finetune")
_HOW_IT_RAN = "many processes", "memory"
ONE_PROCESS: dict[str, Any] = {
    **{
        field.name: field.default
        for field in dataclasses.fields(LanguageSettings)
        if any(field.name in LanguageSettings.HELP_GROUPS[group].split() for group in _HOW_IT_RAN)
    },
    **{"micro_batch_size": 0, "gradient_accumulation": 0, "optimizer_in_backward": False},
    **{"compile": False, "trackers": (), "resume": None, "lm_eval": None, "final_eval": "sample"},
    **{"export_format": ("hf",), "push_to_hub": None},
}
"""Instead of what says only how a run was spread and made fast, and what it measured at its end."""


@dataclass(frozen=True)
class MeasuredModel:
    """What `--model` names. exported: folder or hub id; else `checkpoint` is one of a run. trained: the settings of the
    run that it belongs to, those of its script included; empty where it belongs to none."""

    exported: str | MaybeNone
    checkpoint: Path | MaybeNone
    settings: LanguageSettings | MaybeNone
    trained: Mapping[str, Any]
    flag: str

    @classmethod
    def find(cls, name: str, flag: str, *, prefer_checkpoint: bool = False) -> "MeasuredModel":
        """prefer_checkpoint: of a run that has both, not its export. Raises UserError."""
        path = user_path(name, flag)
        kept = prefer_checkpoint and newest_complete(path / "checkpoints") is not None
        if (path / "hf" / "config.json").is_file() and not kept:
            return cls(str(path / "hf"), None, *_settings_of(path, flag), flag)
        if not path.is_dir() or ((path / "config.json").is_file() and not (path / "checkpoints").is_dir()):
            run = path.parent if path.name == "hf" and (path.parent / "metrics.jsonl").is_file() else None
            return cls(name, None, *(_settings_of(run, flag) if run else (None, {})), flag)
        try:
            checkpoint = resolve_resume(name, Path())
        except UserError as error:
            raise UserError(str(error).replace("--resume", flag, 1) + models_within(path)) from None
        assert checkpoint is not None  # only of "auto" there may be none
        settings, values = _settings_of(checkpoint.parent.parent, flag)
        script = read_meta(checkpoint).get("script")
        if settings is None or script not in LANGUAGE_SCRIPTS:
            raise UserError(f"{flag}: {checkpoint} is not a checkpoint within the run folder of a language model.")
        return cls(None, checkpoint, settings, {**values, "script": script}, flag)

    @cached_property
    def source(self) -> ModelSource:
        """Its config, and where its weights are; of a checkpoint those that its run began with. Raises UserError."""
        return read_model_source(self.settings.model if self.exported is None else self.exported, self.flag)

    def tokenizer(self) -> Tokenizer | None:
        """The exported model's own, if it has one."""
        if self.exported is None:
            return None
        source = self.source
        files = ("tokenizer.json", "tokenizer.model")
        if not source.has_weights or (source.folder and not any((source.folder / name).exists() for name in files)):
            return None
        return load_tokenizer(self.exported, self.flag)

    def describe(self, device: torch.device, dtype: str) -> str:
        """What `loaded` loads, in a line: whose weights, of which step, their dtype and scheme."""
        scheme = self.scheme_text
        if self.checkpoint is not None:
            meta = read_meta(self.checkpoint)
            return f"checkpoint {self.checkpoint}, step {meta['state']['step']:,}, {meta.get('dtype', '')}, in {scheme}"
        kind = "bf16" if choose_dtype(dtype, device) is torch.bfloat16 else "fp32"
        if self.settings is None:
            return f"{self.exported}, {kind}"
        run = Path(self.exported).parent
        step = max((record["step"] for record in read_metrics(run / "metrics.jsonl")), default=0)
        return f"export {self.exported} of the run {run.name}, step {step:,}, {kind}; trained in {scheme}"

    @property
    def scheme_text(self) -> str:
        """The scheme that it was trained in, in words; "" of one that no run is known of."""
        if (settings := self.settings) is None:
            return ""
        others = [f"its --{name}" for name in ("quantize_overrides", "quantize_schedule") if getattr(settings, name)]
        if (lora := self.trained.get("lora")) is not None and (base := as_lora(lora).low_bit_base):
            others.append(f"adapters on {base}")
        text = spec_text({"scheme": settings.quantize, **(settings.quantize_kwargs or {})}).removesuffix(" {}")
        return " and ".join([text, *others])

    @contextlib.contextmanager
    def loaded(self, device: torch.device, dtype: str) -> Iterator[tuple[nn.Module, Run | None]]:
        """The model, with the weights that its training evaluates. dtype: of an exported one."""
        if self.exported is not None:
            yield self._built(device, choose_dtype(dtype, device)), None
            return
        run = self._restored(device)
        if not run.optimizer.averages_weights:
            run.optimizer.state.clear()  # no step follows: its memory is free for caches and activations
        with eval_weights(run.optimizer, run.quantized, run.ema, run.parallel):
            yield run.model, run

    def in_codes(self, device: torch.device, dtype: str, scheme: Scheme, *, quantize_head: bool) -> nn.Module:
        """An exported model whose linears run in `scheme`, for forward passes alone: of their weights codes are kept
        and nothing else, made one matrix after the other."""
        model = self._built(device, choose_dtype(dtype, device), lazy=True)
        head: Any = model.lm_head
        quantize_linears(model, scheme, seed=0, head=head, quantize_head=quantize_head, forward_only=True)
        return model

    def _built(self, device: torch.device, dtype: torch.dtype, lazy: bool = False) -> nn.Module:
        return build_model(self.source, impl=self._impl, device=device, dtype=dtype, pretrained=True, lazy=lazy)

    @property
    def _impl(self) -> str:
        """qtrain's own decoder, unless transformers alone knows the model, or the format of its codes."""
        if self.settings is not None:
            return self.settings.model_impl
        try:
            self.source.model_config()
            self.source.declared_codes()
        except UserError:
            return "hf"
        return "native"

    def outline(self, device: torch.device, *, native: bool) -> tuple[nn.Module, Sequence[LinearChoice]]:
        """The model on the meta device, and what its training does to its linears: nothing to those of an exported
        one. UserError where it is to be qtrain's own decoder, and is not."""
        if self.exported is not None:
            return empty_model(self.source, "native" if native else self._impl), ()
        prepared, _ = self._prepared(device)
        return prepared.architecture.empty, prepared.linears

    @contextlib.contextmanager
    def to_export(self, device: torch.device) -> Iterator[tuple[nn.Module, list[str]]]:
        """The model with the weights that its training exports, adapters merged, and lines that say whose they are."""
        if self.exported is not None:
            named = self.source.config.get("dtype") or self.source.config.get("torch_dtype")
            yield self._built(device, torch.bfloat16 if named == "bfloat16" else torch.float32), []
            return
        run = self._restored(device)
        notes = [f"weights     of step {run.state.step:,}, {self.checkpoint}"]
        with export_weights(run, lambda: merge_lora(run.model)) as whole:
            yield whole, notes + whose_weights(run, adapted=self.trained.get("lora") is not None)

    def card(self, name: str, lines: Sequence[str]) -> ModelCard:
        """Of an export of `name`."""
        if self.settings is None:
            return ModelCard(Path(name).name, self.source, {}, lines=lines)
        run = self.checkpoint.parent.parent if self.checkpoint is not None else Path(self.exported).parent
        return ModelCard.from_run(run, self.source, self.trained, lines=lines)

    def _prepared(self, device: torch.device) -> tuple[Prepared, Lora | None]:
        # In the dtype of the run, which auto may not be on this device; older checkpoints do not name it.
        dtype = read_meta(self.checkpoint).get("dtype", self.settings.dtype)
        changes: dict[str, Any] = {"device": device.type, "dtype": dtype}
        settings = dataclasses.replace(self.settings, **changes)
        lora = None if self.trained.get("lora") is None else as_lora(self.trained["lora"])
        checked = check_settings(settings, self.trained["script"], frozen_base(lora, settings))
        checked = dataclasses.replace(checked, folder=RunFolder(self.checkpoint.parent.parent, self.checkpoint))
        return prepare(checked, LanguageArchitecture.of(settings, checked.mesh), ()), lora

    def _restored(self, device: torch.device) -> Run:
        """The run as one process would go on with it: in its scheme, with its optimizer, which may average weights."""
        prepared, lora = self._prepared(device)
        model, quantized = build_quantized(prepared)
        if self.trained.get("freeze_embedding_layer"):
            freeze_embedding(model)
        if lora is not None:
            add_lora(model, lora, prepared.settings.seed)
        with contextlib.redirect_stdout(None):  # what resuming would replace is of no concern
            return assemble(prepared, model, quantized)

    @contextlib.contextmanager
    def as_folder(self, run: Run | None, tokenizer: Tokenizer | None) -> Iterator[str]:
        """A folder or hub id that transformers loads: of a checkpoint a temporary one. The last that is done with the
        model: adapters are merged."""
        if run is None:
            yield self.exported
            return
        with tempfile.TemporaryDirectory() as scratch:
            with export_weights(run, lambda: merge_lora(run.model)) as whole:
                export_hf(whole, self.source, Path(scratch, "hf"), tokenizer, trained_positions=self.settings.seq_len)
            yield str(Path(scratch, "hf"))


def _settings_of(run: Path, flag: str) -> tuple[LanguageSettings | None, dict[str, Any]]:
    """The settings in a run's config.json, as those of one process, and all of its values; None where it has none."""
    config = run / "config.json"
    if not config.is_file():
        return None, {}
    values = read_recipe(str(config), flag)
    names = {field.name for field in dataclasses.fields(LanguageSettings)}
    shared: dict[str, Any] = check_fields(
        LanguageSettings, {k: v for k, v in values.items() if k in names}, f"{flag} ({config})"
    )
    return LanguageSettings(**{**shared, **ONE_PROCESS}), values
