"""Configs are read completely, refused by file and key, and survive both directions."""

import pytest

from qtrain.core.errors import UserError
from qtrain.models import ModelConfig, list_models, read_model_source
from qtrain.models.config.model import Rope
from tests.models.families import FAMILIES, MIXTURES

LLAMA = FAMILIES["llama2"]


ALL = FAMILIES | MIXTURES


@pytest.mark.parametrize("name", ALL)
def test_to_hf_and_back_is_the_same_config(name):
    config = ModelConfig.from_hf(ALL[name])
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize("name", ALL)
def test_transformers_4_keys_alone_give_the_same_config(name):
    """transformers 4 does not know rope_parameters: what it reads must say everything."""
    config = ModelConfig.from_hf(ALL[name])
    written = config.to_hf()
    del written["rope_parameters"]
    assert ModelConfig.from_hf(written) == config


def test_rope_is_read_from_new_and_old_files():
    llama3 = FAMILIES["llama3"]
    old = ModelConfig.from_hf(llama3).rope
    new = {k: v for k, v in llama3.items() if not k.startswith("rope")}
    new["rope_parameters"] = {**llama3["rope_scaling"], "rope_theta": 500.0}
    assert ModelConfig.from_hf(new).rope == old
    assert old == Rope(500.0, "llama3", 8.0, 1.0, 4.0, 32)


def test_families_differ_where_they_should():
    read = {name: ModelConfig.from_hf(values) for name, values in FAMILIES.items()}
    assert read["qwen2"].qkv_bias and not read["qwen2"].o_bias
    assert read["qwen3"].qk_norm and not read["qwen3"].qkv_bias and not read["qwen2"].qk_norm
    assert read["mistral-window"].sliding_window == 7
    biased = read["llama-biases-linear-rope"]
    assert biased.qkv_bias and biased.o_bias and biased.mlp_bias
    assert not read["llama2"].qkv_bias


def test_a_window_that_no_layer_uses_is_none():
    """Qwen2's published configs name a window and switch it off."""
    published = {**FAMILIES["qwen2"], "sliding_window": 16, "use_sliding_window": False, "max_window_layers": 1}
    assert ModelConfig.from_hf(published).sliding_window is None
    assert ModelConfig.from_hf({**published, "use_sliding_window": True, "max_window_layers": 3}).sliding_window is None
    assert ModelConfig.from_hf({**published, "use_sliding_window": True, "max_window_layers": 0}).sliding_window == 16


BAD = {
    "missing key": ({"hidden_size": ...}, ["hidden_size", "missing"]),
    "missing model_type": ({"model_type": ...}, ["model_type", "missing"]),
    "wrong type": ({"hidden_size": "32"}, ["hidden_size", "'32'", "whole number"]),
    "zero": ({"num_hidden_layers": 0}, ["num_hidden_layers", "from 1 to 10000"]),
    "zero kv heads": ({"num_key_value_heads": 0}, ["num_key_value_heads", "from 1 to 1e+08"]),
    "fraction": ({"vocab_size": 3.5}, ["vocab_size", "3.5"]),
    "heads do not divide": ({"num_attention_heads": 5}, ["hidden_size 32", "num_attention_heads 5"]),
    "kv heads do not divide": ({"num_key_value_heads": 3}, ["num_key_value_heads 3", "num_attention_heads 4"]),
    "odd head": ({"head_dim": 7}, ["head_dim 7"]),
    "unknown family": ({"model_type": "lama"}, ["'lama'", "Did you mean 'llama'", "--model_impl hf"]),
    "experts": ({"num_experts": 8}, ["num_experts", "--model_impl hf"]),
    "activation": ({"hidden_act": "gelu"}, ["hidden_act", "'gelu'", "--model_impl hf"]),
    "dropout": ({"attention_dropout": 0.1}, ["attention_dropout", "--model_impl hf"]),
    "unknown rope": ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ["'dynamic'", "--model_impl hf"]),
    "rope without factor": ({"rope_scaling": {"rope_type": "linear"}}, ["'linear'", "'factor'"]),
    "rope not an object": ({"rope_scaling": 3}, ["rope_parameters", "3"]),
    "rope thresholds": (
        {"rope_scaling": {**FAMILIES["llama3"]["rope_scaling"], "low_freq_factor": 4.0}},
        ["high_freq_factor", "low_freq_factor"],
    ),
    "partial rope": ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "--model_impl hf"]),
    "window in some layers": (
        {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
        ["sliding window", "--model_impl hf"],
    ),
    "negative window": ({"model_type": "mistral", "sliding_window": -1}, ["sliding_window", "-1"]),
    "tie as text": ({"tie_word_embeddings": "yes"}, ["tie_word_embeddings", "true or false"]),
}


