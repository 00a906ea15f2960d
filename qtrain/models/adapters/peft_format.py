"""Adapters in PEFT's format, saved for and loaded like `peft.PeftModel.from_pretrained`: adapter_config.json and
adapter_model.safetensors."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from qtrain.core.checks import check_fields, check_value, json_type, read_json, shown, user_path
from qtrain.core.checksums import check_checksums
from qtrain.core.errors import UserError
from qtrain.core.reading import refuse_other
from qtrain.models.adapters.lora import ALL, Lora, LoraLinear, lora_linears
from qtrain.models.hf.io import refuse_nonfinite
from qtrain.models.hf.writing import finish_export, writing_export
from qtrain.models.native.decoder import Decoder
from qtrain.models.native.lora_experts import EXPERT_TARGETS, LoraExperts
from qtrain.tensors.partition import Partition

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
_EXPERT_SUFFIXES = (".gate_proj", ".up_proj", ".down_proj")


class AdapterTensor(NamedTuple):
    """A parameter of the adapters; of experts a view of its elements in PEFT's order."""

    tensor: Tensor
    part: Partition | None = None
    """Which part this process has; None: all."""

    @property
    def saved_shape(self) -> tuple[int, ...]:
        """That of the whole in a file: B of experts is a matrix [N, r * E]."""
        shape = self.tensor.shape if self.part is None else self.part.full_shape(self.tensor.shape)
        return (shape[0], shape[1:].numel()) if len(shape) == 3 else tuple(shape)

    def own(self, saved: Tensor) -> Tensor:
        """What this process has of the tensor in a file."""
        if self.part is None:
            return saved.reshape(self.tensor.shape)
        return self.part.take(saved.reshape(self.part.full_shape(self.tensor.shape)))

    def whole(self, gather: Callable[[Tensor], Tensor]) -> Tensor:
        """The tensor of all processes, each of which calls it."""
        if self.part is None:
            return self.tensor
        return gather(self.tensor.movedim(self.part.dim, 0)).movedim(0, self.part.dim)


