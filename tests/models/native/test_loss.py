"""The chunked loss and its gradients against plain fp64 cross-entropy."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from qtrain.models import linear_cross_entropy
from qtrain.models.native.loss import chunk_rows, cross_entropy_sums
from qtrain.quant import SCHEMES
from qtrain.quant.linear import LowBitLinear

TOKENS, WIDTH, VOCAB = 37, 8, 61


class OtherHead(nn.Linear):
    """A head that is not a plain linear, as a quantized one is not."""

    def forward(self, x):
        return super().forward(x)


def case(dtype: torch.dtype, head_type: type = nn.Linear, bias: bool = False):
    torch.manual_seed(0)
    hidden = (3 * torch.randn(TOKENS, WIDTH)).to(dtype).requires_grad_()
    head = head_type(WIDTH, VOCAB, bias=bias).to(dtype)
    labels = torch.randint(0, VOCAB, (TOKENS,))
    labels[::5] = -100
    return hidden, head, labels


def exact(hidden, head, labels, z_loss, scale):
    """loss, nll, and gradients of scale * loss, in fp64: of hidden, and of each of the head's parameters."""
    x = hidden.detach().double().requires_grad_()
    w, *bias = [p.detach().double().requires_grad_() for p in head.parameters()]
    logits = F.linear(x, w, *bias)
    nll = F.cross_entropy(logits, labels, reduction="sum")
    loss = nll + z_loss * logits.logsumexp(-1)[labels != -100].square().sum()
    (scale * loss).backward()
    return loss.item(), nll.item(), x.grad, *(p.grad for p in (w, *bias))


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b).norm() / b.norm()).item()


@pytest.mark.parametrize(("head_type", "bias"), [(nn.Linear, False), (nn.Linear, True), (OtherHead, False)])
@pytest.mark.parametrize("z_loss", [0.0, 0.01])
@pytest.mark.parametrize("chunks", [0, 1, 3, TOKENS, 100])
def test_equal_to_fp64_in_any_number_of_chunks(chunks, z_loss, head_type, bias):
    hidden, head, labels = case(torch.float32, head_type, bias)
    loss, nll, *gradients = exact(hidden, head, labels, z_loss, 0.1)
    sums = linear_cross_entropy(hidden, head, labels, chunks, z_loss)
    assert sums.loss.item() == pytest.approx(loss, rel=1e-6)
    assert sums.nll.item() == pytest.approx(nll, rel=1e-6) and not sums.nll.requires_grad
    (0.1 * sums.loss).backward()
    for tensor, gradient in zip((hidden, *head.parameters()), gradients, strict=True):
        assert relative(tensor.grad, gradient) < 1e-5


def quantized(head: nn.Linear) -> LowBitLinear:
    return LowBitLinear(head, SCHEMES.make("int8", {}, "--quantize"), torch.zeros(3, dtype=torch.int64))


