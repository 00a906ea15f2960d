"""A causal language model as the scripts see it before it has weights."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial

from torch import nn

from qtrain.core.checks import refuse_empty
from qtrain.core.errors import UserError
from qtrain.core.hardware.device import Hardware
from qtrain.core.maybe_none import MaybeNone
from qtrain.kernels import compile_ahead
from qtrain.models import (
    Distillation,
    DistillOptions,
    ModelConfig,
    ModelSource,
    ResidualOffload,
    apply_recompute,
    as_distill,
    build_model,
    compile_layers,
    empty_model,
    generation_config,
    read_model_source,
)
from qtrain.models.config.reading import USE_HF
from qtrain.models.cost.parameters import layer_linears, linear_key
from qtrain.models.cost.trained import TrainedPart
from qtrain.models.hf.impl import HfModel
from qtrain.models.hf.readers.declared import DeclaredCodes
from qtrain.models.hf.readers.kept import linears_without_codes, matrices_in_codes
from qtrain.models.native.decoder import Decoder
from qtrain.parallel.layers.context_in_order import ContextInOrder, context_of
from qtrain.parallel.layers.context_parallel import ContextParallel, check_context
from qtrain.parallel.layers.local_config import check_mesh, describe_rows
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.full_shard import Unit, decoder_units
from qtrain.quant import LinearChoice, Scheme
from qtrain.quant.choices import find_linears
from qtrain.quant.quantized_model import SharedLinear
from qtrain.quant.schemes.frozen_base import keeps_codes
from qtrain.train.assembly.architecture import Architecture, refuse_absurd
from qtrain.train.plan.checked_settings import CheckedSettings
from qtrain.train.plan.language_plan import plan_language_run
from qtrain.train.plan.plan import Plan
from qtrain.train.settings.machine import reserves_every_routing
from qtrain.train.settings.recompute import kept_8bit, recompute_kinds
from qtrain.train.settings.settings import LanguageSettings


@dataclasses.dataclass(frozen=True)
class Teacher:
    """The model of --distill."""

    source: ModelSource
    config: ModelConfig
    options: DistillOptions

    @classmethod
    def of(cls, settings: LanguageSettings, student: ModelConfig | MaybeNone) -> "Teacher | None":
        """None without --distill. UserError for a model that cannot teach `student`."""
        if settings.distill is None:
            return None
        options, flag = as_distill(settings.distill), "--distill.teacher"
        refuse_empty(flag, options.teacher)
        source = read_model_source(options.teacher, flag)
        refuse_absurd(source.config, flag)
        if not source.has_weights:
            raise UserError(f"{flag}: {source.name} is a shape without weights; give a hub id or a folder with some.")
        try:
            config = source.model_config()
        except UserError as error:  # a student may run through transformers instead, its teacher may not
            said = str(error).removesuffix(USE_HF).rstrip()
            raise UserError(f"{said} A teacher must be a language model that qtrain's own decoder runs.") from None
        if config.vocab_size != student.vocab_size:
            raise UserError(
                f"{flag}: {source.name} has a vocabulary of {config.vocab_size:,} tokens, and --model {settings.model} "
                f"of {student.vocab_size:,}; give a teacher with the student's tokenizer and vocabulary."
            )
        return cls(source, config, options)

    def build(self, checked: CheckedSettings) -> Distillation:
        model = build_model(self.source, device=checked.device, dtype=checked.dtype, pretrained=True)
        return Distillation(model, self.options)


@dataclasses.dataclass(frozen=True)
class LanguageArchitecture(Architecture[Decoder | HfModel, LanguageSettings]):
    """A causal language model. config: None for one that only transformers knows (--model_impl hf). parts: how ranks
    divide it; None: each has all of it."""

    source: ModelSource
    impl: str
    seq_len: int
    config: ModelConfig | MaybeNone
    parts: ModelParallel | None = None
    context: ContextParallel | ContextInOrder | None = None
    """How ranks share its sequences; None: each computes whole ones."""
    expert_rows: str | None = None
    """The plan's line on the rows of --ep."""
    declared: DeclaredCodes | MaybeNone = None
    """The matrices of the weights to be loaded that are codes."""
    teacher: Teacher | None = None

    @classmethod
    def of(cls, settings: LanguageSettings, mesh: Mesh) -> "LanguageArchitecture":
        """The model that --model and --model_impl name, or this rank's part of it. Raises UserError."""
        source = read_model_source(settings.model)
        generation_config(source, {})  # an export writes it: refuse a broken one now
        config: ModelConfig | MaybeNone = source.model_config() if settings.model_impl == "native" else None
        refuse_absurd(source.config, "--model")
        _check_routers(settings, config)
        if settings.mlp_chunks and config.moe_layers:
            raise UserError(
                f"--mlp_chunks: {settings.model} is a mixture of experts, which does not run in chunks; leave it out."
            )
        check_mesh(config, mesh, settings.sequence_parallel, settings.model)
        if mesh.cp_group is not None:
            check_context(config, mesh.cp, settings.seq_len)
        every_routing = reserves_every_routing(settings)
        parts = ModelParallel.on(config, mesh, sequence=settings.sequence_parallel, every_routing=every_routing)
        context = context_of(mesh, deterministic=settings.deterministic)
        rows = describe_rows(config.mixture, mesh.ep * mesh.tp, every_routing) if mesh.ep > 1 else None
        loads = config is not None and settings.pretrained and source.has_weights
        declared = source.declared_codes() if loads else None
        teacher = Teacher.of(settings, config)
        return cls(source, settings.model_impl, settings.seq_len, config, parts, context, rows, declared, teacher)

    @property
    def rank_config(self) -> ModelConfig | None:
        """`config` with the sizes of this rank's layers."""
        return self.config if self.parts is None else self.parts.local_config

    def shared_linear(self, name: str) -> SharedLinear | None:
        sharing = self.parts or self.context
        return None if sharing is None else sharing.shared_linear(name)

    @property
    def is_native(self) -> bool:
        return self.impl == "native"

    @property
    def vocab_size(self) -> int | None:
        size = self.source.config.get("vocab_size") if self.config is None else self.config.vocab_size
        return size if isinstance(size, int) else None

    @property
    def _place(self) -> Callable[[Decoder], None] | None:
        sharing = self.parts or self.context
        return None if sharing is None else sharing.place

    @cached_property
    def empty(self) -> Decoder | HfModel:
        model = empty_model(self.source, self.impl, self._place)
        limit = getattr(model, "max_positions", None)
        if limit is not None and self.seq_len > limit:
            raise UserError(
                f"--seq_len: {self.seq_len} tokens are more than the {limit} positions in the table of "
                f"{type(model.model).__name__}; give at most {limit}."
            )
        return model

    @property
    def _empty_decoder(self) -> Decoder:
        assert isinstance(self.empty, Decoder)
        return self.empty

    @property
    def rows(self) -> int:
        return self.seq_len // (1 if self.context is None else self.context.sequence_parts)

    def head(self, model: Decoder | HfModel) -> nn.Module | None:
        return model.lm_head

    def blocks(self, model: Decoder | HfModel) -> list[nn.Module]:
        return list(model.layers)

    def units(self, model: Decoder | HfModel) -> list[Unit]:
        return decoder_units(model) if isinstance(model, Decoder) else super().units(model)

    def build(self, checked: CheckedSettings) -> Decoder | HfModel:
        settings = checked.language
        model = build_model(
            self.source,
            impl=self.impl,
            device=checked.device,
            dtype=checked.dtype,
            pretrained=settings.pretrained,
            seed=settings.seed,
            place=self._place,
            lazy=True,
        )
        if isinstance(model, HfModel) and settings.doc_mask:
            model.check_documents()
        model.loss_chunks, model.z_loss = settings.loss_chunks, settings.z_loss
        if not isinstance(model, Decoder):
            return model
        if self.teacher is not None:
            model.distillation = self.teacher.build(checked)
        if "residuals" in checked.offload:
            model.residual_offload = ResidualOffload(len(model.layers))
        if self.config.moe is not None:
            weight = settings.router_balance_loss
            model.router_losses.balance = self.config.moe.aux_loss if weight is None else weight
            model.router_losses.z = settings.router_z_loss
        return model

    def recompute(self, model: Decoder | HfModel, settings: LanguageSettings) -> None:
        apply_recompute(model, recompute_kinds(settings), kept_8bit(settings))
        if settings.mlp_chunks and isinstance(model, Decoder):
            model.set_mlp_chunks(settings.mlp_chunks)

    def compile(self, model: Decoder | HfModel, checked: CheckedSettings) -> None:
        compile_layers(model)
        if not isinstance(model, Decoder):
            return
        if not checked.reshards:  # full sharding follows one tensor from layer to layer
            model.join_layers()
        if model.distillation is not None:
            compile_layers(model.distillation.teacher)
        elif checked.mesh.world == 1 and not checked.reshards:  # the head is whole, and here
            tokens = checked.geometry.micro_batch_size * checked.language.seq_len
            compile_ahead.trace(partial(model.trace_loss, tokens))

    def left_linears(self, scheme: Scheme) -> Mapping[str, str]:
        return linears_without_codes(self.declared, self._empty_decoder) if keeps_codes(scheme) else {}

    def _describe_codes(self, linears: Sequence[LinearChoice]) -> str:
        """The plan's line on a checkpoint in codes."""
        count = matrices_in_codes(self.declared, self._empty_decoder)
        kept = sum(linear.scheme is not None and linear.scheme.keeps_codes for linear in linears)
        what = (
            f"the frozen base of {kept:,} linears keeps them as they are"
            if kept
            else "training starts from their values, dequantized"
        )
        return f"weights {count:,} matrices of --model are codes ({self.declared.description}): {what}"

    def notes(self, linears: Sequence[LinearChoice]) -> list[str]:
        notes = [] if self.declared is None else [self._describe_codes(linears)]
        notes += [] if self.parts is None else self.parts.notes(linears)
        notes += [self.expert_rows] if self.expert_rows else []
        if self.is_native:
            notes += _split_mlps(linears)
        if self.teacher is not None:
            options = self.teacher.options
            notes.append(
                f"teacher {options.teacher}: {options.weight:g} of the loss is KL(teacher || student) at temperature "
                f"{options.temperature:g}"
            )
        if self.impl == "hf" and any(linear.scheme for linear in linears):
            notes += _stacked_parameters_stay(self.empty)
        positions = self.positions
        if positions is None or self.seq_len <= positions:
            return notes
        return [
            *notes,
            f"warning: --seq_len {self.seq_len} is more than the model's {positions} positions; the exported config "
            f"says max_position_embeddings {self.seq_len}",
        ]

    @property
    def linear_rows(self) -> Mapping[str, float] | None:
        if self.config is None or self.config.moe is None:
            return None
        head, linears_by_key = self.head(self.empty), layer_linears(self.config)
        # An expert computes the micro-batches of all data-parallel ranks of its group.
        micro_batches = 1 if self.parts is None else self.parts.expert_group.ranks // self.parts.tp
        shares = {key: n.share * (micro_batches if n.groups > 1 else 1) for key, n in linears_by_key.items()}
        return {
            names[0]: self.seq_len * (1.0 if linear is head else shares[linear_key(names[0])])
            for linear, names in find_linears(self.empty).items()
        }

    @property
    def positions(self) -> int | None:
        """The longest sequence that the model's config names; None where it names none."""
        if self.config is not None:
            return self.config.max_position_embeddings
        named = (self.source.config.get(key) for key in ("max_position_embeddings", "n_positions"))
        return next((positions for positions in named if isinstance(positions, int)), None)

    def plan(
        self, checked: CheckedSettings, linears: Sequence[LinearChoice], hardware: Hardware, trained: TrainedPart | None
    ) -> Plan:
        teacher = None if self.teacher is None else self.teacher.config
        return plan_language_run(checked, self.config, linears, hardware, trained, teacher)


