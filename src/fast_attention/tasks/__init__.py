"""What a model can be trained on: every task is a value that makes batch number i out of its seed."""

from __future__ import annotations

from fast_attention.ops.spelling import Spelling
from fast_attention.tasks.bytes import ByteLM
from fast_attention.tasks.listops import ListOps
from fast_attention.tasks.needle import Needle
from fast_attention.tasks.pathfinder import Pathfinder
from fast_attention.tasks.pixels import Pixels
from fast_attention.tasks.proteins import ProteinMLM
from fast_attention.tasks.recall import MQAR, Copy, Duplicate, Lookup, SelectiveCopy
from fast_attention.tasks.sequences import Sequences
from fast_attention.tasks.task import Batch, PackageMissing, Split, Task

_KINDS: tuple[type[Task], ...] = (
    ProteinMLM, ByteLM, ListOps, Pathfinder, MQAR, Lookup, Copy, Duplicate, SelectiveCopy, Needle, Pixels, Sequences
)  # fmt: skip
_NAMED = {kind.name: kind for kind in _KINDS}
_SPELLING = Spelling("task", "ListOps(longest=128)", {kind.__name__: kind for kind in _KINDS}, tuple(_NAMED))


def names() -> list[str]:
    """The names of all tasks, as the command line has them."""
    return list(_NAMED)


def parse(text: str | Task) -> Task:
    """The task that ``text`` spells: ``"listops"``, a repr such as ``"ListOps(longest=128)"``, or ``"classify FILE"``.

    Nothing is executed, and no file is read.

    Raises:
        ValueError: The text names no task or no such setting, or is not a call with plain values.
    """
    if isinstance(text, Task):
        return text
    word, _, rest = text.strip().partition(" ")
    if word == Sequences.name:
        if not rest.strip():
            raise ValueError(f"{text!r}: name a file, as in classify FILE.csv")
        return Sequences(rest.strip())
    if word in _NAMED and not rest:
        return _SPELLING.read(_NAMED[word].__name__)
    if "(" not in text and word not in _SPELLING.values:
        raise ValueError(f"no task is called {text!r}.{_SPELLING.nearest(text)}")
    value = _SPELLING.read(text)
    assert isinstance(value, Task)
    return value


__all__ = [
    "MQAR", "Batch", "ByteLM", "Copy", "Duplicate", "ListOps", "Lookup", "Needle", "PackageMissing", "Pathfinder",
    "Pixels", "ProteinMLM", "SelectiveCopy", "Sequences", "Split", "Task", "names", "parse",
]  # fmt: skip
