"""Registers swapped models with transformers, now or as soon as it is imported; here it never is."""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

MODELS = "transformers.modeling_utils"  # whatever loads a model has imported it before


class ModelsFinder(MetaPathFinder):
    """Has ``_register`` called after transformers' models were imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The ordinary spec of the module, whose loader also calls ``_register``.

        Packages without an ``__init__`` have a ``path`` that is iterated but no sequence.
        """
        spec = PathFinder.find_spec(fullname, path) if fullname == MODELS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            _register()

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Register now if transformers' models have been imported, else as soon as they are."""
    if MODELS in sys.modules:
        _register()
    elif not any(isinstance(finder, ModelsFinder) for finder in sys.meta_path):
        sys.meta_path.insert(0, ModelsFinder())


def _register() -> None:
    """Make swapped models known to transformers."""
    import_module("fast_attention.integrations.loading")
