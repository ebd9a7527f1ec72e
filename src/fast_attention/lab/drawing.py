"""The drawing kit: inline SVG that stands for itself, its colours, panels side by side, axes of lengths."""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple, ParamSpec

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, PALE, GRID, WIN, GOOD = "#1f2933", "#9aa5b1", "#e4e7eb", "#d9f2e3", "#2f855a"
COLOURS = ("#0b69a3", "#d64545", "#8d5fd3", "#b7791f", "#2f855a", "#718096")
WIDE = 12.5  # inches of a picture as wide as the page
STYLE: Any = {
    "svg.fonttype": "none", "svg.hashsalt": "fast-attention", "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans", "Verdana", "sans-serif"], "font.size": 8, "axes.spines.top": False,
    "axes.spines.right": False, "axes.edgecolor": PALE, "axes.labelcolor": INK, "xtick.color": INK,
    "ytick.color": INK, "text.color": INK, "legend.frameon": False, "axes.axisbelow": True, "axes.titlesize": 9,
    "axes.titlelocation": "left", "axes.titleweight": "bold", "grid.color": GRID, "grid.linewidth": 0.5,
}  # fmt: skip
Given = ParamSpec("Given")


class Picture(NamedTuple):
    """An SVG element and the text that stands for it."""

    svg: str
    alt: str


def picture(draw: Callable[Given, tuple[Figure, str]]) -> Callable[Given, Picture]:
    """Make a picture of what a function draws, and of the words that it gives beside it."""

    @functools.wraps(draw)
    def drawn(*args: Given.args, **options: Given.kwargs) -> Picture:
        with matplotlib.rc_context(STYLE):
            figure, alt = draw(*args, **options)
            return Picture(svg(figure, alt), alt)

    return drawn


def svg(figure: Figure, alt: str) -> str:
    """The figure as an SVG element that scales with the page and carries its text for screen readers."""
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :].replace("<svg", f'<svg role="img" aria-label="{escape(alt)}"', 1)


def sheet(
    height: float, rows: int = 1, columns: int = 1, *, width: float = WIDE, **options: Any
) -> tuple[Figure, list[Axes]]:
    """A figure of so many inches, and its panels."""
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **options).flat)


def panels(count: int, height: float, columns: int, margin: float = 0.5, **options: Any) -> tuple[Figure, list[Axes]]:
    """A panel for each of ``count``, in rows of ``columns``."""
    columns = min(columns, max(count, 1))
    rows = max(math.ceil(count / columns), 1)
    figure, found = sheet(margin + height * rows, rows, columns, **options)
    for axes in found[count:]:
        axes.set_visible(False)
    return figure, found[: max(count, 1)]


def against_length(axes: Axes, lengths: Sequence[int], title: str = "", size: float = 8) -> None:
    """Logarithmic axes with a tick for every length."""
    axes.set_title(title)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xticks(lengths, [f"{n // 1024}k" if n % 1024 == 0 else str(n) for n in lengths], fontsize=size)
    axes.minorticks_off()
    axes.grid()


def line(axes: Axes, points: Mapping[Any, float], style: str = "-", **options: Any) -> None:
    """A line through points."""
    axes.plot(list(points), list(points.values()), style, **{"marker": "o", "markersize": 3, **options})


def bars(axes: Axes, names: Sequence[str], series: Mapping[str, Iterable[float]], colours: Sequence[str]) -> None:
    """Bars to the right, a row for each name and in it one for each of the series, which the legend names."""
    high = 0.76 / len(series)
    for number, (label, values) in enumerate(series.items()):
        at = [i + (number - (len(series) - 1) / 2) * (high + 0.02) for i in range(len(names))]
        axes.barh(at, list(values), high, color=colours[number], label=label)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.3, -0.7)
    axes.minorticks_off()
    axes.legend(fontsize=7, loc="lower right")


def number(value: float, _: Any = None) -> str:
    """A tick without an exponent."""
    return f"{value:g}"


def folded(name: str, most: int) -> str:
    """A long name in two lines."""
    return name if len(name) < most else name.replace("(", "\n(", 1)
