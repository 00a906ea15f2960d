"""The plan: the design's FLOPs, the shortest time at dense peaks, memory, and what is printed."""

import dataclasses
import math
import re

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.core.hardware.datasheets import DATASHEET
from qtrain.core.hardware.device import Hardware
from qtrain.models import Decoder, Lora, ModelConfig, add_lora, list_models, read_model_source
from qtrain.models.cost.parameters import count_parameters
from qtrain.models.cost.trained import TrainedPart
from qtrain.optim import OPTIMIZERS, ParameterShape
from qtrain.parallel.mesh import Mesh
from qtrain.quant import LinearChoice, Scheme, choose_linears, quantize_linears
from qtrain.quant.schemes.frozen_base import base_scheme
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.assembly.assemble import freeze_embedding, trained_part
from qtrain.train.plan.checked_settings import CheckedSettings, check_settings
from qtrain.train.plan.language_plan import plan_language_run
from qtrain.train.plan.language_run import LanguageRun
from qtrain.train.plan.plan import Plan
from qtrain.train.plan.step_time import offload_seconds
from qtrain.train.settings.settings import LanguageSettings

H200 = Hardware("NVIDIA H200", DATASHEET["H200"].peaks, 141 * 10**9, measured=False)

SMALL = {"vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2}


def checked_of(settings: LanguageSettings, scheme: Scheme | None = None, dtype=torch.bfloat16) -> CheckedSettings:
    return dataclasses.replace(check_settings(settings, "test", scheme), dtype=dtype)


def linears_of(checked: CheckedSettings, config: ModelConfig) -> list[LinearChoice]:
    with torch.device("meta"):
        model = Decoder(config)
    return choose_linears(
        model,
        checked.scheme,
        head=model.lm_head,
        device=torch.device("cpu"),
        quantize_head=checked.settings.quantize_lm_head,
        min_size=checked.settings.quantize_min_size,
    )


def plan_for(
    checked: CheckedSettings, config: ModelConfig, trained: TrainedPart | None = None, hardware: Hardware = H200
) -> Plan:
    linears = linears_of(checked, config)
    return plan_language_run(checked, config, linears, hardware, trained)


def plan_of(model: str = "qwen2.5-0.5b", hardware: Hardware = H200, dtype=torch.bfloat16, **changes) -> Plan:
    settings = dataclasses.replace(
        LanguageSettings(model=model, quantize="int8", seq_len=1024, batch_size=16, n_steps=10), **changes
    )
    return plan_for(checked_of(settings, dtype=dtype), read_model_source(model).model_config(), hardware=hardware)


def by_hand(config: ModelConfig, seq_len: int) -> dict[str, float]:
    """FLOPs a token of the design: blocks 6LC(3I + C + QKV), head 6VC, attention 6LCS, C the width of the heads."""
    layers, c = config.num_hidden_layers, config.hidden_size
    return {
        "blocks": 6 * layers * c * (3 * config.intermediate_size + c + config.qkv_size),
        "head": 6 * config.vocab_size * c,
        "attention": 6 * layers * c * seq_len,
    }


SHAPES = {name: read_model_source(name).model_config() for name, _ in list_models()}


@pytest.mark.parametrize("name", [name for name, config in SHAPES.items() if config.moe is None])
def test_the_work_is_the_designs_formula(name):
    found, config = plan_of(name), SHAPES[name]
    assert config.q_size == config.hidden_size
    assert found.flops == by_hand(config, 1024)


def test_a_teacher_adds_its_weights_its_forward_pass_and_its_logits():
    """A larger one, in high precision beside an INT8 student."""
    config, teacher = SHAPES["qwen2.5-0.5b"], SHAPES["qwen2.5-1.5b"]
    checked = checked_of(LanguageSettings(quantize="int8", seq_len=1024, batch_size=16, n_steps=10, loss_chunks=2))
    linears = linears_of(checked, config)
    alone, taught = (plan_language_run(checked, config, linears, H200, None, t) for t in (None, teacher))
    assert taught.flops == {**alone.flops, "teacher": pytest.approx(sum(by_hand(teacher, 1024).values()) / 3)}
    assert taught.seconds["teacher"] == pytest.approx(taught.flops["teacher"] / (H200.peak("bf16") * 1e12))
    assert taught.step_seconds > alone.step_seconds
    memory, with_teacher = (LanguageRun(checked, config, linears, None, t).memory() for t in (None, teacher))
    assert with_teacher.weights - memory.weights == 2 * count_parameters(teacher).total
    # What its layers end with, and a chunk of its logits.
    assert with_teacher.loss - memory.loss == 2 * (16 * 1024 * teacher.hidden_size + 8 * 1024 * teacher.vocab_size)
    assert with_teacher.moments["the teacher's forward pass"]["activations"] == 0


def test_a_mixtures_work_is_that_of_the_experts_that_a_token_uses():
    """Qwen3-30B-A3B: 48 layers, width 2048, 8 experts of 768 a token, heads of 4096 elements together."""
    found = plan_of("qwen3-30b-a3b")
    assert found.flops == {
        "blocks": 6 * 48 * 2048 * (5120 + 4096 + 8 * 3 * 768),
        "head": 6 * 151936 * 2048,
        "attention": 6 * 48 * 4096 * 1024,
    }
    assert "30.5B parameters, 3.35B of them active" in found.lines()[0]


def test_latent_attention_works_on_wider_keys_than_values():
    found = plan_of("deepseek-v2-lite")
    assert found.flops["attention"] == 3 * 27 * 16 * (192 + 128) * 1024


@pytest.mark.parametrize(
    ("name", "ceiling"), [("qwen2.5-0.5b", 489e3), ("qwen2.5-1.5b", 177e3), ("qwen2.5-3b", 93e3), ("qwen2.5-7b", 42e3)]
)
def test_the_shortest_time_is_the_ceiling_by_datasheet(name, ceiling):
    """Eight-bit blocks, head and attention in bf16: ceilings computed independently, to two or three digits."""
    found = plan_of(name)
    assert 1 / sum(found.seconds.values()) == pytest.approx(ceiling, rel=0.015)
    at_ceiling = found.efficiency(1 / sum(found.seconds.values()))
    assert at_ceiling["sol"] == pytest.approx(1) and at_ceiling["mfu"] > 1  # more than bf16 alone could do
    assert found.efficiency(1000.0)["mfu"] == pytest.approx(1000 * sum(found.flops.values()) / 989.4e12)
    timed = dataclasses.replace(found, hardware=dataclasses.replace(found.hardware, measured=True))
    assert timed.efficiency(1000.0) == {"sol": found.efficiency(1000.0)["sol"], "mfu": None}
    assert "mfu is left out" in "\n".join(timed.lines()) and "mfu" not in "\n".join(found.lines())


def test_each_kind_of_work_runs_at_the_rate_of_its_arithmetic():
    flops = plan_of().flops
    bf16, int8 = 989.4e12, 1978.9e12
    assert plan_of().seconds == pytest.approx(
        {"blocks": flops["blocks"] / int8, "head": flops["head"] / bf16, "attention": flops["attention"] / bf16}
    )
    assert plan_of(quantize_lm_head=True).seconds["head"] == pytest.approx(flops["head"] / int8)
    assert plan_of(quantize="bf16").seconds["blocks"] == pytest.approx(flops["blocks"] / bf16)
    two_of_three = plan_of(quantize_kwargs={"grad_weight": "bf16"}).seconds["blocks"]
    assert two_of_three == pytest.approx(flops["blocks"] / 3 * (2 / int8 + 1 / bf16))
    in_fp32 = plan_of(quantize="bf16", dtype=torch.float32).seconds
    assert in_fp32["head"] == pytest.approx(flops["head"] / 66.9e12)
    assert in_fp32["blocks"] == pytest.approx(flops["blocks"] / 66.9e12)


def test_arithmetic_that_the_device_lacks_is_counted_at_the_rate_of_its_emulation_and_reported():
    """INT4 codes run on INT8 tensor cores: no emulation. MX on Hopper is bf16, and the plan says so."""
    assert plan_of(quantize="int4").seconds == plan_of(quantize="int8").seconds
    assert plan_of(quantize="mxfp8").seconds == pytest.approx(plan_of(quantize="bf16").seconds)
    assert "no mxfp8 arithmetic: emulated" in "\n".join(plan_of(quantize="mxfp8").lines())
    blackwell = Hardware("NVIDIA B200", DATASHEET["B200"].peaks, 180 * 10**9, measured=False)
    assert plan_of(quantize="mxfp8", hardware=blackwell).seconds["blocks"] < plan_of(quantize="int8").seconds["blocks"]
    mixture = plan_of("qwen3-30b-a3b", quantize="mxfp8", hardware=blackwell)
    assert "no grouped mxfp8 arithmetic: emulated" in "\n".join(mixture.lines())
    dense_rate = plan_of("qwen3-30b-a3b", quantize="int8", hardware=blackwell).seconds["blocks"]
    assert mixture.seconds["blocks"] > dense_rate, "of these FLOPs, most are experts'"
    for name, hardware in (("mxfp8", blackwell), ("int4", H200), ("fp8_rowwise", H200), ("bf16", H200)):
        assert "emulated" not in "\n".join(plan_of(quantize=name, hardware=hardware).lines())


def test_memory_of_activations_is_what_the_scheme_keeps():
    """A scheme whose grad_weight is in bf16 keeps the inputs themselves, as plain linears do, and no other tensor."""
    plain = plan_of(quantize="bf16", micro_batch_size=16).memory["activations"]
    assert plan_of(quantize="switchback", micro_batch_size=16).memory["activations"] == plain
    assert plan_of(quantize="int8", micro_batch_size=16).memory["activations"] < plain
    kinds = ("rowwise", "tensorwise", "blockwise")
    rowwise, tensor, blocks = (plan_of(quantize=f"fp8_{kind}").memory["activations"] for kind in kinds)
    assert tensor < blocks < 1.01 * tensor
    assert rowwise < 0.95 * tensor  # a gated MLP makes the input of its second linear again


def test_memory_of_weights_is_what_the_scheme_stores():
    """INT8: one byte per weight, or two with the transposed codes; gradients stay in the model's dtype."""
    parameters = count_parameters(read_model_source("qwen2.5-0.5b").model_config())
    plain = plan_of(quantize="bf16").memory["weights"]

    def weights(scheme: str, **options) -> int:
        found = plan_of(quantize=scheme, quantize_kwargs=options).memory
        assert found["gradients"] == plan_of(quantize="bf16").memory["gradients"]
        return found["weights"]

    assert weights("int8_weight") == plain - parameters.linear
    assert weights("int8_weight", activations="int8") == plain
    assert weights("int4_weight") == pytest.approx(plain - (2 - 0.53125) * parameters.linear, abs=1)
    assert weights("int8") == plain + 2 * parameters.linear
    assert weights("bitnet") == pytest.approx(plain + parameters.linear, rel=1e-3)  # and its norms


def test_a_plan_for_bitnets_norms_refuses_what_could_not_be_exported():
    with pytest.raises(UserError, match="QK-norm"):
        config = ModelConfig.from_hf({"model_type": "qwen3", **SMALL})
        plan_for(checked_of(LanguageSettings(quantize="bitnet", batch_size=1)), config)


def test_with_the_optimizer_in_backward_gradients_are_those_of_the_largest_partition():
    def gradients(model: str) -> int:
        settings = LanguageSettings(model=model, batch_size=1, clip_grad_norm=0, optimizer_in_backward=True)
        checked, config = checked_of(settings), SHAPES[model]
        return LanguageRun(checked, config, linears_of(checked, config), None).memory().gradients

    shape = read_model_source("qwen2.5-7b").model_config()
    assert not shape.tie_word_embeddings and gradients("qwen2.5-7b") == 2 * shape.vocab_size * shape.hidden_size
    tied = read_model_source("qwen2.5-0.5b").model_config()
    counted = count_parameters(tied)
    layer = (counted.linear + counted.other) // tied.num_hidden_layers
    assert tied.tie_word_embeddings
    assert gradients("qwen2.5-0.5b") == pytest.approx(2 * (counted.embedding + layer), rel=1e-4)


def test_of_layers_that_are_divided_no_sums_of_gradients_are_kept_then():
    """Fully sharded over two GPUs: what remains are the gradients outside of layers, and those of the layers in
    flight."""

    def gradients(in_backward: bool) -> int:
        chosen = {"batch_size": 1, "clip_grad_norm": 0, "activation_checkpointing": "full"}
        checked = checked_of(LanguageSettings(model="qwen2.5-7b", optimizer_in_backward=in_backward, **chosen))
        checked = dataclasses.replace(checked, mesh=Mesh(1, 2), reshards=True)
        return LanguageRun(checked, shape, linears_of(checked, shape), None).memory().gradients

    shape = read_model_source("qwen2.5-7b").model_config()
    assert gradients(False) - gradients(True) == 4 * count_parameters(shape).total // 2


def test_seven_billion_parameters_train_in_24_gb():
    """INT8 weights, Q-GaLore, one layer's gradients at a time; with all gradients at once it is more."""
    chosen = {"quantize": "int8_weight", "optim": "q_galore_adamw", "batch_size": 1, "clip_grad_norm": 0}
    chosen["activation_checkpointing"] = "full"
    assert sum(plan_of("qwen2.5-7b", **chosen).memory.values()) > 24e9
    plan = plan_of("qwen2.5-7b", optimizer_in_backward=True, **chosen)
    assert sum(plan.memory.values()) < 16.5e9 and "initialization" not in plan.memory


# ---- what does not train ---------------------------------------------------------------------------------------------

SHAPE = {**SMALL, "model_type": "qwen2", "vocab_size": 96, "intermediate_size": 128, "num_hidden_layers": 2}
PARTS = {
    "all but the embedding, the head apart": ({"tie_word_embeddings": False}, None),
    "all but the embedding, the head the same": ({"tie_word_embeddings": True}, None),
    "LoRA": ({}, Lora(r=4)),
    "LoRA on some": ({}, Lora(r=8, targets=("q_proj", "down_proj"))),
    "DoRA": ({}, Lora(r=4, dora=True)),
    "QLoRA, nf4": ({}, Lora(r=4, base="nf4")),
    "QLoRA, int8": ({}, Lora(r=4, base="int8")),
}


@pytest.mark.parametrize("part", PARTS)
def test_planned_bytes_with_frozen_weights_are_those_of_the_model(part):
    """Weights, gradients and states of a plan against a real model's after a step, without row scales and counters."""
    changes, lora = PARTS[part]
    config = ModelConfig.from_hf({**SHAPE, **changes})
    scheme = None if lora is None or lora.base == "none" else base_scheme(lora.base, "bf16")
    trained = trained_part(config, lora, lora is None, torch.bfloat16)
    checked = checked_of(LanguageSettings(batch_size=1, seq_len=8), scheme)
    plan = plan_for(checked, config, trained)

    model = Decoder(config).to(torch.bfloat16)
    quantize_linears(model, checked.scheme, seed=0, head=model.lm_head)
    if lora is None:
        freeze_embedding(model)
    else:
        add_lora(model, lora, seed=0)
    ids = torch.randint(0, 96, (1, 9))
    model(ids[:, :-1], ids[:, 1:].contiguous()).loss.backward()
    held = [t for p in model.parameters() for t in (p.inner.values() if isinstance(p, StoredWeight) else [p])]
    held += [t for name, t in model.named_buffers() if "squares" in name or ("weight_codes" in name and t.ndim == 2)]
    rows = [t for name, t in model.state_dict(keep_vars=True).items() if isinstance(t, StoredWeight)]
    scales = {id(t.scale): t.scale.nbytes for t in rows if t.scale.ndim == 1}
    trains = [p for p in model.parameters() if p.requires_grad]
    assert plan.memory["weights"] == sum({id(t): t.nbytes for t in held if id(t) not in scales}.values())
    moments = LanguageRun(checked, config, linears_of(checked, config), trained).memory().moments
    assert moments["the optimizer's step"]["gradients"] == sum(p.grad.nbytes for p in trains)
    states = checked.optimizer.state_bytes([ParameterShape(tuple(p.shape)) for p in trains], trains[0].itemsize)
    assert plan.memory["optimizer"] == round(states)
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_a_head_comes_from_the_host_while_the_last_layer_runs():
    """14B with adapters on NF4, two sequences of 4,096 tokens, on an H200 on 2026-11-27: of 14.89 GiB the head had
    1.45, and gate_up's output without and with its adapters 0.84."""
    config = read_model_source("qwen2.5-14b").model_config()
    settings = LanguageSettings(
        batch_size=4, micro_batch_size=2, seq_len=4096, compile=True, recompute=("norm", "qkv", "ffn"), loss_chunks=16
    )
    checked = checked_of(settings, base_scheme("nf4", "bf16"))
    checked = dataclasses.replace(checked, reshards=True, offload=frozenset({"weights"}))
    trained = trained_part(config, Lora(base="nf4"), False, torch.bfloat16)
    peak = LanguageRun(checked, config, linears_of(checked, config), trained).memory().at_peak
    assert peak.moment == "the last layer's forward pass"
    assert peak.total == pytest.approx(14.89 * 2**30, rel=0.02)


def test_offloaded_states_count_with_their_staging_buffers():
    """Three of at most 256 MiB, for states of 28 GiB of which the embedding's alone are 2."""
    config = read_model_source("qwen2.5-7b").model_config()
    settings = LanguageSettings(model="qwen2.5-7b", seq_len=1024, batch_size=16, optim_kwargs={"offload": True})
    on_cpu = checked_of(settings)
    assert plan_for(on_cpu, config).memory["optimizer"] > 28e9  # there they are in its memory anyway
    assert on_cpu.notes == ("note    --optim_kwargs.offload: has no effect on a CPU, whose memory is the host's",)
    on_gpu = dataclasses.replace(on_cpu, optimizer=OPTIMIZERS.make("adamw", {"offload": True}, ""))
    plan = plan_for(on_gpu, config)
    assert 0.9 * 3 * 2**28 < plan.memory["optimizer"] <= 3 * 2**28


HOST = dataclasses.replace(H200, host_bandwidth=5e10)


def test_each_name_of_offload_moves_its_bytes():
    """From the device to the host; m and v in bf16, the master in fp32, layers' inputs."""
    config = read_model_source("qwen2.5-0.5b").model_config()
    settings = LanguageSettings(
        model="qwen2.5-0.5b", seq_len=1024, batch_size=16, micro_batch_size=8, optim_kwargs={"master": "fp32"}
    )
    checked = checked_of(settings)
    whole, size = plan_for(checked, config, hardware=HOST), count_parameters(config).total
    assert whole.host == {} and whole.memory["optimizer"] == 8 * size

    def moved(*names: str, **changes) -> Plan:
        chosen = dataclasses.replace(checked, offload=frozenset(names), optimizer=checked.optimizer.with_offload(names))
        chosen = dataclasses.replace(chosen, settings=dataclasses.replace(checked.settings, **changes))
        return plan_for(chosen, config, hardware=HOST)

    for name, element in (("m", 2), ("v", 2), ("master", 4)):
        plan = moved(name)
        assert plan.host == {name: element * size}
        staged = plan.memory["optimizer"] - (8 - element) * size
        assert 0.8 * 3 * 2**28 < staged <= 3 * 2**28
        # They cross the link, where the optimizer's step read and wrote them in the device's memory.
        saved = 2 * (element * size - staged) / (0.88 * HOST.memory_bandwidth)
        assert plan.step_seconds - whole.step_seconds == pytest.approx(element * size / 5e10 - saved)
    assert moved("m", "v", "master").host == {"m": 2 * size, "v": 2 * size, "master": 4 * size}
    residuals = 8 * 1024 * config.hidden_size * 2 * (config.num_hidden_layers - 1)
    for mode in ("none", "full"):
        on_device, on_host = moved(activation_checkpointing=mode), moved("residuals", activation_checkpointing=mode)
        assert on_host.host == {"residuals": residuals}
        assert on_device.memory["activations"] - on_host.memory["activations"] == residuals
        # In memory only, for the link carries them while the layers run.
        assert 0 < on_host.step_seconds / on_device.step_seconds - 1 < 0.01
    text = "\n".join(moved("m", "residuals").lines())
    assert f"{(2 * size + residuals) / 2**30:.2f} GiB of pinned host memory: m {2 * size / 2**30:.2f}, resid" in text


def test_a_step_waits_for_residuals_that_take_longer_than_the_layers():
    host = {"m": 3, "residuals": 40}
    # 12 seconds of 2 micro-batches are 2 forward and 4 backward each, with recomputation 1.5 and 4.5; 4 on the link
    assert offload_seconds(host, 10.0, 2, 4, 2) == pytest.approx(0.3 + 2 * 2)
    assert offload_seconds(host, 10.0, 1.5, 4.5, 2) == pytest.approx(0.3 + 2 * 2.5)
    assert offload_seconds(host, 100.0, 1.5, 4.5, 2) == pytest.approx(0.03)
    # Weights come in both passes: beside what leaves in the one, before what comes in the other
    assert offload_seconds({"weights": 30, "residuals": 40}, 10.0, 2, 4, 2) == pytest.approx(2 * (2 + 3))
    assert offload_seconds({"weights": 50}, 10.0, 2, 4, 2) == pytest.approx(2 * (3 + 1))
    # Sums of gradients go out in every backward pass and come in all but the first; both cross at the step once more
    host = {"weights": 30, "gradients": 60, "m": 5}
    assert offload_seconds(host, 10.0, 2, 4, 1) == pytest.approx(9.5 + 1 + 2)
    assert offload_seconds(host, 10.0, 2, 4, 3) == pytest.approx(9.5 + 3 * 1 + 2 + 2 * 5)


def test_a_frozen_linear_has_two_gemms_of_three_and_its_adapters_all_three():
    """In the plan's FLOPs; and the dtype of the missing grad_weight does not affect the time."""
    config = read_model_source("qwen2.5-0.5b").model_config()
    lora, whole = Lora(r=16), plan_of(quantize="switchback")
    settings = LanguageSettings(model="qwen2.5-0.5b", quantize="switchback", seq_len=1024, batch_size=16)
    trained = trained_part(config, lora, False, torch.bfloat16)
    plan = plan_for(checked_of(settings), config, trained)
    assert plan.flops["blocks"] == pytest.approx(whole.flops["blocks"] * 2 / 3)
    assert plan.flops["attention"] == whole.flops["attention"]
    assert plan.seconds["blocks"] == pytest.approx(plan.flops["blocks"] / 1978.9e12)
    parameters = sum(math.prod(shape) * count for shape, count, *_ in trained.shapes)
    assert plan.flops["adapters"] == 6 * parameters
    assert "adapters" in "\n".join(plan.lines())


def test_the_printed_plan():
    found = dataclasses.replace(plan_of(micro_batch_size=4, n_steps=2000), data=("tokens of something",))
    text = "\n".join(found.lines())
    for part in (
        "qwen2.5-0.5b, 494M parameters, linears in int8",
        "tokens of something",
        "16 sequences (4 x 4 accumulated x 1 device), 16,384 tokens",
        "2,000, 32.8M tokens",
        "NVIDIA H200, datasheet TFLOP/s: bf16 989",
        "of 131.3 GiB, most at the loss: weights ",
        "at the speed of light",
    ):
        assert part in text, part
    assert "does not fit" not in text
    assert found.settings_in_force(LanguageSettings(batch_size=16)).gradient_accumulation == 4


def time_of(**changes) -> str:
    return next(line for line in plan_of(batch_size=32, n_steps=1000, **changes).lines() if line.startswith("time"))


def test_the_time_of_a_run_is_that_of_measured_ones():
    """0.165 s a step of `int8` with a low-bit head on an H200 (docs/results/train_steps.json), planned to 10%."""
    text = time_of(compile=True, quantize_lm_head=True)
    figures = re.search(r"; (\d)m (\d\d)s at (\d\d)% of it \((\d+)k tok/s; measured", text).groups()
    minutes, seconds, share, rate = map(int, figures)
    assert 60 * minutes + seconds == pytest.approx(165, rel=0.1)
    assert rate == pytest.approx(198.7, rel=0.1) and share == pytest.approx(33, abs=3)
    assert text.endswith("; measured on one H200, Qwen2.5 of 0.5B to 7B in fp8_tensorwise)")
    other = dataclasses.replace(H200, name="NVIDIA H100 80GB HBM3")
    assert time_of(compile=True, hardware=other).endswith("; assumed of NVIDIA H100 80GB HBM3)")


@pytest.mark.parametrize(
    "changes",
    [{"compile": False}, {"compile": True, "quantize": "nvfp4"}, {"compile": True, "hardware": "measured"}],
    ids=str,
)
def test_the_time_of_a_run_unlike_measured_ones(changes):
    """Not compiled, emulated, or on a device without a datasheet."""
    if "hardware" in changes:
        changes = {**changes, "hardware": dataclasses.replace(H200, measured=True)}
    assert "measured on" not in (text := time_of(**changes)) and text.endswith("s at half of it")


def test_a_plan_that_does_not_fit_says_so_and_what_helps():
    text = "\n".join(plan_of("qwen2.5-7b", batch_size=256).lines())
    assert "warning: this does not fit" in text
    assert sum(plan_of("qwen2.5-7b", batch_size=256).memory.values()) > 141e9


def test_memory_shrinks_with_each_flag_that_saves_it():
    whole = sum(plan_of().memory.values())
    for changes in ({"micro_batch_size": 4}, {"activation_checkpointing": "full"}, {"seq_len": 512}):
        assert sum(plan_of(**changes).memory.values()) < whole, changes


def test_a_transformers_only_model_has_a_plan_without_figures():
    checked = checked_of(LanguageSettings(model="gpt2", model_impl="hf"))
    found = plan_language_run(checked, None, [], H200)
    assert found.efficiency(1000.0) == {"sol": None, "mfu": None} and found.parameters is None
    text = "\n".join(found.lines())
    assert "gpt2, linears in bf16" in text and "memory" not in text and "speed of light" not in text


@pytest.mark.parametrize("model", ["qwen2.5-0.5b", "qwen3-30b-a3b"])
@pytest.mark.parametrize("recompute", ["none", "selective"])
def test_a_plan_of_layers_that_differ_is_the_sum_over_layers(model, recompute):
    """Every second layer in another scheme: halfway between plans in which all layers have it and none has."""
    layers = read_model_source(model).model_config().num_hidden_layers
    every_second = {f"layers.{i}.*": "bf16" for i in range(0, layers, 2)}
    options = {"activation_checkpointing": recompute, "micro_batch_size": 8, "batch_size": 8}
    one, other = (plan_of(model, quantize=scheme, **options) for scheme in ("int8", "bf16"))
    mixed = plan_of(model, quantize="int8", quantize_overrides=every_second, **options)
    assert mixed.moment == one.moment == other.moment
    largest = ["temporaries"] + ["activations"] * (mixed.moment == "the end of backward")  # of one layer
    for kind in mixed.memory:
        sizes = one.memory[kind], other.memory[kind]
        expected = max(sizes) if kind in largest else sum(sizes) / 2
        assert mixed.memory[kind] == pytest.approx(expected, abs=2), kind
    assert mixed.seconds["blocks"] == pytest.approx((one.seconds["blocks"] + other.seconds["blocks"]) / 2)
    assert mixed.step_seconds == pytest.approx((one.step_seconds + other.step_seconds) / 2, rel=0.02)


def test_a_plan_says_that_a_gpu_cannot_run_a_named_scheme():
    chosen = {"quantize": "int8", "quantize_overrides": {"*.qkv": "fp8_rowwise"}, "dry_run": True}
    with pytest.raises(UserError, match=r"has no FP8 arithmetic, which fp8_rowwise \(--quantize_overrides\) needs"):
        checked_of(LanguageSettings(batch_size=1, gpu="a100", **chosen))
