"""The fused update is its definition, the definition is the published rule; shards, clipping and absent gradients."""

import pytest
import torch

from qtrain.kernels.optim.fused_update import SIGNED_STATES, FusedUpdate, Slot
from qtrain.kernels.optim.state_formats import dequantize_state, state_format, zero_state
from qtrain.kernels.optim.update_rules import WeightAmax
from qtrain.tensors.stored_weight import StoredWeight
from tests.cases import sampled

HYPER = {"lr": 0.01, "weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
RULES = list(SIGNED_STATES)
# whole blocks, rows that no block divides, a vector, one of a few elements, nothing
SHAPES = [(7, 256), (5, 33), (300,), (16,), (0, 8)]


def slots(
    shapes, formats=("fp32", "fp32"), rule="adamw", dtype=torch.float32, master=False, stored=None, device="cpu", seed=0
) -> list[Slot]:
    """Random weights with states of zero; the same for the same seed."""
    generator, found = torch.Generator().manual_seed(seed), []
    for number, shape in enumerate(shapes):
        value = torch.randn(shape, generator=generator).to(dtype).to(device)
        states = []
        for signed, name in zip(SIGNED_STATES[rule], formats, strict=False):
            block = 128 if name in ("fp8", "int8", "int4") else None
            format = state_format(name, signed=signed, block=block).fitted(torch.Size(shape))
            states.append((format, zero_state(format, torch.Size(shape), torch.device(device))))
        weight = StoredWeight.from_value(value, stored) if stored else value
        found.append(Slot(weight, tuple(states), None, number, master=value.float() if master else None))
    return found


def gradients(shapes, dtype=torch.float32, device="cpu", seed=1) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(dtype).to(device) for shape in shapes]


def run(update: FusedUpdate, steps: int, shapes, dtype=torch.float32, scale: float | None = None, device="cpu") -> None:
    update.set_hyper(0, HYPER)
    for step in range(steps):
        given = None if scale is None else torch.tensor(scale, device=device)
        update.step(gradients(shapes, dtype, device, seed=step), given)


def state_of(update: FusedUpdate) -> list[torch.Tensor]:
    """Weights, states, counters."""
    values = [t for slot in update.slots for _, state in slot.states for t in state.values()]
    return [t.clone() for t in (*(slot.weight for slot in update.slots), *values, update.steps, update.keys)]


def check_no_update(kernel: bool | None, device: str, **options) -> None:
    """A step by gradients and a scale that are not finite changes nothing, and the next one is as without."""
    found, alone = (FusedUpdate("adamw", slots(SHAPES, device=device, **options), kernel=kernel) for _ in range(2))
    for update in (found, alone):
        run(update, 2, SHAPES, torch.bfloat16, 0.5, device)
    before = state_of(found)
    for scale in ("nan", "inf"):
        broken = [g.fill_(float("nan")) for g in gradients(SHAPES, torch.bfloat16, device)]
        found.step(broken, torch.tensor(float(scale), device=device))
        assert all(torch.equal(a, b) for a, b in zip(before, state_of(found), strict=True)), scale
    for update in (found, alone):
        run(update, 1, SHAPES, torch.bfloat16, 0.5, device)
    assert all(torch.equal(a, b) for a, b in zip(state_of(alone), state_of(found), strict=True))


NO_UPDATE = [{"dtype": torch.bfloat16}, {"dtype": torch.bfloat16, "formats": ("int8", "int8")}]


@pytest.mark.parametrize("options", NO_UPDATE, ids=str)
def test_a_scale_that_is_not_finite_is_no_update(options):
    check_no_update(False, "cpu", **options)


@pytest.mark.interpreter
@pytest.mark.parametrize("options", NO_UPDATE, ids=str)
def test_a_scale_that_is_not_finite_is_no_update_in_the_interpreter(options):
    check_no_update(True, "cpu", **options)


@pytest.mark.gpu
@pytest.mark.parametrize("options", NO_UPDATE, ids=str)
def test_a_scale_that_is_not_finite_is_no_update_on_gpu(options):
    check_no_update(True, "cuda", **options)


# ---- the definition against the published rules ----------------------------------------------------------------------


