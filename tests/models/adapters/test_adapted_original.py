"""Adapters merged into the source's own weights: W + scale · B·A, whatever the frozen base was rounded to."""

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from qtrain.core.errors import UserError
from qtrain.models import AdaptedOriginal, Lora, add_lora, build_model, export_hf, read_model_source, save_adapter
from qtrain.models.adapters.lora import lora_linears
from qtrain.quant import quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from tests.models.families import batch
from tests.models.hf.test_io import transformers_model


def adapted(folder, lora: Lora, impl: str = "native"):
    """The folder's model on its frozen base, with adapters that are not zero."""
    model = build_model(read_model_source(str(folder)), impl=impl, pretrained=True)
    quantize_linears(model, base_scheme(lora.base, "bf16"), seed=0, head=model.lm_head)
    add_lora(model, lora, seed=0)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_b" in name:
                p.normal_(0, 0.1)
    return model.eval()


def tensors(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize(
    ("lora", "impl", "dtype"),
    [
        (Lora(r=4, alpha=8, base="nf4", merge="original"), "native", torch.bfloat16),
        (Lora(r=4, alpha=8, base="fp8", merge="original"), "native", torch.float32),
        (Lora(r=3, rslora=True, targets=("k_proj", "down_proj"), base="fp8", merge="original"), "hf", torch.bfloat16),
        (Lora(r=4, dora=True, base="nf4", merge="original"), "native", torch.float32),
    ],
)
def test_the_export_is_the_source_with_the_adapters_added(tmp_path, lora, impl, dtype):
    """Each tensor is the fp64 sum up to one rounding to the file's dtype; what has no adapter is the source's, bit for
    bit, under the source's file names."""
    peft = pytest.importorskip("peft")
    transformers_model("qwen2", tmp_path / "fp32")
    published = AutoModelForCausalLM.from_pretrained(tmp_path / "fp32", dtype=dtype)
    published.save_pretrained(tmp_path / "source", max_shard_size="30KB")
    source = read_model_source(str(tmp_path / "source"))
    model = adapted(tmp_path / "source", lora, impl)
    export_hf(AdaptedOriginal(model, source), source, tmp_path / "merged")
    originals, merged = tensors(tmp_path / "source"), tensors(tmp_path / "merged")
    truth = {name: value.double() for name, value in originals.items()}
    for linear in lora_linears(model).values():
        for i, projection in enumerate(linear.adapted):
            weight = truth[f"{projection.hf_name}.weight"]
            weight += lora.scale * (linear.lora_b[i].double() @ linear.lora_a[i].double())
            if lora.dora:
                weight *= (linear.magnitude[i].double() / weight.norm(dim=1)).unsqueeze(1)
    assert merged.keys() == originals.keys()
    changed = {name for name in merged if not torch.equal(merged[name], originals[name])}
    adapters = [p for linear in lora_linears(model).values() for p in linear.adapted]
    assert changed == {f"{p.hf_name}.weight" for p in adapters} and len(changed) >= 6
    for name, value in merged.items():
        assert value.dtype == dtype
        rounding = torch.finfo(dtype).eps / 2 * truth[name].abs()
        assert ((value.double() - truth[name]).abs() <= rounding + 1e-6 * truth[name].abs().max()).all(), name
    files = [sorted(p.name for p in (tmp_path / at).glob("model*")) for at in ("source", "merged")]
    assert files[0] == files[1] and len(files[0]) > 2

    save_adapter(model, lora, "source", tmp_path / "adapter")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "source", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32).eval()
    ids, _ = batch()
    with torch.no_grad():
        logits = theirs(input_ids=ids).logits
        error = (loaded(input_ids=ids).logits - logits).norm() / logits.norm()
        of_rounded = (model(ids) - logits).norm() / logits.norm()
    assert error < (1e-5 if dtype == torch.float32 else of_rounded / 3), (error, of_rounded)


def test_a_source_whose_weights_are_gone_is_refused(tmp_path):
    transformers_model("llama2", tmp_path)
    source, weights = read_model_source(str(tmp_path)), tmp_path / "model.safetensors"
    model = adapted(tmp_path, Lora(r=2, base="nf4"))
    saved = load_file(weights)
    original = AdaptedOriginal(model, source)
    weights.unlink()
    with pytest.raises(UserError, match=r"--lora\.merge \(.*\): .*model\.safetensors cannot be read"):
        export_hf(original, source, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
    with pytest.raises(UserError, match=r"--lora\.merge .* has neither model\.safetensors nor"):
        AdaptedOriginal(model, source)
    save_file({f"other.{name}": t for name, t in saved.items()}, weights)
    with pytest.raises(UserError, match=r"lacks the tensors: model\.layers\.0\.mlp\.down_proj\.weight, .* more"):
        AdaptedOriginal(model, source)
