"""The optimizer in the backward pass: the ordinary step bit for bit, with one partition's gradients at a time."""

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

import llm_pretrain
from qtrain.core.errors import UserError
from qtrain.data.batch import Batch
from qtrain.models import RECOMPUTE_SETS, ModelSource, apply_recompute, build_model, compile_layers
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.mesh import Mesh
from qtrain.parallel.sharding.data_parallel import DataParallel
from qtrain.quant import SCHEMES, QuantizedModel, quantize_linears
from qtrain.tensors.stored_weight import StoredWeight
from qtrain.train.settings.exclusions import check_exclusions
from qtrain.train.settings.options import Options
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.state.state_dict import optimizer_tensors
from qtrain.train.step.forward import language_forward
from qtrain.train.step.in_backward import OptimizerInBackward, model_partitions
from qtrain.train.step.step import apply_gradients, compute_gradients, set_lr
from tests.cases import sampled
from tests.data.corpora import write_jsonl
from tests.system import TINY, call, contents, flags, losses, only_run, write_model
from tests.train.test_loop import interrupt, resume_arguments

OPTIONS = {
    "galore_adamw": {"rank": 4, "update_proj_gap": 2},
    "q_galore_adamw": {"rank": 4, "update_proj_gap": 2, "queue_size": 2, "cos_threshold": 0.1},
    "apollo_mini": {"update_proj_gap": 2},
}
RATES = [1e-3, 2e-3, 2e-3, 1e-3, 5e-4]