def truth(rule: str, p: torch.Tensor, grads: list[torch.Tensor], scale: float) -> torch.Tensor:
    """The rule in fp64, as its paper writes it."""
    p, m, v = p.double(), torch.zeros_like(p, dtype=torch.float64), torch.zeros_like(p, dtype=torch.float64)
    lr, decay, b1, b2, eps = HYPER.values()
    for step, g in enumerate(grads, 1):
        g = g.double() * scale
        if rule == "adamw":
            m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g**2
            u = (m / (1 - b1**step)) / ((v / (1 - b2**step)).sqrt() + eps)
        elif rule == "lion":
            u, m = torch.sign(b1 * m + (1 - b1) * g), b2 * m + (1 - b2) * g
        elif rule == "apply":
            u = g
        else:
            m = b1 * m + g
            u = m if rule == "sgd" else g + b1 * m
        p = p - lr * decay * p - lr * u
    return p


@pytest.mark.parametrize("scale", [None, 0.3])
@pytest.mark.parametrize("rule", RULES)
def test_fp32_follows_the_rule(rule, scale):
    found, start = slots(SHAPES, rule=rule), slots(SHAPES, rule=rule)
    run(FusedUpdate(rule, found), 20, SHAPES, scale=scale)
    for number, (slot, before) in enumerate(zip(found, start, strict=True)):
        grads = [gradients(SHAPES, seed=step)[number] for step in range(20)]
        torch.testing.assert_close(
            slot.weight.double(), truth(rule, before.weight, grads, scale or 1.0), rtol=1e-6, atol=2e-6
        )
        assert slot.step == 20


@pytest.mark.parametrize("formats", [("int8", "int8"), ("fp8", "fp8"), ("int4", "int4"), ("bf16", "bf16")], ids=str)
def test_low_bit_states_follow_it_from_afar(formats):
    found, start = slots([(64, 256)], formats), slots([(64, 256)])
    run(FusedUpdate("adamw", found), 20, [(64, 256)])
    run(FusedUpdate("adamw", start), 20, [(64, 256)])
    moved = (start[0].weight - slots([(64, 256)])[0].weight).norm()
    error = float((found[0].weight - start[0].weight).norm() / moved)
    assert 0 < error < {"int8": 0.02, "fp8": 0.06, "int4": 0.35, "bf16": 0.01}[formats[0]]


def test_a_tensor_without_a_gradient_is_left_alone_and_its_steps_are_its_own():
    found = slots([(8, 64), (8, 64)])
    update, before = FusedUpdate("adamw", found), found[1].weight.clone()
    update.set_hyper(0, HYPER)
    first, second = gradients([(8, 64), (8, 64)])
    update.step([first, None])
    assert torch.equal(found[1].weight, before) and found[1].step == 0 and found[0].step == 1
    update.step([first, second])
    alone = slots([(8, 64), (8, 64)])[1:]
    one = FusedUpdate("adamw", alone)
    one.set_hyper(0, HYPER)
    one.step([second])
    assert torch.equal(alone[0].weight, found[1].weight)


def test_bf16_weights_are_unbiased_and_frozen_when_rounded_to_nearest():
    """Updates a tenth of a weight's last bit: 1,000 of them move it by 100."""
    shape, moved = (64, 256), {}
    for sr in (True, False):
        weight = torch.ones(shape, dtype=torch.bfloat16)
        update = FusedUpdate("apply", [Slot(weight)], sr=sr, seed=1)
        update.set_hyper(0, {**HYPER, "lr": 2**-8 / 10, "weight_decay": 0.0})
        for _ in range(200):
            update.step([torch.ones(shape, dtype=torch.bfloat16)])
        moved[sr] = float((1 - weight.double()).mean())
    assert moved[False] == 0 and moved[True] == pytest.approx(200 * 2**-8 / 10, rel=0.01)