@pytest.mark.parametrize("chunks", [1, 3])
def test_a_quantized_head_runs_once_per_chunk_with_the_gradients_of_its_own_backward(chunks):
    hidden, head, labels = case(torch.float32)
    head, calls = quantized(head), []
    head.register_forward_hook(lambda *_: calls.append(1))
    linear_cross_entropy(hidden, head, labels, chunks).loss.backward()
    assert len(calls) == chunks
    ours = hidden.grad, head.weight.grad
    hidden.grad = head.weight.grad = None
    rows = -(-TOKENS // chunks)
    for x, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        F.cross_entropy(head(x), y, reduction="sum").backward()
    # A gradient of a logit that lies between two codes may be rounded to the other one.
    assert relative(ours[0], hidden.grad.double()) < 1e-3 and relative(ours[1], head.weight.grad.double()) < 1e-3


def delayed_head(dtype: torch.dtype, bias: bool = False, **options):
    """hidden, labels, and an FP8 head under delayed scaling that has no history yet."""
    hidden, head, labels = case(dtype, bias=bias)
    scheme = SCHEMES.make("fp8_tensorwise", {"scaling": "delayed", **options}, "--quantize")
    return hidden, LowBitLinear(head, scheme, torch.zeros(3, dtype=torch.int64)), labels


def logits_of(head: LowBitLinear) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A list that receives the logits of each chunk, and their values before anything overwrites them."""
    found: list[tuple[torch.Tensor, torch.Tensor]] = []
    head.register_forward_hook(lambda module, args, y: found.append((y.detach(), y.detach().clone())))
    return found


def with_the_gradient_in_memory(head: LowBitLinear) -> None:
    head.reads_softmax_gradient = lambda *_: False


@pytest.mark.parametrize("scale", [0.0, 0.5 / 448])  # the gradient's own, as in a first step; one of a history
@pytest.mark.parametrize(("chunks", "frozen"), [(1, False), (3, False), (3, True)])
def test_codes_of_the_gradient_are_computed_from_the_logits(chunks, frozen, scale):
    """The gradient is never written: the logits stay. Products and the recorded absmax are those of its codes."""
    found = []
    for in_memory in (False, True):
        hidden, head, labels = delayed_head(torch.float32)
        head.weight.requires_grad_(not frozen)
        head.dy_scale.fill_(scale)
        if in_memory:
            with_the_gradient_in_memory(head)
        logits = logits_of(head)
        sums = linear_cross_entropy(hidden, head, labels, chunks, 0.01)
        sums.loss.backward()
        assert len(logits) == chunks and all(torch.equal(y, before) != in_memory for y, before in logits)
        found.append([sums.loss.detach(), sums.nll, head.dy_amax, hidden.grad])
        found[-1] += [] if frozen else [head.weight.grad]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["int8", "fp8_rowwise", "fp8_blockwise"])
def test_finer_scales_are_computed_from_the_logits_too(name):
    """In fp32 the codes are those of the gradient in memory, but for the last bit of an exponential."""
    found = []
    for in_memory in (False, True):
        hidden, plain, labels = case(torch.float32)
        scheme = SCHEMES.make(name, {}, "--quantize").for_linear(WIDTH, VOCAB, head=True)
        head = LowBitLinear(plain, scheme, torch.zeros(3, dtype=torch.int64))
        if in_memory:
            with_the_gradient_in_memory(head)
        logits = logits_of(head)
        linear_cross_entropy(hidden, head, labels, 3, 0.01).loss.backward()
        assert len(logits) == 3 and all(torch.equal(y, before) != in_memory for y, before in logits)
        found.append([hidden.grad, plain.weight.grad])
    assert all(relative(one, other) < 0.01 for one, other in zip(*found, strict=True))


def test_a_gradient_that_is_quantized_unrounded_is_nearer_to_fp64():
    """Products with the gradient in fp64, of the values that the head multiplies; summed over seeds."""
    errors = torch.zeros(2)
    for seed in range(12):
        for way in range(2):
            torch.manual_seed(seed)
            hidden = (2 * torch.randn(256, 64)).bfloat16().requires_grad_()
            plain, labels = nn.Linear(64, 512, bias=False).bfloat16(), torch.randint(0, 512, (256,))
            scheme = SCHEMES.make("fp8_tensorwise", {"scaling": "delayed"}, "--quantize")
            head = LowBitLinear(plain, scheme, torch.zeros(3, dtype=torch.int64))
            if way:
                with_the_gradient_in_memory(head)
            logits = logits_of(head)
            linear_cross_entropy(hidden, head, labels, 1).loss.backward()
            exact = logits[0][1].double().softmax(dim=-1) - F.one_hot(labels, 512)  # [T, V]
            w = head.weight_codes.operands().columns.dequantize(torch.float64)  # [C, V]
            errors[way] += relative(hidden.grad, exact @ w.t())
    assert errors[0] < errors[1] < 12 * 0.05, errors


@pytest.mark.parametrize(
    ("name", "options", "bias"),
    [
        ("fp8_tensorwise", {}, False),
        ("fp8_tensorwise", {"scaling": "delayed", "stochastic_rounding": True}, False),
        ("fp8_tensorwise", {"scaling": "delayed", "grad_weight": "bf16"}, False),
        ("fp8_tensorwise", {"scaling": "delayed"}, True),
        ("int8", {"grad_weight": "bf16"}, False),
        ("fp8_rowwise", {}, True),
        ("fp8_rowwise", {"grad_input": "bf16"}, False),
    ],
)
def test_other_heads_read_the_gradient_in_memory(name, options, bias):
    hidden, plain, labels = case(torch.float32, bias=bias)
    head = LowBitLinear(plain, SCHEMES.make(name, options, "--quantize"), torch.zeros(3, dtype=torch.int64))
    logits = logits_of(head)
    linear_cross_entropy(hidden, head, labels, 2).loss.backward()
    assert not any(torch.equal(y, before) for y, before in logits)
    assert relative(hidden.grad, exact(hidden, plain, labels, 0.0, 1.0)[2]) < 0.1


def test_a_nan_logit_reaches_loss_and_gradients():
    for scale in (0.0, 1 / 448):
        hidden, head, labels = delayed_head(torch.float32)
        head.dy_scale.fill_(scale)
        with torch.no_grad():
            hidden[1, 0] = float("nan")
        sums = linear_cross_entropy(hidden, head, labels, 1)
        sums.loss.backward()
        assert sums.loss.isnan() and hidden.grad[1].isnan().all() and head.weight.grad.isnan().any()
        assert head.dy_amax.isnan()


def test_the_gradient_of_an_integer_head_is_unbiased():
    """Many small elements beside the label's -1: to nearest their INT8 codes are zero, and their sum is lost."""
    torch.manual_seed(0)
    hidden, labels = torch.randn(64, 64), torch.randint(0, 4096, (64,))
    plain = nn.Linear(64, 4096, bias=False)
    x = hidden.clone().requires_grad_()
    F.cross_entropy(plain(x), labels, reduction="sum").backward()

    def mean_gradient(scheme) -> torch.Tensor:
        total = torch.zeros_like(hidden)
        for seed in range(16):
            x = hidden.clone().requires_grad_()
            linear_cross_entropy(x, LowBitLinear(plain, scheme, torch.tensor([1, seed, 0])), labels).loss.backward()
            total += x.grad / 16
        return total.mean(dim=0)

    int8, exact = SCHEMES.make("int8", {}, "--quantize"), x.grad.mean(dim=0).double()
    assert relative(mean_gradient(int8.for_linear(64, 4096)), exact) > 0.1
    assert relative(mean_gradient(int8.for_linear(64, 4096, head=True)), exact) < 0.03


def test_a_frozen_head_and_a_frozen_stream_have_no_gradients():
    hidden, head, labels = case(torch.float32, OtherHead)
    head.requires_grad_(False)
    assert linear_cross_entropy(hidden, head, labels, 2).loss.requires_grad
    sums = linear_cross_entropy(hidden.detach(), head, labels, 2)
    assert not sums.loss.requires_grad and sums.loss.item() == pytest.approx(exact(hidden, head, labels, 0, 1)[0])


def test_no_tokens_give_gradients_of_zero():
    for head_type in (nn.Linear, OtherHead):
        hidden, head, labels = case(torch.float32, head_type, bias=True)
        linear_cross_entropy(hidden[:0], head, labels[:0]).loss.backward()
        assert all(not p.grad.any() for p in (hidden, *head.parameters()))


@pytest.mark.parametrize("head_type", [nn.Linear, OtherHead])
@pytest.mark.parametrize("chunks", [1, 5])
def test_bf16_is_as_exact_as_plain_pytorch(chunks, head_type):
    """Error against fp64 at most that of plain bf16 cross-entropy, and a quarter of bf16's epsilon."""
    hidden, head, labels = case(torch.bfloat16, head_type)
    loss, _, grad_hidden, grad_weight = exact(hidden, head, labels, 0.0, 1 / 7)
    sums = linear_cross_entropy(hidden, head, labels, chunks)
    (sums.loss / 7).backward()
    ours = hidden.grad, head.weight.grad
    assert ours[0].dtype == ours[1].dtype == torch.bfloat16

    hidden.grad = head.weight.grad = None
    plain = F.cross_entropy(head(hidden).float(), labels, reduction="sum")
    (plain / 7).backward()
    slack = torch.finfo(torch.bfloat16).eps / 4
    assert abs(sums.loss.item() - loss) <= abs(plain.item() - loss) + slack
    assert relative(ours[0], grad_hidden) <= relative(hidden.grad, grad_hidden) + slack
    assert relative(ours[1], grad_weight) <= relative(head.weight.grad, grad_weight) + slack


@pytest.mark.parametrize("head_type", [nn.Linear, OtherHead])
def test_nothing_trained_on_is_zero_not_nan(head_type):
    hidden, head, labels = case(torch.float32, head_type)
    sums = linear_cross_entropy(hidden, head, torch.full_like(labels, -100), 3, z_loss=0.1)
    sums.loss.backward()
    assert sums.loss.item() == sums.nll.item() == 0.0
    assert not hidden.grad.any() and not head.weight.grad.any()


def test_huge_logits_do_not_overflow():
    hidden, head, labels = case(torch.float32)
    with torch.no_grad():
        hidden.mul_(1e4)
    loss, _, grad_hidden, _ = exact(hidden, head, labels, 0.0, 1.0)
    sums = linear_cross_entropy(hidden, head, labels, 2)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(loss, rel=1e-5)
    assert relative(hidden.grad, grad_hidden) < 1e-2  # logits of 1e4 in fp32 are known to 1e-3


@pytest.mark.parametrize("head_type", [nn.Linear, OtherHead])
def test_without_gradients_the_same_sums(head_type):
    hidden, head, labels = case(torch.float32, head_type)
    trained = linear_cross_entropy(hidden, head, labels, 3, 0.01)
    with torch.no_grad():
        evaluated = linear_cross_entropy(hidden, head, labels, 3, 0.01)
    assert evaluated.loss.item() == pytest.approx(trained.loss.item(), rel=1e-6)
    assert not evaluated.loss.requires_grad


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_the_right_one(frozen):
    hidden, head, labels = case(torch.float32)
    _, _, grad_hidden, grad_weight = exact(hidden, head, labels, 0.0, 1.0)
    (hidden if frozen == "hidden" else head.weight).requires_grad_(False)
    linear_cross_entropy(hidden, head, labels, 2).loss.backward()
    if frozen == "hidden":
        assert hidden.grad is None and relative(head.weight.grad, grad_weight) < 1e-5
    else:
        assert head.weight.grad is None and relative(hidden.grad, grad_hidden) < 1e-5


@pytest.mark.parametrize("chunks", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_chunks_are_added_in_fp32_in_their_order(chunks, dtype):
    """Kept as they are, or added in pairs: the bits of one after the other."""
    hidden, head, labels = case(dtype, OtherHead, bias=True)
    rows, total = -(-TOKENS // chunks), [torch.zeros_like(p, dtype=torch.float32) for p in head.parameters()]
    for x, y in zip(hidden.detach().split(rows), labels.split(rows), strict=True):
        linear_cross_entropy(x, head, y, 1).loss.backward()
        for sums, p in zip(total, head.parameters(), strict=True):
            sums += p.grad
            p.grad = None
    factor = torch.tensor(1 / 3)
    (factor * linear_cross_entropy(hidden, head, labels, chunks).loss).backward()
    for sums, p in zip(total, head.parameters(), strict=True):
        assert torch.equal(p.grad, (sums * factor).to(dtype))


def test_never_more_than_one_chunk_of_logits():
    """No tensor of the whole [T, V] is made, forward or backward (the weight, transposed, has few rows)."""
    from torch.utils._python_dispatch import TorchDispatchMode

    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            nonlocal largest
            out = op(*args, **(kwargs or {}))
            if isinstance(out, torch.Tensor) and out.ndim == 2 and out.shape[1] == VOCAB:
                largest = max(largest, out.shape[0])
            return out

    for head_type in (nn.Linear, OtherHead):
        hidden, head, labels = case(torch.float32, head_type)
        with Watch():
            linear_cross_entropy(hidden, head, labels, 4).loss.backward()
    assert 0 < largest <= -(-TOKENS // 4)


def test_the_gradient_of_logits_is_not_copied():
    """Autograd would give a view that has changed since (a quantized head's output) the backward of as_strided: zeros
    as large as the logits, and a copy of the gradient into them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    of_logits = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            out = op(*args, **(kwargs or {}))
            if "zeros" in str(op) and out.numel() == TOKENS * VOCAB:
                of_logits.append(str(op))
            return out

    hidden, head, labels = case(torch.float32)
    head = quantized(head)
    with Watch():
        linear_cross_entropy(hidden, head, labels, 1).loss.backward()
    assert not of_logits


def test_sums_from_whole_logits():
    hidden, head, labels = case(torch.float32)
    loss, nll, grad_hidden, _ = exact(hidden, head, labels, 0.01, 1.0)
    sums = cross_entropy_sums(head(hidden), labels, 0.01)
    sums.loss.backward()
    assert sums.loss.item() == pytest.approx(loss, rel=1e-6) and sums.nll.item() == pytest.approx(nll, rel=1e-6)
    assert relative(hidden.grad, grad_hidden) < 1e-5


def test_chunks_are_whole_tiles():
    """17 sequences of 1,024 tokens in three chunks: a sum over 5,803 tokens has no kernel in 8 bits."""
    assert [chunk_rows(tokens, 0, large=True) for tokens in (17408, 16384, 300, 0)] == [5888, 8192, 384, 1]
    assert [chunk_rows(1000, chunks, large=True) for chunks in (1, 3, 9, 5000)] == [1024, 384, 112, 1]
