"""The settings of a run on disk: config.json is what it trains with now; config.0.json, config.1.json, ... are what it
trained with before it was resumed with other settings, oldest first."""

import contextlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qtrain import __version__
from qtrain.core.checks import MAX_JSON
from qtrain.core.config import as_dict, source_digest, versions, write_config
from qtrain.core.reading import read_small
from qtrain.train.settings import TrainSettings

NOT_COMPARED = ("resume", "runs_dir", "dry_run", "gpus", "dp_replicate", "dp_shard")
"""Settings that say where and how a run is started, not what it is."""


_SHAPING = frozenset(
    {"model", "model_impl", "model_kwargs", "pretrained", "lora", "freeze_embedding_layer", "dtype", "optim"}
    | {"quantize", "quantize_kwargs", "quantize_lm_head", "quantize_min_size", "ema_decay", "optim_kwargs"}
)


def shapes(name: str) -> bool:
    """Whether the names, shapes or dtypes of a run's tensors depend on a setting, whose name is as `changed_settings`
    gives it."""
    return name.partition(".")[0] in _SHAPING


def result_versions() -> dict[str, str]:
    """Versions of what computes a run's results, this package's source among them."""
    others = {name: version for name, version in versions().items() if version and name not in ("git", "tyro", "wandb")}
    return {"qtrain": f"{__version__} (source {source_digest()})", **others}


def changed_versions(saved: Any, here: Mapping[str, str]) -> list[str]:
    """A line with the versions that differ from the `saved` ones of a checkpoint, old > new; none where it has none."""
    if not isinstance(saved, dict):
        return []
    changed = [name for name in {**here, **saved} if saved.get(name) != here.get(name)]
    each = ", ".join(f"{name} {saved.get(name, 'none')} > {here.get(name, 'none')}" for name in changed)
    return [f"--resume: it was saved with other versions: {each}"] if changed else []


def save_run_config(settings: TrainSettings, folder: Path, parent: Mapping[str, Any] | None = None) -> None:
    """Write config.json; one of other settings or versions becomes the next config.N.json.

    parent: {"run", "step"} that a new run continues; kept when the run itself is resumed."""
    path, former = folder / "config.json", _read(folder / "config.json")
    unfinished = folder / ".config.json.tmp"
    parent = parent or former.get("_parent")
    write_config(settings, unfinished, {"_command": sys.argv, **({"_parent": parent} if parent else {})})
    if former and _without_command(former) != _without_command(_read(unfinished)):
        numbers = (n for n in range(10**6) if not (folder / f"config.{n}.json").exists())
        os.rename(path, folder / f"config.{next(numbers)}.json")
    os.replace(unfinished, path)


def changed_settings(checkpoint: Path, settings: TrainSettings) -> dict[str, tuple[Any, Any]]:
    """(old, new) of every setting that differs from the config.json of the run that saved `checkpoint`, by name; the
    keys of JSON objects apart, as `optim_kwargs.betas`. Nothing where there is no config.json."""
    in_run = checkpoint.parent.name == "checkpoints"
    former = _flat(_read(checkpoint.parent.parent / "config.json")) if in_run else {}
    if not former:
        return {}
    current = _flat(json.loads(json.dumps(as_dict(settings))))
    return {
        name: (former.get(name), current.get(name))
        for name in {**former, **current}
        if former.get(name) != current.get(name)
        and name not in NOT_COMPARED
        and (name in former or "." in name)  # a setting that the saved run's version did not have
    }


def _flat(config: Mapping[str, Any]) -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if key.startswith("_"):
            continue
        flat |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
    return flat


def _without_command(config: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key != "_command"}


def _read(path: Path) -> dict[str, Any]:
    """A config; empty where there is none, or none that can be read."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        found = json.loads(read_small(path, MAX_JSON))
        return found if isinstance(found, dict) else {}
    return {}
