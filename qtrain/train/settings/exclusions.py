"""What excludes what: one table of options that contradict each other, or that have no effect with others.

A row that contradicts the rest of the command line is refused, before anything is allocated. One that only lacks
something here, such as the GPU that a recipe was written for, is answered by a line of the plan. The documentation has
the table. What depends on a model's numbers, such as whether --tp divides its heads, is checked where its config has
been read.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from qtrain.comm.ranks import launched_world
from qtrain.core.errors import UserError, unknown_name
from qtrain.models import ExportFormat, Lora, as_lora, read_formats
from qtrain.optim import OPTIMIZERS, LRSchedule, OptimizerSpec, make_schedule
from qtrain.optim.state_layout import HOST_NAMES
from qtrain.quant import SCHEMES, LowBitScheme, Scheme
from qtrain.quant.scheme_map import SchemeMap, with_overrides
from qtrain.quant.scheme_schedule import Phase, built_scheme, read_phases
from qtrain.quant.schemes.auto import Auto
from qtrain.quant.schemes.frozen_base import keeps_codes
from qtrain.quant.schemes.qat import Qat
from qtrain.quant.weight_codes import has_two_layouts
from qtrain.tensors.stored_weight import rows_divide
from qtrain.train.settings.machine import choose_dtype, planned_device, run_world
from qtrain.train.settings.recompute import kept_8bit, recompute_kinds
from qtrain.train.settings.settings import (
    OFFLOAD_NAMES,
    BatchGeometry,
    LanguageSettings,
    TrainSettings,
    batch_geometry,
)


@dataclass(frozen=True)
class Options:
    """The settings of a run, and what follows from them, each worked out when it is first asked. A property raises
    UserError where its flags cannot be used."""

    settings: TrainSettings
    script: str = ""
    base_scheme: Scheme | None = None
    """The scheme in place of --quantize's: that of a frozen base; a map has --quantize_overrides already."""

    @cached_property
    def device(self) -> torch.device:
        return planned_device(self.settings)

    @cached_property
    def dtype(self) -> torch.dtype:
        return choose_dtype(self.settings.dtype, self.device)

    @cached_property
    def geometry(self) -> BatchGeometry:
        return batch_geometry(self.settings, run_world(self.settings))

    @cached_property
    def scheme(self) -> Scheme:
        settings = self.settings
        if isinstance(self.base_scheme, SchemeMap):
            return self.base_scheme
        if self.phases and self.base_scheme is None:
            return built_scheme(self.phases, settings.quantize_overrides)
        default = self.base_scheme or SCHEMES.make(settings.quantize, settings.quantize_kwargs or {}, "--quantize")
        return with_overrides(settings.quantize_overrides, default)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """Of --quantize_schedule; none without."""
        given = self.settings.quantize_schedule
        return () if given is None else read_phases(given)

    @cached_property
    def optimizer(self) -> OptimizerSpec:
        return self._named_optimizer.with_offload(self.offload)

    @cached_property
    def _named_optimizer(self) -> OptimizerSpec:
        return OPTIMIZERS.make(self.settings.optim, self.settings.optim_kwargs or {}, "--optim")

    @cached_property
    def offload(self) -> frozenset[str]:
        """What is asked to be in host memory, by --offload or --optim_kwargs."""
        for name in self.settings.offload or ():
            if name not in OFFLOAD_NAMES:
                raise unknown_name("--offload", "name", name, OFFLOAD_NAMES)
        return self._named_optimizer.offloaded if self.settings.offload is None else frozenset(self.settings.offload)

    def offload_on(self, device: torch.device) -> frozenset[str]:
        """What is in host memory, and so not in the GPU's: nothing on a CPU."""
        return frozenset() if device.type == "cpu" else self.offload

    @cached_property
    def schedule(self) -> LRSchedule:
        return make_schedule(self.settings.lr_schedule_kwargs)

    @cached_property
    def lora(self) -> Lora | None:
        given = getattr(self.settings, "lora", None)
        return None if given is None else as_lora(given)

    @cached_property
    def low_bit_exports(self) -> dict[str, ExportFormat]:
        """The formats of --export_format that are not dense weights of a Hugging Face folder, by name."""
        given = self.get("export_format")
        if given is None or not self.settings.export:
            return {}
        return {name: fmt for name, fmt in read_formats(given, "--export_format").items() if name != "hf"}

    def has(self, name: str) -> bool:
        """Whether the script has the flag `name` and its value is not the default."""
        fields = {field.name: field for field in dataclasses.fields(self.settings)}
        return name in fields and getattr(self.settings, name) != fields[name].default

    def get(self, name: str) -> Any:
        """The value of the flag `name`; None where the script has no such flag."""
        return getattr(self.settings, name, None)

    def key(self, name: str, key: str) -> Any:
        """The value of a key in a flag's JSON object; None where it is not given."""
        return (self.get(name) or {}).get(key)


def phase_settings(settings: TrainSettings, phase: Phase) -> TrainSettings:
    """The settings with the scheme of a phase of --quantize_schedule as that of the whole run."""
    options = {"scheme": phase.spec} if isinstance(phase.spec, str) else dict(phase.spec)
    name = options.pop("scheme")
    return dataclasses.replace(settings, quantize_schedule=None, quantize=name, quantize_kwargs=options or None)