def test_random_bits_depend_on_seed_step_number_and_element_alone():
    """Two shards of a tensor are updated like halves of the whole; another seed, number or step gives other bits."""
    shape, formats = (8, 128), ("int8", "int8")

    def after(rows: slice, number=3, seed=5, first=0) -> torch.Tensor:
        slot = slots([shape], formats, dtype=torch.bfloat16)[0]
        states = tuple((f, {k: v[rows].clone() for k, v in parts.items()}) for f, parts in slot.states)
        part = Slot(slot.weight[rows].clone(), states, None, number, first_element=first)
        update = FusedUpdate("adamw", [part], seed=seed)
        update.set_hyper(0, HYPER)
        for step in range(3):
            update.step([gradients([shape], torch.bfloat16, seed=step)[0][rows]])
        return part.weight

    whole = after(slice(0, 8))
    assert torch.equal(after(slice(4, 8), first=4 * 128), whole[4:]) and torch.equal(after(slice(0, 4)), whole[:4])
    assert torch.equal(after(slice(0, 8)), whole)
    for changed in ({"number": 4}, {"seed": 6}):
        assert not torch.equal(after(slice(0, 8), **changed), whole)


# ---- kernel against definition ---------------------------------------------------------------------------------------

KINDS = [
    {"formats": ("fp32", "fp32")},
    {"formats": ("int8", "int8")},
    {"formats": ("int4", "int4")},
    {"formats": ("int8", "fp32")},
    {"formats": ("bf16", "bf16"), "dtype": torch.bfloat16},
    {"formats": ("int8", "int8"), "dtype": torch.bfloat16},
    {"formats": ("int4", "int8"), "master": True, "dtype": torch.bfloat16},
    {"formats": ("fp8", "fp8")},  # in the interpreter: the conversions of GPUs before sm_89
    {"formats": ("fp8", "fp8"), "dtype": torch.bfloat16},
]


def weights(slot: Slot) -> torch.Tensor:
    """A slot's weights in fp32, or its master copy: the interpreter does not round to bf16 correctly."""
    if isinstance(slot.weight, StoredWeight):
        return slot.weight.dequantize()
    return slot.weight.float() if slot.master is None else slot.master


def code_step(slot: Slot, p: torch.Tensor) -> torch.Tensor:
    """The spacing of a slot's weights around each of p, at most."""
    if not isinstance(slot.weight, StoredWeight):
        return (2**-7 if slot.weight.dtype == torch.bfloat16 else 2e-3) * (p.abs() + 1)
    scale = slot.weight.scale
    return scale[:, None] if scale.ndim == 1 else scale.repeat_interleave(128, 1)[:, : p.shape[1]]


def compare(rule: str, device: str, kernel: bool, steps: int, shapes, **kind) -> None:
    """Weights within fp32's rounding, except a few that were near a threshold of stochastic rounding.

    Such a state can be its block's largest in the next step, and all of the block is then scaled a little differently.
    """
    dtype = kind.get("dtype", torch.float32)
    pairs = [slots(shapes, rule=rule, device=device, **kind) for _ in range(2)]
    for found, use in zip(pairs, (False, kernel), strict=True):
        run(FusedUpdate(rule, found, seed=5, kernel=use), steps, shapes, dtype, 0.5, device)
    for expected, found in zip(*pairs, strict=True):
        a, b = map(weights, (expected, found))
        off = (a - b).abs() > 1e-5 * a.abs() + 1e-6
        assert float(off.float().mean() if off.numel() else 0) <= 2e-3
        assert ((a - b).abs() <= torch.where(off, 1.1 * code_step(expected, a), torch.inf)).all()
        for (format, parts), (_, others) in zip(expected.states, found.states, strict=True):
            x, y = (dequantize_state(p, format, expected.weight.shape) for p in (parts, others))
            amax = float(x.abs().max()) if x.numel() else 0
            other = (x - y).abs() > 1e-4 * amax
            assert int(other.sum()) <= 5e-3 * x.numel() + 2 * (format.block or 0)
            assert ((x - y).abs() <= 0.1 * amax).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", sampled(KINDS, lambda kind: kind in (KINDS[2], KINDS[3], KINDS[5], KINDS[8])), ids=str)
def test_the_kernel_is_the_definition(kind):
    compare("adamw", "cpu", True, 2, SHAPES, **kind)


@pytest.mark.interpreter
@pytest.mark.parametrize("rule", RULES[1:])
def test_the_kernel_is_the_definition_for_other_rules(rule):
    compare(rule, "cpu", True, 2, [(3, 128), (5, 33)], formats=("int8",))


