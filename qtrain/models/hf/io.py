"""Hugging Face checkpoints: safetensors in, safetensors out, under the names that transformers uses.

Loading and exporting follow `hf_layout.py`, one tensor or one file at a time, so host memory stays small. Exported
weights are dense and in the model's dtype, whatever the scheme of the training.
"""

import contextlib
import functools
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qtrain.core.checks import check_value, read_json, shown
from qtrain.core.checksums import NAME as CHECKSUMS
from qtrain.core.checksums import check_checksums
from qtrain.core.errors import UserError
from qtrain.core.hub import reaching_hub
from qtrain.models.config.hf_layout import layout
from qtrain.models.hf.source import FIX, ModelSource, holds_tensors
from qtrain.models.hf.tensor_files import INDEX, dump_json, write_tensors
from qtrain.models.hf.writing import finish_export, writing_export
from qtrain.models.native.decoder import Decoder
from qtrain.quant.export import exported_tensors

MAX_SHARD_BYTES = 5_000_000_000
_WEIGHTS = "model.safetensors"
GENERATION, CARD = "generation_config.json", "README.md"
"""Files that users edit: they have no checksum."""
_WEIGHT_FILES = ["model*.safetensors", INDEX, "config.json", GENERATION]


WriteWeights = Callable[[Decoder, Path], dict[str, Any]]
"""Writes a model's tensors into a folder and returns what config.json says of them."""


class ExportableTokenizer(Protocol):
    """The interface of a tokenizer that export needs."""

    bos_id: int | None
    eos_id: int | None

    def save_hf(self, folder: Path) -> None: ...


def weights_folder(source: ModelSource) -> Path:
    """The local folder of a source's safetensors, downloaded for a hub id. UserError for an exported folder whose
    weights are not those that were exported."""
    if source.hub_id is None:
        assert source.folder is not None, "a source without weights"
        check_checksums(source.folder, f"--pretrained ({source.name})", holds_tensors)
        return source.folder
    from huggingface_hub import snapshot_download

    with reaching_hub("--model", f"the checkpoint of {source.hub_id!r}", FIX):
        return Path(snapshot_download(source.hub_id, allow_patterns=_WEIGHT_FILES))


def export_hf(
    model: nn.Module,
    source: ModelSource,
    folder: Path | str,
    tokenizer: ExportableTokenizer | None = None,
    *,
    trained_positions: int = 0,
    write_weights: WriteWeights | None = None,
    card: Callable[[], str] | None = None,
) -> None:
    """Write what `AutoModelForCausalLM` (and, with a tokenizer, `AutoTokenizer`) loads from `folder`.

    Weights keep their dtype; low-bit ones are dequantized. Everything is written to a temporary folder, which then
    replaces `folder`. trained_positions: tokens of the sequences that the model was trained on; the config names no
    fewer positions. write_weights: of a native decoder, in place of the dense weights. card: the text of README.md,
    asked for when the weights are written.
    """
    with replacing(Path(folder)) as temporary, writing_export(folder):
        if write_weights is None and (save := getattr(model, "save_pretrained", None)) is not None:
            save(temporary, max_shard_size=MAX_SHARD_BYTES)
            config = read_json(temporary / "config.json", "export")
        else:
            assert isinstance(model, Decoder)
            entries = (write_weights or _write_dense)(model, temporary)
            dense = {key: value for key, value in source.config.items() if key != "quantization_config"}
            config = {**dense, **model.config.to_hf(), **entries}
            config.pop("dtype", None)  # transformers 5 reads torch_dtype too, and the two must not disagree
        if isinstance(positions := config.get("max_position_embeddings"), int):
            config["max_position_embeddings"] = max(positions, trained_positions)
        generation = generation_config(source, config)
        if tokenizer is not None:
            _adopt_special_ids(config, tokenizer)
            _adopt_special_ids(generation, tokenizer)
            tokenizer.save_hf(temporary)
        dump_json(temporary / "config.json", config)
        dump_json(temporary / GENERATION, generation)
        if card is not None:
            (temporary / CARD).write_text(card(), encoding="utf-8")
        unchecked = (GENERATION, CARD, CHECKSUMS)
        finish_export(temporary, (p.name for p in temporary.iterdir() if p.name not in unchecked))


def _write_dense(model: Decoder, folder: Path) -> dict[str, Any]:
    """Write the checkpoint's tensors in the model's dtype. Returns what config.json says of them."""
    parameters = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
    values, dtype = exported_tensors(model), parameters["embed_tokens.weight"].dtype
    slices = {entry.hf_name: entry for entry in layout(model.config)}
    # Consecutive tensors are often rows of one parameter, which may take long to dequantize.
    whole = functools.lru_cache(maxsize=1)(lambda name: values[name]())

    def on(device: str, hf_name: str) -> Tensor:
        entry = slices[hf_name]
        if entry.name is None:
            return torch.zeros(entry.stop, dtype=dtype, device=device)
        if device == "meta":
            like = parameters[entry.name]
            return entry.of(torch.empty(like.shape, dtype=like.dtype, device=device))
        return entry.of(whole(entry.name)).to(device, copy=True).contiguous()

    write_tensors(slices, on, folder, MAX_SHARD_BYTES)
    return {"torch_dtype": str(dtype).removeprefix("torch.")}


