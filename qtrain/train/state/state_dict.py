"""The state of a run (progress, model, optimizer, random generators): named tensors, and as JSON what is no tensor."""

import math
import random
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Annotated, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import empty as empty_dtensor

from qtrain.comm.ranks import all_gather, rank
from qtrain.core.checks import Range, check_fields
from qtrain.core.errors import UserError
from qtrain.optim import Optimizer
from qtrain.optim.state_layout import StateShapes
from qtrain.parallel.sharding.shards import is_placeholder
from qtrain.tensors.stored_weight import StoredWeight

OTHER_VERSION = "--resume: the checkpoint's state is not one of this version; start from its hf/ export."
Count = Annotated[int, Range(0)]
_ADDED = {"best_step", "evals_since_best", "phase"}
"""Fields that checkpoints of earlier versions lack."""


@dataclass
class TrainState:
    """The progress of a run: one explicit object, saved with every checkpoint."""

    step: Count = 0
    """Finished optimizer steps."""
    tokens: Count = 0
    """Tokens (images) read so far, of all ranks."""
    data: dict[str, Any] | None = None
    """Position of the training stream after them."""
    best_eval_loss: float | None = None
    """The lowest so far."""
    best_step: Count | None = None
    """The step of that evaluation."""
    evals_since_best: Count = 0
    """Evaluations after it."""
    phase: Count = 0
    """Of --quantize_schedule, which linears run in."""
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex[:12])

    def as_meta(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_meta(cls, meta: dict[str, Any]) -> "TrainState":
        """The state saved in a checkpoint's meta. UserError if its fields are others."""
        if not {f.name for f in fields(cls)} <= {*meta, *_ADDED}:
            raise UserError(OTHER_VERSION)
        try:
            return cls(**check_fields(cls, meta, "--resume"))
        except (UserError, TypeError):
            raise UserError(OTHER_VERSION) from None


# ---- model and generators -------------------------------------------------------------------------------------------


class OtherTensors(UserError):
    """A whole checkpoint of other tensors than this run's: of a model or of settings that are not the saved ones."""


def clean_name(name: str) -> str:
    """A parameter's name without the wrappers of torch.compile and activation checkpointing."""
    return name.replace("_orig_mod.", "").replace("_checkpoint_wrapped_module.", "")


Master = Callable[[Tensor], Tensor]
"""What the optimizer updates in place of a parameter: a shard of it, where it is sharded."""


def itself(parameter: Tensor) -> Tensor:
    """The `Master` of parameters that are not sharded."""
    return parameter


def model_tensors(model: nn.Module, trains: bool | None = None, master: Master = itself) -> dict[str, Tensor]:
    """Parameters and persistent buffers by name: the tensors themselves, tied ones once; of sharded ones the masters.

    A weight stored in low bits gives its codes and scale, as `<name>.codes` and `<name>.scale`. trains: True: only what
    a step may change; False: only the frozen parameters; None: both.
    """
    found, seen = {}, set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert isinstance(tensor, Tensor), f"{name}: only tensors are saved, not {type(tensor).__name__}"
        frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
        if id(tensor) not in seen and trains in (None, not frozen):
            seen.add(id(tensor))
            tensor = master(tensor)
            if is_placeholder(tensor):
                continue
            if isinstance(tensor, StoredWeight):
                found |= {f"{clean_name(name)}.{part}": inner for part, inner in tensor.inner.items()}
            else:
                found[clean_name(name)] = tensor
    return found


def seed_rng(seed: int) -> None:
    """Seed every generator that `rng_state` saves; a transformers or timm model's dropout may draw from them."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


def rng_state() -> dict[str, dict[str, Tensor]]:
    """This rank's generators (python, numpy, torch CPU, the current CUDA device) as new tensors, under its rank."""
    _, python_key, python_gauss = random.getstate()
    _, numpy_key, numpy_position, has_gauss, numpy_gauss = np.random.get_state()
    state = {
        # The Mersenne Twister's 624 words and the position in them; the Gaussian drawn in advance, if there is one.
        "python": torch.tensor(python_key, dtype=torch.int64),  # [625]
        "python_gauss": torch.tensor([python_gauss is not None, python_gauss or 0.0], dtype=torch.float64),
        "numpy": torch.tensor([*map(int, numpy_key), numpy_position], dtype=torch.int64),  # [625]
        "numpy_gauss": torch.tensor([has_gauss, numpy_gauss], dtype=torch.float64),
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return {str(rank()): state}


def set_rng_state(state: Mapping[str, Mapping[str, Tensor]]) -> None:
    """Restore what `rng_state` returned."""
    own = state[str(rank())]
    has_gauss, gauss = own["python_gauss"].tolist()
    random.setstate((3, tuple(own["python"].tolist()), gauss if has_gauss else None))
    *key, position = own["numpy"].tolist()
    has_gauss, gauss = own["numpy_gauss"].tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), position, int(has_gauss), gauss))
    torch.set_rng_state(own["torch"])
    if "cuda" in own:
        torch.cuda.set_rng_state(own["cuda"])


