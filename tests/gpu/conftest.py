"""Triton's interpreter runs the kernels on the CPU's tensors: slow, exact, and without a GPU.

Triton decides when it is imported whether it interprets, so these tests have a run of their own: ``make kernels``.
"""

from __future__ import annotations

import os

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dispatch take tensors of the CPU for a GPU's."""
    from fast_attention.engine import dispatch

    monkeypatch.setattr(dispatch, "on_gpu", lambda x: x.device.type == "cpu")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)
