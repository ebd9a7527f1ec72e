"""Training tasks: values that make batch number i of the data from their seed."""

from __future__ import annotations

from dataclasses import MISSING, fields
from typing import Any

from fast_attention.expressions import Parser
from fast_attention.tasks.bytes import ByteLM
from fast_attention.tasks.listops import ListOps
from fast_attention.tasks.needle import Needle
from fast_attention.tasks.pathfinder import Pathfinder
from fast_attention.tasks.pixels import Pixels
from fast_attention.tasks.proteins import ProteinMLM
from fast_attention.tasks.recall import MQAR, Copy, Duplicate, Lookup, SelectiveCopy
from fast_attention.tasks.sequences import Sequences
from fast_attention.tasks.tags import Tags
from fast_attention.tasks.task import Batch, PackageMissing, Split, Task

_KINDS: tuple[type[Task], ...] = (
    ProteinMLM, ByteLM, ListOps, Pathfinder, MQAR, Lookup, Copy, Duplicate, SelectiveCopy, Needle, Pixels, Sequences,
    Tags,
)  # fmt: skip
_FILES = {"classify": "FILE.csv", "tag": "FILE.fasta"}
_NAMED = {kind.name: kind for kind in _KINDS}
_PARSER = Parser("task", "ListOps(longest=128)", {kind.__name__: kind for kind in _KINDS}, tuple(_NAMED))


def names() -> list[str]:
    """The names of all tasks, as the command line has them."""
    return list(_NAMED)


def parse(text: str | Task) -> Task:
    """Parse a task: a name (``"listops"``), a repr (``"ListOps(longest=128)"``), or a name and a file of the user's
    (``"classify FILE.csv"``, ``"byte-lm FILE.txt"``).

    Nothing is executed, and no file is read.

    Raises:
        ValueError: The text names no task or no such setting, or is not a call with plain values.
    """
    if isinstance(text, Task):
        return text
    word, _, rest = text.strip().partition(" ")
    if word in _NAMED:
        return _with_file(_NAMED[word], rest.strip())
    if "(" not in text and word not in _PARSER.values:
        raise ValueError(f"no task is called {text!r}.{_PARSER.nearest(text)}")
    value = _PARSER.read(text)
    assert isinstance(value, Task)
    return value


def kind(name: str) -> type[Task]:
    """The class of the task called ``name``.

    Raises:
        ValueError: No task has that name.
    """
    if name not in _NAMED:
        raise ValueError(f"no task is called {name!r}.{_PARSER.nearest(name)}")
    return _NAMED[name]


def wants_file(kind: type[Task]) -> bool:
    """Whether a task needs a file of the user's."""
    return any(field.name == kind.takes and field.default is MISSING for field in fields(kind))  # type: ignore[arg-type]


def _with_file(kind: type[Task], file: str) -> Task:
    make: Any = kind
    if not file and wants_file(kind):
        raise ValueError(f"{kind.name}: name a file, as in {kind.name} {_FILES[kind.name]}")
    if file and not kind.takes:
        takers = ", ".join(each.name for each in _KINDS if each.takes)
        raise ValueError(f"{kind.name} {file}: the task {kind.name} takes no file; those that do: {takers}")
    return make(**{kind.takes: file}) if file else make()


__all__ = [
    "MQAR", "Batch", "ByteLM", "Copy", "Duplicate", "ListOps", "Lookup", "Needle", "PackageMissing", "Pathfinder",
    "Pixels", "ProteinMLM", "SelectiveCopy", "Sequences", "Split", "Tags", "Task", "kind", "names", "parse",
    "wants_file",
]  # fmt: skip
