"""Which flags are advised where memory has run out, in which order, and that none of them would be refused."""

from dataclasses import replace

import pytest

from qtrain.train.plan.memory_advice import memory_advice
from qtrain.train.settings.settings import LanguageSettings, TrainSettings, VisionSettings


def in_force(**settings) -> LanguageSettings:
    """One sequence a step, unless sizes are given."""
    sizes = {"batch_size": 1, "micro_batch_size": 1, "gradient_accumulation": 1}
    return LanguageSettings(**{**sizes, "device": "cpu", **settings})


def flags(settings: TrainSettings) -> list[str]:
    return [line.split(" (")[0] for line in memory_advice(settings)]


def test_advice_to_keep_8_bits_goes_with_what_is_recomputed():
    def advised(**settings) -> bool:
        return any("--keep_8bit" in line for line in flags(in_force(**settings)))

    assert advised() and advised(recompute=("swiglu",)) and advised(activation_checkpointing="selective", compile=True)
    assert not advised(activation_checkpointing="selective") and not advised(recompute=("ffn",), compile=True)
    assert not advised(activation_checkpointing="full") and not advised(model_impl="hf")
    assert not advised(keep_8bit=("gate_up",))


@pytest.mark.parametrize(
    ("settings", "advised"),
    [
        ({}, True),
        ({"optim": "muon"}, True),
        ({"deterministic": True}, False),
        ({"batch_size": 2, "gradient_accumulation": 2}, False),
        ({"optim": "q_galore_adamw", "optimizer_in_backward": True, "clip_grad_norm": 0.0}, False),
        ({"optim": "torch.AdamW"}, False),
        ({"tp": 2, "gpus": 2}, False),
        ({"ep": 2, "gpus": 2, "batch_size": 2}, False),
    ],
)
def test_the_optimizer_in_backward_is_advised_where_it_is_allowed(settings, advised):
    found = flags(in_force(**settings))
    assert ("--optimizer_in_backward --clip_grad_norm 0" in found) is advised


def test_advice_adds_kinds_to_those_that_are_recomputed():
    def recomputed(*kinds: str) -> list[str]:
        found = flags(in_force(recompute=kinds))
        return [line for line in found if line.startswith(("--recompute", "--activation_checkpointing"))]

    block = """--recompute '["block"]'"""
    assert recomputed("norm") == [
        """--recompute '["norm","swiglu"]'""",
        """--recompute '["norm","ffn"]'""",
        block,
    ]
    assert recomputed("norm", "swiglu", "ffn") == [block] and recomputed("block") == []
    assert recomputed() == ["--activation_checkpointing selective", "--activation_checkpointing full"]
    kept = flags(in_force(recompute=("swiglu",), keep_8bit=("gate_up",)))
    assert not any(line.startswith("--recompute") for line in kept), "all others compute it again"


def test_advice_comes_in_order_and_keeps_the_batch():
    settings = in_force(
        batch_size=24, micro_batch_size=12, gradient_accumulation=2, loss_chunks=1, seq_len=1024, keep_8bit=("gate_up",)
    )
    assert flags(settings) == [
        "--micro_batch_size 6 --gradient_accumulation 4",
        "--loss_chunks 4",
        "--optim adamw_8bit",
        "--seq_len 512",
    ]
    assert flags(replace(settings, keep_8bit=(), model_impl="hf", loss_chunks=64, seq_len=128)) == [
        "--micro_batch_size 6 --gradient_accumulation 4",
        "--activation_checkpointing selective",
        "--activation_checkpointing full",
        "--optim adamw_8bit",
    ]


@pytest.mark.parametrize("micro", [2, 3, 9, 15, 16])
def test_an_advised_micro_batch_divides_the_present_one(micro):
    line = flags(in_force(batch_size=micro * 5, micro_batch_size=micro, gradient_accumulation=5))[0]
    smaller, accumulation = int(line.split()[1]), int(line.split()[3])
    assert smaller < micro and smaller * accumulation == micro * 5


def test_settings_at_their_limit_are_not_advised():
    at_limit = in_force(
        activation_checkpointing="full", loss_chunks=64, optim="adamw_8bit", seq_len=128, deterministic=True
    )
    assert memory_advice(at_limit) == []
    assert memory_advice(replace(at_limit, optim="adamw", optim_kwargs={"offload": True})) == []


def test_vision_models_have_fewer_flags():
    settings = VisionSettings(batch_size=4, micro_batch_size=4, gradient_accumulation=1, device="cpu")
    assert flags(settings) == [
        "--micro_batch_size 2 --gradient_accumulation 2",
        "--activation_checkpointing selective",
        "--activation_checkpointing full",
        "--optimizer_in_backward --clip_grad_norm 0",
        "--optim adamw_8bit",
    ]
