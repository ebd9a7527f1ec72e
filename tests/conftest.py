"""Every test of tensors runs on every device at hand."""

from __future__ import annotations

import gc

import pytest
import torch

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 50)  # traced programs are many objects that all stay: looking through them often is waste


def pytest_sessionstart() -> None:
    from fast_attention.allocator import keep_memory

    keep_memory()  # or a tenth of some tests' time goes to memory that is given back and taken anew


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