# ---- the optimizer --------------------------------------------------------------------------------------------------


# How a step is computed, not what: the machine that resumes decides.
_HOW = ("params", "fused", "foreach", "capturable", "differentiable")


def optimizer_tensors(
    optimizer: Optimizer, model: nn.Module, master: Master = itself
) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """An optimizer's state by parameter name: ({parameter: {state: tensor}}, the rest as JSON).

    torch's own get/set_optimizer_state_dict are not exact: saving before the first step takes a step, and loading casts
    floating states to the parameter's dtype.
    """
    optimizer.synchronize()
    names = {id(master(p)): clean_name(name) for name, p in model.named_parameters()}
    tensors: dict[str, dict[str, Tensor]] = {}
    states: dict[str, dict[str, Any]] = {}
    groups = []
    for group in optimizer.param_groups:
        options = {k: v.item() if isinstance(v, Tensor) else v for k, v in group.items() if k not in _HOW}
        groups.append({"params": [names[id(p)] for p in group["params"]], "options": options})
        for parameter in group["params"]:
            # A placeholder stands for a parameter that another rank owns whole: it has no state here.
            name = names[id(parameter)]
            if is_placeholder(parameter):
                continue
            for key, value in optimizer.state.get(parameter, {}).items():
                described = states.setdefault(name, {})
                if not isinstance(value, Tensor):
                    described[key] = {"value": value}
                    continue
                assert value.ndim == 0 or isinstance(value, DTensor) == isinstance(parameter, DTensor), (
                    f"{name}.{key}: the state of a sharded parameter must be a DTensor, else ranks overwrite each other"
                )
                tensors.setdefault(name, {})[key] = value
                described[key] = {
                    "shape": list(value.shape),
                    "dtype": str(value.dtype).removeprefix("torch."),
                    # Step counts of torch's optimizers: on the GPU, reading one would synchronize.
                    "on_host": value.device.type == "cpu" and parameter.device.type != "cpu",
                }
    states = {name: state for rank_entries in all_gather(states) for name, state in rank_entries.items()}
    return tensors, {"class": type(optimizer).__name__, "groups": groups, "states": states}


