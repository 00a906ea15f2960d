"""Adapters merged into the source's own weights instead of the base in low bits that they were trained on.

The merged weights are those of `PeftModel.from_pretrained(source, adapter).merge_and_unload()`. They are not what was
trained and evaluated: that saw the rounding of the base.
"""

import json
import shutil
from pathlib import Path

import torch
from torch import nn

from qtrain.models.adapters.lora import LoraLinear, lora_linears
from qtrain.models.hf.io import INDEX, files_of_tensors, opened_tensors, refuse_tensors, weights_folder
from qtrain.models.hf.source import ModelSource
from qtrain.models.native.lora_experts import LoraExperts


class AdaptedOriginal:
    """The source's files with the adapters of `model` added, which `export_hf` writes as it writes a model.

    Raises UserError where the source has no safetensors, or other tensors than those adapted.
    """

    def __init__(self, model: nn.Module, source: ModelSource):
        self.model, self.source, self._where = model, source, f"--lora.merge ({source.name})"
        self._folder = weights_folder(source)
        self._files = files_of_tensors(self._folder, self._where)
        refuse_tensors(self._where, "lacks the tensors", self._adapters().keys() - self._files.keys())

    def _adapters(self) -> dict[str, tuple[LoraLinear | LoraExperts, int]]:
        """Name of a tensor of the source -> what adapts it: a linear's projection."""
        linears = lora_linears(self.model).values()
        return {f"{p.hf_name}.weight": (linear, i) for linear in linears for i, p in enumerate(linear.adapted)}

    def save_pretrained(self, folder: Path, max_shard_size: int) -> None:
        """Write config.json and the source's files under their names, one in memory at a time: each adapted weight is
        summed in fp32 and rounded once to its dtype there. max_shard_size: not applied."""
        from safetensors.torch import save_file

        adapters = self._adapters()
        for file in sorted(set(self._files.values())):
            with opened_tensors(file, self._where) as opened:
                tensors = {name: opened.get_tensor(name) for name, holder in self._files.items() if holder == file}
            for name in tensors.keys() & adapters.keys():
                (linear, index), rows = adapters[name], tensors[name]
                adapted = linear.add_adapter(index, rows.to(linear.weight.device, torch.float32))
                tensors[name] = adapted.to(rows)  # the dtype and device of the source's tensor
            save_file(tensors, folder / file.name, metadata={"format": "pt"})
        if (self._folder / INDEX).is_file():
            shutil.copyfile(self._folder / INDEX, folder / INDEX)
        (folder / "config.json").write_text(json.dumps(self.source.config), encoding="utf-8")
