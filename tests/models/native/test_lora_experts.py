"""Adapters of routed experts: those of PEFT's target_parameters, number for number, and what they are merged into."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from qtrain.core.errors import UserError
from qtrain.models import (
    AdaptedOriginal,
    Lora,
    add_lora,
    as_lora,
    build_model,
    export_hf,
    load_adapter,
    merge_lora,
    read_model_source,
    save_adapter,
)
from qtrain.models.adapters.peft_format import adapter_tensors
from qtrain.models.cost.trained import only_adapters
from qtrain.models.native.lora_experts import LoraExperts
from qtrain.optim.registry import hidden_matrices
from qtrain.quant import quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from tests.models.beside_peft import train_beside_peft
from tests.models.families import batch, drawn, source_of

EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
WIDE = {"hidden_size": 128, "moe_intermediate_size": 64, "num_hidden_layers": 2}
"""Experts that schemes take: their matrices have rows in multiples of 128."""


def exported(name: str, folder, **changes) -> str:
    """A family's tiny model as a Hugging Face folder."""
    source = source_of(name, **changes)
    export_hf(drawn(source), source, folder)
    return str(folder)


def adapted(folder: str, lora: Lora, drawn_b: bool = False):
    """The folder's model on its frozen base, with adapters."""
    model = build_model(read_model_source(folder), pretrained=True)
    if lora.base != "none":
        quantize_linears(model, base_scheme(lora.base, "bf16"), seed=0, head=model.lm_head)
    add_lora(model, lora, seed=3)
    with torch.no_grad():
        for parameter, name in ((p, n) for n, p in model.named_parameters() if drawn_b and "lora_b" in n):
            parameter.normal_(0, 0.1, generator=torch.Generator().manual_seed(len(name)))
    return model


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return bool((ours - theirs).abs().max() <= 1e-5 * theirs.abs().max())


@pytest.mark.parametrize(
    ("name", "lora"),
    [
        ("qwen3_moe", Lora(r=4, alpha=8, targets=EXPERTS)),
        ("mixtral", Lora(r=3, alpha=6, rslora=True, targets=("all-linear", *EXPERTS))),
    ],
)
def test_twenty_steps_equal_pefts_and_the_saved_adapter_loads_there(name, lora, tmp_path):
    peft = pytest.importorskip("peft")
    folder = exported(name, tmp_path / "hf", initializer_range=0.05, num_hidden_layers=2)
    own = adapted(folder, lora)
    base = {name: p.detach().clone() for name, p in own.named_parameters() if not p.requires_grad}
    save_adapter(own, lora, folder, tmp_path / "start")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "start", is_trainable=True).train()
    ids = batch()[0]
    losses = train_beside_peft(own, theirs, [batch()[0]] * 20)
    assert losses[-1] < losses[0] - 0.5, "nothing was learned"
    assert all(torch.equal(p, base[name]) for name, p in own.named_parameters() if name in base)

    save_adapter(own, lora, folder, tmp_path / "end")
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loaded = peft.PeftModel.from_pretrained(loaded, tmp_path / "end").eval()
    with torch.no_grad():
        logits = own.eval()(ids)
        assert close(loaded(input_ids=ids).logits, logits)
        merge_lora(own)
        assert not adapter_tensors(own) and close(own(ids), logits)
        export_hf(own, read_model_source(folder), tmp_path / "merged")
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32)
        assert close(merged(input_ids=ids).logits, logits)


@pytest.mark.parametrize("parameters", [["gate_up_proj", "mlp.experts.down_proj"], ["experts.down_proj"]])
def test_an_adapter_that_peft_saved_loads_here(parameters, tmp_path):
    peft = pytest.importorskip("peft")
    folder = exported("qwen3_moe", tmp_path / "hf")
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=["k_proj"], target_parameters=parameters)
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32), config).eval()
    with torch.no_grad():
        for name, p in theirs.named_parameters():
            if "lora_" in name:
                p.add_(torch.randn_like(p) * 0.1)
    theirs.save_pretrained(tmp_path / "adapter")
    lora = as_lora({"adapter": str(tmp_path / "adapter")})
    assert lora.targets == (*sorted(f"experts.{name.rpartition('.')[2]}" for name in parameters), "k_proj")
    own = adapted(folder, lora).eval()
    load_adapter(own, lora.adapter)
    ids = batch()[0]
    with torch.no_grad():
        assert close(own(ids), theirs(input_ids=ids).logits)


@pytest.mark.parametrize("targets", ["all-linear", ("all-linear", *EXPERTS)])
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_adapters_of_dense_and_shared_mlps_are_not_taken_for_experts(name, targets, tmp_path):
    """PEFT takes modules of these names for experts in a mixture; saved as parameters they are what they were."""
    peft = pytest.importorskip("peft")
    lora = Lora(r=2, targets=targets)
    folder = exported(name, tmp_path / "hf")
    own = adapted(folder, lora, drawn_b=True).eval()
    save_adapter(own, lora, folder, tmp_path / "adapter")
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    again = as_lora({"adapter": str(tmp_path / "adapter")})
    same = adapted(folder, again).eval()
    load_adapter(same, again.adapter)
    ids = batch()[0]
    with torch.no_grad():
        logits = own(ids)
        assert close(theirs(input_ids=ids).logits, logits) and torch.equal(same(ids), logits)


