"""The values of `--model`: a JSON file, a shipped shape (configs/models), a local folder, or a hub id."""

import dataclasses
from pathlib import Path
from typing import Any

from qtrain.core.checks import json_type, read_json, user_path
from qtrain.core.checksums import check_checksums
from qtrain.core.errors import UserError, unknown_name
from qtrain.core.hub import hub_file
from qtrain.models.config.model import ModelConfig
from qtrain.models.hf.readers.declared import DeclaredCodes, declared_codes

SHIPPED = Path(__file__).parents[2] / "configs" / "models"
FIX = "Give a local folder, a .json file, or a name that `--list` shows."


@dataclasses.dataclass(frozen=True)
class ModelSource:
    """The origin of a model. At most one of `folder` and `hub_id` is set; with neither there are no weights."""

    name: str
    """As given by the user."""
    config: dict[str, Any]
    """The Hugging Face config, without notes (keys that begin with an underscore)."""
    where: str
    """Flag and file, for error messages about the config."""
    folder: Path | None = None
    hub_id: str | None = None

    @property
    def has_weights(self) -> bool:
        """Whether it can have weights and a tokenizer."""
        return self.folder is not None or self.hub_id is not None

    def declared_codes(self) -> DeclaredCodes | None:
        """The matrices of its weights that are codes; None: they are in high precision. UserError for codes of a format
        that is not read."""
        return declared_codes(self.config, self.where)

    def model_config(self) -> ModelConfig:
        """The native architecture; UserError where it is not covered."""
        return ModelConfig.from_hf(self.config, self.where)


def holds_tensors(file: str) -> bool:
    """Whether a file of a model's folder is large: its checksum is compared when the weights are loaded."""
    return file.endswith(".safetensors")


def models_within(folder: Path) -> str:
    """A sentence that names one of the models in a folder, of `export --output` or of runs; empty if there is none."""
    found = (path.parent for depth in ("*", "*/hf") for path in sorted(folder.glob(f"{depth}/config.json")))
    models = [path for path in found if not (path / "metrics.jsonl").is_file()]  # config.json of a run is its recipe
    return f" It holds models: give one, such as {models[-1]}." if models else ""


def read_model_source(name: str, flag: str = "--model") -> ModelSource:
    """Find and read the config that `name` refers to. Raises UserError naming `flag`.

    A name without a slash is looked up among the shipped shapes first (ignoring case), then as a folder. A name with
    exactly one slash that is not a local path is a hub id.
    """
    path = user_path(name, flag)
    shipped = {p.stem: p for p in SHIPPED.glob("*.json")}
    if name.lower() in shipped:
        return _from_file(name, shipped[name.lower()], flag)
    if path.suffix == ".json":
        return _from_file(name, path, flag)
    if path.is_dir():
        if (path / "metrics.jsonl").is_file():
            export = path / "hf"
            fix = f"Give its export, {export}." if export.is_dir() else f"Write {export} with: python -m qtrain export"
            fix += "" if export.is_dir() else f" {name} --format hf"
            raise UserError(f"{flag}: {name} is the folder of a run. {fix}")
        if not (path / "config.json").is_file():
            raise UserError(f"{flag}: the folder {name} has no config.json.{models_within(path) or f' {FIX}'}")
        check_checksums(path, flag, lambda file: not holds_tensors(file))
        return _from_file(name, path / "config.json", flag, folder=path)
    if "/" not in name:
        raise unknown_name(flag, "model", name, shipped, "A hub id is written owner/name.")
    if name.startswith((".", "/", "~")) or name.count("/") != 1:
        raise UserError(f"{flag}: there is no folder {name}. {FIX}")
    return _from_file(name, hub_file(name, "config.json", flag, FIX), flag, hub_id=name)


def list_models() -> list[tuple[str, str]]:
    """(name, one-line description) of every shipped shape, sorted by name."""
    return [(p.stem, read_json(p, "--list")["_comment"]) for p in sorted(SHIPPED.glob("*.json"))]


def _from_file(name: str, path: Path, flag: str, folder: Path | None = None, hub_id: str | None = None) -> ModelSource:
    values = read_json(path, flag)
    shown = f"config.json of {hub_id}" if hub_id else path.name if path.parent == SHIPPED else path
    if not isinstance(values, dict):
        raise UserError(f"{flag} ({shown}): a model config is a JSON object, not {json_type(values)}.")
    config = {key: value for key, value in values.items() if not key.startswith("_")}
    return ModelSource(name, config, f"{flag} ({shown})", folder, hub_id)