def _check_routers(settings: LanguageSettings, config: ModelConfig | MaybeNone) -> None:
    """UserError for settings of routers that the model does not have."""
    given = {
        "--router_balance_loss": settings.router_balance_loss,
        "--router_z_loss": settings.router_z_loss,
        "--router_bias_rate": settings.router_bias_rate,
    }
    for flag, value in given.items():
        if value and not config.moe_layers:
            raise UserError(f"{flag}: {settings.model} is not a mixture of experts; leave it out.")
    if settings.router_bias_rate and not config.mixture.selection_bias:
        raise UserError(
            f"--router_bias_rate: the routers of {settings.model} select without a bias, which only DeepSeek-V3's "
            "have; use --router_balance_loss."
        )


def _split_mlps(linears: Sequence[LinearChoice]) -> list[str]:
    """The plan's line on MLPs that are not one function because one of their linears alone is in low bits; those of
    experts always are."""
    low_bit: dict[str, set[bool]] = {}
    for linear in linears:
        owner, _, own = linear.name.rpartition(".")
        if own in ("gate_up", "down_proj") and linear.groups == 1:
            low_bit.setdefault(owner, set()).add(linear.scheme is not None)
    split = sum(len(kinds) > 1 for kinds in low_bit.values())
    if not split:
        return []
    return [
        f"note    {split} of {len(low_bit)} MLPs have one linear in low bits and one in high precision: activations "
        "between them are quantized apart from SwiGLU"
    ]


def _stacked_parameters_stay(model: nn.Module) -> list[str]:
    """The plan's line on experts of transformers' models, which are no linears."""
    stacked = sum(p.numel() for p in model.parameters() if p.dim() > 2)
    if not stacked:
        return []
    share = stacked / sum(p.numel() for p in model.parameters())
    return [
        f"warning: {100 * share:.0f}% of the parameters have three dimensions, as experts do, and are not quantized: "
        "only linears of transformers' models are; --model_impl native quantizes experts"
    ]