@pytest.mark.parametrize("base", ["nf4", "int8", "fp8"])
def test_experts_in_low_bits_keep_their_codes_and_train_adapters(base, tmp_path):
    folder = exported("qwen3_moe", tmp_path / "hf", **WIDE)
    model, ids = adapted(folder, Lora(r=4, base=base, targets=EXPERTS)), batch()[0]
    codes = {name: t for name, t in model.named_buffers() if "experts" in name and "codes" in name}
    before = {name: t.clone() for name, t in codes.items()}
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, 1e-2)
    losses = []
    for _ in range(6):
        loss = model(ids[:, :-1], ids[:, 1:].contiguous()).loss / ids[:, 1:].numel()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert len(codes) >= 4 and all(torch.equal(t, before[name]) for name, t in codes.items())
    with torch.no_grad():
        logits = model.eval()(ids)
        merge_lora(model)
        error = (model(ids) - logits).norm() / logits.norm()
    assert error < {"nf4": 1e-5, "int8": 0.05, "fp8": 0.15}[base]


def test_the_source_with_the_adapters_added_is_pefts_merge(tmp_path):
    """Every expert's tensors get their own expert's adapter, whatever the base was rounded to."""
    lora = Lora(r=3, alpha=5, targets=EXPERTS, base="nf4", merge="original")
    folder = exported("mixtral", tmp_path / "hf", **{**WIDE, "intermediate_size": 64})
    model, source = adapted(folder, lora, drawn_b=True), read_model_source(folder)
    export_hf(AdaptedOriginal(model, source), source, tmp_path / "merged")
    on_source = adapted(folder, Lora(r=3, alpha=5, targets=EXPERTS))
    save_adapter(model, lora, folder, tmp_path / "adapter")
    load_adapter(on_source, str(tmp_path / "adapter"))
    originals, merged = (load_file(f"{at}/model.safetensors") for at in (folder, tmp_path / "merged"))
    assert {n for n, t in merged.items() if not torch.equal(t, originals[n])} == {n for n in merged if "experts" in n}
    loaded, ids = build_model(read_model_source(str(tmp_path / "merged")), pretrained=True), batch()[0]
    with torch.no_grad():
        assert close(loaded(ids), on_source.eval()(ids)) and not close(loaded(ids), model.eval()(ids))


@pytest.mark.parametrize("targets", [EXPERTS, EXPERTS[1], ("all-linear", EXPERTS[0])])
def test_adapters_are_those_that_the_plan_counts_and_optimizers_see_each_experts_matrices(targets):
    source, lora = source_of("qwen2_moe"), Lora(r=3, targets=targets)
    model, ids = drawn(source), batch()[0]
    before = model(ids)
    added = add_lora(model, lora, seed=0)
    part = only_adapters(source.model_config(), lora)
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(added) == sum(a.layers for a in part.adapters)
    assert 4 * sum(p.numel() for p in trained) == part.bytes
    of_plan = sorted((g.shape, g.parts) for g in part.shapes for _ in range(g.count))
    parts = hidden_matrices(model)
    assert of_plan == sorted((tuple(p.shape), parts[id(p)]) for p in trained)
    assert torch.equal(model(ids), before)  # B is 0
    model(*batch()).loss.backward()
    assert all(p.grad is not None for p in trained)
    experts = [m for m in added if isinstance(m, LoraExperts)]
    assert {m.hf_name.partition("mlp.")[2] for m in experts} == {t for t in lora.names if t in EXPERTS}


def test_an_expert_costs_only_the_tokens_that_use_it():
    """FLOPs of adapters: of the experts of a token, not of all."""
    config = source_of("mixtral").model_config()
    part = only_adapters(config, Lora(r=4, targets=EXPERTS))
    active = config.moe.per_token * (config.hidden_size + 2 * config.moe.width)
    active += config.moe.per_token * (config.moe.width + config.hidden_size)
    assert part.flops({"blocks": 3.0, "head": 3.0})["adapters"] == 6 * 4 * 3 * active


def test_what_experts_cannot_have_is_refused():
    dense, mixture = source_of("llama2").model_config(), source_of("mixtral").model_config()
    with pytest.raises(UserError, match=r"--lora\.targets: unknown projection 'experts\.down_proj'\. Did you mean"):
        only_adapters(dense, Lora(targets=EXPERTS[1:]))
    with pytest.raises(
        UserError, match=r"unknown projection 'experts\.gate_proj'.* Did you mean 'experts\.gate_up_pro"
    ):
        only_adapters(mixture, Lora(targets=("experts.gate_proj",)))


def test_an_adapter_of_other_parameters_is_refused(tmp_path):
    (tmp_path / "adapter_config.json").write_text(
        '{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": [], "target_parameters": ["mlp.gate.table"]}'
    )
    with pytest.raises(UserError, match=r"its target_parameters name 'mlp\.gate\.table'; only experts and weights are"):
        as_lora({"adapter": str(tmp_path)})
