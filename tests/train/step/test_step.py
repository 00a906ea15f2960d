"""One step: the logged loss, gradients that do not depend on how the step is split, and what is updated."""

import math

import pytest
import torch
import torch.nn.functional as F

from qtrain.data.batch import Batch
from qtrain.models import ModelSource, build_model
from qtrain.optim import OPTIMIZERS, parameter_groups
from qtrain.parallel.sharding.data_parallel import Gradients, LossAndNorm, StepNumbers
from qtrain.quant import SCHEMES, QuantizedModel, quantize_linears
from qtrain.train.eval.language import summed_loss
from qtrain.train.step.forward import document_ids, language_forward
from qtrain.train.step.step import apply_gradients, compute_gradients
from tests.system import TINY

B, S, V = 8, 24, TINY["vocab_size"]
EOS = 257


def model_of(scheme: str = "bf16", z_loss: float = 0.0, **options) -> tuple[torch.nn.Module, QuantizedModel]:
    model = build_model(ModelSource("tiny", TINY, "--model"), seed=1)
    model.z_loss = z_loss
    return model, quantize_linears(model, SCHEMES.make(scheme, options, "--quantize"), seed=0)


def masked_batch(seed: int = 0) -> Batch:
    """[8, 24] with labels masked as llm.q masks them: rows with every fraction of trained tokens from none to all."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, V, (B, S + 1), generator=generator)
    labels = tokens[:, 1:].clone()
    for row in range(B):
        labels[row, torch.rand(S, generator=generator) < row / (B - 1)] = -100
    assert (labels[0] >= 0).all() and (labels[-1] == -100).all()
    return Batch(tokens[:, :-1], labels)


def split(batch: Batch, micro_batch_size: int) -> list[Batch]:
    return [Batch(*p) for p in zip(*(t.split(micro_batch_size) for t in (batch.input_ids, batch.labels)), strict=True)]


def gradients_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    return found


def assert_close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Up to the rounding of a few fp32 sums."""
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-6 * b[name].abs().max().item(), msg=name)


@pytest.mark.parametrize("micro_batch_size", [8, 4, 2, 1])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
def test_loss_and_gradients_are_those_of_the_mean_over_the_steps_tokens(micro_batch_size, z_loss):
    """Against plain autograd over the whole batch, with unequal counts of trained tokens in the micro-batches."""
    batch = masked_batch()
    model, quantized = model_of(z_loss=z_loss)
    logits = model(batch.input_ids).double()
    nll = F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), ignore_index=-100)  # the mean over trained ones
    trained = batch.labels >= 0
    (nll + z_loss * logits.logsumexp(-1)[trained].square().mean()).backward()
    expected = gradients_of(model)

    found = compute_gradients(model, language_forward(model, None), quantized, split(batch, micro_batch_size), step=0)
    norm = math.sqrt(sum(p.grad.double().square().sum().item() for p in model.parameters()))
    assert found.loss == pytest.approx(nll.item(), rel=1e-5)  # without the z-loss
    assert found.norm == pytest.approx(norm, rel=1e-5)
    assert found.tokens == B * S and found.finite
    assert_close(gradients_of(model), expected)


@pytest.mark.parametrize("micro_batch_size", [4, 2, 1])
def test_int8_gives_the_same_gradients_however_the_step_is_split(micro_batch_size):
    """Where each token is quantized by itself; the scales of grad_weight span a micro-batch, so that is left out."""
    batch = masked_batch()
    model, quantized = model_of("int8", grad_weight="bf16")
    forward = language_forward(model, None)
    whole = compute_gradients(model, forward, quantized, [batch], step=0)
    expected = gradients_of(model)
    parts = compute_gradients(model, forward, quantized, split(batch, micro_batch_size), step=0)
    assert parts.loss == pytest.approx(whole.loss, rel=1e-6)
    assert_close(gradients_of(model), expected)


def test_every_micro_batch_rounds_with_its_own_random_bits():
    model, quantized = model_of("int8", stochastic_rounding=True)
    seen, set_step = [], quantized.set_step
    quantized.set_step = lambda step: (seen.append(step), set_step(step))
    for step in range(3):
        compute_gradients(model, language_forward(model, None), quantized, split(masked_batch(), 2), step)
    assert seen == [*range(12)]
    one, other = (gradients_of_step(model, quantized, step) for step in (5, 6))
    assert any(not torch.equal(one[name], other[name]) for name in one)
    again = gradients_of_step(model, quantized, 5)
    assert all(torch.equal(one[name], again[name]) for name in one)


