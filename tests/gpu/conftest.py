"""Kernels on a GPU where there is one; else Triton's interpreter runs them on the CPU's tensors: slow, exact.

Triton decides when it is imported whether it interprets, so these tests have a run of their own: ``make kernels``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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


@pytest.fixture(autouse=True, scope="session")
def patched_once_a_launch() -> Iterator[None]:
    """Let the interpreter put its functions into Triton's language once a launch, not with every function it calls.

    Which it does to be sure of the modules that the function sees; here all there are are patched at the beginning. It
    was more than half of these tests' time.
    """
    if not INTERPRETED:
        yield
        return
    from triton import language
    from triton.runtime import interpreter

    inside: list[Any] = []

    def patched(function: Any) -> Any:
        if inside:
            return None
        inside.append(function)
        scope = real(SimpleNamespace(__globals__={"tl": language, "core": language.core}))

        def restored() -> None:
            inside.clear()
            scope.restore()

        return SimpleNamespace(restore=restored)

    with pytest.MonkeyPatch.context() as patch:
        real = interpreter._patch_lang
        patch.setattr(interpreter, "_patch_lang", patched)
        yield
