"""Loads the compiled core: C++ functions for CPUs that make mechanisms fast, and that nobody needs."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch

FILE = Path(__file__).parent / f"_core.{sysconfig.get_platform()}.so"
WIDTHS = {"AVX512": 16, "AVX2": 8}
_reason: str | None = None


def unavailable() -> str:
    """Why the core does not serve; empty where it does."""
    global _reason
    if _reason is None:
        _reason = _load()
    return _reason


def _load() -> str:
    if not FILE.exists():
        return "no core was built; `python -m fast_attention.core build` makes one"
    try:
        torch.ops.load_library(str(FILE))
    except OSError as error:
        return f"torch could not load it: {error}"
    torch.ops.fast_attention_core.use_width(WIDTHS.get(torch.backends.cpu.get_cpu_capability(), 4))
    return ""
