"""What a run needs and no checkpoint holds: its training files, its frozen weights, and those of its teacher.

A position in the data means nothing in other files, and the same --model (and --seed, where weights are random) gives
the frozen weights again. A checkpoint holds fingerprints of all, so that a run is not resumed on other ones unnoticed.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from qtrain.core.checks import shown
from qtrain.core.checksums import sampled_checksums
from qtrain.core.errors import UserError
from qtrain.parallel.layers.place import ModelParallel
from qtrain.parallel.sharding.shards import as_bytes, as_shard
from qtrain.tensors.partition import Partition
from qtrain.train.state.state_dict import Master, clean_name, itself, model_tensors

# ---- training files -------------------------------------------------------------------------------------------------

MAX_FILES = 1 << 14
"""The files beyond these are not read."""


def files_entry(files: Sequence[Path]) -> dict[str, Any]:
    """The entry of a checkpoint's meta. UserError for a file that cannot be read."""
    try:
        checksums = sampled_checksums(files[:MAX_FILES])
    except OSError as error:
        raise UserError(f"--train_ds: cannot read {error.filename}: {error.strerror}.") from None
    return {"count": len(files), "checksums": checksums}


def check_files(saved: Any, files: Sequence[Path], here: Mapping[str, Any], checkpoint: Path) -> Iterator[str]:
    """Lines for the log, if files of text are not the `saved` ones, as they may be edited. UserError for token shards,
    which are written once: others of the same size are other data, and the run would go on somewhere in them.

    saved: the entry of `checkpoint`; here: that of `files`.
    """
    if not isinstance(saved, dict) or not saved.get("count") or not files:
        return
    before, now = saved.get("checksums"), here["checksums"]
    if not isinstance(before, list) or saved["count"] != here["count"] or len(before) != len(now):
        raise UserError(
            f"--train_ds: cannot resume: the run of {checkpoint} read {shown(saved['count'])} files, this one reads "
            f"{len(files)}. Use the data of the interrupted run."
        )
    changed = [file for file, old, new in zip(files, before, now, strict=False) if old != new]
    for file in changed:
        if file.suffix == ".bin":
            raise UserError(
                f"--train_ds: cannot resume: {file} is not the file that the run of {checkpoint} read: its contents "
                "differ. Use the data of the interrupted run; to train on these, start a new run from its export."
            )
    if changed:
        yield f"--resume: {len(changed)} of {len(files)} files of --train_ds have changed since, first {changed[0]}"


# ---- frozen weights -------------------------------------------------------------------------------------------------


def fingerprint(model: nn.Module, master: Master = itself) -> dict[str, str]:
    """Dtype, shape and checksum of every frozen parameter by name; of weights stored in low bits, of codes and scales.

    The checksum is the sum of the bits, read as integers: exact, independent of the order, bound by memory bandwidth.
    Where ranks have parts of the model, their sums are added and shapes are those of the whole; they all call it.
    master: what this rank has of a parameter.
    """
    frozen = model_tensors(model, trains=False, master=master)
    sums = [_sum_of_bits(tensor) for tensor in frozen.values()]
    parts, splits, groups = getattr(model, "parts", None), dict.fromkeys(frozen), dict.fromkeys(frozen)
    if isinstance(parts, ModelParallel):
        parameters = {clean_name(name) for name, _ in model.named_parameters()}
        named = {name: _parameter(name, parameters) for name in frozen}
        splits = {name: parts.partition(parameter) for name, parameter in named.items()}
        groups = {name: parts.group_of(parameter) if splits[name] else None for name, parameter in named.items()}
    for group in filter(None, dict.fromkeys(groups.values())):  # in the order of the names, the same on all ranks
        # A partitioned weight is the sum of its parts; one that all ranks hold counts once.
        every = group.all_gather_no_grad(torch.stack(sums)[None])
        sums = [every[:, i].sum() if groups[name] == group else sums[i] for i, name in enumerate(frozen)]
    totals = torch.stack([total.cpu() for total in sums]).tolist() if sums else []  # some may be in host memory
    return {
        name: f"{str(tensor.dtype).removeprefix('torch.')} {_shape(tensor, splits[name])} {total}"
        for (name, tensor), total in zip(frozen.items(), totals, strict=True)
    }


def _parameter(name: str, parameters: Set[str]) -> str:
    """The parameter that the entry `name` of `model_tensors` is of: of codes and scales the one that they store."""
    owner = name.rpartition(".")[0]
    return owner if owner in parameters else name


def _shape(tensor: Tensor, split: Partition | None) -> list[int]:
    return list(split.full_shape(tensor.shape) if split else tensor.shape)


def _sum_of_bits(tensor: Tensor) -> Tensor:
    # Four bytes at a time where that leaves no rest; int64 sums of int32 cannot overflow below 2^32 elements.
    flat = _bytes(tensor.detach()).flatten()
    wide = flat.numel() % 4 == 0
    return flat.view(torch.int32 if wide else torch.uint8).sum(dtype=torch.int64)


def _bytes(tensor: Tensor) -> Tensor:
    """All of a tensor's bytes; of one that is sharded by rows gathered, whatever its dtype."""
    if not isinstance(tensor, DTensor):
        return as_bytes(tensor)
    rows, width = tensor.to_local().contiguous(), tensor.shape[1:].numel() * tensor.element_size()
    own = rows.view(torch.uint8).view(len(rows), width)
    return as_shard(own, tensor.device_mesh, torch.Size((len(tensor), width))).full_tensor()


def check_frozen(saved: dict[str, str] | None, here: dict[str, str], path: Path, source: str) -> None:
    """UserError if the fingerprints `here`, of the frozen weights of --model `source`, are not the `saved` ones of the
    checkpoint `path` (None: it has none)."""
    if not isinstance(saved, dict):
        return
    for name in sorted(saved.keys() | here.keys()):
        if saved.get(name) != here.get(name):
            raise UserError(
                f"--resume: {path} was saved on other frozen weights than --model {source} gives: {name} differs. "
                "Resume with the --model, --seed and --dtype of the run that saved it."
            )


# ---- the teacher ----------------------------------------------------------------------------------------------------


def check_teacher(saved: Any, here: Mapping[str, str] | None, path: Path) -> Iterator[str]:
    """A line for the log, if the fingerprint `here` of the teacher's weights is not the `saved` one of the checkpoint
    `path` (None: a run without a teacher). Any teacher can go on; what the student learns from it changes."""
    if not isinstance(saved, dict) or here is None or saved == here:
        return
    name = min(name for name in saved.keys() | here.keys() if saved.get(name) != here.get(name))
    yield f"--resume: the teacher of --distill is not the one of {path}: {name} differs, the loss changes with it"