def generation_config(source: ModelSource, config: dict[str, Any]) -> dict[str, Any]:
    """The source's generation settings if they are available locally, else its special tokens. Raises UserError."""
    own = source.folder / GENERATION if source.folder else None
    if source.hub_id is not None:
        from huggingface_hub import try_to_load_from_cache  # 0.1 s, which a shape or a folder does not need

        cached = try_to_load_from_cache(source.hub_id, GENERATION)
        own = Path(cached) if isinstance(cached, str) else None
    if own is not None and own.is_file():
        generation = read_json(own, "--model")
        return check_value(f"--model ({own})", generation, dict[str, Any])
    special = {key: config.get(key) for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {"_from_model_config": True, **{key: value for key, value in special.items() if value is not None}}


def _adopt_special_ids(config: dict[str, Any], tokenizer: ExportableTokenizer) -> None:
    """Set the ids of the training's tokenizer; a config with several end tokens, its own among them, keeps them."""
    known = config.get("eos_token_id")
    if tokenizer.eos_id is not None and tokenizer.eos_id not in (known if isinstance(known, list) else [known]):
        config["eos_token_id"] = tokenizer.eos_id
    if tokenizer.bos_id is not None:
        config["bos_token_id"] = tokenizer.bos_id


def files_of_tensors(folder: Path, where: str) -> dict[str, Path]:
    """Name of each tensor -> the file of the folder that holds it."""
    if (folder / INDEX).is_file():
        files = {name: folder / file for name, file in weight_map(folder / INDEX, where).items()}
        refuse_tensors(where, f"lacks files that {INDEX} names", {f.name for f in files.values() if not f.is_file()})
        return files
    if not (folder / _WEIGHTS).is_file():
        raise UserError(f"{where}: {folder} has neither {_WEIGHTS} nor {INDEX}; only safetensors are read.")
    with opened_tensors(folder / _WEIGHTS, where) as opened:
        return dict.fromkeys(opened.keys(), folder / _WEIGHTS)


def weight_map(index: Path, where: str) -> dict[str, str]:
    """Name of each tensor -> name of its file, from an index. UserError for a file outside of the index's folder."""
    values = read_json(index, where)
    given = values.get("weight_map") if isinstance(values, dict) else None
    found: dict[str, str] = check_value(f"{where} ({index.name}): weight_map", given, dict[str, str])
    for file in sorted(set(found.values())):
        if Path(file).name != file:
            raise UserError(f"{where} ({index.name}): {shown(file)} is not the name of a file in its folder.")
    return found


def refuse_nonfinite(where: str, name: str, tensor: Tensor) -> None:
    """UserError naming a loaded tensor that holds a NaN or Inf: a run on it would stop at its first step."""
    if not tensor.numel() or not tensor.is_floating_point():
        return
    values = tensor if tensor.element_size() > 1 else tensor.to(torch.bfloat16)  # aminmax takes no FP8
    smallest, largest = torch.aminmax(values.detach())  # NaN propagates; no temporary of the tensor's size
    if not bool(torch.isfinite(smallest) & torch.isfinite(largest)):
        what = "NaN" if bool(torch.isnan(smallest)) else "Inf"
        raise UserError(f"{where}: {name} holds {what}: the file is damaged or its training had diverged. Use another.")


@contextlib.contextmanager
def opened_tensors(file: Path, where: str, device: str = "cpu") -> Iterator[Any]:
    """An open safetensors file that loads tensors to `device`. UserError for a damaged file."""
    from safetensors import SafetensorError, safe_open

    try:
        opened = safe_open(file, framework="pt", device=device)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{where}: {file} cannot be read as safetensors: {error}") from None
    with opened as tensors:
        yield tensors


def by_file(names: Iterable[str], files: Mapping[str, Path]) -> dict[Path, list[str]]:
    """The tensors of each file, so that one is opened once."""
    found: dict[Path, list[str]] = {}
    for name in sorted(names):
        found.setdefault(files[name], []).append(name)
    return found


def tensor_headers(
    names: Iterable[str], files: Mapping[str, Path], where: str
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of tensors, from the headers of their files: nothing is loaded. UserError for those that are not
    in the file that the index names."""
    found = {}
    for file, members in by_file(names, files).items():
        with opened_tensors(file, where) as opened:
            refuse_tensors(where, f"lacks in {file.name} the tensors", set(members) - set(opened.keys()))
            for name in members:
                stored = opened.get_slice(name)
                found[name] = (stored.get_dtype(), tuple(stored.get_shape()))
    return found


def refuse_tensors(where: str, what: str, names: Any) -> None:
    if names:
        shown = sorted(names)
        more = f" and {len(shown) - 3} more" if len(shown) > 3 else ""
        raise UserError(f"{where}: the checkpoint {what}: {', '.join(shown[:3])}{more}.")


@contextlib.contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A temporary folder beside `folder` that replaces it at the end, or is deleted when writing fails."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    temporary = private / "new"
    try:
        temporary.mkdir()  # with the permissions that the umask gives; mkdtemp's are its owner's only
        yield temporary
        # A folder with files cannot be replaced in one step: the old one is moved away, and back if that fails.
        old = private / "old"
        if folder.exists():
            folder.rename(old)
        try:
            temporary.rename(folder)
        except OSError:
            if old.exists():
                old.rename(folder)
            raise
    finally:
        shutil.rmtree(private, ignore_errors=True)
