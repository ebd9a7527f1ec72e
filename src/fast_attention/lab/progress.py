"""The progress bar of the commands that measure."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn


def progress_bar(console: Console) -> Progress:
    """A bar with steps done, the time, and what is being done; it vanishes at the end."""
    columns = (BarColumn(24), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    return Progress(*columns, console=console, transient=True)
