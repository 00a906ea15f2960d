"""A native decoder as one GGUF file, one tensor of the file in memory at a time.

llama.cpp rotates neighbouring elements of llama's heads, so rows of q and k are permuted for it. It wants norms and
routers in fp32, and the matrices of all experts of a layer in one tensor.
"""

from pathlib import Path
from typing import Any

import torch

from qtrain.models.config.hf_layout import TensorSlice
from qtrain.models.config.model import ModelConfig
from qtrain.models.hf.formats.gguf import ARCHITECTURES, Gguf
from qtrain.models.hf.gguf_tokenizer import add_tokenizer
from qtrain.models.hf.io import CARD, replacing
from qtrain.models.hf.quantized_export import PLAIN, ExportOptions, HeldCodes, WeightsInCodes
from qtrain.models.hf.writing import finish_export, writing_export
from qtrain.models.native.decoder import Decoder

FILE = "model.gguf"
NAMES = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
"""What the package calls BitNet's norms, by transformers' name."""


def export_gguf(model: Decoder, folder: Path | str, fmt: Gguf, options: ExportOptions = PLAIN) -> HeldCodes | None:
    """Write FILE and the tokenizer's files into `folder`. Returns what became of the codes; None: there are none.
    Raises UserError."""
    import gguf

    weights, tokenizer = WeightsInCodes(model, fmt, options.left), options.tokenizer
    with replacing(Path(folder)) as temporary, writing_export(folder):
        writer = gguf.GGUFWriter(temporary / FILE, ARCHITECTURES[model.config.model_type])
        _add_settings(writer, model.config, fmt, options.trained_positions)
        if tokenizer is not None:
            tokenizer.save_hf(temporary)
        if tokenizer is None or not add_tokenizer(writer, temporary, tokenizer, model.config.vocab_size):
            writer.add_tokenizer_model("no_vocab")  # llama.cpp then takes ids; it loads no file that names none
        members = _members(weights)
        for name, entries in members.items():
            shape, kind = _shape_and_type(weights, fmt, entries)
            elements, size = gguf.GGML_QUANT_SIZES[kind]
            count = torch.Size(shape).numel()
            # pyrefly: ignore[bad-argument-type]  # the dtype is not read where the raw one is given
            writer.add_tensor_info(name, shape, None, count // elements * size, raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for entries in members.values():
            writer.write_tensor_data(_data(weights, fmt, entries))
        writer.close()
        finish_export(temporary, [path.name for path in temporary.iterdir()])
        held = weights.held if fmt.weight is not None else None
        if options.card is not None:
            (temporary / CARD).write_text(options.card(None, held), encoding="utf-8")
    return held


def _members(weights: WeightsInCodes) -> dict[str, list[TensorSlice]]:
    """Name of each of the file's tensors -> those of a checkpoint that it consists of, one but for experts."""
    import gguf

    config = weights.model.config
    architecture = next(k for k, v in gguf.MODEL_ARCH_NAMES.items() if v == ARCHITECTURES[config.model_type])
    names = gguf.get_tensor_name_map(architecture, config.num_hidden_layers)
    found: dict[str, list[TensorSlice]] = {}
    for entry in weights.entries.values():
        parts = [NAMES.get(part, part) for part in entry.hf_name.split(".")]
        if "experts" in parts:
            del parts[parts.index("experts") + 1]  # the number of the expert
        name = names.get_name(".".join(parts), try_suffixes=(".weight", ".bias"))
        assert name is not None, f"llama.cpp has no name for {entry.hf_name}"
        found.setdefault(name, []).append(entry)
    return found


def _shape_and_type(weights: WeightsInCodes, fmt: Gguf, entries: list[TensorSlice]) -> tuple[tuple[int, ...], Any]:
    """Of one of the file's tensors: its shape, and its GGMLQuantizationType."""
    import gguf

    first, shape = entries[0], weights.shape(entries[0])
    shape = (len(entries), *shape) if len(entries) > 1 else shape
    kinds = gguf.GGMLQuantizationType
    if weights.in_codes(first):
        return shape, kinds[fmt.type_name]
    if len(shape) == 1 or first.hf_name.endswith("mlp.gate.weight"):
        return shape, kinds.F32
    if fmt.weight is None:
        return shape, kinds.F16
    return shape, kinds.BF16 if weights.dtype() == torch.bfloat16 else kinds.F32


def _data(weights: WeightsInCodes, fmt: Gguf, entries: list[TensorSlice]) -> Any:
    """The bytes of one of the file's tensors, as a numpy array."""
    import gguf
    import numpy as np

    _, kind = _shape_and_type(weights, fmt, entries)
    parts = []
    for entry in entries:
        if weights.in_codes(entry):
            part = fmt.encode(weights.codes(entry), weights.shape(entry)[1])
        else:
            part = gguf.quants.quantize(weights.plain(entry).float().cpu().numpy(), kind)
        parts.append(_permuted(part, entry, weights.model.config))
    return np.ascontiguousarray(np.concatenate(parts))


def _permuted(rows: Any, entry: TensorSlice, config: ModelConfig) -> Any:
    """Rows of q and k as llama.cpp reads them; others as they are."""
    projection = entry.hf_name.split(".")[-2]
    if ARCHITECTURES[config.model_type] != "llama" or projection not in ("q_proj", "k_proj"):
        return rows
    heads = config.num_attention_heads if projection == "q_proj" else config.num_key_value_heads
    pairs = rows.reshape(heads, 2, len(rows) // heads // 2, *rows.shape[1:])  # the halves that are rotated together
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def _add_settings(writer: Any, config: ModelConfig, fmt: Gguf, trained_positions: int) -> None:
    import gguf

    writer.add_context_length(max(config.max_position_embeddings, trained_positions))
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_value_length(config.head_dim)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope.theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_file_type(gguf.LlamaFileType[f"MOSTLY_{fmt.type_name}"])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    if config.moe is not None:
        writer.add_expert_count(config.moe.experts)
        writer.add_expert_used_count(config.moe.per_token)
        writer.add_expert_feed_forward_length(config.moe.width)