def adapter_tensors(model: nn.Module) -> dict[str, AdapterTensor]:
    """The adapters' parameters under PEFT's names."""
    found: dict[str, AdapterTensor] = {}
    linears = lora_linears(model)
    for linear in linears.values():
        if isinstance(linear, LoraExperts):
            continue
        for projection, a, b in zip(linear.adapted, linear.lora_a, linear.lora_b, strict=True):
            found[f"{PREFIX}{projection.hf_name}.lora_A.weight"] = AdapterTensor(a)
            found[f"{PREFIX}{projection.hf_name}.lora_B.weight"] = AdapterTensor(b)
        for projection, magnitude in zip(linear.adapted, linear.magnitude or (), strict=linear.magnitude is not None):
            found[f"{PREFIX}{projection.hf_name}.lora_magnitude_vector"] = AdapterTensor(magnitude)
    by_name = {m.hf_name: (own, m) for own, m in linears.items() if isinstance(m, LoraExperts)}
    for name, (own_name, linear) in by_name.items():
        owner, _, own = name.rpartition(".")
        # Of two wrappers of one module the inner one is that of gate_up_proj.
        inner = own == "gate_up_proj" and f"{owner}.down_proj" in by_name
        prefix = f"{PREFIX}{owner}.base_layer" if inner else f"{PREFIX}{owner}"
        assert isinstance(model, Decoder)
        part = model.partition(f"{own_name}.lora_a.weight")
        found[f"{prefix}.lora_A.weight"] = AdapterTensor(linear.lora_a.weight, part)
        by_expert = linear.lora_b.weight.unflatten(0, (linear.groups, -1))  # [E, N, r]
        # [N, r, E]: in PEFT's matrix [N, r * E] the columns of one expert are E apart.
        if part is not None:  # each expert has `rank` rows of A
            ranges = tuple((start // linear.rank, stop // linear.rank) for start, stop in part.ranges)
            part = Partition(2, part.full // linear.rank, ranges)
        found[f"{prefix}.lora_B.weight"] = AdapterTensor(by_expert.permute(1, 2, 0), part)
    return found


def save_adapter(
    model: nn.Module,
    lora: Lora,
    base: str,
    folder: Path | str,
    gather: Callable[[Tensor], Tensor] | None = None,
    *,
    writes: bool = True,
) -> None:
    """Write the adapters into `folder`. base: the model that they adapt, a hub id or a folder. gather: the rows of all
    processes that have some of the experts, each of which calls this; writes: whether this one does."""
    from safetensors.torch import save_file

    tensors = {
        name: (found.tensor if gather is None else found.whole(gather)).detach().to("cpu", copy=True)
        for name, found in adapter_tensors(model).items()
        if writes or found.part is not None
    }
    if not writes:
        return
    folder = Path(folder)
    names = [p.hf_name for m in lora_linears(model).values() if isinstance(m, LoraLinear) for p in m.adapted]
    experts = [name for name in EXPERT_TARGETS.values() if name in lora.names]
    # PEFT takes a module of a mixture named gate_proj, up_proj or down_proj for experts.
    mixture = isinstance(model, Decoder) and bool(model.config.moe_layers) and not lora.dora
    weights = [name for name in names if mixture and name.endswith(_EXPERT_SUFFIXES)]
    # Such as mlp.gate_proj.weight: PEFT matches the end of a parameter's name.
    parameters = sorted({".".join(name.split(".")[-2:]) + ".weight" for name in weights}) + experts
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.r,
        "lora_alpha": lora.alpha,
        "lora_dropout": 0.0 if parameters else lora.dropout,  # PEFT has none for parameters, and refuses to load it
        "target_modules": sorted({name.rpartition(".")[2] for name in set(names) - set(weights)}),
        **({"target_parameters": parameters} if parameters else {}),
        "use_rslora": lora.rslora,
        "use_dora": lora.dora,
        "bias": "none",
        "fan_in_fan_out": False,  # weights are [out, in]
        "init_lora_weights": True,
        "inference_mode": True,
    }
    shapes = {name: found.saved_shape for name, found in adapter_tensors(model).items()}
    tensors = {name: t.reshape(shapes[name]).contiguous() for name, t in tensors.items()}
    with writing_export(folder):
        folder.mkdir(parents=True, exist_ok=True)
        save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        finish_export(folder, [CONFIG, WEIGHTS])


def with_adapter_config(lora: Lora, flag: str = "--lora") -> Lora:
    """`lora` with r, alpha, targets, rslora and dora of the adapter that it continues, if it names one."""
    if lora.adapter is None:
        return lora
    where = f"{flag}.adapter"
    path = user_path(lora.adapter, where)
    if not (path / CONFIG).is_file():
        raise UserError(f"{where}: {lora.adapter} is no adapter: it has no {CONFIG}. Give a folder in PEFT's format.")
    check_checksums(path, where)
    config = read_json(path / CONFIG, where)
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        kind = repr(config.get("peft_type")) if isinstance(config, dict) else json_type(config)
        raise UserError(f"{where}: {path / CONFIG} describes {kind}, not a LoRA adapter.")
    unsupported = {"bias": "none", "rank_pattern": {}, "alpha_pattern": {}, "modules_to_save": None}
    for key, plain in unsupported.items():
        if config.get(key) not in (plain, None):
            raise UserError(f"{where}: its {key} is {config[key]!r}, which is not supported; only {plain!r} is.")
    targets = config.get("target_modules")
    parameters = check_value(f"{where}: target_parameters", config.get("target_parameters"), list[str] | None)
    parameters = _targets_of_parameters(parameters, where)
    if parameters and targets is None:
        targets = []
    if isinstance(targets, list) and all(isinstance(t, str) for t in targets):
        targets = tuple(sorted({*(target.rpartition(".")[2] for target in targets), *parameters}))
    elif targets != ALL:
        raise UserError(f"{where}: its target_modules are {targets!r}; only a list of projections' names is supported.")
    elif parameters:
        targets = (ALL, *parameters)
    fields = {f.name: f.type for f in dataclasses.fields(Lora)}
    return dataclasses.replace(
        lora,
        r=check_value(f"{where}: r", config.get("r"), fields["r"]),
        alpha=check_value(f"{where}: lora_alpha", config.get("lora_alpha"), fields["alpha"]),
        rslora=check_value(f"{where}: use_rslora", config.get("use_rslora", False), bool),
        dora=check_value(f"{where}: use_dora", config.get("use_dora", False), bool),
        targets=targets,
    )


def _targets_of_parameters(parameters: Any, where: str) -> list[str]:
    """The `targets` that PEFT's target_parameters name: experts, or weights of linears."""
    found = set()
    for name in parameters or ():
        owner, _, own = str(name).rpartition(".")
        target = owner.rpartition(".")[2] if own == "weight" else f"experts.{own}"
        if own != "weight" and target not in EXPERT_TARGETS.values():
            raise UserError(f"{where}: its target_parameters name {name!r}; only experts and weights are supported.")
        found.add(target)
    return sorted(found)


@torch.no_grad()
def load_adapter(model: nn.Module, folder: str, flag: str = "--lora", base: str | None = None) -> None:
    """Fill the adapters of `model` from a folder. UserError for adapters of another model; a printed line for those
    that name another one than `base` as theirs, which may be a copy of it."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    where = f"{flag}.adapter"
    path = user_path(folder, where) / WEIGHTS
    refuse_other(path, where)
    try:
        saved = load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where}: {path} cannot be read as safetensors: {error}") from None
    wanted = adapter_tensors(model)
    for name in [*sorted(saved.keys() - wanted.keys()), *sorted(wanted.keys() - saved.keys())]:
        what = "has no place in this model" if name in saved else "is missing"
        raise UserError(f"{where}: {folder} is an adapter of another model: {name} {what}.")
    for name, target in wanted.items():
        if saved[name].shape != target.saved_shape:
            shapes = f"{list(saved[name].shape)}, here it is {list(target.saved_shape)}"
            raise UserError(f"{where}: {folder} is an adapter of another model: {name} has the shape {shapes}.")
        if not saved[name].is_floating_point():
            kind = str(saved[name].dtype).removeprefix("torch.")
            raise UserError(f"{where}: {folder}: {name} is stored as {kind}; only floating-point weights load.")
        refuse_nonfinite(f"{where} ({folder})", name, saved[name])
        target.tensor.copy_(target.own(saved[name]))
    own = read_json(path.with_name(CONFIG), where).get("base_model_name_or_path")
    if base is not None and own and own != base:
        print(f"{where}: {folder} was trained on {shown(own)}; here it is added to --model {base}")


def as_lora(values: dict[str, Any], flag: str = "--lora") -> Lora:
    """The checked options of --lora, with those of the adapter that it names. UserError where the two contradict."""
    given = Lora(**check_fields(Lora, values, flag))
    lora = with_adapter_config(given, flag)
    for key in values:
        asked, saved = (sorted(v) if isinstance(v := getattr(of, key), tuple) else v for of in (given, lora))
        if asked != saved:
            raise UserError(
                f"{flag}.{key}: {asked!r} contradicts the adapter {lora.adapter}, which has {saved!r}. Leave it out to "
                "continue the adapter as it is, or leave out adapter to start a new one."
            )
    return lora
