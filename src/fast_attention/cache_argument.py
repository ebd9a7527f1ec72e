"""Names the argument in which transformers' models take their cache: ``cache`` from 5.24 on, before that another."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

NAMES = ("cache", "past_key_values")


def name_of(forward: Any) -> str | None:
    """The name under which a model's ``forward`` takes a cache, and returns it; None if it takes none."""
    return next((name for name in NAMES if name in inspect.signature(forward).parameters), None)


def given(keywords: Mapping[str, Any]) -> Any:
    """The cache among a call's keywords, also under its former name; None if there is none."""
    return next((keywords[name] for name in NAMES if keywords.get(name) is not None), None)
