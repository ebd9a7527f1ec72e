"""Replaces the attention of other people's models by any mechanism; saves, loads and restores them.

Importing it lets transformers' own ``from_pretrained`` read swapped models.
"""

import sys
from importlib import import_module
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from typing import Any

from fast_attention.integrations.extending import Extension, extend
from fast_attention.integrations.late_chunking import Chunk, LateChunks, late_chunks
from fast_attention.integrations.modules import MODELS
from fast_attention.integrations.report import ExactLayer, ExactReport, Layer, Report, Verified
from fast_attention.integrations.swapping import from_pretrained, swap, swap_back

__all__ = [
    "Chunk", "ExactLayer", "ExactReport", "Extension", "LateChunks", "Layer", "Report", "Verified", "extend",
    "from_pretrained", "late_chunks", "swap", "swap_back",
]  # fmt: skip
LOADING = "fast_attention.integrations.loading"  # which makes swapped models known to transformers


class ModelsFinder(MetaPathFinder):
    """Imports ``LOADING`` after transformers' models were imported."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        """The ordinary spec of the module, whose loader also imports ``LOADING``.

        Packages without an ``__init__`` have a ``path`` that is iterated but no sequence.
        """
        spec = PathFinder.find_spec(fullname, path) if fullname == MODELS else None
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            load(module)
            import_module(LOADING)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


if MODELS in sys.modules:
    import_module(LOADING)
elif not any(isinstance(finder, ModelsFinder) for finder in sys.meta_path):
    sys.meta_path.insert(0, ModelsFinder())