def prepare_optimizer(
    optimizer: Optimizer, model: nn.Module, saved: Mapping[str, Any], master: Master = itself
) -> dict[str, dict[str, Tensor]]:
    """Allocate the states that `saved` (from `optimizer_tensors`) describes in a new optimizer. Returns the tensors.

    `Checkpoints.load` then fills them in place; `finish_optimizer` comes last. Group options come from `saved` too,
    `lr` and `weight_decay` among them; of another class, those that both have. Raises UserError when the optimizer
    holds other parameters than the saved one, or states that cannot be made this one's.
    """
    parameters = {clean_name(name): master(p) for name, p in model.named_parameters()}
    names = {id(p): name for name, p in parameters.items()}
    try:
        before = [group["params"] for group in saved["groups"]]
        now = [[names[id(p)] for p in group["params"]] for group in optimizer.param_groups]
        # States are filled by name, options by the position of their group: both must agree.
        if before != now:
            flat_before, flat_now = {n for g in before for n in g}, {n for g in now for n in g}
            in_one = sorted(flat_before ^ flat_now)
            why = f"{in_one[0]} is trained in only one of them" if in_one else "they are grouped differently"
            raise OtherTensors(
                f"--resume: the checkpoint's optimizer and this one differ: {why}. Use the run's settings."
            )
        # In place of what the optimizer made: states of the saved shapes and formats, which DCP then fills.
        optimizer.state.clear()
        tensors: dict[str, dict[str, Tensor]] = {}
        for group, saved_group in zip(optimizer.param_groups, saved["groups"], strict=True):
            for key, value in saved_group["options"].items():
                if key in group or saved.get("class", type(optimizer).__name__) == type(optimizer).__name__:
                    _restore_option(group, key, value)
            on_device = bool(group.get("fused") or group.get("capturable"))
            for name in saved_group["params"]:
                if is_placeholder(parameters[name]):
                    continue
                if saved["states"].get(name):
                    _check_saved(optimizer, name, parameters[name], _described(saved["states"][name]))
                for key, described in saved["states"].get(name, {}).items():
                    if "value" in described:
                        optimizer.state[parameters[name]][key] = described["value"]
                        continue
                    device = optimizer.state_device(key, parameters[name], described["on_host"])
                    state = _empty_state(described, parameters[name], device, on_device)
                    optimizer.state[parameters[name]][key] = state
                    tensors.setdefault(name, {})[key] = state
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise UserError(f"--resume: the checkpoint's optimizer entry cannot be read ({error!r}).") from None
    return tensors


def _check_saved(optimizer: Optimizer, name: str, parameter: Tensor, described: Any) -> None:
    try:
        optimizer.check_saved(name, parameter, described)
    except UserError as error:
        raise OtherTensors(str(error)) from None


def user_options(optimizer: Optimizer) -> list[dict[str, Any]]:
    """The options of each parameter group that the user can set, without the learning rate, which every step sets."""
    return [
        {name: list(v) if isinstance(v := group[name], tuple) else v for name in optimizer.defaults if name in group}
        | {"lr": None}
        for group in optimizer.param_groups
    ]


def finish_optimizer(optimizer: Optimizer, model: nn.Module, master: Master = itself) -> list[str]:
    """Check the loaded states and convert them to the optimizer's formats. Returns the conversions, for a message.

    UserError for states that no training leaves behind, such as NaN.
    """
    return optimizer.adopt_states({master(p): clean_name(name) for name, p in model.named_parameters()})


def _described(states: Mapping[str, Mapping[str, Any]]) -> StateShapes:
    """Shape and dtype of each of a parameter's states; no dtype for a plain number."""
    return {
        key: ((), None) if "value" in known else (tuple(known["shape"]), getattr(torch, known["dtype"]))
        for key, known in states.items()
    }


def _restore_option(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option of a group to its saved value, converted to the type of the current one."""
    current = group.get(key)
    if isinstance(current, Tensor):
        current.fill_(value)
    elif isinstance(current, tuple):
        group[key] = tuple(type(a)(b) for a, b in zip(current, value, strict=True))
    elif isinstance(current, float) and not (isinstance(value, int | float) and math.isfinite(value)):
        raise ValueError(f"{key} is {value!r}")
    else:
        group[key] = value


def _empty_state(
    described: Mapping[str, Any], parameter: Tensor, device: torch.device, scalars_on_device: bool
) -> Tensor:
    shape, dtype = torch.Size(described["shape"]), getattr(torch, described["dtype"])
    # A damaged description must not allocate without bounds.
    if shape.numel() > 8 * max(parameter.numel(), 1024) or not isinstance(dtype, torch.dtype):
        raise ValueError(f"a state of {described['dtype']} with shape {list(shape)}")
    if not shape:
        return torch.empty((), dtype=dtype, device=parameter.device if scalars_on_device else device)
    if shape == parameter.shape:
        return torch.empty_like(parameter, dtype=dtype, device=device, requires_grad=False)
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        return empty_dtensor(shape, dtype=dtype, device_mesh=mesh, placements=placements)
    return torch.empty(shape, dtype=dtype, device=device)
