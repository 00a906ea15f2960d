"""What comes with the package is read as it was timed, and grows by what another machine has timed."""

import json
import math
import os
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
    other, again = LARGE.replace("1152", "4864"), LARGE[:-1] + "2"  # of another shape; of the same, by other candidates
    for time, checksum, found in (
        (1, "00000002", {LARGE: "cublas", SMALL: "cublas", other: "cublas"}),
        (2, "00000001", {again: "triton a"}),
    ):
        file = tuned / f"tuning-NVIDIA-H100-torch-2.11.0-kernels-{checksum}.json"
        file.write_text(json.dumps(found))
        os.utime(file, (time, time))
    main(["--tuned", str(tuned)])
    expected = {again: "triton a", other: "cublas"}
    assert json.loads((shipped / "NVIDIA-H100-torch-2.11.0.json").read_text()) == expected
