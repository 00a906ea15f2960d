"""Mixtures of experts compute what transformers computes, through the files, both ways."""

import pytest
import torch
import torch.nn.functional as F

from qtrain.models import build_model, export_hf, read_model_source
from qtrain.models.hf_layout import layout
from tests.models.families import MIXTURES, batch, drawn, source_of
from tests.models.test_hf import transformers_model


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    """Equal to 1e-5 of the scale, which is what fp32 sums in another order may differ by."""
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


def gradients(theirs: torch.nn.Module, native: torch.nn.Module) -> dict[str, torch.Tensor]:
    """The gradients of a transformers model under the names of a checkpoint, as its experts' parameters are fused."""
    found = {name: p.grad for name, p in theirs.named_parameters()}
    for entry in layout(native.config):
        prefix, _, tail = entry.hf_name.partition(".experts.")
        if not tail:
            continue
        number, projection, _ = tail.split(".")
        prefix = prefix.replace("block_sparse_moe", "mlp")
        down = projection in ("w2", "down_proj")
        grad = found[f"{prefix}.experts.{'down_proj' if down else 'gate_up_proj'}"][int(number)]
        found[entry.hf_name] = grad if down else grad.chunk(2)[projection in ("w3", "up_proj")]
    return {name.replace("mlp.gate.", "block_sparse_moe.gate."): grad for name, grad in found.items()} | found


@pytest.mark.parametrize("name", MIXTURES)
def test_logits_loss_and_gradients_equal_transformers(name, tmp_path):
    """What export writes, transformers loads as the same function with the same gradients."""
    from transformers import AutoModelForCausalLM

    source = source_of(name)
    ours = drawn(source)
    export_hf(ours, source, tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.config.to_dict()["model_type"] == source.config["model_type"]
    ids, labels = batch()
    logits = theirs(ids).logits
    assert close(ours(ids), logits)

    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    expected.backward()
    sums = ours(ids, labels)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(expected.item(), rel=1e-5)
    native, of_theirs = dict(ours.named_parameters()), gradients(theirs, ours)
    compared = 0
    for entry in layout(ours.config):
        if entry.name in native:
            assert close(entry.of(native[entry.name].grad), of_theirs[entry.hf_name]), entry.hf_name
            compared += entry.of(native[entry.name]).numel()
    assert compared == sum(p.numel() for p in native.values())


@pytest.mark.parametrize("name", MIXTURES)
def test_a_checkpoint_of_transformers_loads(name, tmp_path):
    theirs = transformers_model(name, tmp_path)
    ours = build_model(read_model_source(str(tmp_path)), pretrained=True)
    ids, _ = batch()
    assert close(ours(ids), theirs(ids).logits)