def gradients_of_step(model: torch.nn.Module, quantized: QuantizedModel, step: int) -> dict[str, torch.Tensor]:
    model.zero_grad(set_to_none=True)
    compute_gradients(model, language_forward(model, None), quantized, [masked_batch()], step)
    return gradients_of(model)


def test_a_step_without_trained_tokens_has_zero_loss_and_gradients():
    model, quantized = model_of()
    batch = masked_batch()
    batch.labels.fill_(-100)
    found = compute_gradients(model, language_forward(model, None), quantized, [batch], step=0)
    assert found.loss == 0 and found.norm == 0 and batch.n_trained == 0


def test_documents_in_one_window_train_as_if_each_were_alone():
    """doc_mask: loss and gradients of a packed window equal those of its documents one by one."""
    model, quantized = model_of()
    tokens = torch.randint(0, EOS, (2, S + 1), generator=torch.Generator().manual_seed(3))
    for row, ends in enumerate([(4, 5, 17), (11,)]):  # a document of one token among them
        tokens[row, list(ends)] = EOS
    batch = Batch(tokens[:, :-1], tokens[:, 1:].clone())
    packed = compute_gradients(model, language_forward(model, EOS), quantized, [batch], step=0)
    found = gradients_of(model)
    ids = document_ids(batch.input_ids, EOS)
    documents = [
        Batch(batch.input_ids[row : row + 1, ids[row] == number], batch.labels[row : row + 1, ids[row] == number])
        for row in range(2)
        for number in range(int(ids[row].max()) + 1)
    ]
    assert len(documents) == 6
    alone = compute_gradients(model, language_forward(model, None), quantized, documents, step=0)
    assert packed.loss == pytest.approx(alone.loss, rel=1e-6)
    assert_close(found, gradients_of(model))
    unmasked = compute_gradients(model, language_forward(model, None), quantized, [batch], step=0)
    assert abs(unmasked.loss - packed.loss) > 1e-5


# ---- the update ------------------------------------------------------------------------------------------------------


def optimizer_for(model: torch.nn.Module, quantized: QuantizedModel) -> torch.optim.Optimizer:
    optimizer = OPTIMIZERS.make("adamw", {}, "--optim").build(parameter_groups(model, 0.1), lr=1.0)
    quantized.track_versions(optimizer)
    return optimizer


@pytest.mark.parametrize(("clip", "scaled"), [(0.0, False), (1e9, False), (0.25, True)])
def test_gradients_are_clipped_to_the_norm_and_only_above_it(clip, scaled):
    model, quantized = model_of()
    gradients = compute_gradients(model, language_forward(model, None), quantized, [masked_batch()], step=0)
    assert gradients.norm > 0.25
    optimizer, seen = optimizer_for(model, quantized), {}

    def used(*_):  # the optimizer clips as it reads
        scale = 1.0 if optimizer.grad_scale is None else optimizer.grad_scale
        seen.update({n: p.grad * scale for n, p in model.named_parameters()})

    optimizer.register_step_pre_hook(used)
    before = {n: p.grad.clone() for n, p in model.named_parameters()}
    apply_gradients(optimizer, quantized, gradients, lr=1e-3, clip_grad_norm=clip)
    factor = clip / gradients.norm if scaled else 1.0
    for name, gradient in before.items():
        torch.testing.assert_close(seen[name], gradient * factor, rtol=1e-4 if scaled else 0, atol=1e-12)


