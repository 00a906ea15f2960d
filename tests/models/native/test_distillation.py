"""A decoder that learns from a teacher: loss, divergence and gradients against fp64 autograd over full logits."""

import copy

import pytest
import torch
import torch.nn.functional as F

from qtrain.core.errors import UserError
from qtrain.models import Distillation, DistillOptions, as_distill
from qtrain.quant import SCHEMES, quantize_linears
from tests.models.families import DOC_IDS, batch, drawn, source_of

OPTIONS = DistillOptions("-", weight=0.7, temperature=2.0)


def with_teacher(options: DistillOptions = OPTIONS, teacher_seed: int = 1, family: str = "qwen3"):
    model = drawn(source_of(family))
    torch.manual_seed(teacher_seed)
    teacher = drawn(source_of(family))
    for p in teacher.parameters():
        p.data += 0.1 * torch.randn_like(p)
    model.distillation = Distillation(teacher, options)
    return model


def exact(model, ids, labels, doc_ids, options):
    """The model in fp64 with gradients of the loss, its loss, nll and divergence."""
    student, teacher = copy.deepcopy(model).double(), copy.deepcopy(model.distillation.teacher).double()
    student.distillation = None
    s, t = student(ids, doc_ids=doc_ids).flatten(0, 1), teacher(ids, doc_ids=doc_ids).flatten(0, 1).detach()
    trained = labels.flatten() != -100
    nll = F.cross_entropy(s, labels.flatten(), reduction="sum")
    log_q, log_p = ((a[trained] / options.temperature).log_softmax(-1) for a in (s, t))
    kl = F.kl_div(log_q, log_p, reduction="sum", log_target=True)
    loss = (1 - options.weight) * nll + options.weight * options.temperature**2 * kl
    loss.backward()
    return student, loss.item(), nll.item(), kl.item()


@pytest.mark.parametrize("chunks", [0, 1, 3])
@pytest.mark.parametrize("documents", [False, True])
def test_equal_to_fp64_in_any_number_of_chunks(chunks, documents):
    model, (ids, labels), doc_ids = with_teacher(), batch(), DOC_IDS if documents else None
    labels = labels.clone()
    labels[0, :3] = -100
    model.loss_chunks = chunks
    truth, loss, nll, kl = exact(model, ids, labels, doc_ids, OPTIONS)
    sums = model(ids, labels, doc_ids)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(loss, rel=1e-5) and sums.nll.item() == pytest.approx(nll, rel=1e-5)
    assert model.distillation.sums.tolist() == pytest.approx([kl, (labels != -100).sum().item()], rel=1e-4)
    assert kl > 1, "the teacher is another model"
    for (name, own), true in zip(model.named_parameters(), truth.parameters(), strict=True):
        assert (own.grad - true.grad).norm() <= 1e-4 * true.grad.norm(), name
    assert all(p.grad is None for p in model.distillation.teacher.parameters())


def test_weight_0_is_cross_entropy_bit_for_bit():
    model, (ids, labels) = with_teacher(DistillOptions("-", weight=0.0)), batch()
    plain = copy.deepcopy(model)
    plain.distillation = None
    losses = [m(ids, labels) for m in (model, plain)]
    for sums in losses:
        sums.loss.backward()
    assert torch.equal(losses[0].loss, losses[1].loss) and torch.equal(losses[0].nll, losses[1].nll)
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), plain.parameters(), strict=True))
    assert model.distillation.sums[0] > 1


def test_of_a_quantized_head_the_gradients_are_those_of_its_own_backward():
    model, (ids, labels) = with_teacher(), batch()
    truth = exact(model, ids, labels, None, OPTIONS)[0]
    quantize_linears(model, SCHEMES.make("int8", {}, "-"), seed=0, head=model.lm_head, quantize_head=True)
    model.loss_chunks = 2
    model(ids, labels).loss.backward()
    true = truth.norm.weight.grad
    assert 0 < (model.norm.weight.grad - true).norm() < 0.1 * true.norm()


def test_evaluation_is_without_the_teacher():
    model, (ids, labels) = with_teacher(), batch()
    with torch.no_grad():
        sums = model(ids, labels)
    assert torch.equal(sums.loss, sums.nll) and not model.distillation.sums.any()


def test_a_mixture_learns_from_its_teacher_and_its_routers_from_their_losses():
    model, (ids, labels) = with_teacher(family="olmoe"), batch()
    model.router_losses.balance = 0.1
    with_router = model(ids, labels).loss
    model.router_losses.balance = 0.0
    without = model(ids, labels).loss
    truth = exact(model, ids, labels, None, OPTIONS)[1]
    assert without.item() == pytest.approx(truth, rel=1e-4) and with_router > without


def test_nothing_of_the_teacher_is_of_the_model():
    model = with_teacher()
    alone = drawn(source_of("qwen3"))
    assert [name for name, _ in model.named_parameters()] == [name for name, _ in alone.named_parameters()]
    assert model.state_dict().keys() == alone.state_dict().keys()
    assert not any(p.requires_grad for p in model.distillation.teacher.parameters())


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({}, "--distill: the key 'teacher' is missing"),
        ({"teacher": "x", "weights": 1.0}, "weight"),
        ({"teacher": "x", "weight": 1.5}, "--distill.weight"),
        ({"teacher": "x", "temperature": 0.0}, "--distill.temperature"),
        ({"teacher": 3}, "--distill.teacher"),
    ],
)
def test_options_that_are_refused(values, named):
    with pytest.raises(UserError, match=named):
        as_distill(values)