@pytest.mark.interpreter
@pytest.mark.parametrize("stored", sampled(["int8", "int4"], lambda stored: stored == "int8"))
def test_the_kernel_writes_stored_weights_as_store_does(stored):
    compare("adamw", "cpu", True, 2, [(5, 256), (4, 384), (3, 40)], formats=("int8", "int8"), stored=stored)


@pytest.mark.interpreter
def test_a_prepared_step_is_that_of_its_gradients():
    """Another sequence than the prepared one is not taken for it."""
    shapes, found = [(3, 128), (5, 33)], []
    for other in (None, True, False):
        own, grads = slots(shapes), gradients(shapes)
        update = FusedUpdate("adamw", own, kernel=True)
        update.set_hyper(0, HYPER)
        if other is not None:
            update.prepare(gradients(shapes, seed=9) if other else grads)
        for _ in range(2):
            update.step(grads)
        found.append([slot.weight for slot in own])
    assert all(torch.equal(a, b) and torch.equal(a, c) for a, b, c in zip(*found, strict=True))


@pytest.mark.interpreter
def test_launches_do_not_grow_with_the_number_of_tensors():
    counts = []
    for many in (2, 9):
        shapes = [(2, 256)] * many + [(64,)] * many
        update = FusedUpdate("adamw", slots(shapes, ("int8", "int8")), kernel=True)
        run(update, 1, shapes)
        counts.append(update.launches)
    assert counts[0] == counts[1] <= 3


@pytest.mark.interpreter
@pytest.mark.parametrize("formats", [("int8", "int8"), ("int4", "int4"), ("fp8", "fp8"), ("bf16", "bf16")], ids=str)
def test_a_nonfinite_gradient_spoils_no_other_block(formats):
    check_nonfinite_gradient("cpu", formats)


def check_nonfinite_gradient(device: str, formats: tuple[str, str]) -> None:
    found = slots([(4, 256)], formats, dtype=torch.bfloat16, device=device)
    update, grads = FusedUpdate("adamw", found, kernel=True), gradients([(4, 256)], torch.bfloat16, device)
    update.set_hyper(0, HYPER)
    grads[0][1, 3] = torch.nan
    for _ in range(2):
        update.step(grads)
    weight = found[0].weight
    assert weight[1, 3].isnan() and weight[[0, 2, 3]].isfinite().all()


GPU_SHAPES = [(64, 4096), (129, 896), (33, 1000), (5, 33), (4096,), (7,), (2, 3, 5)]
STORED = [{"formats": ("int8", "int8"), "stored": name, "dtype": torch.bfloat16} for name in ("int8", "int4")]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_on_the_gpu_the_kernel_is_the_definition(kind):
    compare("adamw", "cuda", True, 3, GPU_SHAPES, **kind)


@pytest.mark.gpu
@pytest.mark.usefixtures("without_fp8_instructions")
def test_on_the_gpu_fp8_without_its_instructions():
    """The conversions of GPUs before sm_89."""
    compare("adamw", "cuda", True, 3, GPU_SHAPES, formats=("fp8", "fp8"))


@pytest.mark.gpu
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("format", ["fp32", "int8", "int4"])
def test_on_the_gpu_for_every_rule(rule, format):
    compare(rule, "cuda", True, 3, GPU_SHAPES, formats=(format,) * len(SIGNED_STATES[rule]))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", STORED, ids=str)
def test_on_the_gpu_for_stored_weights(kind):
    compare("adamw", "cuda", True, 3, [(64, 4096), (129, 896), (33, 1000), (16, 18944)], **kind)


@pytest.mark.gpu
@pytest.mark.parametrize("formats", [("int8", "int8"), ("int4", "int4"), ("fp8", "fp8"), ("bf16", "bf16")], ids=str)
def test_on_the_gpu_a_nonfinite_gradient_shows_in_its_weight_and_spoils_no_other_block(formats):
    check_nonfinite_gradient("cuda", formats)