def test_the_scale_on_the_device_is_the_hosts():
    """That of `clip_grads_with_norm_`, where the norm is above the limit; NaN for what is not finite."""
    for norm in (0.0, 0.1, 0.25, 0.2500001, 0.3, 7.0, 1e30):
        found = LossAndNorm(torch.tensor(2.0), torch.tensor(norm))
        numbers = StepNumbers(2.0, found.norm.item(), 1)
        for limit in (0.0, 0.25):
            expected = torch.ones(())
            if limit and numbers.norm > limit:
                optimizer = optimizer_for(*model_of())
                optimizer.clip_gradients(numbers.norm, limit)
                expected = optimizer.grad_scale
            assert torch.equal(Gradients(lambda n=numbers: n, found).update_scale(limit), expected), (norm, limit)
    for loss, norm in ((2.0, math.inf), (2.0, math.nan), (math.nan, 1.0), (math.inf, 1.0)):
        found = Gradients(lambda: numbers, LossAndNorm(torch.tensor(loss), torch.tensor(norm)))
        assert all(found.update_scale(limit).isnan() for limit in (0.0, 0.25))


@pytest.mark.parametrize("broken", [False, True])
def test_the_update_is_launched_before_the_host_knows_the_numbers(broken):
    """Gradients that are not finite reach no weight, and are kept for who looks for their cause."""
    model, quantized = model_of("int8")
    optimizer, order = optimizer_for(model, quantized), []
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    if broken:
        hook = model.lm_head.register_forward_hook(lambda module, args, y: y * torch.inf)
    found = compute_gradients(model, language_forward(model, None), quantized, [masked_batch()], step=0)
    if broken:
        hook.remove()

    def read():
        order.append("read")
        return StepNumbers(found.loss, found.norm, found.tokens)

    optimizer.register_step_post_hook(lambda *_: order.append("update"))
    apply_gradients(optimizer, quantized, Gradients(read, found.on_device), lr=0.01, clip_grad_norm=1.0)
    assert order == ["update", "read"] and found.finite is not broken
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]) is broken and (p.grad is not None) is broken, name
    quantized.assert_fresh()


def test_an_update_sets_the_learning_rate_frees_the_gradients_and_refreshes_the_codes():
    model, quantized = model_of("int8")
    optimizer = optimizer_for(model, quantized)
    forward = language_forward(model, None)
    weights = {n: p.detach().clone() for n, p in model.named_parameters()}
    codes = quantized.linears[0].weight_codes.output_codes.clone()
    gradients = compute_gradients(model, forward, quantized, [masked_batch()], step=0)
    apply_gradients(optimizer, quantized, gradients, lr=0.01, clip_grad_norm=1.0)
    assert {group["lr"] for group in optimizer.param_groups} == {0.01}
    assert all(p.grad is None for p in model.parameters())
    moved = {n: (p.detach() - weights[n]).abs().max().item() for n, p in model.named_parameters()}
    assert all(0.005 < most < 0.02 for most in moved.values()), moved  # Adam's first step is the rate
    assert not torch.equal(quantized.linears[0].weight_codes.output_codes, codes)
    quantized.assert_fresh()


def test_stale_codes_are_detected_before_they_are_used():
    model, quantized = model_of("int8")
    optimizer = optimizer_for(model, quantized)
    forward = language_forward(model, None)
    compute_gradients(model, forward, quantized, [masked_batch()], step=0)
    optimizer.step()  # and no refresh
    with pytest.raises(AssertionError, match="stale codes: "):
        compute_gradients(model, forward, quantized, [masked_batch()], step=1)


def test_a_nonfinite_gradient_is_detected():
    model, quantized = model_of()
    with torch.no_grad():
        model.norm.weight[3] = math.inf
    assert not compute_gradients(model, language_forward(model, None), quantized, [masked_batch()], step=0).finite


# ---- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_is_the_mean_over_all_tokens_of_unequal_batches_and_has_no_side_effects():
    model, _ = model_of(z_loss=0.5)
    batches = [*split(masked_batch(), 3), masked_batch(seed=5)]
    logits = torch.cat([model(b.input_ids) for b in batches]).double()
    labels = torch.cat([b.labels for b in batches])
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100).item()
    forward, modes = language_forward(model, None), []

    def watched(batch: Batch):
        modes.append((model.training, torch.is_grad_enabled()))
        return forward(batch)

    for training in (True, False):
        model.train(training)
        assert summed_loss(model, watched, batches).mean == pytest.approx(expected, rel=1e-5)
        assert model.training is training
    assert set(modes) == {(False, False)} and all(p.grad is None for p in model.parameters())
    assert summed_loss(model, forward, []).mean == 0.0
