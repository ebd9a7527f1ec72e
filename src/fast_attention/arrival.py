"""Lets transformers load swapped models, whenever it is imported; it is never imported here: that takes seconds."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

MODELS = "transformers.modeling_utils"  # whatever loads a model has imported it before


class Arrival(MetaPathFinder):
    """Finds nothing by itself: it has transformers' models followed by ours."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        """The module as it is found anyway, with ``register`` behind its last line."""
        spec = PathFinder.find_spec(fullname, path) if fullname == MODELS else None
        if spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            run(module)
            register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Register now where transformers' models have been imported, else right after they will have been."""
    if MODELS in sys.modules:
        register()
    elif not any(isinstance(finder, Arrival) for finder in sys.meta_path):
        sys.meta_path.insert(0, Arrival())


def register() -> None:
    """Make swapped models known to transformers."""
    import_module("fast_attention.integrations.loading")
