"""A step of generation by fused kernels: the model's logits, whichever scheme its weights are in."""

import pytest
import torch

from qtrain.kernels.decode import cached_attention, operands, quantize_normed
from qtrain.models import Decoding, Generation, build_model, read_model_source
from qtrain.models.generation.fused_step import FusedStep, read_weight, runs_fused
from qtrain.models.generation.reader import CachedReader, reader_of
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.linear import LowBitLinear

BASE = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 128, "intermediate_size": 256,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96, "head_dim": 32,
    "rms_norm_eps": 1e-5, "max_position_embeddings": 256, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
MODELS = {
    "llama": BASE,
    "qwen2": BASE | {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tie_word_embeddings": True},
    "qwen3": BASE | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
}
SCHEMES_TRIED = ["bf16", "int8", "fp8_tensorwise", "fp8_blockwise", "int4_weight", "bitnet", "nvfp4", "mxfp8"]


def make(tmp_path, kind: str, scheme: str, device: str = "cpu", dtype=torch.float32):
    import json

    (tmp_path / "config.json").write_text(json.dumps(MODELS[kind]))
    torch.manual_seed(3)
    source = read_model_source(str(tmp_path), "--model")
    model = build_model(source, pretrained=False, device=torch.device(device), dtype=dtype)
    for name, p in model.named_parameters():
        if name.endswith("bias") or "norm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    quantize_linears(
        model, SCHEMES.make(scheme, {}, "--quantize"), seed=0, head=model.lm_head, quantize_head=scheme != "bitnet"
    )
    return model.eval()


def with_values(model):
    """The same model with each low-bit weight as the values of its codes, in high precision."""
    for module in list(model.modules()):
        for name, child in list(module.named_children()):
            if isinstance(child, LowBitLinear):
                plain = torch.nn.Linear(child.in_features, child.out_features, bias=child.bias is not None)
                plain = plain.to(child.weight.device, child.weight.dtype)
                plain.weight.data = read_weight(child).values(child.weight.dtype)
                if child.bias is not None:
                    plain.bias.data = child.bias.data
                setattr(module, name, plain)
    return model


PROMPTS = torch.randint(0, 96, (3, 9), generator=torch.Generator().manual_seed(1))
LENGTHS = torch.tensor([9, 1, 5])


@pytest.mark.parametrize("kind,scheme", [("qwen2", "bf16"), ("qwen3", "int8"), *(("llama", s) for s in SCHEMES_TRIED)])
@torch.no_grad()
def test_logits_are_those_of_the_codes(tmp_path, kind, scheme):
    model = make(tmp_path, kind, scheme)
    places = 20
    reader = CachedReader(model, 3, places, torch.device("cpu"))
    reader.at.copy_(LENGTHS - 1)
    reader.read_prompts(PROMPTS)
    caches = [(c.keys.clone(), c.values.clone()) for c in reader._caches]
    step = FusedStep(model, reader._cos.squeeze(-2), reader._sin.squeeze(-2))
    reader.at.add_(1)
    reader.token.copy_(torch.tensor([5, 6, 7]))
    found = step(reader.token, reader.at, caches)
    reader._model = with_values(model)
    expected = reader.step()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for cache, (keys, values) in zip(reader._caches, caches, strict=True):
        torch.testing.assert_close(keys, cache.keys, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(values, cache.values, rtol=1e-4, atol=1e-4)
    reader.close()


def test_only_what_it_computes(tmp_path):
    assert not runs_fused(make(tmp_path, "llama", "bf16"))  # on a CPU


@pytest.mark.gpu
@pytest.mark.parametrize("kind,scheme", [("qwen3", "bf16"), ("qwen2", "int8"), *(("llama", s) for s in SCHEMES_TRIED)])
@torch.no_grad()
def test_on_the_gpu(tmp_path, kind, scheme):
    """Within the rounding of activations, for one row and several; recorded steps are the same bits as others."""
    model = make(tmp_path, kind, scheme, "cuda", torch.bfloat16)
    assert runs_fused(model)
    texts = {}
    for rows in (1, 3):
        prompts = [PROMPTS[i, : LENGTHS[i]].tolist() for i in range(rows)]
        for fast in (False, True):
            generation = Generation(model, prompts, Decoding(12, logprobs=True, fast=fast))
            texts[fast] = [ids for new in generation for ids in new]
        # Greedy texts of a random model part at ties; until then they are near.
        reader = reader_of(model, rows, 20, fast=True)
        reader.at.copy_(LENGTHS[:rows] - 1)
        reader.read_prompts(PROMPTS[:rows].cuda())
        reader.at.add_(1)
        fused = reader.step().float()
        plain = CachedReader.step(reader).float()
        reader.close()
        # The model quantizes its activations, to 4 bits in nvfp4.
        assert (fused - plain).norm() <= (0.35 if scheme == "nvfp4" else 0.15) * plain.norm()
        again = Generation(model, prompts, Decoding(12, fast=True))
        assert [ids for new in again for ids in new] == texts[True]


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_dependent_launches_change_no_bit(tmp_path, rows, monkeypatch):
    """Kernels that start before the one before them has ended, of 40 recorded steps."""
    model = make(tmp_path, "llama", "int8", "cuda", torch.bfloat16)
    prompts = [PROMPTS[i, : LENGTHS[i]].tolist() for i in range(rows)]

    def generated() -> list:
        generation = Generation(model, prompts, Decoding(40, logprobs=True, fast=True))
        texts = [ids for new in generation for ids in new]
        return [texts, *(generation.logprobs(row) for row in range(rows))]

    found = generated()
    for module in (operands, quantize_normed, cached_attention):
        monkeypatch.setattr(module, "has_dependent_launch", lambda device: False)
    assert generated() == found
