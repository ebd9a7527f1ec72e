"""The weights of Hybrid where both of its parts have some."""

from __future__ import annotations

from typing import Any, NamedTuple


class HybridWeights(NamedTuple):
    """The weights of the far part, and those of the near part's bias."""

    far: Any
    near: Any
