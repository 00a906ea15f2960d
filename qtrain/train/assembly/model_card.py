"""README.md of an export: how the model was trained, how well and where, its format, and how to load it."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from qtrain import __version__
from qtrain.models import ExportFormat, HeldCodes, ModelSource
from qtrain.train.log.metrics import read_metrics

SETTINGS = (
    "model", "pretrained", "dtype", "quantize", "quantize_kwargs", "quantize_lm_head", "lora", "optim", "optim_kwargs",
    "lr", "weight_decay", "lr_schedule_kwargs", "n_steps", "batch_size", "seq_len", "seed",
)  # fmt: skip
LOSSES = {
    "loss": "training loss",
    "eval_loss": "validation loss",
    "final_eval_loss": "loss over all validation data",
}
NAMED = "type", "dataset", "subset", "split"
"""Keys of --train_ds that a card tells; paths of files stay private."""


@dataclass(frozen=True)
class ModelCard:
    """What the cards of all formats share. settings: of the run, empty where there was none."""

    name: str
    source: ModelSource
    settings: Mapping[str, Any]
    records: Sequence[Mapping[str, Any]] = ()
    """Of metrics.jsonl."""
    hardware: str = ""
    lines: Sequence[str] = ()
    """The log's lines on whose weights these are."""

    @classmethod
    def from_run(cls, folder: Path, source: ModelSource, settings: Mapping[str, Any], **others: Any) -> "ModelCard":
        """The card of the run in `folder`."""
        return cls(folder.resolve().name, source, settings, read_metrics(folder / "metrics.jsonl"), **others)

    def text(self, fmt_name: str, fmt: ExportFormat, config: Mapping[str, Any] | None, held: HeldCodes | None) -> str:
        """config: the `quantization_config` of the export."""
        parts = [
            _front_matter(self.source, fmt_name),
            f"# {self.name}",
            f"Exported by qtrain {__version__} as `{fmt_name}`: {str(type(fmt).__doc__).strip().splitlines()[0]}.",
            self._training(),
            self._results(),
            _weights(config, held, self.lines),
            _usage(fmt_name),
        ]
        return "\n\n".join(part for part in parts if part) + "\n"

    def _training(self) -> str:
        if not self.settings:
            return f"The weights are those of `{self.source.name}`."
        rows = [(name, self.settings[name]) for name in SETTINGS if self.settings.get(name) not in (None, "auto")]
        data = {key: value for key, value in (self.settings.get("train_ds") or {}).items() if key in NAMED}
        rows += [("train_ds", data)] if data else []
        rows += [("hardware", self.hardware)] if self.hardware else []
        return _section(
            "Training", ("setting", "value"), ((n, v if n == "hardware" else json.dumps(v)) for n, v in rows)
        )

    def _results(self) -> str:
        found = {}
        for record in self.records:
            found |= {key: (record[key], record["step"]) for key in LOSSES if record.get(key) is not None}
        rows = ((LOSSES[key], f"{found[key][0]:.4f} (step {found[key][1]:,})") for key in LOSSES if key in found)
        return _section("Results", ("measure", "value"), rows) if found else ""


def device_name(device: torch.device, devices: int) -> str:
    """The hardware of a run, for its card."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    return f"{devices} x {name}"


def _front_matter(source: ModelSource, fmt_name: str) -> str:
    lines = ["library_name: transformers", "pipeline_tag: text-generation", "tags:", "- qtrain", f"- {fmt_name}"]
    if source.hub_id:
        lines.append(f"base_model: {source.hub_id}")
    return "\n".join(["---", *lines, "---"])


def _section(title: str, head: tuple[str, str], rows: Any) -> str:
    body = "\n".join(f"| {name} | {value} |" for name, value in rows)
    return f"## {title}\n\n| {head[0]} | {head[1]} |\n|---|---|\n{body}"


def _weights(config: Mapping[str, Any] | None, held: HeldCodes | None, whose: Sequence[str]) -> str:
    found = [held.describe()] if held else []
    found += [line.removeprefix("codes").strip() for line in whose if line.startswith("codes")]
    lines = [f"- {line}" for line in found]
    block = f"```json\n{json.dumps({'quantization_config': config}, indent=2)}\n```" if config else ""
    text = "\n\n".join(part for part in ("\n".join(lines), block) if part)
    return f"## Weights\n\n{text}" if text else ""


def _usage(fmt_name: str) -> str:
    if fmt_name.startswith("gguf"):
        return '## Use\n\n```\nllama-cli -m model.gguf -p "Hello"\n```'
    packages = {"ct": "compressed-tensors", "torchao": "torchao"}
    package = packages.get(fmt_name.partition("_")[0])
    needs = "" if package is None else f"pip install {package}\n"
    install = f"```\n{needs}```\n\n" if needs else ""
    lines = [
        "from transformers import AutoModelForCausalLM, AutoTokenizer",
        "",
        'model = AutoModelForCausalLM.from_pretrained("FOLDER_OR_ID")',
        'tokenizer = AutoTokenizer.from_pretrained("FOLDER_OR_ID")',
        'ids = tokenizer("Hello", return_tensors="pt").input_ids',
        "print(tokenizer.decode(model.generate(ids, max_new_tokens=32)[0]))",
    ]
    code = "\n".join(lines)
    vllm = "" if fmt_name.startswith(("bitnet", "torchao")) else "\n\n```\nvllm serve FOLDER_OR_ID\n```"
    return f"## Use\n\n{install}```python\n{code}\n```{vllm}"
