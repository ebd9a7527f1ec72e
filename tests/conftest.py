"""Every test of tensors runs on every device at hand, and stands in one of two tiers.

``make test`` runs what is not marked ``slow``; ``make test-all`` runs everything. A file or folder outside ``QUICK`` is
slow as a whole, and inside it a test may carry the mark itself.
"""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

TESTS = Path(__file__).parent
QUICK = [
    TESTS / name
    for name in (
        "conformance/test_contract.py", "conformance/test_third_party.py", "dense", "linear", "sparse", "aft", "hybrid",
        "log_manhattan", "lsh", "sinkhorn", "mixers", "biases", "core", "engine", "nn",
        "hf/test_swapped.py", "integrations/test_swap.py", "integrations/test_swap_torch.py",
        "test_attention.py", "test_catalogue.py", "test_files.py", "test_functional.py", "test_grouped.py",
        "test_house.py", "test_names.py", "test_oracles.py", "test_packed.py", "test_prose.py",
    )
]  # fmt: skip

torch.set_num_threads(1)
gc.set_threshold(50_000, 20, 50)  # traced programs are many objects that all stay: looking through them often is waste


def quick(path: Path) -> bool:
    return any(path.is_relative_to(each) or each.is_relative_to(path) for each in QUICK)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import what ``make test`` does not run."""
    return True if config.option.markexpr == "not slow" and not quick(collection_path) else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if not quick(item.path):
            item.add_marker(pytest.mark.slow)


def pytest_sessionstart() -> None:
    from fast_attention.allocator import keep_memory

    keep_memory()  # or a tenth of some tests' time goes to memory that is given back and taken anew


@pytest.fixture(params=["cpu", *(["cuda"] if torch.cuda.is_available() else [])])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
