"""A model is built matrix by matrix: what is stored in low bits is never whole in high precision, and its values are
those of a model that was."""

import pytest
import torch
from torch import Tensor, nn

from qtrain.kernels.quantize import nf4
from qtrain.models import Lora, ModelSource, add_lora, build_model, export_hf, read_model_source
from qtrain.models.cost.parameters import count_parameters
from qtrain.models.cost.trained import only_adapters
from qtrain.quant import SCHEMES, quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.tensors.lazy import plain_tensors
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.settings.settings import LanguageSettings
from tests.models.families import source_of
from tests.peak_bytes import PeakBytes
from tests.train.plan.test_plan import checked_of, linears_of

SHAPE = {"model_type": "qwen2", "vocab_size": 256, "hidden_size": 128, "intermediate_size": 256}
SHAPE |= {"num_hidden_layers": 20, "num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
MATRIX = 2 * SHAPE["intermediate_size"] * SHAPE["hidden_size"]
"""Elements of the largest."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory) -> dict[bool, ModelSource]:
    """By whether weights are loaded."""
    drawn, folder = ModelSource("many layers", SHAPE, "--model"), tmp_path_factory.mktemp("weights") / "hf"
    export_hf(build_model(drawn, dtype=torch.bfloat16), drawn, folder)
    return {False: drawn, True: read_model_source(str(folder))}


def built(source: ModelSource, scheme: str, base: str, lazy: bool, *, dora: bool = False, **options) -> nn.Module:
    """A model that is quantized, or whose frozen base is."""
    chosen = SCHEMES.make(scheme, {}, "-") if base == "none" else base_scheme(base, scheme)
    model = build_model(source, dtype=torch.bfloat16, lazy=lazy, **options)
    quantize_linears(model, chosen, seed=3, head=model.lm_head, quantize_head=scheme == "int4_weight")
    if base != "none":
        add_lora(model, Lora(r=1, base=base, dora=dora), seed=0)
    return model


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """All that a model consists of, codes among it."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {f"{name} {i}": t for name, value in named for i, t in enumerate(plain_tensors(value))}


CASES = [("bf16", "none"), ("int8", "none"), ("int8_weight", "none"), ("int4_weight", "none")]
CASES += [("bf16", base) for base in ("nf4", "int8", "fp8")]


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize(("scheme", "base"), CASES)
def test_a_build_takes_the_model_and_one_matrix(scheme, base, pretrained, sources, monkeypatch):
    """At its peak, as the plan says but for scales and adapters: far less than all weights in bf16 where those are
    stored in fewer bits."""
    monkeypatch.setattr(nf4, "AT_ONCE", MATRIX // 8)  # as of a large matrix
    options = {"quantize": scheme, "pretrained": pretrained, "quantize_lm_head": scheme == "int4_weight"}
    checked = checked_of(LanguageSettings(**options), None if base == "none" else base_scheme(base, scheme))
    config = sources[False].model_config()
    trained = None if base == "none" else only_adapters(config, Lora(r=1, base=base))
    planned = sum(LanguageRun(checked, config, linears_of(checked, config), trained).memory().build.values())
    with PeakBytes() as counted:
        model = built(sources[pretrained], scheme, base, lazy=True, pretrained=pretrained)
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_of(model).values()}
    assert counted.peak < sum(storages.values()) + 6 * MATRIX
    assert 0.9 * planned < counted.peak < 1.05 * planned
    if "weight" in scheme or base == "nf4":
        assert counted.peak < 0.6 * 2 * count_parameters(config).total


@pytest.mark.parametrize("pretrained", [False, True])
@pytest.mark.parametrize(("scheme", "base"), CASES)
def test_values_are_those_of_a_model_built_in_full(scheme, base, pretrained, sources):
    source, options = sources[pretrained], {"pretrained": pretrained, "dora": True}
    whole, lazy = (tensors_of(built(source, scheme, base, lazy=x, **options)) for x in (False, True))
    assert whole.keys() == lazy.keys()
    assert all(torch.equal(t, lazy[name]) for name, t in whole.items())


@pytest.mark.parametrize("scheme", ["int8", "int8_weight"])
@pytest.mark.parametrize("family", ["llama3", "mixtral"])
def test_tied_embeddings_routers_and_experts_get_their_values_too(family, scheme):
    source = source_of(family)
    whole, lazy = (tensors_of(built(source, scheme, "none", lazy=x, seed=1)) for x in (False, True))
    assert all(torch.equal(t, lazy[name]) for name, t in whole.items())
    assert all(t.untyped_storage().nbytes() for t in lazy.values())