BAD_MIXTURES = {
    "more than there are": ("qwen3_moe", {"num_experts_per_tok": 9}, ["num_experts_per_tok 9", "num_experts 8"]),
    "no experts": ("olmoe", {"num_experts": 0}, ["num_experts: 0", "from 1 to"]),
    "jitter": ("mixtral", {"router_jitter_noise": 0.1}, ["router_jitter_noise 0.1", "--model_impl hf"]),
    "clipped": ("olmoe", {"clip_qkv": 8.0}, ["clip_qkv 8.0", "--model_impl hf"]),
    "wider norm": ("olmoe", {"head_dim": 4}, ["head_dim 4", "hidden_size 32"]),
    "window": ("qwen2_moe", {"use_sliding_window": True}, ["use_sliding_window", "--model_impl hf"]),
    "dense layers": ("qwen3_moe", {"mlp_only_layers": "none"}, ["mlp_only_layers", "a list of"]),
    "normalized": ("deepseek_v2", {"norm_topk_prob": True}, ["norm_topk_prob True", "--model_impl hf"]),
    "selection": ("deepseek_v2", {"topk_method": "noaux_tc"}, ["topk_method", "'greedy', 'group_limited_greedy'"]),
    "scores": ("deepseek_v3", {"scoring_func": "softmax"}, ["scoring_func 'softmax'", "--model_impl hf"]),
    "other layers": ("deepseek_v3", {"moe_layer_freq": 2}, ["moe_layer_freq 2", "--model_impl hf"]),
    "groups do not divide": ("deepseek_v3", {"n_group": 3}, ["n_routed_experts 8", "n_group 3"]),
    "groups of one": ("deepseek_v3", {"n_group": 8, "topk_group": 4}, ["n_group 8", "needs two"]),
    "groups too few": ("deepseek_v3", {"topk_group": 1}, ["num_experts_per_tok 3", "topk_group 1"]),
    "keys for fewer heads": ("deepseek_v3", {"num_key_value_heads": 2}, ["num_key_value_heads 2", "every head"]),
    "bias": ("deepseek_v2", {"attention_bias": True}, ["attention_bias True", "--model_impl hf"]),
    "odd rope": ("deepseek_v3", {"qk_rope_head_dim": 7}, ["qk_rope_head_dim 7 is odd"]),
    "yarn without factor": ("deepseek_v3", {"rope_scaling": {"type": "yarn"}}, ["'yarn'", "'factor'"]),
}


@pytest.mark.parametrize("case", BAD_MIXTURES)
def test_bad_mixtures_are_refused_by_file_and_key(case):
    family, changes, expected = BAD_MIXTURES[case]
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf({**MIXTURES[family], **changes}, "--model (x/config.json)")
    for text in ["--model (x/config.json)", *expected]:
        assert text in str(caught.value)


def test_layers_that_are_no_mixtures():
    def dense(family: str, **changes) -> tuple[int, ...]:
        return ModelConfig.from_hf({**MIXTURES[family], **changes}).moe.dense_layers

    assert dense("qwen3_moe") == () and dense("qwen2_moe") == (1,)
    assert dense("qwen3_moe", decoder_sparse_step=2) == (0, 2)
    assert dense("qwen3_moe", decoder_sparse_step=2, mlp_only_layers=[1]) == (0, 1, 2)
    assert dense("deepseek_v3") == (0,) and dense("deepseek_v3", first_k_dense_replace=5) == (0, 1, 2)


def test_the_number_of_experts_has_the_name_that_transformers_5_writes_too():
    values = {k: v for k, v in MIXTURES["qwen3_moe"].items() if k != "num_experts"}
    assert ModelConfig.from_hf({**values, "num_local_experts": 5}).moe.experts == 5


@pytest.mark.parametrize("case", BAD)
def test_bad_configs_are_refused_by_file_and_key(case):
    changes, expected = BAD[case]
    values = {k: v for k, v in {**LLAMA, **changes}.items() if v is not ...}
    with pytest.raises(UserError) as caught:
        ModelConfig.from_hf(values, "--model (x/config.json)")
    for text in ["--model (x/config.json)", *expected]:
        assert text in str(caught.value)


def test_every_shipped_shape_is_read_and_described():
    names = dict(list_models())
    assert {"quickstart", "llama-100m", "llama2-470m", "llama2-1b", "smollm2-135m", "qwen2.5-7b"} <= names.keys()
    assert all(names.values())
    for name in names:
        read_model_source(name).model_config()
