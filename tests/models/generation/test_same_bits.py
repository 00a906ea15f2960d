"""`generate --deterministic`: logits of the training's forward pass, bit for bit, in any batch; or a reason why not."""

import pytest
import torch
from torch import Tensor

from qtrain.models import Decoding, Generation, why_other_bits
from qtrain.models.generation.reader import CachedReader
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.linear import LowBitLinear
from qtrain.train.assembly.deterministic import use_deterministic_kernels
from tests.models.families import drawn, source_of
from tests.models.generation.test_fused_step import make

STEPS = 5
DELAYED = {"scaling": "delayed"}
SAME = {"int8": {}, "fp8_rowwise": {}, "fp8_blockwise": {}, "int4": {}, "bitnet": {}, "fp8_tensorwise": DELAYED}
"""Schemes whose rows are their own, with options."""


def quantized(model, scheme: str, options: dict):
    quantize_linears(model, SCHEMES.make(scheme, options, ""), seed=0, head=model.lm_head, quantize_head=True)
    for module in model.modules():
        if isinstance(module, LowBitLinear) and module.scheme.amax_history:
            module.x_scale.fill_(0.05)
    return model.eval()


@torch.no_grad()
def generated(model, ids: Tensor, lengths: list[int]) -> Tensor:
    """Logits [B, STEPS + 1, V] of prompts of these lengths, and of the tokens that follow them in ids."""
    device = ids.device
    reader = CachedReader(model, len(lengths), ids.shape[1], device)
    prompts = torch.zeros(len(lengths), max(lengths), dtype=torch.int64, device=device)
    for row, own, length in zip(prompts, ids, lengths, strict=False):
        row[:length] = own[:length]
    reader.at.copy_(torch.tensor(lengths) - 1)
    found = [reader.read_prompts(prompts)]
    for _ in range(STEPS):
        reader.at += 1
        reader.token.copy_(ids[: len(lengths)].gather(1, reader.at[:, None])[:, 0])
        found.append(reader.step())
    reader.close()
    return torch.stack(found, 1)


def differences(model, ids: Tensor, lengths: list[int], whole: Tensor) -> int:
    expected = torch.stack([whole[row, at - 1 : at + STEPS] for row, at in enumerate(lengths)])
    return int((generated(model, ids, lengths) != expected).sum())


BATCHES = [[7], [1, 20, 33, 5], list(range(1, 33))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scheme", SAME)
def test_logits_are_those_of_training(tmp_path, scheme, dtype):
    use_deterministic_kernels()
    model = make(tmp_path, "llama" if scheme == "bitnet" else "qwen2", "bf16", dtype=dtype)
    if scheme == "bitnet":  # a head's codes are a linear's as any other's here
        quantize_linears(model, SCHEMES.make("bitnet", {}, ""), seed=0, head=None, quantize_head=True)
        model.eval()
    else:
        model = quantized(model, scheme, SAME[scheme])
    assert why_other_bits(model) is None
    ids = torch.randint(0, 96, (32, 40), generator=torch.Generator().manual_seed(0))
    whole = model(ids).detach()  # with gradients, as training calls it
    assert [differences(model, ids, lengths, whole) for lengths in BATCHES] == [0, 0, 0]


def test_log_probabilities_both_ways():
    """Of sampled tokens: those that generation returns, and those of a training batch of the whole texts."""
    use_deterministic_kernels()
    model = quantized(drawn(source_of("qwen3"), seed=3), "int8", {})
    prompts = [[5, 6, 7], [9], [11, 12, 13, 14, 15]]
    generation = Generation(model, prompts, Decoding(8, logprobs=True))
    for _ in generation:
        pass
    for number, (prompt, row) in enumerate(zip(prompts, generation.rows, strict=True)):
        text = torch.tensor([prompt + row.ids] * 2)
        logprobs = model(text).float().log_softmax(-1)[0, len(prompt) - 1 : -1]
        assert generation.logprobs(number) == logprobs.gather(1, torch.tensor(row.ids)[:, None])[:, 0].tolist()


@pytest.mark.parametrize("scheme,options,reason", [
    ("fp8_tensorwise", {}, "layers.0.attn.qkv: a tensorwise scale of its activations sees the whole batch"),
    ("int8_blockwise", {}, "a scale of 32x32 blocks of its activations sees rows of other texts"),
    ("nvfp4", {}, "products of e2m1 with scales below fp32"),
    ("bf16", {}, "layers.0.attn.qkv is in high precision, for which cuBLAS"),
])  # fmt: skip
def test_others_are_refused(scheme, options, reason):
    use_deterministic_kernels()
    model = quantized(drawn(source_of("qwen2"), seed=3), scheme, options)
    assert reason in why_other_bits(model)
    if scheme != "bf16":  # for cause: their logits differ
        ids = torch.randint(0, 96, (32, 40), generator=torch.Generator().manual_seed(0))
        assert differences(model, ids, BATCHES[1], model(ids).detach())


@pytest.mark.parametrize("family,reason", [
    ("qwen3_moe", "experts"), ("deepseek_v2", "latent attention"), ("mistral-window", "sliding window of 7"),
])  # fmt: skip
def test_models_that_it_refuses(family, reason):
    model = quantized(drawn(source_of(family), seed=3), "int8", {})
    assert reason in why_other_bits(model, places=40)


@pytest.mark.gpu
@pytest.mark.parametrize("scheme", [name for name in SAME if name != "bitnet"])
def test_on_the_gpu(tmp_path, scheme):
    use_deterministic_kernels()
    kind = "qwen3" if scheme == "int8" else "qwen2"
    model = quantized(make(tmp_path, kind, "bf16", "cuda", torch.bfloat16), scheme, SAME[scheme])
    assert why_other_bits(model) is None
    ids = torch.randint(0, 96, (32, 200), generator=torch.Generator().manual_seed(0)).cuda()
    with torch.no_grad():
        whole = model(ids)
    assert torch.equal(whole, model(ids))  # with gradients
    batches = [[70], [1, 150, 33, 128], list(range(1, 160, 5))]
    assert [differences(model, ids, lengths, whole) for lengths in batches] == [0, 0, 0]
