"""Shared test set-up: kernels run in Triton's interpreter where there is no GPU, and GPU tests say so."""

import os

os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
if "PYTEST_XDIST_WORKER" in os.environ:  # workers share the cores: threads of their own would only wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is defined

import qtrain  # noqa: F401  (declares torchvision's operators on CPU builds before transformers is imported)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        skipped, reason = "interpreter", "kernels run for real here"
    else:
        skipped, reason = "gpu", "needs an NVIDIA GPU"
    for item in items:
        if skipped in item.keywords:
            item.add_marker(pytest.mark.skip(reason=reason))
        elif "sweep" in item.keywords and not os.environ.get("QTRAIN_FULL_SWEEP"):
            item.add_marker(pytest.mark.skip(reason="full sweep: make test-full"))
