"""The base class of tasks on the user's own labelled sequences: file, columns, length, validation split."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fast_attention.tasks.tables import Column
from fast_attention.tasks.task import Task
from fast_attention.value import at_least

PAD = 256  # the token behind the bytes


@dataclass(frozen=True, repr=False)
class Labelled(Task):
    """A task on labelled sequences in a file. Subclasses name the columns that are looked for where none is given.

    Args:
        path: The file.
        text: The column with the sequences; empty for the first of ``texts`` that is there.
        label: The column with the labels; empty for the first of ``labels``.
        context: The longest sequence, in bytes; longer ones are cut at the end.
        share: The fraction held out for validation.
        seed: For the split and the order.
    """

    texts: ClassVar[tuple[str, ...]]
    labels: ClassVar[tuple[str, ...]]
    takes = "path"

    path: str
    text: str = ""
    label: str = ""
    context: int = 512
    share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, "context", self.context, 1)
        if not 0.0 < self.share < 1.0:
            raise ValueError(f"{type(self).__name__}(share={self.share!r}): share must lie between 0 and 1")

    @property
    def length(self) -> int:
        """The longest sequence."""
        return self.context

    @property
    def columns(self) -> tuple[Column, Column]:
        """The columns of the sequences and of their labels."""
        return Column("text", self.text, self.texts), Column("label", self.label, self.labels)
