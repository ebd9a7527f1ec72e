"""Kernels on a GPU where there is one; else Triton's interpreter runs them on the CPU's tensors: slow, exact.

Triton decides when it is imported whether it interprets, so these tests have a run of their own: ``make kernels``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if not INTERPRETED and not torch.cuda.is_available():
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let dispatch take tensors of the CPU for a GPU's."""
    from fast_attention.engine import dispatch

    if INTERPRETED:
        monkeypatch.setattr(dispatch, "on_gpu", lambda x: x.device.type == "cpu")


@pytest.fixture(autouse=True)
def device() -> Iterator[torch.device]:
    """Where tensors are made."""
    torch.manual_seed(0)
    with torch.device("cpu" if INTERPRETED else "cuda") as made:
        yield made
