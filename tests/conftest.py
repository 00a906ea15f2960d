"""Shared test set-up: the GPU marker skips itself, with its reason, where there is no GPU."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")

import pytest
import torch

import qtrain  # noqa: F401  (declares torchvision's operators on CPU builds before transformers is imported)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs an NVIDIA GPU")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
