"""The progress bars of the commands that measure and that train; drawn on terminals only."""

from __future__ import annotations

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


def progress_bar(console: Console) -> Progress:
    """A bar with steps done, the time, and what is being done; it vanishes at the end."""
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)


def training_bar(console: Console) -> Progress:
    """A bar with the share done, the time, the time left, and how it goes; it vanishes at the end."""
    words = TextColumn("{task.description}", markup=False)
    times = (TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
    columns = (BarColumn(24), TaskProgressColumn(), *times, words)
    return Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal, speed_estimate_period=120
    )
