"""Evaluation windows are the same every time and for any seed; ranks share them evenly."""

import numpy as np
import pytest
import torch

from qtrain.core.errors import UserError
from qtrain.data.eval_windows import eval_batches, eval_sets, set_flag
from qtrain.data.stream import StreamContext
from tests.data.corpora import specs, write_raw


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    return specs(tmp_path_factory.mktemp("corpora"))


@pytest.mark.parametrize("kind", ["token", "text", "hf_text", "mix"])
def test_windows_do_not_depend_on_the_run(datasets, kind):
    first = eval_batches(datasets[kind][0], StreamContext(32, seed=1), 4, 10, "--eval_ds")
    again = eval_batches(datasets[kind][0], StreamContext(32, seed=2, shuffle=False), 4, 10, "--eval_ds")
    assert first.n_sequences == 10 and [len(b.input_ids) for b in first.batches] == [4, 4, 2]
    for a, b in zip(first.batches, again.batches, strict=True):
        assert torch.equal(a.input_ids, b.input_ids) and torch.equal(a.labels, b.labels)


def test_fewer_windows_than_asked_are_all_used_once(tmp_path):
    write_raw(tmp_path / "x.bin", np.arange(101))
    spec = {"type": "token", "dataset_dir": str(tmp_path)}
    windows = eval_batches(spec, StreamContext(10), 4, 1000, "--eval_ds")
    assert windows.n_sequences == 10
    assert sorted(torch.cat([b.input_ids for b in windows.batches]).flatten().tolist()) == list(range(100))


def test_not_one_window_is_an_error(tmp_path):
    (tmp_path / "x.txt").write_text("short")
    spec = {"type": "text", "paths": str(tmp_path), "tokenizer": "byte"}
    with pytest.raises(UserError, match=r"^--eval_ds: it holds less than one window of seq_len\+1 = 33"):
        eval_batches(spec, StreamContext(32), 4, 10, "--eval_ds")


def test_one_dataset_or_several_by_name():
    one = {"type": "text", "paths": "x"}
    assert eval_sets(None, "--eval_ds") == {} and eval_sets(one, "--eval_ds") == {"": one}
    assert eval_sets({"wiki": one, "code.2-b": one}, "--eval_ds") == {"wiki": one, "code.2-b": one}
    assert eval_sets({"paths": "x"}, "--eval_ds") == {"": {"paths": "x"}}, "a dataset without its type: refused as such"
    assert set_flag("--eval_ds", "wiki") == "--eval_ds.wiki" and set_flag("--eval_ds", "") == "--eval_ds"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ({"wiki": {"type": "text"}, "paths": "x"}, "--eval_ds: 'paths' is no dataset; give"),
        ({"a b": {"type": "text"}}, "--eval_ds: 'a b' cannot name a dataset; use letters"),
        ({"": {"type": "text"}}, "--eval_ds: '' cannot name a dataset"),
    ],
)
def test_what_names_no_datasets_is_refused(spec, message):
    with pytest.raises(UserError, match="^" + message):
        eval_sets(spec, "--eval_ds")