@pytest.mark.gpu
def test_a_recorded_step_goes_on_counting_and_takes_a_new_rate():
    shapes = [(64, 1024), (64,)]
    pair = [slots(shapes, ("int8", "int8"), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    eager, recorded = (FusedUpdate("adamw", found, seed=5) for found in pair)
    grads = gradients(shapes, torch.bfloat16, "cuda")
    for update in (eager, recorded):
        update.set_hyper(0, HYPER)
        update.step(grads)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded.step(grads)
    for rate in (0.01, 0.02, 0.03):
        for update in (eager, recorded):
            update.set_hyper(0, {**HYPER, "lr": rate})
        eager.step(grads)
        graph.replay()
    assert all(torch.equal(a.weight, b.weight) and a.step == b.step == 4 for a, b in zip(*pair, strict=True))


@pytest.mark.gpu
def test_a_step_waits_for_nothing():
    found = slots([(64, 1024)], ("int8", "int8"), dtype=torch.bfloat16, device="cuda")
    update = FusedUpdate("adamw", found)
    grads = gradients([(64, 1024)], torch.bfloat16, "cuda")
    update.set_hyper(0, HYPER)
    update.step(grads)
    torch.cuda.set_sync_debug_mode("error")
    try:
        update.set_hyper(0, {**HYPER, "lr": 0.5})
        update.step([grads[0].clone()])
    finally:
        torch.cuda.set_sync_debug_mode("default")


# ---- the absmax of new weights ---------------------------------------------------------------------------------------


def check_amax(device: str, shapes, sr: bool, master: bool) -> None:
    """Of the weights as they are stored, exactly; of a tensor without a gradient the former one."""
    found = slots(shapes, ("int8", "int8"), dtype=torch.bfloat16, master=master, device=device)
    for slot in found[:-1]:
        slot.amax = WeightAmax([slot.weight], slot.weight.device)
    update = FusedUpdate("adamw", found, sr=sr, kernel=True)
    update.set_hyper(0, HYPER)
    for step in range(2):
        grads = gradients(shapes, torch.bfloat16, device, seed=step)
        grads[0] = grads[0] if step == 0 else None
        before = found[0].amax.bits.clone()
        update.step(grads)
        assert step == 0 or torch.equal(found[0].amax.bits, before)
        for slot in found[:-1]:
            weight = slot.weight.float() if slot.master is None else slot.master.to(torch.bfloat16).float()
            assert torch.equal(slot.amax.bits.view(torch.float32), weight.abs().max().view(1)) and slot.amax.known
    found[1].weight.mul_(2)
    assert not found[1].amax.known and found[0].amax.known


AMAX_SHAPES = [(40, 256), (5, 33), (300,), (7, 256)]  # of several CTAs, unaligned, a partial tile


@pytest.mark.interpreter
@pytest.mark.parametrize("master", [False, True])
def test_the_kernel_leaves_the_absmax_of_the_weights_that_it_stores(master):
    check_amax("cpu", AMAX_SHAPES, True, master)


@pytest.mark.gpu
@pytest.mark.parametrize(("sr", "master"), [(True, False), (False, False), (True, True)])
def test_on_the_gpu_the_kernel_leaves_the_absmax_of_the_weights_that_it_stores(sr, master):
    check_amax("cuda", [(129, 4096), *GPU_SHAPES], sr, master)


@pytest.mark.interpreter
@pytest.mark.parametrize("length", [16, 5])
def test_elements_that_a_tile_does_not_hold_are_not_in_its_absmax(length):
    """Loads are clamped to the last element, whose copies draw random bits of their own: each rounds 1 + 2**-11 up with
    a probability of 1 / 16, and one of them in nearly every step."""
    weight = torch.ones(1, length, dtype=torch.bfloat16)
    slot = Slot(weight, amax=WeightAmax([weight], weight.device))
    update = FusedUpdate("apply", [slot], kernel=True)
    update.set_hyper(0, {**HYPER, "lr": 2**-11, "weight_decay": 0.0})
    for _ in range(8):
        weight.fill_(1)
        update.step([-torch.ones_like(weight)])
        assert torch.equal(slot.amax.bits.view(torch.float32), weight.float().max().view(1))


@pytest.mark.interpreter
def test_a_nan_is_the_absmax():
    found = slots([(4, 256)], ("int8", "int8"), dtype=torch.bfloat16)
    found[0].amax = WeightAmax([found[0].weight], torch.device("cpu"))
    update, grads = FusedUpdate("adamw", found, kernel=True), gradients([(4, 256)], torch.bfloat16)
    update.set_hyper(0, HYPER)
    grads[0][1, 3] = torch.nan
    update.step(grads)
    assert found[0].amax.bits.view(torch.float32).isnan()
