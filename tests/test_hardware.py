"""What is asked of the C library is asked where it can be, and is no error elsewhere."""

import ctypes

import pytest

from qtrain.hardware import keep_freed_memory


@pytest.mark.parametrize("missing", [AttributeError, OSError, TypeError])
def test_a_c_library_without_the_option_is_left_alone(monkeypatch, missing):
    def library(name):
        raise missing

    monkeypatch.setattr(ctypes, "CDLL", library)
    keep_freed_memory()


def test_both_thresholds_are_set(monkeypatch):
    asked = {}

    class Library:
        def mallopt(self, option, value):
            asked[option] = value
            return 1

    monkeypatch.setattr(ctypes, "CDLL", lambda name: Library())
    keep_freed_memory()
    assert set(asked) == {-1, -3} and all(2**30 <= value < 2**31 for value in asked.values())