@dataclass(frozen=True)
class Exclusion:
    """A row of the table."""

    option: str
    """The flag, or a key of one, that the message names first: the one to change."""
    other: str
    """What it does not go with."""
    applies: Callable[[Options], object]
    """Whether the settings have both."""
    why: str
    """The reason, as the rest of the sentence that begins with the option; {flag} stands for the value of --flag."""
    fix: str | Callable[[Options], str] = ", or leave it out"
    """The end of the sentence, where it is refused."""
    refused: bool = True
    """False: the option has no effect, which the plan says in a line."""

    def message(self, options: Options) -> str:
        """The sentence, without a full stop; of a note without a fix."""
        fix = self.fix(options) if callable(self.fix) else self.fix
        text = f"{self.option}: {self.why}{fix if self.refused else ''}"
        return re.sub(r"\{([\w.]+)\}", lambda name: _value(options, name[1]), text)


def _value(options: Options, name: str) -> str:
    """A flag's value as a message has it, or with `lora.` an option's of --lora; of a list the first."""
    if name == "low_bit_export":
        return next(iter(options.low_bit_exports))
    value = getattr(options.lora, name[5:]) if name.startswith("lora.") else options.get(name)
    value = value[0] if isinstance(value, list) else value
    return f"{value:g}" if isinstance(value, float) else str(value)


# ---- predicates that several rows share -----------------------------------------------------------------------------


def _without(name: str, needed: str) -> Callable[[Options], bool]:
    return lambda o: o.has(name) and not getattr(o.settings, needed)


def _decayless(key: str) -> Callable[[Options], bool]:
    return lambda o: o.key("lr_schedule_kwargs", key) is not None and o.schedule.decay == 0


def _with(name: str, also: Callable[[Options], Any]) -> Callable[[Options], bool]:
    """name: tp, cp, ep, optimizer_in_backward: a flag whose default (1, False) stands for nothing."""
    return lambda o: getattr(o.settings, name) > 1 - (name == "optimizer_in_backward") and bool(also(o))


def _all_bf16(o: Options) -> bool:
    scheme = o.scheme.root
    plain = isinstance(scheme, LowBitScheme) and scheme.stored_format is None and not scheme.latent
    return plain and set(scheme.gemm_dtypes().values()) == {"bf16"}


def _stored(o: Options) -> bool:
    return any(isinstance(part, LowBitScheme) and part.stored_format is not None for part in o.scheme.parts())


def _qat(o: Options) -> list[Qat]:
    return [part for part in o.scheme.parts() if isinstance(part, Qat)]


def _arithmetics(o: Options) -> set[str]:
    """Of the GEMMs of all linears."""
    return {name for part in o.scheme.parts() if isinstance(part, LowBitScheme) for name in part.gemm_dtypes().values()}


def _quantizes_by_name(o: Options) -> bool:
    """Whether --quantize_overrides quantizes linears whose weights stay in high precision."""
    schemes = [scheme for _, scheme in o.scheme.rules] if isinstance(o.scheme, SchemeMap) else []
    return any(isinstance(scheme, LowBitScheme) and scheme.stored_format is None for scheme in schemes)


def _timm(o: Options) -> bool:
    return not isinstance(o.settings, LanguageSettings)


def _transformers(o: Options) -> bool:
    return isinstance(o.settings, LanguageSettings) and o.settings.model_impl != "native"


def _batches_differ(o: Options) -> bool:
    """Examples are padded, to a length of each micro-batch."""
    multiple = o.get("seq_len_multiple") or 0
    return multiple not in (0, o.get("seq_len"))


def _adapters(o: Options) -> bool:
    return o.get("lora") is not None


def _low_bit_base(o: Options) -> bool:
    """Whether --lora makes frozen low-bit codes of the weights."""
    return o.lora is not None and o.lora.low_bit_base is not None


def _keeps_8bit(*kinds: str) -> Callable[[Options], bool]:
    """Whether something is kept in 8 bits where one of these kinds is recomputed."""
    return lambda o: bool(kept_8bit(o.settings)) and bool(recompute_kinds(o.settings) & set(kinds))


def _streams(o: Options) -> bool:
    """Whether weights pass through the GPU with their gradients: of one process."""
    return "gradients" in o.offload and run_world(o.settings) == 1


def _offloads_states(o: Options) -> bool:
    return bool(set(o.settings.offload or ()) & set(HOST_NAMES))


def _one_micro_batch(o: Options) -> str:
    micro = o.geometry.micro_batch_size * o.geometry.gradient_accumulation
    return f"; give --gradient_accumulation 1 --micro_batch_size {micro}, or a smaller --batch_size"


def _allowed(works: Callable[[OptimizerSpec], bool]) -> Callable[[Options], str]:
    """The end of a sentence with the optimizers that work."""

    def allowed(_: Options) -> str:
        return "; allowed: " + ", ".join(n for n in OPTIMIZERS.names() if works(OPTIMIZERS.make(n, {}, "--optim")))

    return allowed


def _note(option: str, other: str, applies: Callable[[Options], object], why: str) -> Exclusion:
    """A row of an option that has no effect."""
    return Exclusion(option, other, applies, why, refused=False)


