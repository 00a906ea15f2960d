"""The state of a run survives a checkpoint's JSON; one with other fields is refused."""

import json

import pytest

from qtrain.core.errors import UserError
from qtrain.train.state.state_dict import TrainState


def test_a_state_survives_json():
    state = TrainState(step=7, tokens=2**40, data={"sample": 3, "parts": [{"token": 1}]}, best_eval_loss=0.1 + 0.2)
    assert TrainState.from_meta(json.loads(json.dumps(state.as_meta()))) == state


def test_a_state_of_an_earlier_version_lacks_the_best_step():
    meta = TrainState(step=7, best_eval_loss=1.5).as_meta()
    del meta["best_step"], meta["evals_since_best"]
    assert TrainState.from_meta(meta).best_step is None


def test_every_run_has_its_own_id():
    assert TrainState().run_id != TrainState().run_id


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.pop("run_id"),
        lambda m: m.update(more=1),
        lambda m: m.update(step="7"),
        lambda m: m.update(tokens=None),
    ],
)
def test_a_state_with_other_fields_is_refused(change):
    meta = TrainState(step=7).as_meta()
    change(meta)
    with pytest.raises(UserError, match="--resume: the checkpoint's state is not one of this version"):
        TrainState.from_meta(meta)
