"""Efficient attention for PyTorch: 39 published mechanisms, exact speed-ups for models, and tests for any attention.

The page of contents is ``contents.py``. Start with ``attention(q, k, v, "LinearAttention")`` on tensors,
``MultiheadAttention`` or ``TokenMixer`` in a model, ``catalogue.names()`` for what there is, ``conformance.check`` for
what it keeps.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fast_attention.contents import *  # noqa: F403

__version__ = "0.1.0"

_NOT_PUBLIC = ("LATER", "TYPE_CHECKING")  # of the page of contents


def __getattr__(name: str) -> Any:
    """Import a module or a public name when it is first used: torch takes seconds to import."""
    if name == "__all__":
        return [*(each for each, value in _contents().items() if not isinstance(value, ModuleType)), *_later()]
    if not name.startswith("__"):
        if find_spec(f"{__name__}.{name}") is not None:
            return import_module(f"{__name__}.{name}")
        if name in _later():
            return getattr(import_module(f"{__name__}.{_later()[name]}"), name)
        if name in (public := _contents()):
            globals().update(public)
            return public[name]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_contents(), *_later()})


def _contents() -> dict[str, Any]:
    names = vars(import_module(f"{__name__}.contents"))
    return {name: value for name, value in names.items() if not name.startswith("_") and name not in _NOT_PUBLIC}


def _later() -> dict[str, str]:
    """Public names and the rooms that they are imported from when they are asked for."""
    return import_module(f"{__name__}.contents").LATER
