"""What NCCL may do with the memory of CUDA graphs, by the environment."""

import os

import pytest

from qtrain.comm import ranks
from qtrain.core.errors import UserError
from qtrain.core.process import maps_by_pages


@pytest.mark.parametrize(
    ("settings", "by_pages"),
    [
        ({}, False),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:True"}, True),
        ({"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512, expandable_segments: true"}, True),
        ({"PYTORCH_ALLOC_CONF": "expandable_segments:False"}, False),
    ],
)
def test_expandable_segments_are_found(monkeypatch, settings, by_pages):
    for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert maps_by_pages() == by_pages


def test_nccl_registers_no_buffers_and_a_setting_that_asks_for_it_is_refused(monkeypatch):
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "")  # restored after the test
    monkeypatch.delenv("NCCL_GRAPH_REGISTER")
    ranks._register_no_buffers()
    assert os.environ["NCCL_GRAPH_REGISTER"] == "0"
    ranks._register_no_buffers()
    monkeypatch.setenv("NCCL_GRAPH_REGISTER", "1")
    with pytest.raises(UserError, match="NCCL_GRAPH_REGISTER: 1 breaks"):
        ranks._register_no_buffers()
