"""Schedules reach both ends whatever the number of steps, and never leave their range."""

import pytest

from qtrain.core.errors import UserError
from qtrain.optim import make_schedule


@pytest.mark.parametrize("n_steps", [1, 2, 3, 7, 10, 33, 1000])
@pytest.mark.parametrize("decay_type", ["linear", "cosine", "sqrt"])
@pytest.mark.parametrize("warmup,decay", [(0.0, 0.0), (0.1, 0.2), (0.5, 0.5), (0.0, 1.0), (0.02, 0.98)])
def test_reaches_its_ends(n_steps, decay_type, warmup, decay):
    schedule = make_schedule({"warmup": warmup, "decay": decay, "decay_type": decay_type, "final": 0.1})
    factors = [schedule.factor(step, n_steps) for step in range(n_steps)]
    assert all(0 < f <= 1 for f in factors)
    rise, fall = round(warmup * n_steps), round(decay * n_steps)
    if fall:
        assert factors[-1] == pytest.approx(0.1)
    if rise and rise + fall <= n_steps:
        assert factors[rise - 1] == 1.0
        assert factors[:rise] == sorted(factors[:rise])
    assert factors[n_steps - fall :] == sorted(factors[n_steps - fall :], reverse=True)


def test_shapes_at_the_middle():
    middle = {}
    for decay_type in ("linear", "cosine", "sqrt"):
        middle[decay_type] = make_schedule({"warmup": 0, "decay": 1, "decay_type": decay_type}).factor(49, 100)
    assert middle["linear"] == pytest.approx(0.5) and middle["cosine"] == pytest.approx(0.5)
    assert middle["sqrt"] == pytest.approx(1 - 0.5**0.5)


def test_above_one_is_steps_and_up_to_one_a_fraction():
    """The same schedule in both words; 1 is the whole run."""
    shares, steps = make_schedule({"warmup": 0.1, "decay": 0.3}), make_schedule({"warmup": 20, "decay": 60})
    assert [shares.factor(n, 200) for n in range(200)] == [steps.factor(n, 200) for n in range(200)]
    # Of a longer run a number of steps stays what it is.
    assert steps.factor(19, 1000) == 1.0 and steps.factor(18, 1000) < 1 and steps.factor(939, 1000) == 1.0
    assert make_schedule({"warmup": 1, "decay": 0}).factor(99, 200) == 0.5
    steps.check(80)
    with pytest.raises(UserError, match=r"20 \+ 60 steps of a run of 79; give fewer, or more --n_steps"):
        steps.check(79)


def test_inverse_square_root():
    """After the warm-up the peak x sqrt(warm-up steps / step), from which the decay goes down to the final rate."""
    schedule = make_schedule({"warmup": 100, "decay": 0, "stable": "inverse_sqrt"})
    assert schedule.factor(99, 1000) == 1.0 and schedule.factor(399, 1000) == 0.5
    assert [schedule.factor(n, 1000) for n in range(1000)] == [schedule.factor(n, 9999) for n in range(1000)]
    cooled = make_schedule({"warmup": 100, "decay": 200, "stable": "inverse_sqrt", "final": 0.1})
    factors = [cooled.factor(n, 600) for n in range(600)]
    assert factors[399] == 0.5 and factors[499] == pytest.approx(0.3) and factors[599] == pytest.approx(0.1)
    assert factors[100:] == sorted(factors[100:], reverse=True)


@pytest.mark.parametrize(
    "options,message",
    [
        ({"warmup": 0.8, "decay": 0.4}, "more than the whole run"),
        ({"warmup": -0.1}, "at least 0"),
        ({"warmup": 1.5}, "neither a fraction of the steps, at most 1, nor a whole number of steps"),
        ({"stable": "inverse_sqrt", "warmup": 0}, 'give a "warmup" above 0'),
        ({"decay_type": "cosin"}, "one of 'linear', 'cosine', 'sqrt'"),
        ({"warmups": 0.1}, "Did you mean 'warmup'?"),
        ({"final": True}, "must be a number"),
    ],
)
def test_bad_schedules_are_refused(options, message):
    with pytest.raises(UserError, match="--lr_schedule_kwargs") as error:
        make_schedule(options)
    assert message in str(error.value)
