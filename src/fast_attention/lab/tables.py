"""Builds tables, once for the terminal and for pages; shows them, and progress bars on stderr, on terminals only."""

from __future__ import annotations

import math
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Self

from rich import progress as bars
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text


class Number(str):
    """A number as people read it, which knows its value: tables sort by that."""

    __slots__ = ("value",)
    value: float

    def __new__(cls, text: str, value: float) -> Self:
        """The text with its value."""
        self = super().__new__(cls, text)
        self.value = value
        return self


def digits(value: float, count: int = 2) -> str:
    """So many digits: 110.3 as ``110``, 0.01234 as ``0.012``."""
    return f"{float(f'{value:.{count}g}'):,.10g}" if abs(value) >= 1e-4 or not value else f"{value:.0e}"


def count(number: int) -> Number:
    """12345 as ``12,345``."""
    return Number(f"{number:,}", number)


def percent(value: float | None) -> str:
    """A relative error as a percentage of two digits; here and below ``-`` stands for None."""
    if value is None:
        return "-"
    if not math.isfinite(value):
        return Number("not finite", value)
    return Number("below 0.001 %" if 0 < value < 1e-5 else f"{digits(100 * value)} %", value)


def bytes_of(size: int | None) -> str:
    """1536 as ``1.5 KiB``."""
    return _scaled(size, 1024, (" B", " KiB", " MiB", " GiB"))


def milliseconds(value: float | None) -> str:
    """12.3456 as ``12.3 ms``."""
    return _scaled(value, 1000, (" ms", " s"))


def _scaled(value: float | None, base: int, units: tuple[str, ...]) -> str:
    if value is None:
        return "-"
    power = next((power for power in range(len(units)) if value < base ** (power + 1)), len(units) - 1)
    return Number(f"{digits(value / base**power, 3)}{units[power]}", value)


def factor(ratio: float | None) -> str:
    """A time ratio as a speed: 0.5 as ``2x``."""
    return "-" if ratio is None else Number(f"{digits(1 / ratio)}x", 1 / ratio)


def fixed(value: float | None, form: str) -> str:
    """A number in a format of its own, such as ``.3f``."""
    return "-" if value is None else Number(f"{value:{form}}", value)


if TYPE_CHECKING:
    from fast_attention.lab.records import Record

STYLES = {
    "fast": "green", "slow": "red", "even": "dim", "none": "dim", "strong": "bold", "broken": "bold red",
    "chosen": "bold green", "exact": "bold", "pale": "dim",
}  # fmt: skip
WIDEST = 10_000  # columns: room for every word


class Value(NamedTuple):
    """The value of a cell. ``kind`` is a class on the page and a colour on the terminal."""

    text: str
    kind: str = ""
    title: str = ""  # shown where the mouse rests
    small: str = ""  # below it, on pages only

    @property
    def sorts_by(self) -> str:
        """The value by which the page's script sorts; empty: the text."""
        if not isinstance(self.text, Number) or math.isnan(self.text.value):
            return ""
        value = self.text.value
        return f"{value!r}" if math.isfinite(value) else f"{'-' * (value < 0)}Infinity"


class Row(NamedTuple):
    """A row with a style: ``kind`` holds for all its cells."""

    cells: Sequence[str | Value]
    kind: str = ""


class Table:
    """Heads over rows, or rows alone; the first column names the row.

    Columns of the numbers ``left``, beside the first, hold words, on the left. The title stands above on the terminal.
    """

    def __init__(
        self, heads: Sequence[str], rows: Iterable[Sequence[str | Value] | Row], *, left: Iterable[int] = (),
        title: str = "",
    ) -> None:  # fmt: skip
        self.heads, self.title, self.left = list(heads), title, {0, *left}
        kinds = [row if isinstance(row, Row) else Row(row) for row in rows]
        self.rows = [([x if isinstance(x, Value) else Value(x) for x in row.cells], row.kind) for row in kinds]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Columns; where the terminal is too narrow for their words, or they grow tall, every row by itself."""
        columns, rows = self._columns(), Group(*self._one_by_one())
        fits = columns.__rich_measure__(console, options.update(max_width=WIDEST)).minimum <= options.max_width
        heights = [len(console.render_lines(each, options)) for each in (columns, rows)]
        yield columns if fits and heights[0] <= 2 * heights[1] else rows

    def _one_by_one(self) -> Iterable[Text | Padding]:
        yield from [Text(self.title)] if self.title else []
        for values, kind in self.rows:
            cells = zip(self.heads[1:], values[1:], strict=False)
            words = "; ".join(f"{head} {value.text}".strip() for head, value in cells if value.text)
            yield Text(values[0].text, style=STYLES.get(kind, "bold"))
            yield Padding(Text(words), (0, 0, 0, 4))

    def _columns(self) -> RichTable:
        table = RichTable(box=None, header_style="bold", pad_edge=False, title_justify="left")
        table.title = Text(self.title) if self.title else None
        for number, head in enumerate(self.heads):
            justify = "left" if number in self.left else "right"
            table.add_column(head, justify=justify, no_wrap=number == 0, overflow="fold")
        for values, kind in self.rows:
            cells = (Text(value.text, style=STYLES.get(value.kind, "")) for value in values)
            table.add_row(*cells, style=STYLES.get(kind, ""))
        return table


def show(*parts: Table | Text | str, width: int = 200) -> None:
    """Print tables and text; ``width`` columns where no terminal gives their number."""
    console = Console(width=None if sys.stdout.isatty() else width)
    for part in parts:
        console.print(Text(part) if isinstance(part, str) else part)


def say(words: str) -> None:
    """Print beside the results, on stderr: where files lie, what to do next."""
    Console(stderr=True).print(Text(words), soft_wrap=True)


def present(
    record: Record, folder: Path, as_json: bool, *parts: Table | Text | str, last: Sequence[Text | str] = ()
) -> None:
    """Print a record as JSON, or what it shows; where it and its page lie; and ``last``, unless it is JSON."""
    if as_json:
        print(record.to_json())
    else:
        show(*parts)
    if record.meta["status"] == "interrupted" and record.same:
        say("interrupted; the same command with --resume resumes it.")
    say(f"\nReport: {(folder / record.page).resolve()}\nRecord: {(folder / record.data).resolve()}")
    if last and not as_json:
        show("", *last)


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