# ---- the table ------------------------------------------------------------------------------------------------------

KEPT, OTHER_BASE = "--lora on the codes of --model", '; give --lora "base":"dense", or nf4, int8 or fp8'
LEAVE, SHARD = "; leave it out", "; shard the run with --dp_shard or --dp_replicate instead"

# fmt: off
PLAN_EXCLUSIONS = (
    *(Exclusion(f"--{name}", "no --dry_run", lambda o, name=name: o.get(name) is not None and not o.settings.dry_run,
          "it plans for other machines than this run's", "; add --dry_run, or leave it out")
      for name in ("gpu", "world_size")),
    Exclusion("--gpu", "--device cpu", lambda o: o.settings.gpu is not None and o.settings.device == "cpu",
        "it names the GPU to plan for, and --device cpu none", "; leave one of them out"),
    *(Exclusion(f"--{name}", "no --world_size", lambda o, name=name: o.settings.world_size is None and o.has(name),
          "it needs --world_size, the number of GPUs to plan for", "; or leave it out")
      for name in ("gpus_per_node", "wire", "sol")),
    Exclusion("--world_size", "torchrun, --gpus",
        lambda o: o.settings.world_size is not None and (launched_world() > 1 or o.settings.gpu_count > 1),
        "one process plans for any world", "; start it without torchrun and --gpus"),
)
# fmt: on
"""Those of plans, checked first: the device of a plan is not that of a run."""

