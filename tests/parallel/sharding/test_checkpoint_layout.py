"""Checkpoints of a divided model: whole tensors, the same bit for bit on any number of tensor ranks."""

from pathlib import Path

import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.data.batch import Batch
from qtrain.parallel.sharding.checkpoint_layout import refuse_other_tp
from qtrain.train.assembly.assemble import assemble, build_quantized
from qtrain.train.assembly.language_architecture import LanguageArchitecture
from qtrain.train.assembly.prepare import prepare
from qtrain.train.plan.checked_settings import check_settings
from qtrain.train.settings.settings import LanguageSettings
from qtrain.train.step.forward import language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.cases import sampled
from tests.system import contents, write_model
from tests.worlds import run_ranks

SIZES = {
    "hidden_size": 64,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
}


def _run(settings: LanguageSettings, steps: int) -> str:
    """Build or resume a run, train it for some steps, save it. Returns the checkpoint."""
    checked = check_settings(settings, "llm_pretrain")
    prepared = prepare(checked, LanguageArchitecture.of(settings, checked.mesh), [])
    model, quantized = build_quantized(prepared)
    run = assemble(prepared, model, quantized)
    forward = language_forward(model, None)
    for step in range(steps):
        tokens = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(step))
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
        gradients = compute_gradients(model, forward, quantized, [batch], step, parallel=run.parallel)
        apply_gradients(run.optimizer, quantized, gradients, lr=1e-3, clip_grad_norm=1.0, parallel=run.parallel)
        run.state.step += 1
    run.save()
    return str(run.folder.path)


def _saved(folder: str) -> dict[str, torch.Tensor]:
    found = contents(next(Path(folder).glob("checkpoints/*")))
    return {name: tensor for name, tensor in found.items() if not name.startswith("rng.")}


def _settings(folder: Path, **changes) -> LanguageSettings:
    model = write_model(folder / "m.json", max_position_embeddings=64, **{**SIZES, **changes.pop("model", {})})
    given = {"dtype": "bf16", "device": "cpu", "batch_size": 4, "micro_batch_size": 2, "seq_len": 16, "n_steps": 9}
    return LanguageSettings(**{**given, "model": model, "runs_dir": str(folder / "runs"), **changes})


BITNET = {"hidden_size": 256, "head_dim": 64}  # what its norms can be exported with
MIXTURE = {
    "model_type": "qwen2_moe",
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 128,
    "mlp_only_layers": [0],
}
CHAINS = [
    ("adamw_8bit", "int8", {}),
    ("adamw_4bit", "bitnet", BITNET),
    ("adamw", "int4_weight", {}),
    ("lion", "bf16", {}),
    ("adamw_8bit", "fp8_tensorwise", MIXTURE),
    ("adamw_4bit", "int4_weight", MIXTURE),
]


@pytest.mark.parametrize(
    ("optim", "scheme", "sizes"),
    sampled(CHAINS, lambda optim, scheme, _: (optim, scheme) not in (CHAINS[0][:2], CHAINS[4][:2])),
)
def test_any_mesh_resumes_what_any_other_saved(optim, scheme, sizes, tmp_path):
    """tp 2 > 1 > tp 2 x shard 2, and what the last saved is what the first did."""
    settings = {"optim": optim, "quantize": scheme, "model": sizes}
    path = run_ranks(2, _run, _settings(tmp_path, **settings, tp=2, run_name="first"), 2)[0]
    expected = _saved(path)
    assert len(expected) > 20
    for world, tp in ((1, 1), (4, 2)):
        resumed = _settings(tmp_path, **settings, tp=tp, resume=path, runs_dir=str(tmp_path / f"{world}"))
        path = run_ranks(world, _run, resumed, 0)[0]
        found = _saved(path)
        assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in expected.items()}
        assert not [name for name in expected if not torch.equal(found[name], expected[name])]


def test_scales_that_a_cut_divides_are_for_the_same_tp_only(tmp_path):
    """Columns of 84 elements are no whole number of blocks; nor is a row of an INT8 weight one rank's."""
    settings = {"optim": "adamw_8bit", "quantize": "int8_weight", "model": {"intermediate_size": 168}, "tp": 2}
    first = run_ranks(2, _run, _settings(tmp_path, **settings), 2)[0]
    again = _settings(tmp_path, **settings, resume=first, runs_dir=str(tmp_path / "again"))
    a, b = _saved(first), _saved(run_ranks(2, _run, again, 0)[0])
    assert a.keys() == b.keys() and not [name for name in a if not torch.equal(a[name], b[name])]
    with pytest.raises(UserError, match=r"^--tp: .* was saved with --tp 2, and cannot be resumed with --tp 1: .*scale"):
        _run(_settings(tmp_path, **{**settings, "tp": 1}, resume=first), 0)


def test_a_cut_that_the_checkpoint_does_not_have_is_refused(tmp_path):
    settings = {"optim": "adamw_8bit", "model": {"head_dim": 32}}
    (first,) = run_ranks(1, _run, _settings(tmp_path, **settings), 2)
    with pytest.raises(AssertionError, match=r"--tp: .* was saved with --tp 1, and cannot be resumed with --tp 2"):
        run_ranks(2, _run, _settings(tmp_path, **settings, tp=2, resume=first), 0)


def test_the_same_tp_is_never_refused():
    refuse_other_tp(2, ["x.scale"], 2, "run")
    refuse_other_tp(2, [], 1, "run")
