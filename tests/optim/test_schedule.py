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


@pytest.mark.parametrize(
    "options,message",
    [
        ({"warmup": 0.8, "decay": 0.4}, "more than the whole run"),
        ({"warmup": -0.1}, "from 0 to 1"),
        ({"warmup": 100}, "from 0 to 1"),
        ({"decay_type": "cosin"}, "one of 'linear', 'cosine', 'sqrt'"),
        ({"warmups": 0.1}, "Did you mean 'warmup'?"),
        ({"final": True}, "must be a number"),
    ],
)
def test_bad_schedules_are_refused(options, message):
    with pytest.raises(UserError, match="--lr_schedule_kwargs") as error:
        make_schedule(options)
    assert message in str(error.value)
