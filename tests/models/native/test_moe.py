"""Mixtures of experts compute what transformers computes, through the files, both ways."""

import pytest
import torch
from safetensors.torch import load_file, save_file

from qtrain.core import checksums
from qtrain.core.errors import UserError
from qtrain.models import (
    RECOMPUTE_SETS,
    Lora,
    add_lora,
    apply_recompute,
    build_model,
    compile_layers,
    export_hf,
    merge_lora,
    read_model_source,
)
from qtrain.models.adapters.lora import LoraLinear
from qtrain.models.config.hf_layout import layout
from qtrain.models.cost.trained import only_adapters
from qtrain.models.native.lora_experts import LoraExperts
from qtrain.models.native.moe import Experts
from qtrain.parallel.layers.local_config import check_divisible
from tests.models.beside_transformers import backward_of_both
from tests.models.families import MIXTURES, batch, drawn, source_of
from tests.models.hf.test_io import transformers_model


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
    ours, theirs = backward_of_both(name, tmp_path / "hf", close)
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


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path):
    """DeepSeek-V3's checkpoint has one beyond the last."""
    source = source_of("deepseek_v3")
    model = drawn(source)
    export_hf(model, source, tmp_path / "hf")
    (tmp_path / "hf" / checksums.NAME).unlink()
    tensors = load_file(tmp_path / "hf" / "model.safetensors")
    last = {n: t for n, t in tensors.items() if n.startswith("model.layers.2.")}
    tensors |= {name.replace("layers.2.", "layers.3."): tensor.clone() for name, tensor in last.items()}
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    loaded = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)
    ids, _ = batch()
    assert torch.equal(loaded(ids), model(ids))
    del tensors["model.layers.1.mlp.experts.7.up_proj.weight"]
    save_file(tensors, tmp_path / "hf" / "model.safetensors")
    with pytest.raises(UserError, match=r"lacks the tensors: model\.layers\.1\.mlp\.experts\.7\.up_proj\.weight"):
        build_model(read_model_source(str(tmp_path / "hf")), pretrained=True)


def test_a_bf16_model_keeps_the_selection_bias_in_fp32(tmp_path):
    source = source_of("deepseek_v3")
    model = drawn(source, dtype=torch.bfloat16)
    bias = model.layers[1].mlp.router.bias
    assert bias.dtype == torch.float32 and not torch.equal(bias, bias.bfloat16().float())
    export_hf(model, source, tmp_path / "hf")
    loaded = build_model(read_model_source(str(tmp_path / "hf")), pretrained=True, dtype=torch.bfloat16)
    assert torch.equal(loaded.layers[1].mlp.router.bias, bias)


def test_what_tensor_parallelism_does_not_divide():
    with pytest.raises(UserError, match="--tp: a model with latent attention cannot be divided"):
        check_divisible(source_of("deepseek_v2").model_config(), 2)
    with pytest.raises(UserError, match="--no_sequence_parallel: ranks of --tp route their own tokens"):
        check_divisible(source_of("qwen3_moe").model_config(), 2, sequence=False)


def test_each_experts_matrices_are_drawn_alike_and_are_a_projection_each():
    """The config's standard deviation in every expert, and rows that optimizers treat as matrices of their own."""
    source = source_of("qwen3_moe", hidden_size=128, moe_intermediate_size=96, initializer_range=0.05)
    experts = build_model(source).layers[0].mlp.experts
    for name, parts in (("gate_up", 16), ("down_proj", 8)):
        weight = getattr(experts, name).weight
        assert len(experts.projections[name]) == parts
        assert sum(experts.projections[name]) == weight.shape[0]
        for matrix in weight.split(experts.projections[name]):
            assert matrix.std().item() == pytest.approx(0.05, rel=0.05)


@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_adapters_are_those_that_the_plan_counts(name):
    """On attention, dense layers and shared experts, not on the experts that a router chooses among."""
    source, lora = source_of(name), Lora(r=3)
    model, ids = drawn(source), batch()[0]
    before = model(ids)
    adapted = add_lora(model, lora, seed=0)
    trained = [p for p in model.parameters() if p.requires_grad]
    part = only_adapters(source.model_config(), lora)
    assert len(adapted) == sum(a.layers for a in part.adapters)
    assert 4 * sum(p.numel() for p in trained) == part.bytes
    model(*batch()).loss.backward()
    assert all(p.grad is not None for p in trained) and not any(isinstance(m, LoraLinear) for m in experts_of(model))
    assert torch.equal(model(ids), before)  # B is 0
    merge_lora(model)
    assert close(model(ids), before)


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [m for owner in model.modules() if isinstance(owner, Experts) for m in owner.modules()]


@pytest.mark.sweep
@pytest.mark.parametrize("adapted", [False, True])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_compiled_layers_are_one_graph_and_count_each_route_once(mode, adapted):
    """With the routers' losses and what is recomputed: the values of eager layers."""
    torch._dynamo.reset()
    shape = {"num_hidden_layers": 1, "first_k_dense_replace": 0}
    plain, compiled = (drawn(source_of("deepseek_v3", **shape)) for _ in range(2))
    for model in (plain, compiled) if adapted else ():
        add_lora(model, Lora(r=3, targets=("experts.gate_up_proj", "experts.down_proj")), seed=0)
        for m in model.modules():
            if isinstance(m, LoraExperts):
                torch.nn.init.normal_(m.lora_b.weight, std=0.1, generator=torch.Generator().manual_seed(0))
    apply_recompute(compiled, RECOMPUTE_SETS[mode])
    compile_layers(compiled)
    ids, labels = batch()
    for model in (plain, compiled):
        model.router_losses.balance, model.router_losses.z = 0.5, 0.1
        model(ids, labels).loss.backward()
    assert torch.equal(plain.expert_load.step, compiled.expert_load.step)
    trained = [[p for p in model.parameters() if p.requires_grad] for model in (compiled, plain)]
    for ours, theirs in zip(*trained, strict=True):
        assert (ours.grad - theirs.grad).abs().max() <= 1e-4 * theirs.grad.abs().max()
