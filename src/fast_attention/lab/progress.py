"""Shows progress bars on stderr, on terminals only, and ends a command early when it is interrupted."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import progress as bars
from rich.console import Console
from rich.text import Text


@contextmanager
def counted(total: int) -> Iterator[Callable[[str], None]]:
    """A bar of ``total`` steps; every call is one of them, and shows its description."""
    with _bar(Console(stderr=True), bars.MofNCompleteColumn(), bars.TimeElapsedColumn()) as progress:
        task = progress.add_task("starting", total=total)
        yield lambda what: progress.update(task, advance=1, description=what)


@contextmanager
def measured(total: float = 1.0) -> Iterator[tuple[Callable[..., None], Callable[[str], None]]]:
    """A bar of a run with the time left: ``update(words, done)`` moves it, ``say(words)`` prints a line above it."""
    console = Console(stderr=True)
    columns = (bars.TaskProgressColumn(), bars.TimeElapsedColumn(), bars.TextColumn("left"), bars.TimeRemainingColumn())
    with _bar(console, *columns) as progress:
        task = progress.add_task("starting", total=total)

        def update(words: str, done: float | None = None) -> None:
            progress.update(task, description=words, completed=done)

        yield update, lambda words: console.print(Text(words), soft_wrap=True)


def _bar(console: Console, *columns: bars.ProgressColumn) -> bars.Progress:
    """A bar that vanishes at the end."""
    words = bars.TextColumn("{task.description}", markup=False)
    return bars.Progress(
        bars.BarColumn(24), *columns, words, console=console, transient=True, disable=not console.is_terminal,
        speed_estimate_period=120,
    )  # fmt: skip


def until_stopped(run: Callable[[], str | None]) -> str:
    """Run, and return how that ended: as it says, else ``"complete"``; ``"interrupted"`` by Ctrl-C or SIGTERM."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        return run() or "complete"
    except KeyboardInterrupt:
        return "interrupted"
    finally:
        signal.signal(signal.SIGTERM, before)