class Trainee:
    """A tiny model with its optimizer, stepped in one of the two ways."""

    def __init__(
        self,
        optim: str,
        scheme: str = "bf16",
        *,
        in_backward: bool,
        impl: str = "native",
        quantize_head: bool = False,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
        **config: Any,
    ):
        source = ModelSource("tiny", {**TINY, **config}, "--model")
        self.model = build_model(source, impl=impl, device=device, dtype=dtype, seed=1)
        self.quantized: QuantizedModel = quantize_linears(
            self.model,
            SCHEMES.make(scheme, {}, "--quantize"),
            seed=0,
            head=self.model.lm_head,
            quantize_head=quantize_head,
        )
        spec = OPTIMIZERS.make(optim, OPTIONS.get(optim, {}), "--optim")
        self.optimizer = spec.build(parameter_groups(self.model, 0.1), 1e-3, seed=3)
        self.quantized.track_versions(self.optimizer)
        self.in_backward = self.parallel = None
        if in_backward:
            self.update_in_backward()
        self.forward = language_forward(self.model, None)

    def update_in_backward(self) -> None:
        self.parallel = DataParallel(self.model, self.quantized, Mesh(), partitions=model_partitions(self.model))
        self.in_backward = OptimizerInBackward(self.optimizer, self.parallel)

    def steps(self, rates: list[float] = RATES) -> list[tuple[float, float]]:
        """Loss and gradient norm of every step."""
        found = []
        for step, lr in enumerate(rates):
            if self.in_backward is not None:
                set_lr(self.optimizer, lr)
            gradients = compute_gradients(
                self.model,
                self.forward,
                self.quantized,
                [batch(step)],
                step,
                in_backward=self.in_backward,
                parallel=self.parallel,
            )
            if self.in_backward is not None:
                self.quantized.refresh()
            else:
                apply_gradients(self.optimizer, self.quantized, gradients, lr=lr, clip_grad_norm=0)
            found.append((gradients.loss, gradients.norm))
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Weights and states by name."""
        states, _ = optimizer_tensors(self.optimizer, self.model)
        found = {f"{p}.{key}": value for p, each in states.items() for key, value in each.items()}
        for name, p in self.model.named_parameters():
            found[name] = p.dequantize() if isinstance(p, StoredWeight) else p.detach()
        return found


def batch(seed: int) -> Batch:
    tokens = torch.randint(0, TINY["vocab_size"], (2, 17), generator=torch.Generator().manual_seed(seed))
    return Batch(tokens[:, :-1], tokens[:, 1:].clone())


def assert_same(ordinary: Trainee, other: Trainee) -> None:
    for (loss, norm), (own_loss, own_norm) in zip(ordinary.steps(), other.steps(), strict=True):
        assert own_loss == loss and own_norm == pytest.approx(norm, rel=1e-6)
    expected, found = ordinary.tensors(), other.tensors()
    assert expected.keys() == found.keys()
    assert [name for name in expected if not torch.equal(expected[name], found[name])] == []


DTYPES = {"bf16": torch.float32, "int8_weight": torch.bfloat16}


@pytest.mark.parametrize(
    ("optim", "tied", "scheme"),
    sampled(
        list(itertools.product(OPTIMIZERS.names(), [True, False], DTYPES)),
        lambda optim, tied, scheme: tied == (scheme == "int8_weight"),
    ),
)
def test_five_steps_are_the_ordinary_ones_bit_for_bit(optim, tied, scheme):
    dtype = DTYPES[scheme]
    ways = [Trainee(optim, scheme, tie_word_embeddings=tied, in_backward=way, dtype=dtype) for way in (False, True)]
    assert_same(*ways)


def test_it_is_the_step_of_a_transformers_model_too():
    assert_same(*(Trainee("adamw_8bit", impl="hf", in_backward=way) for way in (False, True)))


@pytest.mark.parametrize("scheme", ["int8", "int8_weight"])
def test_a_head_whose_gradient_comes_in_chunks_is_updated_once(scheme):
    chosen = {"quantize_head": True, "tie_word_embeddings": False}
    ways = [Trainee("adamw_8bit", scheme, in_backward=way, **chosen) for way in (False, True)]
    for way in ways:
        way.model.loss_chunks = 3
    assert_same(*ways)


@pytest.mark.parametrize("scheme", ["bf16", "int8", "int8_weight"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_layers_are_recomputed_before_their_weights_change(scheme, mode):
    ways = [Trainee("adamw", scheme, in_backward=way) for way in (False, True)]
    apply_recompute(ways[1].model, RECOMPUTE_SETS[mode])
    assert_same(*ways)


@pytest.mark.sweep
@pytest.mark.parametrize("scheme", ["int8", "int8_weight"])
def test_compiled_layers_are_updated_outside_the_compiled_graph(scheme):
    ways = [Trainee("q_galore_adamw", scheme, tie_word_embeddings=False, in_backward=way) for way in (False, True)]
    for way in ways:
        compile_layers(way.model)
    assert_same(*ways)


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
def test_one_partitions_gradients_exist_at_a_time(tied, monkeypatch):
    trainee, seen = Trainee("adamw", tie_word_embeddings=tied, in_backward=True), []
    name_of = {p: name for name, members in model_partitions(trainee.model).items() for p in members}
    step_partition = trainee.optimizer.step_partition

    def watched(number: int) -> None:
        seen.append({name_of[p] for p in trainee.model.parameters() if p.grad is not None})
        step_partition(number)

    monkeypatch.setattr(trainee.optimizer, "step_partition", watched)
    trainee.steps(RATES[:2])
    order = ["norm", "layers.1", "layers.0", "embed_tokens"]
    assert seen == [{name} for name in (order if tied else ["lm_head", *order])] * 2
    assert all(p.grad is None for p in trainee.model.parameters())


def test_partitions_are_the_blocks_and_every_trained_parameter_is_in_one():
    model = Trainee("adamw", in_backward=False).model
    model.embed_tokens.weight.requires_grad_(False)
    model.layers[0].attn.qkv.weight.requires_grad_(False)
    partitions = model_partitions(model)
    assert list(partitions) == ["layers.0", "layers.1", "norm"]
    found = [id(p) for members in partitions.values() for p in members]
    assert sorted(found) == sorted(id(p) for p in model.parameters() if p.requires_grad)


def test_parameters_without_a_gradient_are_left_alone_and_their_partitions_are_not():
    ways = [Trainee("adamw", in_backward=False) for _ in range(2)]
    for way in ways:  # a parameter that the forward pass does not use
        way.model.layers[1].unused = torch.nn.Parameter(torch.ones(3))
        way.optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(parameter_groups(way.model, 0.1), 1e-3)
    ways[1].update_in_backward()
    assert_same(*ways)
    assert torch.equal(ways[1].model.layers[1].unused, torch.ones(3))


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw", "adamw_8bit", "adamw_4bit", "lion", "sgd", "adamw_schedule_free"])
@pytest.mark.parametrize("scheme", ["bf16", "int8_weight"])
def test_elementwise_updates_on_a_gpu_are_the_ordinary_ones_bit_for_bit(optim, scheme):
    """Matrix methods multiply in batches of other sizes, which cuBLAS may round differently."""
    chosen = {"device": "cuda", "dtype": torch.bfloat16, "tie_word_embeddings": False}
    assert_same(*(Trainee(optim, scheme, in_backward=way, **chosen) for way in (False, True)))


@pytest.mark.gpu
@pytest.mark.parametrize("optim", ["adamw_8bit", "q_galore_adamw"])
def test_a_gpu_holds_the_gradients_of_one_partition(optim):
    config = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 16, "tie_word_embeddings": False}
    taken = []
    for way in (False, True):
        trainee = Trainee(optim, in_backward=way, device="cuda", dtype=torch.bfloat16, **config)
        trainee.steps(RATES[:2])
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        trainee.steps(RATES[:1])
        taken.append(torch.cuda.max_memory_allocated() - before)
    gradients = 2 * sum(p.numel() for p in trainee.model.parameters())
    assert taken[0] > gradients and taken[1] < gradients / 2


# ---- what it cannot do -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "optim", "options", "says"),
    [
        ({"batch_size": 8, "micro_batch_size": 2}, "adamw", {}, "--gradient_accumulation 1 --micro_batch_size 8"),
        ({"clip_grad_norm": 0.5}, "adamw", {}, "clipped to 0.5; give --clip_grad_norm 0"),
        ({}, "adamw_8bit", {"offload": True}, "leave m, v and master out of --offload"),
        ({}, "lion", {"offload": True}, "leave m, v and master out of --offload"),
        ({}, "torch.AdamW", {}, "torch.AdamW comes from another library"),
    ],
)
def test_incompatible_settings_are_refused_with_the_fix(changes, optim, options, says):
    settings = LanguageSettings(optimizer_in_backward=True, clip_grad_norm=0)
    settings = dataclasses.replace(settings, **changes, optim=optim, optim_kwargs=options)
    with pytest.raises(UserError, match="--optimizer_in_backward: ") as refused:
        check_exclusions(Options(settings), option="--optimizer_in_backward")
    assert says in str(refused.value)
    settings = dataclasses.replace(settings, optimizer_in_backward=False)
    check_exclusions(Options(settings), option="--optimizer_in_backward")


def test_every_own_optimizer_supports_it():
    for name in OPTIMIZERS.names():
        settings = LanguageSettings(optimizer_in_backward=True, clip_grad_norm=0, optim=name)
        check_exclusions(Options(settings), option="--optimizer_in_backward")


# ---- whole runs ------------------------------------------------------------------------------------------------------


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_model(Path("tiny.json"))
    write_jsonl(Path("jsonl"))
    return tmp_path


def argv(**settings) -> list[str]:
    text = {"type": "text", "paths": "jsonl", "tokenizer": "byte"}
    chosen = {"model": "tiny.json", "train_ds": text, "eval_ds": text, "eval_sequences": 4, "seq_len": 32, "n_steps": 6}
    chosen |= {"optim": "q_galore_adamw", "optim_kwargs": {"rank": 4, "update_proj_gap": 2}, "quantize": "int8_weight"}
    chosen |= {"eval_interval": 3, "ckpt_interval": 0, "export": False, "device": "cpu", "clip_grad_norm": 0}
    return flags(**{**chosen, **settings})


def test_a_run_equals_the_ordinary_one_also_when_resumed(here, monkeypatch):
    for name, in_backward in (("ordinary", False), ("whole", True)):
        done = call(llm_pretrain.main, argv(runs_dir=name, optimizer_in_backward=in_backward))
        assert done.code == 0, done.err
    with monkeypatch.context() as patch:
        interrupt(patch, "_step", 4)
        done = call(llm_pretrain.main, argv(optimizer_in_backward=True))
    assert call(llm_pretrain.main, resume_arguments(done.out)).code == 0
    runs = {name: only_run(here / name) for name in ("ordinary", "whole", "runs")}
    assert losses(runs["runs"]) == losses(runs["whole"])
    without_norm = [[row[:2] + row[3:] for row in losses(runs[name])] for name in ("ordinary", "whole")]
    assert without_norm[0] == without_norm[1]
    saved = {name: contents(run / "checkpoints" / "00000006") for name, run in runs.items()}
    for name in ("whole", "runs"):
        assert saved[name].keys() == saved["ordinary"].keys()
        assert all(torch.equal(value, saved["ordinary"][key]) for key, value in saved[name].items())


@pytest.mark.parametrize("optim", ["q_galore_adamw", "muon"])
def test_a_nonfinite_gradient_stops_the_run_before_anything_is_saved(here, monkeypatch, optim):
    """In a step that refreshes subspaces from gradients some of which are non-finite."""
    options = {"optim": optim, "optim_kwargs": {"update_proj_gap": 1} if optim == "q_galore_adamw" else {}}
    made = OptimizerInBackward._update

    def spoiled(self, number: int) -> None:
        self.updates = getattr(self, "updates", 0) + 1
        if self.updates == 3 * len(self.optimizer.partitions) + 2:  # in step 4
            self.optimizer.partitions[number][0].grad[0] = float("nan")
        made(self, number)

    monkeypatch.setattr(OptimizerInBackward, "_update", spoiled)
    done = call(llm_pretrain.main, argv(optimizer_in_backward=True, ckpt_interval=3, **options))
    assert done.code == 1
    said = "step 4: the gradient norm is nan. First non-finite tensor: the gradient of layers.1 (norm nan)."
    assert said in done.err and "have been updated with it; nothing of this step is saved" in done.err
    assert "--clip_grad_norm 1 without --optimizer_in_backward" in done.err
    (saved,) = (only_run(here / "runs") / "checkpoints").iterdir()
    assert saved.name == "00000003" and f"--resume {saved.relative_to(here)}" in done.err
