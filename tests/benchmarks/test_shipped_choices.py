"""What comes with the package is read as it was timed, and grows by what another machine has timed."""

import json
import math
import re

import pytest

from benchmarks import shipped_choices
from benchmarks.shipped_choices import LEAST, main, sizes
from qtrain.core.errors import UserError
from qtrain.kernels.autotune import SHIPPED

LARGE, SMALL = "scaled_mm 16384 1152 896 int8 int8 bfloat16 True ad7b28c1", "scaled_mm 48 256 1280 int8 int8 c8f3dae4"


def test_files_of_the_package_name_a_device_and_have_large_products():
    files = list(SHIPPED.glob("*.json"))
    assert files and all(re.fullmatch(r"NVIDIA-[\w-]+-torch-[\w.-]+\.json", file.name) for file in files)
    for file in files:
        choices = json.loads(file.read_text())
        assert choices and all(isinstance(name, str) for name in choices.values())
        assert all(
            math.prod(sizes(entry)) >= LEAST and re.fullmatch(r"[0-9a-f]{8}", entry.split()[-1]) for entry in choices
        )


def test_choices_of_a_machine_join_those_of_the_package(tmp_path, monkeypatch):
    shipped, tuned = tmp_path / "choices", tmp_path / "tuned"
    monkeypatch.setattr(shipped_choices, "SHIPPED", shipped)
    tuned.mkdir()
    with pytest.raises(UserError, match="--tuned"):
        main(["--tuned", str(tuned)])
    for checksum, found in (
        ("00000001", {LARGE: "cublas", SMALL: "cublas"}),
        ("00000002", {LARGE[:-1] + "2": "triton a"}),
    ):
        (tuned / f"tuning-NVIDIA-H100-torch-2.11.0-kernels-{checksum}.json").write_text(json.dumps(found))
    main(["--tuned", str(tuned)])
    assert json.loads((shipped / "NVIDIA-H100-torch-2.11.0.json").read_text()) == {
        LARGE: "cublas", LARGE[:-1] + "2": "triton a",
    }  # fmt: skip
