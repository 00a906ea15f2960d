"""Lists, options and sizes on the command line."""

import pytest

from qtrain.bench.arguments import name_and_options, parse_sizes, split_list, wanted_names
from qtrain.core.errors import UserError


def test_lists():
    assert split_list(' a,b:{"x":1,"y":[2,3]}, ,c,') == ["a", 'b:{"x":1,"y":[2,3]}', "c"]
    assert split_list("") == []


def test_options():
    assert name_and_options("int8", "--schemes") == ("int8", {})
    assert name_and_options('int8:{"a":{"b":1}}', "--schemes") == ("int8", {"a": {"b": 1}})
    for bad in ("int8:", "int8:[1]", "int8:{", "int8:3"):
        with pytest.raises(UserError, match="--schemes"):
            name_and_options(bad, "--schemes")


def test_sizes():
    assert parse_sizes("1x20X300", 3, "--shapes") == (1, 20, 300)
    for bad in ("1x2", "1x2x3x4", "0x1x1", "ax1x1", "-1x2x3", "1.5x2x3", "²x1x1", ""):
        with pytest.raises(UserError, match=r"--shapes.*4096x4096x4096"):
            parse_sizes(bad, 3, "--shapes")


def test_wanted():
    names = ["INT8 cuBLAS", "INT8 Triton", "FP8 Triton"]
    assert wanted_names("", "", names, "--rows") == set(names)
    assert wanted_names("int8", "triton", names, "--rows") == {"INT8 cuBLAS"}
    with pytest.raises(UserError, match="--rows: no row has 'int9'"):
        wanted_names("int9", "", names, "--rows")