# fmt: off
RUN_EXCLUSIONS = (
    # ---- plans ----
    Exclusion("--gpu", "--quantize auto", lambda o: o.settings.gpu is not None and isinstance(o.scheme.root, Auto),
        "--quantize auto times the GPU that is here", "; name a scheme instead"),
    Exclusion("--world_size", "--reshard_after_forward always (timm)",
        lambda o: _timm(o) and o.settings.world_size is not None and o.settings.reshard_after_forward == "always",
        "fully sharded vision models are not planned", "; leave out --reshard_after_forward always"),
    # ---- memory ----
    Exclusion("--memory_limit", "a CPU", lambda o: o.has("memory_limit") and o.device.type == "cpu",
        "it limits a GPU's memory, and this run is on the CPU", "; leave it out, or plan for a GPU with --gpu"),
    Exclusion("--fit", "--quantize auto", lambda o: o.get("fit") == "auto" and isinstance(o.scheme.root, Auto),
        "--quantize auto times micro-batches of a size that --fit auto is still to choose", "; name a scheme"),
    Exclusion("--fit", "--model_impl hf", lambda o: o.get("fit") == "auto" and _transformers(o),
        "the plan does not know the memory of transformers' own models", "; use --model_impl native"),
    Exclusion("--optim_kwargs.offload", "--offload",
        lambda o: o.settings.offload is not None and o.key("optim_kwargs", "offload") is not None,
        "--offload says which states are in host memory", "; leave one of them out"),
    Exclusion("--offload", "--optim that keeps its states on the GPU",
        lambda o: _offloads_states(o) and not o.optimizer.host_names,
        "m, v and master are of elementwise optimizers, and --optim {optim} keeps its states on the GPU",
        _allowed(lambda spec: bool(spec.host_names))),
    Exclusion("--offload", "models of timm, --model_impl hf",
        lambda o: bool({"residuals", "weights", "gradients"} & o.offload) and (_timm(o) or _transformers(o)),
        "residuals, weights and gradients are those of qtrain's own decoder", "; take them out of the list"),
    Exclusion("--offload", "gradients with --lora", lambda o: "gradients" in o.offload and _adapters(o),
        "gradients of adapters are small and stay on the GPU", "; take gradients out of the list"),
    Exclusion("--offload", "weights of several processes",
        lambda o: "weights" in o.offload and run_world(o.settings) > 1,
        "weights of several processes are sharded among them",
        "; take weights out of the list, and give --reshard_after_forward always"),
    Exclusion("--offload", "gradients of several processes without --reshard_after_forward always",
        lambda o: "gradients" in o.offload and run_world(o.settings) > 1
        and o.settings.reshard_after_forward != "always",
        "gradients of several processes are in host memory where layers are sharded",
        "; give --reshard_after_forward always"),
    Exclusion("--offload", "weights without gradients",
        lambda o: "weights" in o.offload and not _adapters(o) and "gradients" not in o.offload,
        "weights that train are updated from gradients that are in host memory too", "; add gradients to the list"),
    Exclusion("--offload", "gradients of one process without weights",
        lambda o: "gradients" in o.offload and "weights" not in o.offload and run_world(o.settings) == 1,
        "gradients are added up in host memory for weights that are there too", "; add weights to the list"),
    Exclusion("--offload", "gradients of one process with --optim that keeps its states on the GPU",
        lambda o: _streams(o) and not o.optimizer.streams_weights,
        "--optim {optim} updates weights on the GPU only", _allowed(lambda spec: spec.streams_weights)),
    Exclusion("--offload", "gradients of one process with weights stored in low bits",
        lambda o: _streams(o) and _stored(o),
        "--quantize {quantize} stores weights in low bits, which stay on the GPU",
        "; take weights and gradients out of the list"),
    Exclusion("--optimizer_in_backward", "--offload gradients",
        lambda o: "gradients" in o.offload and o.has("optimizer_in_backward"),
        "it leaves no gradients that could be in host memory",
        "; leave it out, or take weights and gradients out of --offload"),
    Exclusion("--deterministic", "--offload gradients of one process", lambda o: _streams(o) and o.has("deterministic"),
        "it adds gradients in fp32 on the GPU", "; leave it out, or take weights and gradients out of --offload"),
    _note("--offload", "--optim without what it names",
        lambda o: bool(o.optimizer.host_names) and _offloads_states(o)
        and not set(o.settings.offload or ()) & set(HOST_NAMES) <= set(o.optimizer.host_names),
        "what --optim {optim} does not keep has no effect"),
    *(_note(option, "a CPU", lambda o, given=given: bool(given(o)) and o.device.type == "cpu",
          "has no effect on a CPU, whose memory is the host's")
      for option, given in (("--offload", lambda o: o.settings.offload),
                            ("--optim_kwargs.offload", lambda o: o.key("optim_kwargs", "offload")))),
    _note("--weight_codes", "--quantize without a second layout that follows from the first",
        lambda o: o.has("weight_codes") and not isinstance(o.scheme.root, Auto) and not has_two_layouts(o.scheme),
        "has no effect: no transposed codes of weights that follow from the others"),
    # ---- recomputation ----
    Exclusion("--recompute", "--activation_checkpointing",
        lambda o: o.has("recompute") and o.has("activation_checkpointing"),
        "--activation_checkpointing {activation_checkpointing} names another set of kinds", "; leave one out"),
    Exclusion("--recompute", "--model_impl hf", lambda o: o.has("recompute") and _transformers(o),
        "layers of transformers' own models recompute the sets of --activation_checkpointing only",
        "; use that, or --model_impl native"),
    Exclusion("--mlp_chunks", "--model_impl hf", lambda o: bool(o.get("mlp_chunks")) and _transformers(o),
        "only layers of qtrain's own decoder run in chunks", "; use --model_impl native, or leave it out"),
    Exclusion("--mlp_chunks", "no --recompute block",
        lambda o: bool(o.get("mlp_chunks")) and "block" not in recompute_kinds(o.settings),
        "{mlp_chunks}, but only layers that are recomputed as a whole run in chunks",
        "; add --recompute '[\"block\"]', or leave it out"),
    Exclusion("--mlp_chunks", "--tp", lambda o: bool(o.get("mlp_chunks")) and o.settings.tp > 1,
        "{mlp_chunks}, but the ranks of --tp {tp} exchange the tokens of whole layers", "; leave one of them out"),
    Exclusion("--keep_8bit", "--model_impl hf", lambda o: o.has("keep_8bit") and _transformers(o),
        "it keeps tensors of qtrain's own decoder", "; use --model_impl native, or leave it out"),
    Exclusion("--keep_8bit", "--recompute ffn or block", _keeps_8bit("ffn", "block"),
        "ffn, and block or --activation_checkpointing full, compute the output of gate_up again and keep nothing of it",
        "; leave one of them out"),
    Exclusion("--keep_8bit", "--recompute norm without --compile",
        lambda o: _keeps_8bit("norm")(o) and not o.settings.compile,
        "without a compiler norm would compute gate_up's product again too",
        "; add --compile, or leave norm (--activation_checkpointing selective) out"),
    Exclusion("--keep_8bit", "--lora with --recompute norm or swiglu",
        lambda o: _adapters(o) and _keeps_8bit("norm", "swiglu")(o),
        "with adapters norm and swiglu would compute gate_up's product again", "; leave one of them out"),
    # ---- distillation ----
    Exclusion("--distill", "--model_impl hf", lambda o: o.has("distill") and _transformers(o),
        "only qtrain's own decoder runs its head with a teacher's, in chunks of tokens",
        "; use --model_impl native, or leave it out"),
    Exclusion("--distill", "--tp", lambda o: o.has("distill") and o.settings.tp > 1,
        "the ranks of --tp {tp} have a part of the vocabulary each, and a teacher's distribution is over all of it",
        SHARD),
    Exclusion("--distill", "--ep", lambda o: o.has("distill") and o.settings.ep > 1,
        "every rank has the teacher in full, which --ep {ep} does not shard", "; leave one of them out"),
    Exclusion("--distill", "--cp", lambda o: o.has("distill") and o.settings.cp > 1,
        "every rank of --cp {cp} would run the teacher over whole sequences", "; leave one of them out"),
    # ---- adapters ----
    *(Exclusion(f"--{name}", "--lora dropout", lambda o, name=name: o.lora and o.lora.dropout and o.has(name),
          "recomputed layers would drop other values", "; set dropout to 0")
      for name in ("activation_checkpointing", "recompute")),
    Exclusion("--lora.dropout", "--lora dora", lambda o: o.lora and o.lora.dora and o.lora.dropout,
        "{lora.dropout} does not go with DoRA, which scales the whole sum", "; set 0"),
    Exclusion("--lora.targets", "--model_impl hf", lambda o: o.lora and o.lora.expert_targets and _transformers(o),
        "'{lora.expert_targets}' needs qtrain's own decoder", "; use --model_impl native, or take it out"),
    Exclusion("--lora.targets", "--lora dora", lambda o: o.lora and o.lora.expert_targets and o.lora.dora,
        "'{lora.expert_targets}' does not go with DoRA, which experts do not have", "; take it out, or set dora false"),
    Exclusion("--quantize", "--lora dora", lambda o: o.lora and o.lora.dora and o.settings.quantize != "bf16",
        "'{quantize}' does not go with DoRA, which needs the norms of the multiplied weights",
        '; leave it out, or give --lora a "base"'),
    Exclusion("--quantize_overrides", "--lora dora", lambda o: o.lora and o.lora.dora and _quantizes_by_name(o),
        "low-bit schemes do not go with DoRA, which needs the norms of the multiplied weights",
        "; take all but \"bf16\" and stored weights out"),
    Exclusion("--quantize", "--quantize_schedule",
        lambda o: o.settings.quantize_schedule is not None and o.has("quantize"),
        "'{quantize}' and --quantize_schedule both say which scheme linears run in", "; leave one of them out"),
    Exclusion("--quantize_kwargs", "--quantize_schedule",
        lambda o: o.settings.quantize_schedule is not None and o.has("quantize_kwargs"),
        "they are options of --quantize, and the entries of --quantize_schedule have their own",
        '; write them there, beside "scheme"'),
    Exclusion("--quantize_schedule", "--lora base",
        lambda o: o.has("quantize_schedule") and _low_bit_base(o),
        "the products of a base in low bits do not change", '; give --lora "base":"dense"'),
    Exclusion("--quantize_schedule", KEPT, lambda o: o.has("quantize_schedule") and keeps_codes(o.scheme),
        "the frozen base keeps the codes of --model, whose products do not change", f"{OTHER_BASE}, or leave it out"),
    Exclusion("--quantize_kwargs", "--lora base",
        lambda o: _low_bit_base(o) and o.settings.quantize_kwargs,
        "the products of a base in low bits have no options", LEAVE),
    *(Exclusion(f"--{name}", KEPT, lambda o, name=name: keeps_codes(o.scheme) and getattr(o.settings, name) > 1,
          "the frozen base keeps the codes of --model, which it does not shard", OTHER_BASE)
      for name in ("tp", "ep")),
    Exclusion("--quantize_kwargs", KEPT, lambda o: keeps_codes(o.scheme) and o.settings.quantize_kwargs,
        "the products of a base in the codes of --model have no options", f"{OTHER_BASE}, or leave it out"),
    Exclusion("--reshard_after_forward", KEPT,
        lambda o: keeps_codes(o.scheme) and not rows_divide(getattr(o.scheme.root, "stored_format", ""))
        and o.settings.reshard_after_forward == "always" and run_world(o.settings) > 1,
        "the frozen base keeps FP8 codes with a scale per 128x128, which are not split by rows",
        f"{OTHER_BASE}, or leave it out"),
    *(Exclusion("--lora.merge_format", f"--lora {name}",
          lambda o, key=key: o.lora and o.lora.merge_format and getattr(o.lora, key),
          f"'{{lora.merge_format}}' does not go with {what}", f"; leave {name} out")
      for key, name, what in (("dora", "dora", "DoRA, which scales the sum"),
                              ("dropout", "dropout", "dropout, which a merged weight does not have"),
                              ("expert_targets", "expert targets", "adapters of routed experts"))),
    Exclusion("--lora.merge_format", "--quantize_overrides",
        lambda o: o.lora and o.lora.merge_format and _quantizes_by_name(o),
        "'{lora.merge_format}' and --quantize_overrides both say which rounded weights are multiplied",
        "; leave one of them out"),
    Exclusion("--lora.merge_format", "--lora merge original",
        lambda o: o.lora and o.lora.merge_format and o.lora.merge == "original",
        "'{lora.merge_format}' rounds the trained weights, not those of --model", "; leave merge out"),
    Exclusion("--lora.merge_format", "--quantize",
        lambda o: o.lora and o.lora.merge_format and o.settings.quantize != "bf16",
        "'{lora.merge_format}' and --quantize {quantize} both say which rounded weights are multiplied",
        "; leave one of them out"),
    Exclusion("--lora", "--quantize qat", lambda o: _adapters(o) and _qat(o),
        "it freezes the weights that qat rounds and trains",
        '; leave qat out and give --lora a "merge_format", whose rounding adapters train through'),
    Exclusion("--lora.merge_format", "--model_impl hf",
        lambda o: o.lora and o.lora.merge_format and _transformers(o),
        "'{lora.merge_format}' needs qtrain's own decoder, as its export does", "; use --model_impl native"),
    *(Exclusion("--lora.merge_format", f"--{name}",
          lambda o, name=name: o.lora and o.lora.merge_format and getattr(o.settings, name) > 1,
          f"'{{lora.merge_format}}' rounds whole weights, which --{name} splits", "; leave one of them out")
      for name in ("tp", "ep")),
    Exclusion("--lora.merge_format", "--reshard_after_forward always",
        lambda o: o.lora and o.lora.merge_format and o.settings.reshard_after_forward == "always",
        "'{lora.merge_format}' rounds whole weights, which full sharding splits", "; leave one of them out"),
    _note("--lora.merge_format", "--export_format without it",
        lambda o: o.lora and o.lora.merge_format and o.lora.merge_format not in o.get("export_format"),
        "trains for an export in {lora.merge_format}, which --export_format does not name"),
    Exclusion("--lora.merge", "--no_pretrained",
        lambda o: o.lora and o.lora.merge == "original" and not o.settings.pretrained,
        "'original' adds adapters to the weights of --model", "; leave out --no_pretrained"),
    _note("--freeze_embedding_layer", "--lora", lambda o: o.has("freeze_embedding_layer") and _adapters(o),
        "has no effect with --lora, which freezes all weights"),
    Exclusion("--router_bias_rate", "--lora", lambda o: o.has("router_bias_rate") and _adapters(o),
        "routers are frozen with --lora; train all weights"),
    *(Exclusion(f"--{name}", "--model_impl hf", lambda o, name=name: bool(o.get(name)) and _transformers(o),
          "it has no effect on transformers' own models", "; use --model_impl native")
      for name in ("router_balance_loss", "router_z_loss", "router_bias_rate")),
    # ---- processes ----
    Exclusion("--gradient_wire, --deterministic", "each other",
        lambda o: o.has("gradient_wire") and o.settings.deterministic,
        "the one rounds what the other promises to add exactly", "; leave one out"),
    _note("--gradient_wire", "one process", lambda o: o.has("gradient_wire") and run_world(o.settings) == 1,
        "has no effect on one process"),
    _note("--reshard_after_forward", "one process",
        lambda o: o.settings.reshard_after_forward == "always" and run_world(o.settings) == 1,
        "has no effect on one process"),
    _note("--sequence_parallel", "no --tp", lambda o: o.has("sequence_parallel") and o.settings.tp == 1,
        "has no effect without --tp"),
    _note("--gradient_accumulation", "--deterministic",
        lambda o: o.settings.deterministic and o.has("gradient_accumulation") and not o.has("micro_batch_size"),
        "with it the micro-batch, and so the last bits of a --deterministic loss, depends on the number of "
        "processes; give --micro_batch_size instead"),
    # ---- checkpoints ----
    Exclusion("--max_hours", "--keep_ckpts 0", lambda o: o.has("max_hours") and not o.settings.keep_ckpts,
        "it saves where it stops, and --keep_ckpts 0 saves nothing", "; leave one of them out"),
    Exclusion("--keep_best", "--keep_ckpts 0", lambda o: o.has("keep_best") and not o.settings.keep_ckpts,
        "it saves checkpoints, and --keep_ckpts 0 saves none", "; leave one of them out"),
    *(Exclusion("--on_spike", f"{other} 0",
          lambda o, name=name: o.get("on_spike") == "rewind" and not getattr(o.settings, name),
          f"rewind returns to checkpoints, and {other} 0 saves none before the end", "; give another, or skip or stop")
      for name, other in (("keep_ckpts", "--keep_ckpts"), ("ckpt_interval", "--ckpt_interval"))),
    Exclusion("--on_spike", "--optimizer_in_backward",
        lambda o: o.get("on_spike") == "skip" and o.settings.optimizer_in_backward,
        "skip drops gradients before the update, and --optimizer_in_backward has updated the weights by then",
        "; give rewind or stop"),
    _note("--spike_threshold", "no --on_spike", lambda o: o.has("spike_threshold") and o.settings.on_spike == "off",
        "has no effect without --on_spike"),
    # ---- evaluation, samples, data ----
    *(Exclusion(f"--{name}", "no --eval_ds", _without(name, "eval_ds"), "it compares losses on --eval_ds; give that")
      for name in ("keep_best", "early_stopping")),
    Exclusion("--hellaswag_file", "no --hellaswag", _without("hellaswag_file", "hellaswag"), "needs --hellaswag"),
    Exclusion("--hellaswag_limit", "no --hellaswag", _without("hellaswag_limit", "hellaswag"), "needs --hellaswag"),
    Exclusion("--eval_images", "no --eval_ds", _without("eval_images", "eval_ds"), "needs --eval_ds"),
    _note("--eval_sequences", "no --eval_ds", _without("eval_sequences", "eval_ds"), "has no effect without --eval_ds"),
    Exclusion("--final_eval all", "no --eval_ds",
        lambda o: o.get("final_eval") == "all" and o.settings.eval_ds is None,
        "there is nothing to evaluate on", "; give --eval_ds, or leave it out"),
    _note("--sample_tokens", "no --sample_prompts", _without("sample_tokens", "sample_prompts"),
        "has no effect without prompts"),
    _note("--answer_tokens", "no --accuracy", _without("answer_tokens", "accuracy"),
        "has no effect without --accuracy"),
    Exclusion("--lm_eval", "--no_export", lambda o: o.get("lm_eval") is not None and not o.settings.export,
        "it evaluates the exported model", "; leave out --no_export, or --lm_eval"),
    Exclusion("--lm_eval", "--export_format without hf",
        lambda o: o.get("lm_eval") is not None and "hf" not in o.get("export_format"),
        "it evaluates the dense export", "; add hf to --export_format, or leave --lm_eval out"),
    Exclusion("--push_to_hub", "--no_export", lambda o: o.get("push_to_hub") is not None and not o.settings.export,
        "it uploads the export", "; leave out --no_export, or --push_to_hub"),
    _note("--export_format", "--no_export", lambda o: o.has("export_format") and not o.settings.export,
        "has no effect with --no_export"),
    Exclusion("--export_format", "--model_impl hf", lambda o: bool(o.low_bit_exports) and _transformers(o),
        "'{low_bit_export}' needs qtrain's own decoder", "; use --model_impl native, or hf alone"),
    Exclusion("--export_format", "--lora merge original",
        lambda o: bool(o.low_bit_exports) and o.lora and o.lora.merge == "original",
        "'{low_bit_export}' holds codes of the trained weights, not of those of --model", "; use hf alone"),
    *(Exclusion("--export_format", f"--{name}",
          lambda o, name=name: bool(o.low_bit_exports) and getattr(o.settings, name) > 1,
          f"'{{low_bit_export}}' needs linears that one process holds in full, and --{name} shards them",
          "; use hf alone, and then python -m qtrain export RUN --format {low_bit_export}")
      for name in ("tp", "ep")),
    Exclusion("--augment.mixup_prob", "neither mixup nor cutmix",
        lambda o: o.key("augment", "mixup_prob") is not None
        and not (o.key("augment", "mixup") or o.key("augment", "cutmix")),
        'needs "mixup" or "cutmix"'),
    # ---- schedule, quantization, optimizer ----
    *(Exclusion(f"--lr_schedule_kwargs.{key}", '"decay":0', _decayless(key), 'needs a "decay" above 0')
      for key in ("decay_type", "final")),
    Exclusion("--quantize", "bf16 for all GEMMs", _all_bf16,
        "all three GEMMs are in bf16, so nothing is quantized; use --quantize bf16"),
    _note("--quantize_kwargs.fast_accum", "a CPU",
        lambda o: o.device.type == "cpu" and o.key("quantize_kwargs", "fast_accum") not in (None, False, []),
        "has no effect on a CPU, which accumulates in fp32"),
    Exclusion("--optim", "--quantize that stores weights",
        lambda o: "." in o.settings.optim and _stored(o) and not _adapters(o),
        "other libraries' optimizers cannot update weights that --quantize stores in low bits; use qtrain's, as adamw"),
    _note("--quantize_lm_head", "--quantize bf16",
        lambda o: o.settings.quantize_lm_head and o.settings.quantize == "bf16" and not _low_bit_base(o),
        "has no effect with --quantize bf16"),
    _note("--optim_kwargs.master", "fp32 weights",
        lambda o: o.key("optim_kwargs", "master") == "fp32" and o.dtype == torch.float32,
        "has no effect on fp32 weights"),
    _note("--optim_kwargs.sr", "fp32 weights",
        lambda o: o.key("optim_kwargs", "sr") is True and o.dtype == torch.float32,
        "has no effect on fp32 weights; it rounds bf16 ones and bf16 states"),
    _note("--lr_schedule_kwargs.decay", "--optim adamw_schedule_free",
        lambda o: o.settings.optim == "adamw_schedule_free" and o.schedule.decay > 0,
        'adamw_schedule_free averages instead of decaying; {"decay":0} is usual'),
    # ---- health ----
    Exclusion("--health_fallback", "--health 0", lambda o: o.has("health_fallback") and o.settings.health == 0,
        "{health_fallback} samples in a row decide, and --health 0 takes none", "; give --health a number of steps"),
    # ---- the optimizer in the backward pass ----
    Exclusion("--optimizer_in_backward", "--deterministic",
        _with("optimizer_in_backward", lambda o: o.settings.deterministic),
        "with --deterministic weights change only after all gradients are summed", "; leave it out"),
    Exclusion("--optimizer_in_backward", "--gradient_accumulation",
        _with("optimizer_in_backward", lambda o: o.geometry.gradient_accumulation > 1),
        "a micro-batch's gradients are freed before the next one's could be added", _one_micro_batch),
    Exclusion("--optimizer_in_backward", "--clip_grad_norm",
        _with("optimizer_in_backward", lambda o: o.settings.clip_grad_norm),
        "weights change before the norm of all gradients is known, so it cannot be clipped to {clip_grad_norm}",
        "; give --clip_grad_norm 0"),
    Exclusion("--optimizer_in_backward", "--optim that updates all parameters at once",
        _with("optimizer_in_backward", lambda o: o.optimizer.refuses_partitions()),
        "it updates a part of the model at a time",
        lambda o: f"; {str(o.optimizer.refuses_partitions()).removesuffix('.')}"),
    # ---- tensor parallelism ----
    Exclusion("--tp", "models of timm", _with("tp", _timm),
        "{tp}, but models of timm have no tensor parallelism", SHARD),
    Exclusion("--tp", "--model_impl hf", _with("tp", _transformers),
        "{tp}, but only qtrain's own decoder has tensor parallelism",
        f"; use --model_impl native, or {SHARD.removeprefix('; ')}"),
    Exclusion("--tp", "--lora", _with("tp", _adapters),
        "{tp}, but adapters (--lora) have no tensor parallelism", SHARD),
    Exclusion("--tp", "--quantize auto --quantize_lm_head",
        _with("tp", lambda o: o.settings.quantize == "auto" and o.settings.quantize_lm_head),
        "{tp}, but --quantize auto times one rank's part of the head (--quantize_lm_head), and others may have fewer "
        "rows", "; name the scheme, or leave out --quantize_lm_head"),
    Exclusion("--tp", "--quantize qat with a scale per row or tensor",
        _with("tp", lambda o: any(not qat.has_groups for qat in _qat(o))),
        "{tp}, but each rank would scale its columns of a row by themselves, and an export has one scale for all",
        f'; give qat the "weight" int4_g32 or int4_g128, or {SHARD.removeprefix("; ")}'),
    Exclusion("--tp", "--optimizer_in_backward", _with("tp", lambda o: o.settings.optimizer_in_backward),
        "{tp}, but --optimizer_in_backward updates a layer before the gradients of its norms are summed over its "
        "ranks", "; leave one of them out"),
    Exclusion("--tp", "--optim of whole matrices", _with("tp", lambda o: o.optimizer.needs_whole(hidden=True)),
        "{tp}, but --optim {optim} works on whole matrices, and each rank has a part",
        _allowed(lambda spec: not spec.needs_whole(hidden=True))),
    # ---- context parallelism ----
    Exclusion("--cp", "models of timm", _with("cp", _timm), "{cp}, but images are no sequences to share", LEAVE),
    Exclusion("--cp", "--model_impl hf", _with("cp", _transformers),
        "{cp}, but only qtrain's own decoder has context parallelism", "; use --model_impl native, or leave it out"),
    *(Exclusion("--cp", f"--{name}", _with("cp", lambda o, name=name: getattr(o.settings, name) > 1),
          f"{{cp}}, but ranks of --{name} {{{name}}} {what}", "; leave one of them out")
      for name, what in (("tp", "split the tokens between the layers' parts already"),
                         ("ep", "compute experts for whole sequences of their own"))),
    Exclusion("--cp", "--seq_len_multiple that it does not divide",
        _with("cp", lambda o: (o.get("seq_len_multiple") or 0) % o.settings.cp),
        "{cp} does not divide the lengths of sequences, multiples of --seq_len_multiple {seq_len_multiple}",
        "; give a multiple of it, or 0, which packs examples"),
    # ---- expert parallelism ----
    Exclusion("--ep", "models of timm", _with("ep", _timm), "{ep}, but models of timm have no experts", LEAVE),
    Exclusion("--ep", "--model_impl hf", _with("ep", _transformers),
        "{ep}, but only qtrain's own decoder has expert parallelism", "; use --model_impl native, or leave it out"),
    Exclusion("--ep", "--deterministic --lora of experts",
        _with("ep", lambda o: o.settings.deterministic and o.lora and o.lora.expert_targets),
        "{ep}, but ranks add the gradients of experts' adapters (--lora.targets) for the tokens of all at once, in no "
        "order of micro-batches", "; leave --deterministic or --ep out"),
    Exclusion("--ep", "--lora that merges elsewhere",
        _with("ep", lambda o: o.lora and (o.lora.merge != "trained" or o.lora.merge_format)),
        "{ep}, but then adapters are merged with the weights that they train on",
        '; leave "merge" and "merge_format" out'),
    Exclusion("--ep", "--seq_len_multiple", _with("ep", _batches_differ),
        "{ep}, but ranks that compute experts together need micro-batches of one shape, and with --seq_len_multiple "
        "{seq_len_multiple} they differ in length", "; give 0, which packs examples, or --seq_len"),
    Exclusion("--ep", "--optimizer_in_backward", _with("ep", lambda o: o.settings.optimizer_in_backward),
        "{ep}, but --optimizer_in_backward does not know experts that only some ranks hold", "; leave one of them out"),
    Exclusion("--ep", "--deterministic --quantize nvfp4",
        _with("ep", lambda o: o.settings.deterministic and "nvfp4" in _arithmetics(o)),
        "{ep}, but with --deterministic nvfp4 needs a scale of the tokens of all experts, which no rank has",
        "; leave one of them out"),
    Exclusion("--ep", "--quantize qat in nvfp4", _with("ep", lambda o: any(qat.weight == "nvfp4" for qat in _qat(o))),
        "{ep}, but each rank would scale its experts by themselves, and an export has one scale for all",
        '; give qat another "weight", or leave --ep out'),
    Exclusion("--ep", "--optim of whole matrices", _with("ep", lambda o: not o.optimizer.takes_parts(hidden=True)),
        "{ep}, but --optim {optim} works on the matrices of all experts at once, and each rank has a part",
        _allowed(lambda spec: spec.takes_parts(hidden=True))),
)
# fmt: on

EXCLUSIONS = PLAN_EXCLUSIONS + RUN_EXCLUSIONS


def check_exclusions(
    options: Options, rows: Iterable[Exclusion] = RUN_EXCLUSIONS, option: str | None = None
) -> tuple[str, ...]:
    """Lines for the plan: given options that have no effect. UserError for one that contradicts the others.

    option: only the rows of this flag."""
    found = [row for row in rows if option in (None, row.option) and row.applies(options)]
    for row in found:
        if row.refused:
            raise UserError(f"{row.message(options)}.")
    return tuple(f"note    {row.message(options)}" for row in found)
