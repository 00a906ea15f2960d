"""What tests of kernels share."""

from collections.abc import Iterator

import pytest

from qtrain.kernels.numerics import encode


@pytest.fixture
def without_fp8_instructions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels convert to FP8 as on GPUs before sm_89."""
    monkeypatch.setattr(encode, "has_fp8", lambda device: False)
    encode.encoding.cache_clear()
    yield
    encode.encoding.cache_clear()
